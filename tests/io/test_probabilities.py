"""Probability files: frames, refusals, and what is not a probability."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from segcal.io.probabilities import holds_probabilities, read_probabilities
from segcal.io.volumes import Geometry, write_nifti
from tests.io.test_volumes import GEOMETRY

RNG = np.random.default_rng(0)
P = RNG.dirichlet(np.ones(3), (3, 4, 5)).transpose(3, 0, 1, 2).astype(np.float32)


def npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


def test_reads_npz_and_nifti_alike(tmp_path):
    a = npz(tmp_path / "a.npz", probabilities=P)
    write_nifti(tmp_path / "a.nii.gz", P, GEOMETRY)
    np.testing.assert_array_equal(read_probabilities(a, GEOMETRY, num_classes=3), P)
    np.testing.assert_array_equal(read_probabilities(tmp_path / "a.nii.gz", GEOMETRY), P)
    assert holds_probabilities(a)
    assert holds_probabilities(tmp_path / "a.nii.gz")
    write_nifti(tmp_path / "labels.nii.gz", P.argmax(0), GEOMETRY)
    assert not holds_probabilities(tmp_path / "labels.nii.gz")
    b = npz(tmp_path / "b.npz", anything=P.astype(np.float16))  # a single array of another name
    np.testing.assert_allclose(read_probabilities(b, GEOMETRY), P, atol=1e-3)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"probabilities": np.log(P + 1e-3)}, "if these are logits, apply a softmax"),
        ({"probabilities": 3 * P}, "which are no probabilities"),
        ({"probabilities": P * 0.9}, "the classes sum to 0.9"),
        ({"probabilities": np.where(P.max() == P, np.nan, P)}, "1 voxels of class . are NaN"),
        ({"probabilities": P[:, :, :, :4]}, r"expected probabilities \(K, z, y, x\)"),
        ({"probabilities": P.transpose(0, 3, 2, 1)}, "the axes look reversed"),
        ({"probabilities": P.transpose(0, 2, 1, 3)}, "the axes look permuted"),
        ({"probabilities": P[:2] / P[:2].sum(0)}, "expected 3 classes"),
        ({"probabilities": (P > 0.5).astype(np.uint8)}, "expected floating probabilities"),
        ({"softmax": P}, "this is nnU-Net v1"),
        ({"a": P, "b": P}, "expected nnU-Net v2's array 'probabilities', got a, b"),
        ({"probabilities": np.array([object()])}, "not a readable array file"),
    ],
)
def test_refuses_npz(tmp_path, arrays, message):
    path = npz(tmp_path / "case.npz", **arrays)
    with pytest.raises(ValueError, match=message) as error:
        read_probabilities(path, GEOMETRY, num_classes=3)
    assert str(path) in str(error.value)


def test_refuses_a_truncated_npz(tmp_path):
    path = npz(tmp_path / "case.npz", probabilities=P)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"case\.npz: not a complete \.npz file"):
        read_probabilities(path, GEOMETRY)


def test_refuses_what_only_looks_like_npz(tmp_path):
    path = tmp_path / "case.npz"
    np.save(tmp_path / "a.npy", P)
    path.write_bytes((tmp_path / "a.npy").read_bytes())
    with pytest.raises(ValueError, match=r"not a complete \.npz file"):
        read_probabilities(path, GEOMETRY)
    path.write_text("not a zip")
    with pytest.raises(ValueError, match=r"not a complete \.npz file"):
        read_probabilities(path, GEOMETRY)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("probabilities", "no array")
    with pytest.raises(ValueError, match="expected nnU-Net v2's array"):
        read_probabilities(path, GEOMETRY)
    with zipfile.ZipFile(path, "w"):
        pass
    with pytest.raises(ValueError, match="got nothing"):
        read_probabilities(path, GEOMETRY)
    npz(path, probabilities=P)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"case\.npz: not a readable array file"):
        read_probabilities(path, GEOMETRY)


def test_refuses_another_place(tmp_path):
    moved = Geometry(GEOMETRY.shape, GEOMETRY.spacing_mm, (13.0, -20.0, 30.0), GEOMETRY.direction)
    write_nifti(tmp_path / "a.nii.gz", P, moved)
    with pytest.raises(ValueError, match=r"does not lie on the reference: origin .* 3 mm apart"):
        read_probabilities(tmp_path / "a.nii.gz", GEOMETRY)


def test_sum_to_one_at_half_precision(tmp_path):
    many = RNG.dirichlet(np.ones(40), (3, 4, 5)).transpose(3, 0, 1, 2).astype(np.float16)
    a = npz(tmp_path / "a.npz", probabilities=many)
    assert read_probabilities(a, GEOMETRY).dtype == np.float16
