"""ACDC: which file becomes which case, patients kept together, true voxel sizes."""

from __future__ import annotations

import json
from collections import Counter

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813

from segcal.datasets.acdc import Info, parse_info, plan_acdc, read_infos
from segcal.datasets.raw import RawCase, write_dataset
from segcal.io.sources import find_sources
from tests.data_paths import real_data
from tests.datasets.sources import AFFINE, image, labels, pack, write_acdc

GROUPS = ("DCM", "HCM", "MINF", "NOR", "RV")


def names(patients, subset="training", frames=(1, 7)):
    return [
        f"{subset}/patient{p:03d}/patient{p:03d}_frame{f:02d}{kind}.nii.gz"
        for p in patients
        for f in frames
        for kind in ("", "_gt")
    ]


def infos(patients, groups=GROUPS):
    return {f"patient{p:03d}": Info((1, 7), groups[p % len(groups)]) for p in patients}


def patients_of(cases):
    return {name.split("_")[0] for name in cases}


def test_info():
    text = "ED: 1\r\nES: 12\r\nGroup: DCM\r\nHeight: 184.0\r\n"
    assert parse_info(text) == Info((1, 12), "DCM")
    assert parse_info("ED: x\nno line\n") == Info((), "unknown")


def test_cases_and_folds():
    plan = plan_acdc([*names(range(1, 101)), *names((101, 102), "testing")], infos(range(1, 103)))
    assert plan.skipped == ()
    assert plan.counts == {}
    assert plan.cases[0] == RawCase(
        "patient001_frame01",
        "Tr",
        ("training/patient001/patient001_frame01.nii.gz",),
        "training/patient001/patient001_frame01_gt.nii.gz",
    )
    test = [case.name for case in plan.cases if case.subset == "Ts"]
    assert test == [f"patient{p}_frame{f}" for p in (101, 102) for f in ("01", "07")]
    training = {case.name for case in plan.cases if case.subset == "Tr"}
    assert len(training) == 200
    assert len(plan.splits) == 5
    validated = Counter()
    for fold in plan.splits:
        assert set(fold["train"]) | set(fold["val"]) == training
        assert not patients_of(fold["train"]) & patients_of(fold["val"])
        held_out = patients_of(fold["val"])
        assert len(fold["val"]) == 2 * len(held_out) == 40
        assert Counter(infos([int(p[7:])])[p].group for p in held_out) == dict.fromkeys(GROUPS, 4)
        validated.update(fold["val"])
    assert validated == dict.fromkeys(training, 1)


def test_split_of_the_papers():
    files = [*names(range(1, 101)), *names((101,), "testing")]
    plan = plan_acdc(files, infos(range(1, 102)), split="paper", seed=3)
    (fold,) = plan.splits
    test = patients_of(case.name for case in plan.cases if case.subset == "Ts")
    parts = [patients_of(fold["train"]), patients_of(fold["val"]), test]
    assert [len(part) for part in parts] == [70, 10, 20]
    assert len(set.union(*parts)) == 100
    for part, each in zip(parts, (14, 2, 4), strict=True):
        groups = Counter(infos([int(p[7:])])[p].group for p in part)
        assert groups == dict.fromkeys(GROUPS, each)
    assert plan.counts == {"patients in testing, which the split of the papers leaves out": 1}
    assert plan.settings == {"split": "paper", "seed": 3}
    other = plan_acdc(files, infos(range(1, 102)), split="paper", seed=4)
    assert other.splits != plan.splits
    with pytest.raises(ValueError, match="at least 10 patients in training, got 9"):
        plan_acdc(names(range(1, 10)), infos(range(1, 10)), split="paper")


@pytest.mark.parametrize(("patients", "folds"), [(1, 0), (2, 2), (4, 4), (7, 5)])
def test_few_patients_have_few_folds(patients, folds):
    plan = plan_acdc(names(range(1, patients + 1)), {})
    assert len(plan.splits) == folds


def test_what_is_missing():
    files = set(names(range(1, 6))) | set(names((101, 102), "testing"))
    one = "training/patient{0:03d}/patient{0:03d}_frame{1:02d}{2}.nii.gz"
    files -= {one.format(1, 7, ""), one.format(2, 1, "_gt")}
    files |= {one.format(3, 7, "")[:-3], "training/patient001/patient001_4d.nii.gz"}
    files |= set(names((4,), frames=(9,)))
    files -= {"testing/patient101/patient101_frame01_gt.nii.gz"}
    known = infos((1, 2, 3, 5, 101, 102))
    known["patient005"] = Info((1,), "RV")
    plan = plan_acdc(files, known)
    reasons = {one.name: one.reason for one in plan.skipped}
    assert set(reasons) == {
        "patient001_frame07", "patient002_frame01", "patient003_frame07", "patient004",
    }  # fmt: skip
    assert reasons["patient001_frame07"] == "it has no image; there are frames [1, 7]"
    assert "no label map" in reasons["patient002_frame01"]
    assert "occurs twice: training/patient003" in reasons["patient003_frame07"]
    assert reasons["patient004"].endswith("of the frames [1, 7, 9] are end-diastole and -systole")
    assert {"patient005_frame01", "patient005_frame07"} <= {case.name for case in plan.cases}
    assert plan.counts == {"test cases without a label": 1}
    for fold in plan.splits:
        assert not {*fold["train"], *fold["val"]} & set(reasons)


