"""What would stop an evaluation, from the headers of the files alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from segcal.io.cases import Case, LabelSet
from segcal.io.probabilities import check_classes, check_shape, stored_shape
from segcal.io.volumes import Geometry, read_geometry


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
        reference, channels = read_geometry(case.reference)
    except ValueError as error:
        return [str(error)]
    if channels > 1:
        problems.append(f"{case.reference}: expected a label map, got {channels} channels")
    if case.prediction.suffix == ".npz":
        attempt(lambda: _check_npz(case, reference, label_set, reader))
        if (label_map := case.label_map) is not None:
            attempt(lambda: _check_label_map(label_map, reference, tolerance))
    else:
        attempt(lambda: _check_volume(case, reference, label_set, tolerance))
    return problems


def _check_channels(path: Path, found: int, label_set: LabelSet | None) -> None:
    if label_set is not None:
        check_classes(str(path), found, label_set.num_channels, regions=bool(label_set.regions))


def _check_npz(
    case: Case, reference: Geometry, label_set: LabelSet | None, reader: str | None
) -> None:
    shape = stored_shape(case.prediction)
    reorients = reader is not None and reader.endswith("WithReorient") and len(shape) == 4
    if reorients and sorted(shape[1:]) == sorted(reference.shape):
        shape = (shape[0], *reference.shape)  # its axes may be in another order
    check_shape(case.prediction, shape, reference)
    _check_channels(case.prediction, shape[0], label_set)


def _check_label_map(path: Path, reference: Geometry, tolerance: float) -> None:
    channels = _check_place(path, reference, tolerance)
    if channels > 1:
        raise ValueError(f"{path}: expected a label map, got {channels} channels")


def _check_volume(
    case: Case, reference: Geometry, label_set: LabelSet | None, tolerance: float
) -> None:
    channels = _check_place(case.prediction, reference, tolerance)
    if channels > 1:
        _check_channels(case.prediction, channels, label_set)


def _check_place(path: Path, reference: Geometry, tolerance: float) -> int:
    geometry, channels = read_geometry(path)
    if differences := geometry.differences(reference, tolerance):
        raise ValueError(f"{path}: does not lie on the reference: {'; '.join(differences)}")
    return channels
