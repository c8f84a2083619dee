"""Decathlon: the list of dataset.json is followed, 4-D images become channels."""

from __future__ import annotations

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813
from PIL import Image

from segcal.datasets.msd import plan_msd, read_task, task_name
from segcal.datasets.raw import write_dataset
from segcal.io.files import write_json
from segcal.io.sources import find_sources
from tests.data_paths import real_data
from tests.datasets.sources import SHAPE, files, image, labels, pack, save

CONTENT = {
    "name": "PROSTATE",
    "description": "Prostate",
    "licence": "CC-BY-SA 4.0",
    "modality": {"0": "T2", "1": "ADC"},
    "labels": {"0": "background", "1": "PZ", "2": "TZ"},
    "numTraining": 2,
    "training": [
        {
            "image": f"./imagesTr/prostate_{n:02d}.nii.gz",
            "label": f"./labelsTr/prostate_{n:02d}.nii.gz",
        }
        for n in (0, 1)
    ],
    "test": ["./imagesTs/prostate_02.nii.gz"],
}  # fmt: skip


def write_task(root, **changes):
    for number in range(3):
        subset = "Ts" if number == 2 else "Tr"
        save(root / f"images{subset}/prostate_{number:02d}.nii.gz", image(number, (*SHAPE, 2)))
    for number in range(2):
        save(root / f"labelsTr/prostate_{number:02d}.nii.gz", labels(3, number))
    (root / "imagesTr" / "._prostate_00.nii.gz").write_bytes(b"of macOS")
    write_json(root / "dataset.json", {**CONTENT, **changes})
    return root


def convert(root, folder):
    sources = find_sources(root)
    return write_dataset(sources, plan_msd(sources, read_task(sources)), folder)


@pytest.mark.parametrize("layout", ["plain", "nested", "zip"])
def test_a_task(tmp_path, layout):
    root = write_task(tmp_path / "up" / "Task05_Prostate")
    if layout == "nested":
        root = root.parent
    if layout == "zip":
        root = pack(tmp_path / "Task05_Prostate.zip", root)
    sources = find_sources(root)
    assert task_name(read_task(sources), root.name) == (5, "Prostate")
    done = convert(root, tmp_path / "Dataset005_Prostate")
    assert (done.training, done.test, done.skipped) == (2, 1, ())
    assert files(tmp_path / "Dataset005_Prostate") == [
        "conversion.json", "dataset.json",
        *(f"imagesTr/prostate_0{n}_000{c}.nii.gz" for n in (0, 1) for c in (0, 1)),
        *(f"imagesTs/prostate_02_000{c}.nii.gz" for c in (0, 1)),
        *(f"labelsTr/prostate_0{n}.nii.gz" for n in (0, 1)),
    ]  # fmt: skip
    for number, subset in ((1, "Tr"), (2, "Ts")):
        for channel in range(2):
            path = f"images{subset}/prostate_{number:02d}_{channel:04d}.nii.gz"
            got = nib.load(tmp_path / "Dataset005_Prostate" / path)
            np.testing.assert_array_equal(got.get_fdata(), image(number, (*SHAPE, 2))[..., channel])
    dataset = json.loads((tmp_path / "Dataset005_Prostate/dataset.json").read_text())
    assert dataset["labels"] == {"background": 0, "PZ": 1, "TZ": 2}
    assert dataset["channel_names"] == {"0": "T2", "1": "ADC"}
    assert dataset["numTraining"] == 2
    assert dataset["licence"] == "CC-BY-SA 4.0"
    assert not {"training", "test", "modality", "numTest"} & set(dataset)


