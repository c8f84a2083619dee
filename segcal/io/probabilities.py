"""Probability maps as ``(K, z, y, x)`` in the geometry of the reference labels."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from segcal.io.volumes import Array, Geometry, from_canonical, read_volume, stored_axes

SUM_TOLERANCE = 1e-2
"""How far the sum over classes may be from 1 (float16 files)."""
RANGE_TOLERANCE = 1e-3


def read_probabilities(
    path: Path,
    geometry: Geometry,
    *,
    num_classes: int | None = None,
    regions: bool = False,
    reader: str | None = None,
    tolerance: float = 1e-2,
) -> Array:
    """Read an nnU-Net v2 ``.npz`` or a 4-D NIfTI of class probabilities.

    Args:
        path: ``.npz`` with the array ``probabilities`` ``(K, z, y, x)``, or a volume with the
            classes on the fourth axis.
        geometry: of the reference labels, which the result shares.
        num_classes: K that is expected; None takes what comes.
        regions: whether channels are regions, one probability each, that may overlap.
        reader: nnU-Net's reader, as its plans name it: the ``.npz`` of a ``*WithReorient`` reader
            lies in a RAS-reoriented frame. None is a reader that leaves images as they are.
        tolerance: of the geometry, in voxels.

    Returns:
        floating ``(K, z, y, x)``, as stored.

    Raises:
        ValueError: naming the file: not readable, another size or place than the reference,
            values that are no probabilities (logits, NaN), a sum over classes other than one.
    """
    if path.suffix == ".npz":
        array = _read_npz(path)
        if reader is not None and reader.endswith("WithReorient") and array.ndim == 4:
            array = from_canonical(array, geometry, reader=reader)
        check_shape(path, array.shape, geometry)
    else:
        volume = read_volume(path)
        array = volume.array
        if array.ndim != 4:
            raise ValueError(
                f"{path}: expected a 4-D volume (x, y, z, class), got shape {array.shape[::-1]}"
            )
        if differences := volume.geometry.differences(geometry, tolerance):
            raise ValueError(f"{path}: does not lie on the reference: {'; '.join(differences)}")
    check_probabilities(array, str(path), num_classes, regions=regions)
    return array


def check_shape(path: Path, shape: tuple[int, ...], geometry: Geometry) -> None:
    """Check that an array ``(K, z, y, x)`` has the reference's size.

    Raises:
        ValueError: it has not, with both sizes.
    """
    if len(shape) != 4 or shape[1:] != geometry.shape:
        raise ValueError(
            f"{path}: expected probabilities (K, z, y, x) = (K, {_shape(geometry.shape)}) like "
            f"the reference, got {shape}" + _hint(shape, geometry.shape)
        )


def holds_probabilities(path: Path) -> bool:
    """Whether a prediction is probabilities (``.npz``, 4-D) or a label map (2-D, 3-D).

    Raises:
        ValueError: not a file that can be read.
    """
    return path.suffix == ".npz" or stored_axes(path) > 3


def check_classes(name: str, found: int, num_classes: int | None, *, regions: bool = False) -> None:
    """Check the number of channels, background included where there are no regions.

    Raises:
        ValueError: starting with `name`.
    """
    if num_classes is not None and found != num_classes:
        what = "regions" if regions else "classes (background included)"
        raise ValueError(f"{name}: expected {num_classes} {what}, got {found}")


def check_probabilities(
    array: Array, name: str, num_classes: int | None = None, *, regions: bool = False
) -> None:
    """Check that ``(K, *S)`` holds probabilities that, but for regions, sum to one over K.

    Raises:
        ValueError: starting with `name`.
    """
    check_classes(name, array.shape[0], num_classes, regions=regions)
    if array.dtype.kind != "f":
        raise ValueError(f"{name}: expected floating probabilities, got {array.dtype}")
    if array.shape[0] < 2 and not regions:
        raise ValueError(
            f"{name}: expected a channel per class, background included, got {array.shape[0]}; "
            "write 1 - p as channel 0"
        )
    total = np.zeros(array.shape[1:], np.float32)
    for k, channel in enumerate(array):
        low, high = float(channel.min(initial=0)), float(channel.max(initial=0))
        if not (np.isfinite(low) and np.isfinite(high)):
            bad = int(np.count_nonzero(~np.isfinite(channel)))
            raise ValueError(f"{name}: {bad} voxels of class {k} are NaN or infinite")
        if low < -RANGE_TOLERANCE or high > 1 + RANGE_TOLERANCE:
            raise ValueError(
                f"{name}: class {k} has values from {low:.4g} to {high:.4g}, which are no "
                "probabilities; if these are logits, apply a softmax over the classes first"
            )
        total += channel
    off = np.abs(total - 1) > SUM_TOLERANCE
    if not regions and off.any():
        raise ValueError(
            f"{name}: in {np.count_nonzero(off)} voxels the classes sum to "
            f"{float(total[off].min()):.4g} - {float(total[off].max()):.4g} instead of 1; if these "
            "are overlapping regions from a sigmoid head, give the dataset.json that defines them"
        )


def stored_shape(path: Path) -> tuple[int, ...]:
    """Shape of the probabilities in an ``.npz``, from its headers alone.

    Raises:
        ValueError: as :func:`read_probabilities`, but for damage behind the headers.
    """
    with _archive(path) as (archive, key), archive.zip.open(f"{key}.npy") as file:
        header = np.lib.format.read_magic(file)
        if header == (1, 0):
            return np.lib.format.read_array_header_1_0(file)[0]
        return np.lib.format.read_array_header_2_0(file)[0]


def _read_npz(path: Path) -> Array:
    with _archive(path) as (archive, key):
        array = archive[key]
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


@contextmanager
def _archive(path: Path) -> Iterator[tuple[Any, str]]:
    """Open an ``.npz`` and name the array with the probabilities."""
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a complete .npz file (an .npz is a zip archive)")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            keys = archive.files
            key = "probabilities" if "probabilities" in keys or len(keys) != 1 else keys[0]
            if f"{key}.npy" in archive.zip.namelist() and key != "softmax":
                yield archive, key
                return
    except Exception as error:  # noqa: BLE001 - a damaged file fails anywhere in zip and NumPy
        raise ValueError(
            f"{path}: not a readable array file ({type(error).__name__}: {error})"
        ) from None
    raise ValueError(
        f"{path}: expected nnU-Net v2's array 'probabilities', got {', '.join(keys) or 'nothing'}"
        + (
            "; this is nnU-Net v1, whose arrays are cropped: convert them first"
            if "softmax" in keys
            else ""
        )
    )


def _shape(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if len(shape) == 4 and shape[1:] == expected[::-1]:
        return "; the axes look reversed: segcal and nnU-Net store (z, y, x)"
    if len(shape) == 4 and sorted(shape[1:]) == sorted(expected):
        return "; the axes look permuted: was it predicted with another image reader?"
    return ""
