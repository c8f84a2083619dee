"""What would stop an evaluation, from the headers of the files alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segcal.io.class_files import check_class_files, class_geometry
from segcal.io.files import is_array
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case
from segcal.io.probabilities import check_classes, check_npz, not_floating, stored_channels
from segcal.io.volumes import Geometry, check_place, read_geometry, stores_bytes


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


def odd_headers(case: Case) -> list[str]:
    """Sentences on headers of a case that readers take differently."""
    notes = []
    for path in (case.reference, *case.raters[1:], case.label_map, case.prediction):
        if path is None or path.is_dir() or is_array(path):
            continue
        try:
            conflict = read_geometry(path)[0].conflict
        except ValueError:  # which stops the evaluation, and is told as such
            continue
        if conflict:
            notes.append(f"{path}: {conflict}")
    return notes


def check_case(
    case: Case,
    label_set: LabelSet | None = None,
    *,
    reader: str | None = None,
    tolerance: float = 1e-2,
) -> list[str]:
    """Sentences on what is wrong with the files of a case; empty if nothing is seen.

    Headers tell sizes, places and numbers of channels. Damaged contents, wrong label values and
    values that are no probabilities only show in the evaluation.

    Args:
        case: files to look at.
        label_set: what the labels mean, which gives the number of channels.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        tolerance: of the geometry, in voxels.
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
    except ValueError as error:
        return [str(error)]
    if channels > 1:
        problems.append(f"{case.reference}: expected a label map, got {channels} channels")
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
    channels = check_place(path, reference, tolerance)
    if channels > 1:
        raise ValueError(f"{path}: expected a label map, got {channels} channels")


def _check_volume(
    path: Path, reference: Geometry, label_set: LabelSet | None, tolerance: float
) -> None:
    channels = check_place(path, reference, tolerance)
    if channels > 1:
        if stores_bytes(path):
            raise ValueError(not_floating(str(path), np.dtype(np.uint8)))
        check_classes(str(path), channels, **_channels(label_set))
