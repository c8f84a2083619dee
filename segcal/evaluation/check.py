"""Finds what would stop an evaluation, from the headers of the files alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segcal.evaluation.reading import image_of_box
from segcal.io.class_files import check_class_files, class_geometry, note_missing
from segcal.io.files import is_array, is_image, is_segmentation
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case
from segcal.io.probabilities import check_classes, check_npz, not_floating, stored_channels
from segcal.io.volumes import Geometry, check_place, read_geometry, value_type


def count_channels(case: Case) -> int | None:
    """Channels of a prediction, from its header; None for a label map or what cannot be read."""
    if case.prediction.is_dir():
        return None
    try:
        if is_array(case.prediction):
            return stored_channels(case.prediction)
        channels = read_geometry(case.prediction)[1]
    except ValueError:
        return None
    return channels if channels > 1 else None


def oddities(case: Case, label_set: LabelSet | None) -> list[str]:
    """Sentences on what is unusual about a case: ambiguous orientations, labels without a file."""
    notes = []
    for path in (case.reference, *case.raters[1:], case.label_map, case.prediction):
        if path is None or is_array(path):
            continue
        try:
            if path.is_dir():
                notes += note_missing(path, label_set)
            elif conflict := read_geometry(path)[0].conflict:
                notes.append(f"{path}: {conflict}")
        except ValueError:  # which stops the evaluation, and is told as such
            continue
    return notes


def check_case(
    case: Case,
    label_set: LabelSet | None = None,
    *,
    reader: str | None = None,
    tolerance: float = 1e-2,
) -> list[str]:
    """Sentences on what is wrong with the files of a case; empty if nothing is found.

    Headers state sizes, positions and numbers of channels. Damaged contents, wrong label values
    and values that are not probabilities only show in the evaluation.

    Args:
        case: files to look at.
        label_set: what the labels mean, which determines the number of channels.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        tolerance: how far, in voxels, the geometry may deviate from the reference.
    """
    problems: list[str] = []

    def attempt(step: Callable[[], None]) -> None:
        try:
            step()
        except ValueError as error:
            problems.append(str(error))

    try:
        if case.reference.is_dir():
            reference, channels = class_geometry(case.reference, label_set), 1
            check_class_files(case.reference, reference, label_set, tolerance=tolerance)
        else:
            reference, channels = read_geometry(case.reference)
            reference = image_of_box(case, reference) or reference
    except ValueError as error:
        return [str(error)]
    attempt(lambda: _check_single(case.reference, channels))
    for other in (*case.raters[1:], *case.samples):
        attempt(partial(_check_label_map, other, reference, tolerance))
    if case.prediction.is_dir():
        attempt(
            lambda: check_class_files(case.prediction, reference, label_set, tolerance=tolerance)
        )
    elif is_array(case.prediction):
        attempt(lambda: _check_npz(case.prediction, reference, label_set, reader))
        if (label_map := case.label_map) is not None:
            attempt(lambda: _check_label_map(label_map, reference, tolerance))
    else:
        attempt(lambda: _check_volume(case.prediction, reference, label_set, tolerance))
    return problems


def _channels(label_set: LabelSet | None) -> dict[str, Any]:
    if label_set is None:
        return {"num_classes": None}
    return {"num_classes": label_set.num_channels, "regions": bool(label_set.regions)}


def _check_npz(
    path: Path, reference: Geometry, label_set: LabelSet | None, reader: str | None
) -> None:
    check_npz(path, reference, reader=reader, **_channels(label_set))


def _check_label_map(path: Path, reference: Geometry, tolerance: float) -> None:
    _check_single(path, check_place(path, reference, tolerance))


def _check_single(path: Path, channels: int) -> None:
    """Refuse a label map with several channels, unless it is an image saved in colour."""
    if channels > 1 and not is_image(path):
        raise ValueError(f"{path}: expected a label map, got {channels} channels")


def _check_volume(
    path: Path, reference: Geometry, label_set: LabelSet | None, tolerance: float
) -> None:
    channels = check_place(path, reference, tolerance)
    if is_image(path) or is_segmentation(path):
        _check_single(path, channels)
    elif channels > 1:
        if value_type(path) == np.uint8:
            raise ValueError(not_floating(str(path), np.dtype(np.uint8)))
        check_classes(str(path), channels, **_channels(label_set))
