"""Probability files: frames, refusals, and what is not a probability."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch

from segcal.io.files import BULK
from segcal.io.probabilities import (
    check_probabilities,
    holds_probabilities,
    read_foreground,
    read_probabilities,
)
from segcal.io.volumes import Geometry, Volume, write_nifti
from tests.io.test_volumes import GEOMETRY, peak

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
    notes = []
    np.testing.assert_allclose(read_probabilities(b, GEOMETRY, note=notes.append), P, atol=1e-3)
    assert notes == ["b.npz: read from its only array, 'anything'"]
    for stored in (np.asfortranarray(P), P.astype(">f4"), np.asfortranarray(P.astype(">f8"))):
        array = read_probabilities(npz(tmp_path / "c.npz", probabilities=stored), GEOMETRY)
        np.testing.assert_array_equal(array, P)
        assert array.dtype.isnative


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"probabilities": np.log(P + 1e-3)}, "if these are logits, apply a softmax"),
        ({"probabilities": 3 * P}, "are not probabilities"),
        ({"probabilities": P * 0.9}, "the classes sum to 0.9"),
        ({"probabilities": np.where(P.max() == P, np.nan, P)}, "class .: 1 voxels are NaN"),
        ({"probabilities": P[:, :, :, :4]}, r"expected probabilities \(K, z, y, x\)"),
        ({"probabilities": P.transpose(0, 3, 2, 1)}, "the axes look reversed"),
        ({"probabilities": P.transpose(0, 2, 1, 3)}, "the axes look permuted"),
        ({"probabilities": P[:2] / P[:2].sum(0)}, "expected 3 classes"),
        ({"probabilities": (P > 0.5).astype(np.uint8)}, "expected floating probabilities"),
        ({"softmax": P[:, :-1]}, r"cropped softmax of nnU-Net v1, which needs case\.pkl beside it"),
        ({"a": P, "b": P}, "expected nnU-Net's array 'probabilities', got a, b"),
        ({"probabilities": np.array([object()])}, "type object, not of numbers"),
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
    with pytest.raises(ValueError, match="expected nnU-Net's array"):
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


def test_threads_say_the_same():
    """Of wrong sums in several slices, and of the class whose values are wrong."""
    sums, values = (np.full((2, 7, 5, 4), 0.5, np.float32) for _ in range(2))
    sums[0, 1, :2, 0], sums[0, 6, 0, 0] = 0.7, 0.1
    values[1, 5], values[1, 6] = 3, np.nan
    before, said = torch.get_num_threads(), []
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            for array, message in (
                (sums, r"in 3 voxels the classes sum to 0\.6 - 1\.2 "),
                (values, "class 1: 20 voxels are NaN or infinite"),
            ):
                with pytest.raises(ValueError, match=message) as error:
                    check_probabilities(array, "case")
                said.append(str(error.value))
            check_probabilities(sums, "case", regions=True)
    finally:
        torch.set_num_threads(before)
    assert len(set(said)) == 2


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_reading_takes_one_copy(tmp_path, dtype):
    many = RNG.dirichlet(np.ones(16), (32, 48, 48)).transpose(3, 0, 1, 2).astype(dtype)
    many = np.tile(many, (1, 2, 2, 2))
    path = npz(tmp_path / "a.npz", probabilities=many)
    at = Geometry(many.shape[1:], (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
    read_probabilities(path, at)  # what is imported on the way does not count
    array, used = peak(lambda: read_probabilities(path, at))
    np.testing.assert_array_equal(array, many)
    assert used < 1.1 * many.nbytes + 4 * BULK, used / many.nbytes


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_channels_are_announced_when_they_are_there(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr("segcal.io.files.BULK", 100)
    p, seen = P.astype(dtype), []

    def arrived(array, channels):
        np.testing.assert_array_equal(array[:channels], p[:channels])
        seen.append((channels, array))

    array = read_probabilities(
        npz(tmp_path / "a.npz", probabilities=p), GEOMETRY, arrived=arrived
    )  # fmt: skip
    assert [channels for channels, _ in seen] == [1, 2, 3]
    assert all(np.shares_memory(array, one) for _, one in seen)


@pytest.mark.parametrize("stored", [np.asfortranarray(P), P.astype(">f4"), P[1]])
def test_channels_that_are_stored_otherwise_are_not_announced(tmp_path, stored):
    def arrived(array, channels):
        raise AssertionError(channels)

    path = npz(tmp_path / "a.npz", probabilities=stored)
    assert len(read_probabilities(path, GEOMETRY, arrived=arrived)) == (3 if stored.ndim > 3 else 2)
    reader = "NibabelIOWithReorient"
    path = npz(tmp_path / "b.npz", probabilities=P)
    assert len(read_probabilities(path, GEOMETRY, reader=reader, arrived=arrived)) == 3


def test_archives_that_unpack_to_more(tmp_path):
    """What an array's header claims is compared with the reference and with the archive's size."""
    path = tmp_path / "case.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": P.shape}
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("probabilities.npy", header.getvalue() + bytes(1 << 26))
    assert path.stat().st_size < 1 << 17
    size = len(header.getvalue()) + P.nbytes
    with pytest.raises(ValueError, match=f"takes {size} bytes, the archive holds 6"):
        read_probabilities(path, GEOMETRY)
    huge = np.zeros((3, 64, 256, 256), np.float32)
    npz(path, probabilities=huge)
    cut = path.read_bytes()
    del huge

    def refused():
        with pytest.raises(ValueError, match=r"got \(3, 64, 256, 256\)"):
            read_probabilities(path, GEOMETRY)

    _, used = peak(refused)
    assert used < 1 << 22
    damaged = bytearray(cut)
    damaged[len(cut) // 2] ^= 255  # the sizes are compared first
    path.write_bytes(bytes(damaged))
    refused()


def test_damage_anywhere_is_noticed(tmp_path):
    """Of a file with a flipped byte comes what was stored, or an error that names the file."""
    path = npz(tmp_path / "case.npz", probabilities=P)
    content = path.read_bytes()
    refused = 0
    for position, byte in enumerate(content):
        path.write_bytes(content[:position] + bytes([byte ^ 0x5A]) + content[position + 1 :])
        error = ""
        try:
            array = read_probabilities(path, GEOMETRY)
        except ValueError as raised:
            error = str(raised)
            refused += 1
        assert str(path) in error if error else (array == P).all()
    assert refused > 0.9 * len(content)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"case\.npz"):
            read_probabilities(path, GEOMETRY)


@pytest.mark.parametrize("axes", ["LPS", "RAS", "PIR", "SLA"])
def test_volumes_are_put_on_the_reference(tmp_path, axes):
    write_nifti(tmp_path / "a.nii.gz", P, GEOMETRY)
    image = nib.load(tmp_path / "a.nii.gz")
    turn = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(image.affine), nib.orientations.axcodes2ornt(axes)
    )
    nib.save(image.as_reoriented(turn), tmp_path / "b.nii.gz")
    notes = []
    b = read_probabilities(tmp_path / "b.nii.gz", GEOMETRY, note=notes.append)
    np.testing.assert_array_equal(b, P)
    expected = [] if axes == "LPS" else [
        f"b.nii.gz: stored as {axes}, re-ordered to the reference's LPS"
    ]  # fmt: skip
    assert notes == expected


@pytest.mark.parametrize(
    ("array", "taken"),
    [
        (np.linspace(0, 0.4, 1200), True),  # a case without foreground, or with little
        (np.linspace(0, 0.04, 1200), True),
        (np.linspace(0, 1, 1200), True),
        (np.resize([0, 0.7], 1200), True),
        (np.resize(np.arange(200) / 1000, 1200), False),  # labels that were divided
        (np.resize([0, 1 / 255], 1200), False),
        (np.resize([0.0, 1], 1200) * (1 - 5e-7 * RNG.random(1200)), False),
        (1e-7 * np.linspace(0, 1, 1200), False),
    ],
)
def test_what_is_a_map_of_foreground(tmp_path, array, taken):
    geometry = replace(GEOMETRY, shape=(10, 10, 12))
    array = np.clip(array, 0, 1).reshape(geometry.shape).astype(np.float32)
    volume = Volume(array, geometry)
    found = read_foreground(tmp_path / "a.nii.gz", volume, geometry)
    assert (found is not None) == taken
    if found is not None:
        np.testing.assert_array_equal(found, np.stack([1 - array, array]))
