"""A case as one file per class: masks, probabilities, and what is neither."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import nibabel as nib
import numpy as np
import pytest

from segcal.io.class_files import check_class_files, note_missing, read_class_files
from segcal.io.label_sets import LabelSet
from segcal.io.volumes import write_nifti
from tests.io.test_volumes import GEOMETRY

LABELS = LabelSet({0: "background", 1: "liver", 2: "left kidney"}, None, "dataset.json")
RNG = np.random.default_rng(0)
P = RNG.dirichlet(np.ones(3), GEOMETRY.shape).transpose(3, 0, 1, 2).astype(np.float32)
Y = RNG.integers(0, 3, GEOMETRY.shape)


def write(folder, **files):
    for name, array in files.items():
        write_nifti(folder / f"{name.replace('_', ' ')}.nii.gz", array, GEOMETRY)
    return folder


def test_masks_become_a_label_map(tmp_path):
    masks = {"liver": Y == 1, "left_kidney": Y == 2}
    labels = read_class_files(write(tmp_path / "a", **masks), GEOMETRY, LABELS)
    np.testing.assert_array_equal(labels, Y)
    assert labels.dtype.kind == "i"
    floats = {name: mask.astype(np.float32) for name, mask in masks.items()}
    folder = write(tmp_path / "b", **floats, background=Y == 0)
    np.testing.assert_array_equal(read_class_files(folder, GEOMETRY, LABELS), Y)
    image = nib.Nifti1Image((Y == 2).astype(float).transpose(), GEOMETRY.affine)
    image.set_data_dtype(np.uint8)  # scaled: 255 stands for 1
    nib.save(image, folder / "left kidney.nii.gz")
    np.testing.assert_array_equal(read_class_files(folder, GEOMETRY, LABELS), Y)


def test_labels_of_any_value(tmp_path):
    labels = LabelSet({0: "background", 7: "liver", 300: "left kidney"}, None, "dataset.json")
    folder = write(tmp_path, liver=Y == 1, left_kidney=Y == 2)
    np.testing.assert_array_equal(
        read_class_files(folder, GEOMETRY, labels), np.array([0, 7, 300])[Y]
    )
    with pytest.raises(ValueError, match="are not 0 to K - 1"):
        read_class_files(write(folder, liver=P[1]), GEOMETRY, labels)


def test_floats_become_probabilities(tmp_path):
    folder = write(tmp_path / "a", liver=P[1], left_kidney=P[2])
    array = read_class_files(folder, GEOMETRY, LABELS)
    np.testing.assert_array_equal(array[1:], P[1:])
    np.testing.assert_allclose(array[0], 1 - P[1].astype(float) - P[2], atol=1e-6)
    whole = write(tmp_path / "b", background=P[0], liver=P[1], left_kidney=P[2])
    np.testing.assert_array_equal(read_class_files(whole, GEOMETRY, LABELS), P)
    sure = write(tmp_path / "c", liver=np.zeros(P.shape[1:], np.float32), left_kidney=P[2])
    array = read_class_files(sure, GEOMETRY, LABELS)  # the first could be a mask
    np.testing.assert_allclose(array[0], 1 - P[2], atol=1e-6)


def test_axes_are_reordered_and_other_files_left_out(tmp_path):
    folder = write(tmp_path / "case", liver=Y == 1, left_kidney=Y == 2, spleen=Y == 0)
    for name in ("liver", "left kidney"):
        path = folder / f"{name}.nii.gz"
        nib.save(nib.as_closest_canonical(nib.load(path)), path)
    notes = []
    array = read_class_files(folder, GEOMETRY, LABELS, note=notes.append)
    np.testing.assert_array_equal(array, Y)
    assert notes == [
        "case: 1 files belong to no label and are left out: spleen.nii.gz",
        "case: stored as RAS, re-ordered to the reference's LPS",
    ]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"liver": P[1]}, r"no file for label left kidney of dataset\.json; expected left"),
        ({"liver": Y > 0, "left_kidney": Y == 2}, f"masks overlap in {(Y == 2).sum()} voxels"),
        ({"liver": Y * 255, "left_kidney": Y == 2}, "510; store a mask as 0 and 1, .*/ 510"),
        ({"liver": Y * -128, "left_kidney": Y == 2}, "expected a mask .* int16 from -256 to 0"),
        ({"liver": 0.6 + 0 * P[1], "left_kidney": 0.7 + 0 * P[2]}, "in 60 voxels .* up to 1.3"),
        ({"liver": P[1], "left_kidney": Y == 2}, "left kidney.nii.gz: expected floating"),
        ({"liver": 9 * P[1], "left_kidney": P[2]}, "liver.nii.gz: values .* not probabilities"),
        ({"liver": P[1] * np.nan, "left_kidney": P[2]}, "liver.nii.gz: 60 voxels are NaN"),
        ({"background": P[0] / 2, "liver": P[1], "left_kidney": P[2]}, "the classes sum to"),
        ({"liver": P, "left_kidney": P[2]}, "liver.nii.gz: expected a volume of one class, got 3"),
    ],
)  # fmt: skip
def test_refuses(tmp_path, files, message):
    folder = write(tmp_path, **files)
    with pytest.raises(ValueError, match=message) as error:
        read_class_files(folder, GEOMETRY, LABELS)
    assert str(tmp_path) in str(error.value)


def test_refuses_from_headers(tmp_path):
    folder = write(tmp_path, liver=Y == 1, left_kidney=Y == 2)
    check_class_files(folder, GEOMETRY, LABELS)
    for read in (check_class_files, read_class_files):
        with pytest.raises(ValueError, match=r"give a dataset\.json"):
            read(folder, GEOMETRY, None)
        with pytest.raises(ValueError, match=r"liver\.nii\.gz: does not .* origin .* 5 mm apart"):
            read(folder, replace(GEOMETRY, origin_mm=(10.0, -20.0, 35.0)), LABELS)
    (folder / "left kidney.nii.gz").unlink()
    check_class_files(folder, GEOMETRY, LABELS)
    assert note_missing(folder, LABELS) == [
        f"{folder}: label left kidney has no file, so it has no results in this case"
    ]
    (folder / "liver.nii.gz").unlink()
    for check in (partial(check_class_files, geometry=GEOMETRY), note_missing):
        with pytest.raises(ValueError, match="no file for label liver, left kidney"):
            check(folder, label_set=LABELS)
