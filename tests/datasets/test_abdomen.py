"""AMOS22 and BTCV: organs, subsets, and the fold that holds their validation set out."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest

from segcal.datasets.abdomen import plan_amos, plan_btcv
from segcal.datasets.raw import write_dataset
from segcal.io.sources import find_sources
from tests.datasets.sources import files, image, labels, pack, save

AMOS_CASES = {1: "Tr", 4: "Tr", 8: "Va", 3: "Ts", 507: "Tr", 578: "Va", 510: "Ts"}


def write_amos(root):
    for number, subset in AMOS_CASES.items():
        save(root / f"images{subset}/amos_{number:04d}.nii.gz", image(number))
        if subset != "Ts":
            save(root / f"labels{subset}/amos_{number:04d}.nii.gz", labels(16, number))
    return root


def write_btcv(root):
    for number in (1, 2, 35):
        save(root / f"Training/img/img{number:04d}.nii.gz", image(number))
        save(root / f"Training/label/label{number:04d}.nii.gz", labels(14, number))
    save(root / "Testing/img/img0061.nii.gz", image(61))
    return root


def convert(root, folder, plan_of):
    sources = find_sources(root)
    plan = plan_of(sources)
    return plan, write_dataset(sources, plan, folder)


def read(folder, name):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("zipped", [False, True])
def test_amos_in_ct(tmp_path, zipped):
    root, folder = write_amos(tmp_path / "amos22"), tmp_path / "Dataset218_AMOS22CT"
    root = pack(tmp_path / "amos22.zip", root) if zipped else root
    plan, done = convert(root, folder, plan_amos)
    assert (done.training, done.test, done.skipped) == (3, 1, ())
    assert plan.counts == {
        "MRI scans, which are not part of task 1": 3,
        "test cases without a label": 1,
    }
    assert [f for f in files(folder) if "images" in f] == [
        "imagesTr/amos_0001_0000.nii.gz", "imagesTr/amos_0004_0000.nii.gz",
        "imagesTr/amos_0008_0000.nii.gz", "imagesTs/amos_0003_0000.nii.gz",
    ]  # fmt: skip
    assert read(folder, "splits_final.json") == [
        {"train": ["amos_0001", "amos_0004"], "val": ["amos_0008"]}
    ]
    dataset = read(folder, "dataset.json")
    assert dataset["channel_names"] == {"0": "CT"}
    names = {v: k for k, v in dataset["labels"].items()}
    assert [names[k] for k in (0, 1, 6, 9, 10, 15)] == [
        "background", "spleen", "liver", "postcava", "pancreas", "prostate or uterus"
    ]  # fmt: skip
    assert sorted(names) == list(range(16))
    got = nib.load(folder / "labelsTr/amos_0008.nii.gz").get_fdata()
    np.testing.assert_array_equal(got, labels(16, 8))


def test_amos_in_ct_and_mri(tmp_path):
    folder = tmp_path / "Dataset219_AMOS22"
    plan, done = convert(write_amos(tmp_path / "a"), folder, lambda names: plan_amos(names, "2"))
    assert (done.training, done.test) == (5, 2)
    assert plan.counts == {"test cases without a label": 2}
    assert read(folder, "dataset.json")["channel_names"] == {"0": "CT or MRI"}
    assert read(folder, "splits_final.json")[0]["val"] == ["amos_0008", "amos_0578"]


def test_btcv(tmp_path):
    folder = tmp_path / "Dataset017_BTCV"
    _, done = convert(write_btcv(tmp_path / "RawData"), folder, plan_btcv)
    assert (done.training, done.test, done.skipped) == (3, 1, ())
    assert read(folder, "splits_final.json") == [
        {"train": ["img0001", "img0002"], "val": ["img0035"]}
    ]
    names = {v: k for k, v in read(folder, "dataset.json")["labels"].items()}
    assert [names[k] for k in (1, 8, 9, 10, 13)] == [
        "spleen", "aorta", "inferior vena cava", "portal and splenic veins", "left adrenal gland"
    ]  # fmt: skip


def test_what_has_no_partner_is_listed(tmp_path):
    root = write_amos(tmp_path / "a")
    (root / "labelsVa/amos_0008.nii.gz").unlink()
    (root / "imagesTr/amos_0004.nii.gz").unlink()
    save(root / "again/imagesTr/amos_0001.nii.gz", image(1))
    save(root / "labelsTs/amos_0003.nii.gz", labels(16))
    save(root / "imagesTr/amos_0005.nii.gz", image(1))
    save(root / "labelsTr/amos_0005.nii.gz", labels(16))
    plan = plan_amos(find_sources(root))
    assert [(case.name, case.subset) for case in plan.cases] == [
        ("amos_0003", "Ts"), ("amos_0005", "Tr"),
    ]  # fmt: skip
    assert plan.cases[0].label == "labelsTs/amos_0003.nii.gz"
    assert {one.name: one.reason for one in plan.skipped} == {
        "amos_0001": "occurs twice: again/imagesTr/amos_0001.nii.gz and "
        "imagesTr/amos_0001.nii.gz and labelsTr/amos_0001.nii.gz",
        "amos_0004": "there is no image for labelsTr/amos_0004.nii.gz",
        "amos_0008": "there is no label map for imagesVa/amos_0008.nii.gz",
    }
    assert plan.splits == ()


def test_what_is_neither(tmp_path):
    with pytest.raises(ValueError, match="task: expected 1 or 2, got '3'"):
        plan_amos([], "3")
    for plan in (plan_amos, plan_btcv):
        with pytest.raises(ValueError, match="found no such pair"):
            plan(["imagesTr/other.nii.gz"])
