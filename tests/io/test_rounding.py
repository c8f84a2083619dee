"""Labels that were divided, scaled, resampled or written as images; none is emptied by rounding."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.adapters.monai.data import ReadCase
from segcal.adapters.monai.dataset import CaseFiles
from segcal.evaluation.cohort import evaluate_cohort
from segcal.io.class_files import read_class_files
from segcal.io.label_sets import read_label_set
from segcal.io.pairing import pair, with_rois
from segcal.io.rounding import round_labels
from segcal.io.volumes import read_labels, write_nifti
from tests.io.test_class_files import LABELS, Y
from tests.io.test_volumes import GEOMETRY

MAP = np.arange(60).reshape(GEOMETRY.shape) % 5


def save(path, labels, *, slope=None, scale=1.0):
    """Labels times `scale` as float32; or as they are, with a slope in the header."""
    path.parent.mkdir(exist_ok=True)
    array = labels.astype(np.uint8) if slope else (labels * scale).astype(np.float32)
    image = nib.Nifti1Image(array.transpose(), GEOMETRY.affine)
    if slope:
        image.header.set_slope_inter(slope, 0)
    nib.save(image, path)
    return path


@pytest.mark.parametrize("divisor", [100, 255, 1000, 65535])
@pytest.mark.parametrize("by_header", [False, True])
def test_divided_labels_are_refused_wherever_they_are_read(tmp_path, divisor, by_header):
    how = {"slope": 1 / divisor} if by_header else {"scale": 1 / divisor}
    bad = save(tmp_path / "p" / "a.nii.gz", MAP, **how)
    good = save(tmp_path / "gt" / "a.nii.gz", MAP)
    said = f"{bad}: 5 stored values, 0 to {4 / divisor:.4g}, would all become label 0; they look "
    said += f"like labels divided by {divisor}: multiply them by it"
    for prediction, reference in ((bad, good), (good, bad)):
        failed = evaluate_cohort(pair(prediction, reference)).failed
        assert [text.startswith(said) for text in failed.values()] == [True]
    with pytest.raises(ValueError, match="divided by"):
        ReadCase()(CaseFiles("a", (good,), bad))


def test_a_region_of_interest_that_was_divided(tmp_path):
    for folder in ("p", "gt"):
        save(tmp_path / folder / "a.nii.gz", MAP)
    save(tmp_path / "roi" / "a.nii.gz", MAP > 0, scale=1 / 255)
    pairing = with_rois(pair(tmp_path / "p", tmp_path / "gt"), tmp_path / "roi")
    why = evaluate_cohort(pairing).failed["a"]
    assert "2 stored values, 0 to 0.003922, would all become label 0" in why


def test_a_mask_of_a_class_that_was_divided(tmp_path):
    for divisor in (255, 65535):
        folder = tmp_path / str(divisor)
        for name, mask in (("liver", Y == 1), ("left kidney", Y == 2)):
            save(folder / f"{name}.nii.gz", mask, scale=1 / divisor)
        with pytest.raises(ValueError, match=rf"liver\.nii\.gz: holds only 0 and .* by {divisor};"):
            read_class_files(folder, GEOMETRY, LABELS)


def test_probabilities_of_one_class_are_no_label_map(tmp_path):
    p = np.linspace(0, 0.04, 1200)
    p = np.concatenate([p, 1 - p]).reshape(20, 30, 4)
    with pytest.raises(ValueError, match=r"1200 stored values, 0 to 0\.04, .* of probabilities\?"):
        round_labels(p, "a")


def test_what_interpolation_and_noise_leave():
    noisy = MAP * (1 + 1e-7 * np.random.default_rng(0).standard_normal(MAP.shape))
    assert (round_labels(noisy, "a") == MAP).all()
    assert (round_labels(MAP.astype(np.float32) * 1.005, "a") == MAP).all()  # a scaled header
    with pytest.raises(ValueError, match=r"2 stored values, 0\.98 to 1, would all become label 1"):
        round_labels(np.array([0, 1, 0.98]), "a")
    with pytest.raises(ValueError, match=r"1 voxels do not hold labels.*resample"):
        round_labels(np.array([0, 0.5, 1, 2]), "a")
    with pytest.raises(ValueError, match=r"4 voxels do not hold labels.*divided by 4: multiply"):
        round_labels(np.array([0, 0.25, 0.25, 0.5, 0.75, 1]), "a")
    with pytest.raises(
        ValueError, match=r"2 stored values, 0 to 0\.003922"
    ):  # 0 is what it becomes
        round_labels(np.full(4, 1 / 255), "a")
    assert round_labels(np.zeros((0, 3)), "a").shape == (0, 3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-3, 3, width=32), max_size=12))
def test_what_is_rounded_keeps_values_apart(values):
    array = np.array(values, np.float32)
    try:
        rounded = round_labels(array, "a")
    except ValueError:
        return
    assert np.abs(rounded - array).max(initial=0) <= 0.05 + 1e-6
    for label in np.unique(rounded):
        assert np.ptp(array[rounded == label]) <= 3e-6 * max(1, abs(label))


def cohort(tmp_path, prediction, reference, names=None):
    write_nifti(tmp_path / "p" / "a.nii.gz", prediction, GEOMETRY)
    write_nifti(tmp_path / "gt" / "a.nii.gz", reference, GEOMETRY)
    label_set = None
    if names is not None:
        (tmp_path / "dataset.json").write_text(json.dumps({"labels": names}))
        label_set = read_label_set(tmp_path / "dataset.json")
    return evaluate_cohort(pair(tmp_path / "p", tmp_path / "gt"), label_set=label_set)


def test_a_mask_of_0_and_255_beside_one_of_0_and_1(tmp_path):
    one = MAP // 4
    for prediction, reference in ((255 * one, one), (one, 255 * one)):
        why = cohort(tmp_path, prediction, reference).failed["a"]
        assert "store a mask of 0 and 255 as 0 and 1, or if 255 means 'ignore'" in why
    why = cohort(tmp_path, one, 255 * one, {"background": 0, "organ": 1}).failed["a"]
    assert "gt/a.nii.gz: labels [255] are not among the classes 0, 1; store a mask" in why
    assert cohort(tmp_path, 255 * one, 255 * one).rows.loc["a", "dsc/255"] == 1


@pytest.mark.parametrize("names", [None, {"background": 0, "organ": 1}])
@pytest.mark.parametrize(("most", "dtype"), [(255, np.uint8), (255, np.float32), (100, np.uint8)])
def test_a_map_of_probabilities_stored_as_whole_numbers(tmp_path, names, most, dtype):
    p = (np.linspace(0, most, MAP.size).reshape(MAP.shape)).astype(np.uint8)
    why = cohort(tmp_path, p.astype(dtype), MAP // 4, names).failed["a"]
    assert f"of foreground from 0 to {most}, store value / {most} as float32" in why
    assert str(tmp_path / "p" / "a.nii.gz") in why


def test_labels_that_have_nothing_in_common_are_said(tmp_path):
    found = cohort(tmp_path, (MAP == 1) + 2 * (MAP == 2), 85 * (MAP == 1) + 170 * (MAP == 2))
    assert found.notes["a"] == [
        "a.nii.gz: holds labels [1, 2], its reference a.nii.gz [85, 170], none in common; if they "
        "mean the same structures, store the same values in both"
    ]


def test_label_4_beside_0_1_and_2(tmp_path):
    """Tumours of old BraTS: the file says so, or nobody does."""
    write_nifti(tmp_path / "gt" / "a.nii.gz", np.where(MAP == 3, 0, MAP), GEOMETRY)
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "a.npz", probabilities=np.full((4, *MAP.shape), 0.25, np.float32))
    pairing = pair(tmp_path / "p", tmp_path / "gt")
    why = evaluate_cohort(pairing).failed["a"]
    assert "labels [4] are not among the classes 0, 1, 2, 3; renumber the labels to these" in why
    names = {"background": 0, "necrosis": 1, "edema": 2, "enhancing": 4}
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": names}))
    label_set = read_label_set(tmp_path / "dataset.json")
    why = evaluate_cohort(pairing, label_set=label_set).failed["a"]
    assert "renumber the labels to 0, 1, 2, ... without gaps" in why
    assert read_labels(tmp_path / "gt" / "a.nii.gz").array.max() == 4
