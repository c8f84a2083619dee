"""Probability maps as ``(K, z, y, x)`` in the geometry of the reference labels."""

from __future__ import annotations

import itertools
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import (
    MANY,
    PROBABILITY_TOLERANCE,
    applied_twice,
    copy_floats,
    holds_masks,
)
from segcal.io.archives import DAMAGED_STREAM, unpack_fast
from segcal.io.files import ARRAY_ENDINGS, is_array, is_image, is_segmentation, read_exactly
from segcal.io.nnunet_v1 import KEY, Crop, read_crop
from segcal.io.rounding import LABEL_ROUNDING, MOST_LABELS, NOISE
from segcal.io.volumes import (
    Array,
    Geometry,
    Volume,
    check_place,
    from_canonical,
    put_on,
    read_volume,
    stored_axes,
    to_canonical,
)
from segcal.threads import in_threads, threads_for

SUM_TOLERANCE = 1e-2
"""How far the sum over classes may be from 1 (float16 files)."""
FEW = 16
"""Most distinct values near 0 and 1 that a scaled label map may have."""
LOGITS_KEY = "logits"
"""Name of the array of logits in an ``.npz``."""
Arrived = Callable[[Array, int], None]
"""Takes ``(K, z, y, x)`` while it is being read, and the number of channels that are there."""
DAMAGE: tuple[type[Exception], ...] = (
    OSError, EOFError, MemoryError, RuntimeError, UnicodeDecodeError,
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, *DAMAGED_STREAM,
)  # fmt: skip
"""What zipfile raises when a file is damaged."""