def test_what_is_no_acdc():
    with pytest.raises(ValueError, match="expected ACDC's training/patient001"):
        plan_acdc(names((1,), "testing"), {})
    with pytest.raises(ValueError, match="patient001: expected in training or testing"):
        plan_acdc([*names((1,)), *names((1,), "testing")], {})
    with pytest.raises(ValueError, match="split: expected nnunet or paper"):
        plan_acdc(names((1,)), {}, split="random")


def convert(root, folder):
    sources = find_sources(root)
    plan = plan_acdc(sources, read_infos(sources))
    return plan, write_dataset(sources, plan, folder)


@pytest.mark.parametrize("layout", ["plain", "nested", "zip", "parts", "nii", "folder a file"])
def test_layouts(tmp_path, layout):
    root = tmp_path / "ACDC"
    ending = ".nii" if layout in ("nii", "folder a file") else ".nii.gz"
    inner = root / "database" if layout == "nested" else root
    place = "{patient}/{file}/{file}" if layout == "folder a file" else "{patient}/{file}"
    write_acdc(inner, ["DCM", "RV"], testing=1, ending=ending, place=place)
    if layout == "zip":
        root = pack(tmp_path / "acdc.zip", root)
    if layout == "parts":
        for part in ("training", "testing"):
            pack(tmp_path / f"{part}.zip", root / part)
        (tmp_path / "parts").mkdir()
        for part in ("training", "testing"):
            (tmp_path / f"{part}.zip").rename(tmp_path / "parts" / f"{part}.zip")
        root = tmp_path / "parts"
    plan, done = convert(root, tmp_path / "Dataset027_ACDC")
    assert (done.training, done.test, done.skipped, done.splits) == (4, 2, (), 2)
    assert {case.name for case in plan.cases} == {
        f"patient{p:03d}_frame{f:02d}" for p in (1, 2, 3) for f in (1, 7)
    }
    for number, subset in ((1, "Tr"), (3, "Ts")):
        name = f"patient{number:03d}_frame07"
        for kind, array in (("images", image(number)), ("labels", labels(4, number))):
            channel = "_0000" if kind == "images" else ""
            path = tmp_path / "Dataset027_ACDC" / f"{kind}{subset}" / f"{name}{channel}.nii.gz"
            np.testing.assert_array_equal(nib.load(path).get_fdata(), array)
            spacing = np.abs(np.diag(AFFINE)[:3])
            np.testing.assert_allclose(
                nib.load(path).affine, np.diag([*spacing, 1]) * [-1, -1, 1, 1]
            )
            np.testing.assert_allclose(sitk.ReadImage(str(path)).GetSpacing(), spacing)
    dataset = json.loads((tmp_path / "Dataset027_ACDC" / "dataset.json").read_text())
    assert dataset["labels"] == {"background": 0, "RV": 1, "MLV": 2, "LVC": 3}
    assert dataset["channel_names"] == {"0": "cineMRI"}
    assert dataset["numTraining"] == 4
    assert "Bernard" in dataset["citation"]


def test_real_patients(tmp_path):
    """Two of the largest slices' distances, and the voxels, as they are in the source."""
    root = real_data("acdc")
    sources = {
        name: source
        for name, source in find_sources(root).items()
        if any(patient in name for patient in ("patient043", "patient075", "patient107"))
    }
    plan = plan_acdc(sources, read_infos(sources))
    done = write_dataset(sources, plan, tmp_path / "Dataset027_ACDC")
    assert (done.training, done.test, done.skipped) == (4, 2, ())
    path = tmp_path / "Dataset027_ACDC/imagesTr/patient043_frame01_0000.nii.gz"
    source = nib.load(root / "training/patient043/patient043_frame01.nii.gz")
    written = nib.load(path)
    np.testing.assert_array_equal(written.get_fdata(), source.get_fdata())
    np.testing.assert_allclose(np.diag(written.affine)[:3], [-1.91964, -1.91964, 6.5], rtol=1e-6)
    counts = np.bincount(
        nib.load(tmp_path / "Dataset027_ACDC/labelsTs/patient107_frame10.nii.gz")
        .get_fdata().astype(int).ravel()
    )  # fmt: skip
    assert counts[1:].tolist() == [4316, 3761, 2701]


@pytest.mark.slow
def test_all_of_it(tmp_path):
    plan, done = convert(real_data("acdc"), tmp_path / "Dataset027_ACDC")
    assert (done.training, done.test, done.skipped) == (200, 10, ())
    assert done.rewritten == 210
    for fold in plan.splits:
        assert (len(fold["train"]), len(fold["val"])) == (160, 40)
    for path in (tmp_path / "Dataset027_ACDC").rglob("*.nii.gz"):
        written = nib.load(path)
        np.testing.assert_allclose(
            np.linalg.norm(written.affine[:3, :3], axis=0), written.header.get_zooms(), rtol=1e-6
        )
