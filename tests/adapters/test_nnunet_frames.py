"""Probabilities of every nnU-Net reader land on the reference labels."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest
from nnunetv2.imageio import nibabel_reader_writer, simpleitk_reader_writer

from segcal.evaluation.cohort import evaluate_cohort
from segcal.io.pairing import find_reader, pair
from segcal.io.volumes import read_labels

READERS = ("SimpleITKIO", "NibabelIO", "NibabelIOWithReorient", "SimpleITKIOWithReorient")


def reader(name):
    if name.startswith("Nibabel"):
        return getattr(nibabel_reader_writer, name)()
    return getattr(simpleitk_reader_writer, name)()


@pytest.mark.parametrize("axes", ["RAS", "LPS", "LAS", "PIR", "ASL", "none stated"])
@pytest.mark.parametrize("name", READERS)
def test_argmax_of_what_the_reader_sees_is_the_label(tmp_path, name, axes):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, (6, 6, 6)).astype(np.uint8)  # a cube: no shape gives it away
    image = nib.Nifti1Image(labels, np.diag([1.5, 2.0, 3.0, 1.0]))
    if axes == "none stated":  # nibabel and SimpleITK assume different ones
        image = nib.Nifti1Image(labels, None)
        image.header.set_zooms((1.5, 2.0, 3.0))
    else:
        to = nib.orientations.ornt_transform(
            nib.orientations.axcodes2ornt("RAS"), nib.orientations.axcodes2ornt(axes)
        )
        image = image.as_reoriented(to)
    (tmp_path / "gt").mkdir()
    (tmp_path / "p").mkdir()
    nib.save(image, tmp_path / "gt" / "a.nii.gz")
    seen, properties = reader(name).read_seg(str(tmp_path / "gt" / "a.nii.gz"))
    seen = seen[0].astype(int)
    np.savez(
        tmp_path / "p" / "a.npz",
        probabilities=np.eye(3, dtype=np.float32)[seen].transpose(3, 0, 1, 2),
    )
    (tmp_path / "p" / "plans.json").write_text(json.dumps({"image_reader_writer": name}))
    cohort = evaluate_cohort(
        pair(tmp_path / "p", tmp_path / "gt"), reader=find_reader(tmp_path / "p")
    )
    assert cohort.failed == {}
    assert cohort.rows.iloc[0]["dsc"] == 1
    if name == "SimpleITKIO":  # nnU-Net's spacing is in the order of our arrays
        geometry = read_labels(tmp_path / "gt" / "a.nii.gz").geometry
        np.testing.assert_allclose(geometry.spacing_mm, properties["spacing"], rtol=1e-6)
