"""FLARE: releases and their organs, labelled cases in, others counted."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest

from segcal.datasets.flare import ORGANS, _held_out, find_release, plan_flare
from segcal.datasets.raw import write_dataset
from segcal.io.sources import find_sources
from tests.data_paths import real_data
from tests.datasets.sources import files, image, labels, pack, save

ABDOMEN_21 = {5: 1, 2: 2, 3: 2, 1: 3, 7: 4}
"""FLARE21's label of TotalSegmentator's liver, kidneys, spleen, pancreas."""


def write_21(root):
    for number in range(2):
        save(root / f"TrainingImg/train_{number:03d}_0000.nii.gz", image(number))
        save(root / f"TrainingMask/train_{number:03d}.nii.gz", labels(5, number))
    save(root / "ValidationImg/validation_001_0000.nii.gz", image(7))
    return root


def write_22(root):
    labelled = root / "Training" / "FLARE22_LabeledCase50"
    for number in range(1, 3):
        save(labelled / f"images/FLARE22_Tr_{number:04d}_0000.nii.gz", image(number))
        save(labelled / f"labels/FLARE22_Tr_{number:04d}.nii.gz", labels(14, number))
    for number in range(1, 4):
        save(root / f"Training/FLARE22_UnlabeledCase1-500/Case_{number:05d}_0000.nii.gz", image(0))
    save(root / "Validation/images/FLARETs_0001_0000.nii.gz", image(4))
    save(root / "Validation/labels/FLARETs_0001.nii.gz", labels(14, 4))
    return root


def convert(root, folder, release=None):
    sources = find_sources(root)
    plan = plan_flare(sources, release or find_release(sources))
    return plan, write_dataset(sources, plan, folder)


@pytest.mark.parametrize(
    ("path", "held_out"),
    [
        ("ValidationMask/validation_001.nii.gz", True),
        ("Validation/labels/a.nii.gz", True),
        ("val/a.nii.gz", True),
        ("data/TestImages/a.nii.gz", True),
        ("labels/FLARETs_0001.nii.gz", True),
        ("TestCode/TrainingMask/train_001.nii.gz", False),
        ("Valencia/labels/FLARE22_Tr_0001.nii.gz", False),
    ],
)
def test_what_is_held_out(path, held_out):
    assert _held_out(path) is held_out


def test_flare21(tmp_path):
    plan, done = convert(write_21(tmp_path / "src"), tmp_path / "Dataset021_FLARE21")
    assert (done.training, done.test, done.skipped) == (2, 0, ())
    assert plan.counts == {"images without labels, left out": 1}
    assert files(tmp_path / "Dataset021_FLARE21") == [
        "conversion.json", "dataset.json", "imagesTr/train_000_0000.nii.gz",
        "imagesTr/train_001_0000.nii.gz", "labelsTr/train_000.nii.gz", "labelsTr/train_001.nii.gz",
    ]  # fmt: skip
    dataset = json.loads((tmp_path / "Dataset021_FLARE21/dataset.json").read_text())
    organs = {"background": 0, "liver": 1, "kidney": 2, "spleen": 3, "pancreas": 4}
    assert dataset["labels"] == organs
    assert dataset["channel_names"] == {"0": "CT"}
    record = json.loads((tmp_path / "Dataset021_FLARE21/conversion.json").read_text())
    assert record["left_out"] == plan.counts


def test_flare22_in_its_archives(tmp_path):
    root = write_22(tmp_path / "src")
    plan, done = convert(root, tmp_path / "Dataset022_FLARE22")
    assert (done.training, done.test, done.skipped) == (2, 1, ())
    assert plan.counts == {"images without labels, left out": 3}
    assert "imagesTs/FLARETs_0001_0000.nii.gz" in files(tmp_path / "Dataset022_FLARE22")
    labelled = root / "Training" / "FLARE22_LabeledCase50"
    for kind in ("images", "labels"):
        pack(labelled / f"{kind}.zip", labelled / kind)
        for path in (labelled / kind).iterdir():
            path.unlink()
        (labelled / kind).rmdir()
    again, done = convert(root, tmp_path / "Dataset023_FLARE22")
    assert (done.training, done.test, done.skipped) == (2, 1, ())
    assert [case.name for case in again.cases] == [case.name for case in plan.cases]
    assert files(tmp_path / "Dataset023_FLARE22") == files(tmp_path / "Dataset022_FLARE22")


def test_organs_of_the_releases():
    assert len(ORGANS["22"]) == 13
    named = dict(enumerate(ORGANS["22"], 1))
    assert (named[2], named[13], named[5], named[9]) == (
        "right kidney", "left kidney", "aorta", "gallbladder",
    )  # fmt: skip


def test_images_may_lack_their_channel():
    plan = plan_flare(["images/a.nii.gz", "labels/a.nii.gz"], "21")
    assert [(c.name, c.images, c.label) for c in plan.cases] == [
        ("a", ("images/a.nii.gz",), "labels/a.nii.gz")
    ]


def test_what_is_missing():
    names = [
        "TrainingImg/a_0000.nii.gz", "TrainingImg/a_0000.nii", "TrainingMask/a.nii.gz",
        "TrainingMask/b.nii.gz", "TrainingImg/c_0000.nii.gz", "TrainingMask/c.nii.gz", "notes.txt",
    ]  # fmt: skip
    plan = plan_flare(names, "21")
    assert [case.name for case in plan.cases] == ["c"]
    reasons = {one.name: one.reason for one in plan.skipped}
    assert set(reasons) == {"a", "b"}
    assert "occurs twice" in reasons["a"]
    assert reasons["b"] == "there is no image for TrainingMask/b.nii.gz"
    with pytest.raises(ValueError, match="found none among 1 images and 0 label maps"):
        plan_flare(["Img/a_0000.nii.gz"], "21")
    with pytest.raises(ValueError, match="release: expected 21 or 22"):
        plan_flare(names, "23")


def test_a_release_is_told_by_names_or_asked_for():
    assert find_release(["TrainingImg/train_000_0000.nii.gz"]) == "21"
    assert find_release(["x/FLARE22_Tr_0001_0000.nii.gz"]) == "22"
    for names in (["a_0000.nii.gz"], ["FLARE2022/a", "FLARE21/b"]):
        with pytest.raises(ValueError, match="release: the names of the files do not tell"):
            find_release(names)


def test_labels_of_the_other_release_are_refused(tmp_path):
    _, done = convert(write_22(tmp_path / "src"), tmp_path / "Dataset021_X", "21")
    assert (done.training, done.test, len(done.skipped)) == (0, 0, 3)
    assert "holds the unknown label 5, 6, 7" in done.skipped[0].reason


def test_real_ct_with_flares_organs(tmp_path):
    root = real_data("abdomen_ct")
    for number, name in enumerate(("3mm", "512")):
        reference = nib.load(root / f"seg_{name}.nii.gz")
        values = np.asarray(reference.dataobj)
        relabelled = np.zeros(values.shape, np.uint8)
        for there, flare in ABDOMEN_21.items():
            relabelled[values == there] = flare
        path = tmp_path / "src" / "TrainingMask" / f"train_{number:03d}.nii.gz"
        save(path, relabelled, reference.affine)
        target = tmp_path / "src" / "TrainingImg" / f"train_{number:03d}_0000.nii.gz"
        target.parent.mkdir(exist_ok=True)
        target.write_bytes((root / f"ct_{name}.nii.gz").read_bytes())
    _, done = convert(tmp_path / "src", tmp_path / "Dataset021_FLARE21")
    assert (done.training, done.skipped) == (2, ())
    for number, expected in enumerate(([38634, 7623, 9452, 644], [366708, 0, 130634, 1327])):
        path = tmp_path / "Dataset021_FLARE21" / "labelsTr" / f"train_{number:03d}.nii.gz"
        voxels = np.bincount(np.asarray(nib.load(path).dataobj).ravel(), minlength=5)
        assert voxels[1:].tolist() == expected