def read_probabilities(
    path: Path,
    geometry: Geometry,
    *,
    num_classes: int | None = None,
    regions: bool = False,
    reader: str | None = None,
    tolerance: float = 1e-2,
    arrived: Arrived | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Array:
    """Read an nnU-Net ``.npz`` or a 4-D volume of class probabilities.

    Sizes are compared before the contents are read. nnU-Net v1 stores a cropped array (``softmax``,
    with a ``.pkl`` beside the ``.npz``), which is put back into the image; outside of the crop,
    background has probability 1.

    Args:
        path: ``.npz`` with the array ``probabilities`` ``(K, z, y, x)``, ``softmax`` or a single
            array of another name; a ``.npy``; or a volume with the classes on the fourth axis. An
            array with three axes is the probability of foreground.
        geometry: geometry of the reference labels, which the result shares.
        num_classes: expected number K of channels; None accepts any.
        regions: whether the channels are regions, which may overlap and have one probability each.
        reader: nnU-Net's reader, as its plans name it. A ``*WithReorient`` reader stores the
            ``.npz`` in RAS orientation. None means a reader that leaves images as they are.
        tolerance: how far, in voxels, the geometry may deviate from the reference.
        arrived: called with the result while it is still being read, and with how many channels
            are there, when another one is; nothing has been checked then. Not called where the
            result is not what is stored.
        note: called with a sentence on anything unusual, and how it was read.

    Returns:
        floating ``(K, z, y, x)``, as stored.

    Raises:
        ValueError: names the file: it is not readable, differs from the reference in size or
            position, holds values that are not probabilities (logits, NaN), or its classes do
            not sum to one.
    """
    if is_array(path):
        array = _read_npz(path, geometry, num_classes, regions, reader, note, arrived)
    else:
        check_place(path, geometry, tolerance)
        volume = read_volume(path)
        if volume.array.ndim != 4:
            shape = volume.array.shape[::-1]
            raise ValueError(f"{path}: expected a 4-D volume (x, y, z, class), got shape {shape}")
        array, done = put_on(path, volume, geometry, tolerance)
        for text in filter(None, (volume.note, done)):
            note(f"{path.name}: {text}")
    check_probabilities(array, str(path), num_classes, regions=regions, note=note)
    return array


def check_npz(
    path: Path,
    geometry: Geometry,
    *,
    num_classes: int | None = None,
    regions: bool = False,
    reader: str | None = None,
) -> None:
    """Check an ``.npz`` as :func:`read_probabilities` does, as far as its headers allow.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    with _open_array(path) as stored:
        _check_stored(path, stored, geometry, reader)
        check_classes(str(path), _channels(stored.shape, regions), num_classes, regions=regions)


def stored_channels(path: Path) -> int:
    """Length of the first axis of the array in an ``.npz``, from its header.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    with _open_array(path) as stored:
        return stored.shape[0] if stored.shape else 0


def holds_probabilities(path: Path) -> bool:
    """Whether a prediction holds probabilities (``.npz``, 4-D) and not a label map (2-D, 3-D).

    The channels of an image are colours, and the channels of 3D Slicer's segments are layers.

    Raises:
        ValueError: the file cannot be read.
    """
    labels = is_image(path) or is_segmentation(path)
    return is_array(path) or (stored_axes(path) > 3 and not labels)


def _channels(shape: tuple[int, ...], regions: bool) -> int:
    """Channels of an array; an array with three axes holds the foreground alone."""
    return shape[0] if len(shape) == 4 else 2 - regions


def of_foreground(probability: Array) -> Array:
    """Probabilities ``(2, *S)`` of background and foreground, from those of foreground ``(*S)``."""
    return np.stack([1 - probability, probability])


def read_foreground(
    path: Path,
    volume: Volume,
    geometry: Geometry,
    *,
    num_classes: int | None = None,
    regions: bool = False,
    tolerance: float = 1e-2,
    note: Callable[[str], None] = lambda text: None,
) -> Array | None:
    """Probabilities from a 3-D map of foreground; None if the volume is something else.

    A map of foreground has floating values from 0 to 1, some of which are too far from 0 and 1, or
    too many, to be labels. If none is above 0.5, the map could also hold labels that were divided
    by a number, so it must have more distinct values than such a label map.

    Args:
        path: path of the volume, for messages.
        volume: content of the file.
        geometry: geometry of the reference labels, which the result shares.
        num_classes: expected number of channels, background included without regions; None
            accepts any.
        regions: whether the channels are regions; the map is the probability of the only region.
        tolerance: how far, in voxels, the geometry may deviate from the reference.
        note: called with a sentence on how the file was read.

    Raises:
        ValueError: there is one map of foreground, but more than one class or region is expected.
    """
    array = volume.array
    if array.ndim != 3 or array.dtype.kind != "f":
        return None
    inside = array[(array > NOISE) & (array < 1 - NOISE)]
    if not (array.min() >= 0 and array.max() <= 1) or not inside.size:
        return None
    near = np.minimum(inside, 1 - inside) <= LABEL_ROUNDING
    most = MOST_LABELS if array.max() <= 0.5 else FEW if near.all() else 0
    if most and len(np.unique(inside)) <= most:
        return None
    if num_classes not in (None, 1 if regions else 2):
        raise ValueError(
            f"{path}: holds one map of probabilities, where {num_classes} "
            f"{'regions' if regions else 'classes'} are expected; store all of them on a fourth "
            "axis, or label maps"
        )
    placed, done = put_on(path, volume, geometry, tolerance)
    note(f"{path.name}: read as the probability of foreground{done and '; '}{done}")
    return placed[None] if regions else of_foreground(placed)


def not_floating(name: str, dtype: Any) -> str:
    """Message that values do not have a floating type, as probabilities have, and what to do."""
    remedy = "; store value / 255 as float32 if they go from 0 to 255" if dtype == np.uint8 else ""
    if name.endswith(ARRAY_ENDINGS):
        remedy += "; labels are read from volumes, e.g. .nii.gz"
    return f"{name}: expected floating probabilities, got {dtype}{remedy}"


def check_classes(name: str, found: int, num_classes: int | None, *, regions: bool = False) -> None:
    """Check the number of channels, background included where there are no regions.

    Raises:
        ValueError: another number of channels; the message starts with `name`.
    """
    if found < 2 and not regions:
        raise ValueError(
            f"{name}: expected a channel per class, background included, got {found}; write 1 - p "
            "as channel 0"
        )
    if num_classes is not None and found != num_classes:
        what = "regions" if regions else "classes (background included)"
        raise ValueError(f"{name}: expected {num_classes} {what}, got {found}")


def check_probabilities(
    array: Array,
    name: str,
    num_classes: int | None = None,
    *,
    regions: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> None:
    """Check that ``(K, z, y, x)`` holds probabilities, which sum to one over K unless of regions.

    Args:
        array: array to check.
        name: first words of messages.
        num_classes: expected number K of channels; None accepts any.
        regions: whether the channels are regions, which may overlap and have one probability each.
        note: called with a sentence on anything unusual.

    Raises:
        ValueError: the array fails the check; the message starts with `name`.
    """
    check_classes(name, array.shape[0], num_classes, regions=regions)
    if array.dtype.kind != "f":
        raise ValueError(not_floating(name, array.dtype))
    seen = _seen(array, name, regions)
    if seen.off and not regions:
        raise ValueError(
            f"{name}: in {seen.off} voxels the classes sum to {seen.sums[0]:.4g} - "
            f"{seen.sums[1]:.4g} instead of 1; if these are overlapping regions from a sigmoid "
            "head, give the dataset.json that defines them"
        )
    if array[0].size < MANY:
        return
    if regions and len(array) > 1 and not seen.off:
        raise ValueError(
            f"{name}: the {len(array)} channels sum to 1 in every voxel: these are classes of a "
            "softmax, but dataset.json defines regions, each with a sigmoid of its own; give the "
            "dataset.json of the model that predicted them"
        )
    if said := applied_twice(*seen.bounds, len(array), regions=regions):
        note(f"{Path(name).name}: {said}")
    if seen.whole and holds_masks(array):
        note(
            f"{Path(name).name}: holds only 0 and 1, so these are masks and not probabilities; "
            "their ECE is 1 - accuracy"
        )


class _Seen(NamedTuple):
    """What a look at the values of probabilities found."""

    bounds: tuple[float, float]
    """Smallest and largest value."""
    whole: bool
    """Whether all values are 0 or 1."""
    off: int
    """Number of voxels whose sum is not 1; for regions, 1 means at least one."""
    sums: tuple[float, float]
    """Smallest and largest sum that is not 1."""


def _seen(array: Array, name: str, regions: bool) -> _Seen:
    """Look at all slices, each thread at some of them."""
    ends = np.linspace(0, array.shape[1], 1 + threads_for(array.shape[1]), dtype=int)
    parts = in_threads(
        lambda part: _look_at(array, range(*part), name, regions),
        list(itertools.pairwise(ends.tolist())),
    )
    bounds, whole, off, sums = zip(*parts, strict=True)
    return _Seen(_widest(bounds), all(whole), sum(off), _widest(sums))


def _widest(ends: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Smallest of the lower and largest of the upper ends."""
    low, high = zip(*ends, strict=True)
    return min(low), max(high)


def _look_at(array: Array, slices: range, name: str, regions: bool) -> _Seen:
    """Look at slices, one after the other; the sums of regions only until one differs from 1."""
    bounds, sums, off, whole = (np.inf, -np.inf), (np.inf, -np.inf), 0, True
    for z in slices:
        values = _slice(array, z)
        low, high = float(values.min()), float(values.max())
        if not (low >= -PROBABILITY_TOLERANCE and high <= 1 + PROBABILITY_TOLERANCE):
            for k, channel in enumerate(array):  # one of them is refused
                check_range(channel, f"{name}: class {k}")
        bounds = _widest([bounds, (low, high)])
        whole = whole and bool(((values == 0) | (values == 1)).all())
        if regions and off:
            continue
        total = values.sum(0)
        wrong = total[np.abs(total - 1) > SUM_TOLERANCE]
        if wrong.size:
            off += 1 if regions else wrong.size
            sums = _widest([sums, (float(wrong.min()), float(wrong.max()))])
    return _Seen(bounds, whole, off, sums)


def _slice(array: Array, z: int) -> Array:
    """One slice of all classes, as float32 or wider, since computing in float16 is slow."""
    values = array[:, z]
    wide = np.promote_types(values.dtype, np.float32)
    return values if values.dtype == wide else copy_floats(values, np.empty(values.shape, wide))


def check_range(channel: Array, name: str) -> None:
    """Check that an array holds floating values from 0 to 1.

    Raises:
        ValueError: it does not; the message starts with `name`.
    """
    if channel.dtype.kind != "f":
        raise ValueError(not_floating(name, channel.dtype))
    low, high = float(channel.min(initial=0)), float(channel.max(initial=0))
    if not (np.isfinite(low) and np.isfinite(high)):
        bad = int(np.count_nonzero(~np.isfinite(channel)))
        raise ValueError(f"{name}: {bad} voxels are NaN or infinite")
    if low < -PROBABILITY_TOLERANCE or high > 1 + PROBABILITY_TOLERANCE:
        raise ValueError(
            f"{name}: values from {low:.4g} to {high:.4g} are not probabilities; if these "
            "are logits, apply a softmax over the classes first"
        )


@dataclass(frozen=True)
class _Stored:
    """An array in an open ``.npz``, whose header has been read and whose values come next."""

    key: str
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    file: IO[bytes]

    @property
    def size(self) -> int:
        """Number of bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    def shaped(self, content: NDArray[np.uint8]) -> Array:
        """The array that the bytes are."""
        return content.view(self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    def by_channel(self, arrived: Arrived) -> Callable[[NDArray[np.uint8], int], None] | None:
        """Call a function when the bytes of another channel are there; None if that cannot be."""
        if self.fortran or not self.dtype.isnative or not self.size:
            return None
        before = 0

        def arrived_bytes(content: NDArray[np.uint8], filled: int) -> None:
            nonlocal before
            channels = filled * self.shape[0] // self.size
            if channels > before:
                before = channels
                arrived(self.shaped(content), channels)

        return arrived_bytes


def read_logits(
    path: Path,
    geometry: Geometry,
    *,
    num_classes: int | None = None,
    regions: bool = False,
    reader: str | None = None,
) -> Array:
    """Read logits that ``segcal nnunet predict --save-logits`` saved beside probabilities.

    Args:
        path: ``.npz`` with the array ``logits`` ``(K, z, y, x)``.
        geometry: geometry of the reference labels, which the result shares.
        num_classes: expected number K of channels; None accepts any.
        regions: whether the channels are regions, which may overlap.
        reader: nnU-Net's reader, as its plans name it; None means one that does not reorient.

    Returns:
        floating ``(K, z, y, x)``, as stored.

    Raises:
        ValueError: names the file: it is not readable, has no array ``logits``, has another size
            than the reference, or holds values that are not finite.
    """
    stored = read_stored(path)
    if stored.key != LOGITS_KEY:
        raise ValueError(f"{path}: expected the array {LOGITS_KEY!r}, got {stored.key!r}")
    array = stored.placed(geometry, regions=regions, reader=reader)
    check_classes(str(path), len(array), num_classes, regions=regions)
    if bad := sum(int(np.count_nonzero(~np.isfinite(channel))) for channel in array):
        raise ValueError(f"{path}: {bad} logits are NaN or infinite")
    return array


@dataclass(frozen=True)
class StoredProbabilities:
    """The array of an ``.npz`` with its axes as they were stored.

    Attributes:
        path: path of the file.
        key: name of the array.
        array: ``(K, *S)``.
    """

    path: Path
    key: str
    array: Array

    def placed(
        self, geometry: Geometry, *, regions: bool = False, reader: str | None = None
    ) -> Array:
        """The array in the geometry of the reference; see :func:`read_probabilities`.

        Raises:
            ValueError: names the file: the array does not fit the reference.
        """
        crop = _check_frame(self.path, self.key, self.array.shape, geometry, reader)
        if crop is not None:
            return _put_back(self.array, crop, geometry.shape, regions)
        if _reorients(reader):
            return from_canonical(self.array, geometry, reader=str(reader))
        return self.array

    def frame(self, geometry: Geometry, *, reader: str | None = None) -> Geometry:
        """Geometry along the axes of the array, for a case whose reference has `geometry`.

        If the array is a crop of nnU-Net v1, the shape is still that of the whole image.
        """
        if self.key != KEY and _reorients(reader):
            return to_canonical(geometry, reader=str(reader))
        return geometry


def read_stored(path: Path) -> StoredProbabilities:
    """Read the array of an ``.npz`` as it is, however its axes are oriented.

    Raises:
        ValueError: names the file: it is not readable, or its values are not floating.
    """
    with _open_array(path) as stored:
        _check_floating(path, stored)
        return _unpacked(path, stored)


def _unpacked(path: Path, stored: _Stored, arrived: Arrived | None = None) -> StoredProbabilities:
    of_bytes = None if arrived is None else stored.by_channel(arrived)
    array = stored.shaped(read_exactly(stored.file, stored.size, of_bytes))
    if not array.dtype.isnative:
        array = array.byteswap(inplace=True).view(array.dtype.newbyteorder("="))
    return StoredProbabilities(path, stored.key, array)


def _read_npz(
    path: Path,
    geometry: Geometry,
    num_classes: int | None,
    regions: bool,
    reader: str | None,
    note: Callable[[str], None],
    arrived: Arrived | None,
) -> Array:
    with _open_array(path) as stored:
        _check_stored(path, stored, geometry, reader)
        check_classes(str(path), _channels(stored.shape, regions), num_classes, regions=regions)
        if stored.key not in ("probabilities", KEY):
            note(f"{path.name}: read from its only array, {stored.key!r}")
        as_stored = len(stored.shape) == 4 and not _reorients(reader)
        as_stored = as_stored and stored.shape[1:] == geometry.shape and stored.key != KEY
        unpacked = _unpacked(path, stored, arrived if as_stored else None)
        if unpacked.array.ndim == 4:
            return unpacked.placed(geometry, regions=regions, reader=reader)
        one = replace(unpacked, array=unpacked.array[None]).placed(
            geometry, regions=True, reader=reader
        )
        check_range(one, str(path))
        return one if regions else of_foreground(one[0])


def _put_back(array: Array, crop: Crop, shape: tuple[int, ...], regions: bool) -> Array:
    """Surround ``(K, z, y, x)`` of a crop by background; for regions, by probability 0."""
    full = np.zeros((len(array), *shape), array.dtype)
    full[0] = not regions
    z, y, x = (slice(*side) for side in crop.box)
    full[:, z, y, x] = array
    return full


def _reorients(reader: str | None) -> bool:
    return reader is not None and reader.endswith("WithReorient")


def _check_stored(path: Path, stored: _Stored, geometry: Geometry, reader: str | None) -> None:
    """Check what is stored against the reference."""
    _check_frame(path, stored.key, stored.shape, geometry, reader)
    _check_floating(path, stored)


def _check_floating(path: Path, stored: _Stored) -> None:
    if stored.dtype.kind != "f":
        raise ValueError(not_floating(str(path), stored.dtype))


def _check_frame(
    path: Path, key: str, shape: tuple[int, ...], geometry: Geometry, reader: str | None
) -> Crop | None:
    """Check the shape of an array against the reference; return the crop of nnU-Net v1, if any."""
    if len(shape) == 3:  # of foreground alone
        shape = (1, *shape)
    crop, frame = None, "the reference"
    if _is_cropped(path, key, shape, geometry):
        crop = read_crop(path)
        expected, frame = crop.shape, f"the crop_bbox in {path.with_suffix('.pkl').name}"
        inside = all(stop <= n for (_, stop), n in zip(crop.box, geometry.shape, strict=True))
        if not inside or crop.full_shape not in (None, geometry.shape):
            raise ValueError(
                f"{path}: its crop {list(map(list, crop.box))} of an image of size (z, y, x) "
                f"{crop.full_shape or 'unknown'} does not fit the reference, {geometry.shape}"
            )
    elif _reorients(reader):
        expected, frame = to_canonical(geometry, reader=str(reader)).shape, "the reference in RAS"
    else:
        expected = geometry.shape
    if len(shape) != 4 or shape[1:] != expected:
        raise ValueError(
            f"{path}: expected probabilities (K, z, y, x) = (K, {_shape(expected)}) like "
            f"{frame}, got {shape}" + _hint(shape, expected)
        )
    return crop


def _is_cropped(path: Path, key: str, shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether an array is nnU-Net v1's crop; one of the reference's size needs no ``.pkl``."""
    return key == KEY and (shape[1:] != geometry.shape or path.with_suffix(".pkl").is_file())


@contextmanager
def _open_array(path: Path) -> Iterator[_Stored]:
    """Open an array file and read the header of the array with the probabilities."""
    if path.suffix == ".npz":
        with _open_npz(path) as stored:
            yield stored
        return
    try:
        with path.open("rb") as file:
            yield _npy_header(path, "probabilities", path.stat().st_size, file)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except DAMAGE as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: not a readable array file ({type(error).__name__}: {error})")


@contextmanager
def _open_npz(path: Path) -> Iterator[_Stored]:
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not a complete .npz file (an .npz is a zip archive)")
    try:
        with zipfile.ZipFile(path) as archive:
            member = _member(path, archive)
            with archive.open(member) as file:
                unpack_fast(file)
                key = member.filename.removesuffix(".npy")
                yield _npy_header(path, key, member.file_size, file)
    except DAMAGE as error:
        raise _unreadable(path, error) from None


def _member(path: Path, archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    """The array with the probabilities."""
    members = {m.filename.removesuffix(".npy"): m for m in archive.infolist()}
    arrays = [key for key, member in members.items() if member.filename.endswith(".npy")]
    for key in ("probabilities", KEY):
        if key in arrays:
            return members[key]
    if len(arrays) != 1:
        raise ValueError(
            f"{path}: expected nnU-Net's array 'probabilities', got "
            f"{', '.join(list(members)[:9]) or 'nothing'}"
        )
    return members[arrays[0]]


def _npy_header(path: Path, key: str, size: int, file: IO[bytes]) -> _Stored:
    """Read the header of an array, whose values must fill the rest of `size` bytes.

    Raises:
        ValueError: the header is damaged, or states another size.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read = np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except (ValueError, tokenize.TokenError) as error:
        raise ValueError(f"{path}: not a readable array file ({error})") from None
    stored = _Stored(key, shape, fortran, dtype, file)
    if dtype.hasobject or min(shape, default=1) < 0:
        raise ValueError(f"{path}: its array is of shape {shape} and type {dtype}, not of numbers")
    if (needed := file.tell() + stored.size) != size:
        raise ValueError(
            f"{path}: damaged: its array of shape {shape} takes {needed} bytes, the archive holds "
            f"{size}"
        )
    return stored


def _shape(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _hint(shape: tuple[int, ...], expected: tuple[int, ...]) -> str:
    if len(shape) == 4 and shape[1:] == expected[::-1]:
        return "; the axes look reversed: segcal and nnU-Net store (z, y, x)"
    if len(shape) == 4 and sorted(shape[1:]) == sorted(expected):
        return "; the axes look permuted: was it predicted with another image reader?"
    return ""
