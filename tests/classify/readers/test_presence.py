"""Which labels does a slice show?"""

from __future__ import annotations

import json

import numpy as np
import pytest

from segcal.classify.readers.presence import find_slice_cases, presence_of_labels
from segcal.io.volumes import Geometry, write_nifti
from tests.data_paths import real_data


@pytest.fixture
def root(tmp_path):
    """Two cases of a patient to train with, one case to test with; labels 1 and 2, 3 is ignored."""
    rng = np.random.default_rng(0)
    maps = {"p1_a": np.zeros((4, 6, 8)), "p1_b": np.zeros((3, 6, 8)), "p2_a": np.zeros((2, 6, 8))}
    maps["p1_a"][1, 2:4, 2:4] = 1
    maps["p1_a"][2, 0, 0] = 2
    maps["p1_a"][3, 0, :2] = (2, 3)
    maps["p1_b"][0] = 2
    maps["p2_a"][1, 1, 1:3] = 1
    geometry = Geometry((1, 1, 1), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
    for name, labels in maps.items():
        side = "Ts" if name == "p2_a" else "Tr"
        image = rng.normal(size=labels.shape).astype(np.float32)
        image[0] = np.linspace(0, 10, 48).reshape(6, 8)
        at = Geometry(labels.shape, geometry.spacing_mm, geometry.origin_mm, geometry.direction)
        for folder, array in (("images", image), ("labels", labels.astype(np.uint8))):
            (tmp_path / f"{folder}{side}").mkdir(exist_ok=True)
            ending = "_0000" if folder == "images" else ""
            write_nifti(tmp_path / f"{folder}{side}" / f"{name}{ending}.nii.gz", array, at)
    content = {"labels": {"background": 0, "liver": 1, "spleen": 2, "ignore": 3}}
    (tmp_path / "dataset.json").write_text(json.dumps(content))
    return tmp_path


def test_labels_of_slices(root):
    found = presence_of_labels(root, size=8, window=(0.0, 10.0), patient=r"p\d+")
    assert found.names == ("liver", "spleen")
    assert found.inputs.shape == (9, 1, 8, 8)
    # the last slice of the first case holds the ignore label: a liver may be below it
    assert found.targets.tolist() == [
        [0, 0], [1, 0], [0, 1], [-1, 1], [0, 1], [0, 0], [0, 0], [0, 0], [1, 0]]  # fmt: skip
    assert found.groups.tolist() == [0] * 7 + [1] * 2
    assert found.parts.tolist() == [-1] * 7 + [2] * 2
    first = found.inputs[0, 0]
    assert (first[0, 0], first[-1, -1]) == (0, 255)
    assert (np.diff(first.astype(int), axis=1) >= 0).all()


def test_few_voxels_make_a_label_unknown(root):
    found = presence_of_labels(root, size=8, min_voxels=3)
    assert found.targets[1].tolist() == [1, 0]
    assert found.targets[2].tolist() == [0, -1]


def test_other_axes(root):
    found = presence_of_labels(root, size=8, axis="y")
    assert len(found) == 18
    case = found.targets[:6]
    assert case[:, 0].tolist() == [-1, 0, 1, 1, 0, 0]


def test_cases_are_patients_of_their_own_by_default(root):
    assert [case.group for case in find_slice_cases(root)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"axis": "t"}, "axis, size, min_voxels"),
        ({"window": (2.0, 1.0)}, "window: expected low < high"),
        ({"patient": "case"}, "does not match the beginning of 'p1_a'"),
        ({"patient": "("}, "no regular expression"),
    ],
)
def test_wrong_arguments(root, arguments, message):
    with pytest.raises(ValueError, match=message):
        presence_of_labels(root, **arguments)


def test_files_that_do_not_fit(root):
    (root / "dataset.json").write_text('{"labels": {"background": 0, "liver": 1, "ignore": 3}}')
    with pytest.raises(ValueError, match=r"holds labels \[2\]"):
        presence_of_labels(root)
    (root / "imagesTr" / "p1_b_0000.nii.gz").unlink()
    with pytest.raises(ValueError, match="holds no p1_b_0000"):
        presence_of_labels(root)


def test_published_counts():
    """What the description of the data counts: 377 slices, 76 of them without an organ."""
    found = presence_of_labels(real_data("chaos_t2"), size=8)
    of_training = found.parts == -1
    empty = (found.targets == 0).all(1)
    assert (of_training.sum(), (~of_training).sum()) == (277, 100)
    assert (empty[of_training].sum(), empty[~of_training].sum()) == (55, 21)