def write_listed(root, name="dataset.json"):
    """As AMOS22 and MONAI's BTCV are listed: one channel, a validation list, labels of tests."""
    for place, number in (("Tr", 1), ("Tr", 2), ("Va", 3), ("Va", 4), ("Ts", 5), ("Ts", 6)):
        save(root / f"images{place}/img{number}.nii.gz", image(number))
        if number not in (4, 6):
            save(root / f"labels{place}/label{number}.nii.gz", labels(3, number))
    save(root / "imagesTr/img9.nii.gz", image(9))  # which no list names

    def entry(place, n):
        return {"image": f"images{place}/img{n}.nii.gz", "label": f"labels{place}/label{n}.nii.gz"}

    content = {
        "training": [entry("Tr", 1), entry("Tr", 2)],
        "validation": [entry("Va", 3), {"image": "imagesVa/img4.nii.gz"}],
        "test": [entry("Ts", 5), entry("Ts", 6)],
        "unlabelled": ["imagesU/img7.nii.gz", "imagesU/img8.nii.gz"],
    }
    write_json(root / name, {**CONTENT, "modality": {"0": "CT"}, **content})
    return root


@pytest.mark.parametrize("name", ["dataset.json", "dataset_0.json"])
def test_validation_cases_and_labels_of_test_cases(tmp_path, name):
    root, folder = write_listed(tmp_path / "btcv", name), tmp_path / "Dataset017_BTCV"
    sources = find_sources(root)
    plan = plan_msd(sources, read_task(sources))
    done = write_dataset(sources, plan, folder)
    assert (done.training, done.test, done.skipped) == (3, 3, ())
    assert plan.counts == {
        "test cases without a label": 2,  # img4 of the validation, img6
        "volumes that dataset.json does not list, left out": 1,
        "entries in the list 'unlabelled' of dataset.json, left out": 2,
    }
    assert json.loads((folder / "conversion.json").read_text())["left_out"] == plan.counts
    there = files(folder)
    assert [f for f in there if f.startswith("labels")] == [
        "labelsTr/img1.nii.gz", "labelsTr/img2.nii.gz", "labelsTr/img3.nii.gz",
        "labelsTs/img5.nii.gz",
    ]  # fmt: skip
    assert {f"imagesTs/img{n}_0000.nii.gz" for n in (4, 5, 6)} <= set(there)
    got = nib.load(folder / "labelsTr/img3.nii.gz").get_fdata()
    np.testing.assert_array_equal(got, labels(3, 3))
    splits = json.loads((folder / "splits_final.json").read_text())
    assert splits == [{"train": ["img1", "img2"], "val": ["img3"]}]


def test_labels_that_were_divided_are_no_empty_ones(tmp_path):
    root = write_task(tmp_path / "Task05_Prostate")
    for number in range(2):
        save(root / f"labelsTr/prostate_{number:02d}.nii.gz", labels(3, number) / np.float32(255))
    done = convert(root, tmp_path / "out")
    assert done.training == 0
    assert len(done.skipped) == 2
    for one in done.skipped:
        assert "3 stored values, 0 to 0.007843, would all become label 0" in one.reason


def test_what_is_missing(tmp_path):
    one, two = CONTENT["training"]
    lost = {"image": "./imagesTr/lost.nii.gz", "label": "./labelsTr/lost.nii.gz"}
    unlabelled = {"image": "./imagesTr/prostate_00.nii.gz"}
    entries = [one, one, two, lost, unlabelled, {"image": "readme", "label": "readme"}]
    outside = "../../etc/prostate_09.nii.gz"
    root = write_task(tmp_path / "Task05_Prostate", training=entries, test=[outside])
    (root / "labelsTr/prostate_01.nii.gz").unlink()
    sources = find_sources(root)
    plan = plan_msd(sources, read_task(sources))
    assert [case.name for case in plan.cases] == ["prostate_00"]
    reasons = [(one.name, one.reason) for one in plan.skipped]
    assert [name for name, _ in reasons] == [
        "prostate_00", "prostate_01", "lost", "prostate_00", str(entries[-1]), "prostate_09",
    ]  # fmt: skip
    assert "lists it twice" in reasons[0][1]
    assert "labelsTr/prostate_01.nii.gz is missing" in reasons[1][1]
    assert "imagesTr/lost.nii.gz and labelsTr/lost.nii.gz" in reasons[2][1]
    assert "its label is missing" in reasons[3][1]
    assert "not a volume" in reasons[4][1]
    assert "../../etc" in reasons[5][1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": 3}, "json of the Decathlon"),
        ({"modality": None}, "json of the Decathlon"),
        ({"labels": {"0": "background", "2": "a"}}, "without gaps, got"),
        ({"modality": {"1": "T2"}}, "must number the channels"),
        ({"labels": {}}, "expected 'labels'"),
    ],
)
def test_what_is_no_task(tmp_path, changes, message):
    root = write_task(tmp_path / "Task05_Prostate", **changes)
    with pytest.raises(ValueError, match=message):
        read_task(find_sources(root))


