"""Reads a case that is stored as a folder with one volume per class, named by the classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from segcal.io.label_sets import LabelSet
from segcal.io.pairing import scan
from segcal.io.probabilities import SUM_TOLERANCE, check_probabilities, check_range
from segcal.io.rounding import LABEL_ROUNDING, merged
from segcal.io.volumes import Array, Geometry, check_place, put_on, read_geometry, read_volume

MASK_ROUNDING = 1e-4
"""Values this near to 0 or 1 count as a mask (scaled headers)."""


def find_class_files(folder: Path, label_set: LabelSet) -> dict[int, Path]:
    """Files of the labels, by label value; background only if it has a file.

    Raises:
        ValueError: no label has a file.
    """
    files = scan(folder, arrays=False)
    found = {k: files[name] for k, name in label_set.names.items() if name in files}
    if not any(found):
        raise _missing(folder, label_set)
    return found


def missing_classes(folder: Path, label_set: LabelSet) -> list[str]:
    """Names of the labels that have no file in a folder."""
    files = scan(folder, arrays=False)
    return [name for name in label_set.foreground if name not in files]


def note_missing(folder: Path, label_set: LabelSet | None) -> list[str]:
    """Sentences on the labels that have no file in a folder.

    Raises:
        ValueError: no label has a file.
    """
    label_set = _known(folder, label_set)
    find_class_files(folder, label_set)
    return [
        f"{folder}: label {name} has no file, so it has no results in this case"
        for name in missing_classes(folder, label_set)
    ]


def class_geometry(folder: Path, label_set: LabelSet | None) -> Geometry:
    """Geometry of the first label's file.

    Raises:
        ValueError: no label has a file, or it cannot be read.
    """
    files = find_class_files(folder, _known(folder, label_set))
    return read_geometry(next(iter(files.values())))[0]


def _missing(folder: Path, label_set: LabelSet) -> ValueError:
    missing, files = missing_classes(folder, label_set), scan(folder, arrays=False)
    return ValueError(
        f"{folder}: no file for label {', '.join(missing[:9])} of {label_set.source}; expected "
        f"{missing[0]}.nii.gz beside {', '.join(sorted(files)[:3])}"
    )


def _known(folder: Path, label_set: LabelSet | None) -> LabelSet:
    if label_set is None:
        raise ValueError(
            f"{folder}: holds one file per class; give a dataset.json, or --labels "
            "NAME=VALUE,..., that says which label each file holds"
        )
    if label_set.regions:
        raise ValueError(
            f"{folder}: holds one file per class, but {label_set.source} defines regions that "
            "overlap; write them as channels of one file"
        )
    return label_set


def check_class_files(
    folder: Path, geometry: Geometry, label_set: LabelSet | None, *, tolerance: float = 1e-2
) -> None:
    """Check names and headers of the files of a case.

    Raises:
        ValueError: as :func:`read_class_files`; the values themselves are not checked.
    """
    for path in find_class_files(folder, _known(folder, label_set)).values():
        _check_header(path, geometry, tolerance)


def read_class_files(
    folder: Path,
    geometry: Geometry,
    label_set: LabelSet | None,
    *,
    tolerance: float = 1e-2,
    note: Callable[[str], None] = lambda text: None,
    overlaps: bool = False,
) -> Array:
    """Read a case of one file per class.

    Files of 0 and 1 are masks and give a label map. Files of other floating values are
    probabilities; if background has no file, its probability is the rest to 1.

    Args:
        folder: folder of the case.
        geometry: geometry of the reference labels, which the result shares.
        label_set: names of the labels, by which the files are found.
        tolerance: how far, in voxels, the geometry may deviate from the reference.
        note: called with a sentence on anything unusual, and how it was read.
        overlaps: whether masks may overlap; then the largest label wins, and a note says so.

    Returns:
        label map ``(z, y, x)`` of integers, or probabilities ``(K, z, y, x)``.

    Raises:
        ValueError: names the file: it is missing or not readable, differs from the reference in
            size or position, or holds neither a mask nor probabilities; masks overlap; or
            probabilities do not sum to one.
    """
    label_set = _known(folder, label_set)
    files = find_class_files(folder, label_set)
    if unused := sorted(set(scan(folder, arrays=False).values()) - set(files.values())):
        names = ", ".join(path.name for path in unused[:9])
        note(f"{folder.name}: {len(unused)} files belong to no label and are left out: {names}")
    notes: set[str] = set()

    def read(path: Path) -> Array:
        _check_header(path, geometry, tolerance)
        volume = read_volume(path)
        array, done = put_on(path, volume, geometry, tolerance)
        if array.dtype.kind not in "iufb":
            raise ValueError(f"{path}: expected a mask or probabilities, got {array.dtype}")
        notes.update((volume.note, done))
        return array

    array, twice = _label_map(files, geometry.shape, read)
    if twice and not overlaps:
        raise ValueError(
            f"{folder}: masks overlap in {twice} voxels, which would then have two labels"
        )
    if twice:
        note(
            f"{folder.name}: masks overlap in {twice} voxels, which get the largest of their "
            f"labels: {' < '.join(label_set.names[k] for k in files)}"
        )
    if array is None:
        if missing_classes(folder, label_set):
            raise _missing(folder, label_set)
        array = _probabilities(folder, files, geometry.shape, read, label_set.num_channels, note)
    for text in sorted(notes - {""}):
        note(f"{folder.name}: {text}")
    return array


def _check_header(path: Path, geometry: Geometry, tolerance: float) -> None:
    channels = check_place(path, geometry, tolerance)
    if channels > 1:
        raise ValueError(f"{path}: expected a volume of one class, got {channels} channels")


def _label_map(
    files: dict[int, Path], shape: tuple[int, ...], read: Callable[[Path], Array]
) -> tuple[Array | None, int]:
    """Label map from masks, in which larger labels win, and the number of voxels in several masks.

    The label map is None if a file holds floating values other than 0 and 1.
    """
    labels, taken, twice = np.zeros(shape, np.int32), np.zeros(shape, bool), 0
    for k, path in files.items():
        array = read(path)
        mask = array > 0.5
        if array.dtype.kind == "f":
            distance = np.abs(array - mask.astype(array.dtype))
            if not (distance <= MASK_ROUNDING).all() or merged(array, distance):
                return None, 0
        elif (values := (array.min(), array.max()))[0] < 0 or values[1] > 1:
            low, high = values
            hint = f"; store a mask as 0 and 1, probabilities as value / {high} in float32"
            raise ValueError(
                f"{path}: expected a mask of 0 and 1, or floating probabilities, got {array.dtype} "
                f"from {low} to {high}{hint if low == 0 else ''}"
            )
        twice += int(np.count_nonzero(mask & taken))
        labels[mask] = k
        taken |= mask
    return labels, twice


def _probabilities(
    folder: Path,
    files: dict[int, Path],
    shape: tuple[int, ...],
    read: Callable[[Path], Array],
    num_classes: int,
    note: Callable[[str], None],
) -> Array:
    probabilities = np.zeros((num_classes, *shape), np.float32)
    for k, path in files.items():
        array = read(path)
        check_range(array, str(path))
        _check_undivided(path, array)
        probabilities[k] = array
    if 0 not in files:
        over, most = 0, 0.0
        for z in range(shape[0]):
            total = probabilities[:, z].sum(0)
            over += int(np.count_nonzero(total > 1 + SUM_TOLERANCE))
            most = max(most, float(total.max()))
            probabilities[0, z] = np.maximum(1 - total, 0)
        if over:
            raise ValueError(
                f"{folder}: in {over} voxels the classes sum to more than 1, up to {most:.4g}, so "
                "nothing is left for background, which has no file; check the files, or add one "
                "for background"
            )
    check_probabilities(probabilities, str(folder), num_classes, note=note)
    return probabilities


def _check_undivided(path: Path, array: Array) -> None:
    """Refuse a mask that was divided: nothing but 0 and one tiny value."""
    most = array.max(initial=0)
    if 0 < most <= LABEL_ROUNDING and not ((array > 0) & (array < most)).any():
        raise ValueError(
            f"{path}: holds only 0 and {most:.4g}, which looks like a mask that was divided by "
            f"{1 / most:.0f}; store 0 and 1"
        )