def test_one_dataset_json(tmp_path):
    with pytest.raises(ValueError, match=r"folder of one task, .*dataset\.json; found none"):
        read_task(find_sources(tmp_path))
    write_task(tmp_path / "Task05_A")
    write_task(tmp_path / "Task06_B")
    with pytest.raises(ValueError, match=r"found 2: Task05_A/dataset.json, Task06_B"):
        read_task(find_sources(tmp_path))


def test_names_that_are_no_tasks(tmp_path):
    root = write_task(tmp_path / "download")
    assert task_name(read_task(find_sources(root)), "download") == (None, "PROSTATE")


def test_real_hippocampi(tmp_path):
    source = real_data("hippocampus")
    root = tmp_path / "Task04_Hippocampus"
    entries = []
    for path in sorted((source / "labelsTr").iterdir())[:3]:
        name = path.name
        for kind, file in (("labelsTr", name), ("imagesTr", name.replace(".nii", "_0000.nii"))):
            (root / kind).mkdir(parents=True, exist_ok=True)
            shutil.copy(source / kind / file, root / kind / name)
        entries.append({"image": f"./imagesTr/{name}", "label": f"./labelsTr/{name}"})
    labels = {"0": "background", "1": "Anterior", "2": "Posterior"}
    content = {
        **CONTENT,
        "modality": {"0": "MRI"},
        "labels": labels,
        "training": entries,
        "test": [],
    }
    write_json(root / "dataset.json", content)
    done = convert(root, tmp_path / "Dataset004_Hippocampus")
    assert (done.training, done.test, done.skipped) == (3, 0, ())
    for entry in entries:
        name = entry["label"].split("/")[-1]
        written = nib.load(tmp_path / "Dataset004_Hippocampus/labelsTr" / name)
        np.testing.assert_array_equal(
            written.get_fdata(), nib.load(source / "labelsTr" / name).get_fdata()
        )


def test_a_task_of_images(tmp_path):
    """Colours are channels, and a pixel becomes 1 mm: nnU-Net reads NIfTI of one slice."""
    root, rng = tmp_path / "Task11_Roads", np.random.default_rng(0)
    colours = rng.integers(0, 256, (2, 20, 30, 3)).astype(np.uint8)
    maps = rng.integers(0, 3, (2, 20, 30)).astype(np.uint8)
    training = []
    for number, ending in enumerate(("png", "tif")):
        for kind, array in (("image", colours[number]), ("label", maps[number])):
            path = root / f"{kind}sTr" / f"road_{number}.{ending}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
        training.append({k: f"./{k}sTr/road_{number}.{ending}" for k in ("image", "label")})
    modality = {"0": "red", "1": "green", "2": "blue"}
    write_json(
        root / "dataset.json", {**CONTENT, "modality": modality, "training": training, "test": []}
    )
    done = convert(root, tmp_path / "out")
    assert (done.training, done.skipped) == (2, ())
    for number in range(2):
        for channel in range(3):
            path = tmp_path / "out" / "imagesTr" / f"road_{number}_{channel:04d}.nii.gz"
            made = sitk.ReadImage(str(path))
            expected = colours[number][None, ..., channel]
            np.testing.assert_array_equal(sitk.GetArrayFromImage(made), expected)
            assert made.GetSpacing() == (1, 1, 1)
        made = sitk.ReadImage(str(tmp_path / f"out/labelsTr/road_{number}.nii.gz"))
        np.testing.assert_array_equal(sitk.GetArrayFromImage(made), maps[number][None])
    assert "a pixel as 1 mm" in (tmp_path / "out" / "conversion.json").read_text()
