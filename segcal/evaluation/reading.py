"""Reads the files of one case as checked arrays on the reference's grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import MANY, distinct_labels, holds_masks
from segcal.evaluation.case import Structure
from segcal.io.class_files import class_geometry, missing_classes, note_missing, read_class_files
from segcal.io.files import is_array, is_segmentation
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import DECISION_HEAD, Case
from segcal.io.probabilities import (
    FEW,
    Arrived,
    holds_probabilities,
    read_foreground,
    read_probabilities,
)
from segcal.io.volumes import (
    Geometry,
    Volume,
    check_place,
    grid_around,
    put_into,
    put_on,
    read_geometry,
    read_labels,
    read_volume,
    to_labels,
)
from segcal.metrics.rater_agreement import majority
from segcal.posthoc.decision import decide_argmax, regions_to_labels

Note = Callable[[str], None]
ArrivedWithReference = Callable[[NDArray[Any], int | None, NDArray[Any], int], None]
WHITE = 255
"""Value of the foreground in a mask that was written as an image."""


@dataclass(frozen=True)
class CaseArrays:
    """What the files of a case hold, on the reference's grid.

    Attributes:
        reference: reference label map.
        prediction: label map, ``(z, y, x)``.
        probabilities: ``(K, z, y, x)``, or None.
        structures: labels or regions to report.
        names: names of the labels in the label maps.
        regions: whether the channels are regions.
        ignore_index: reference label that is left out.
        roi: mask of the region of interest, or None.
        raters: label maps of several raters, whose majority is `reference`; empty if there is only
            one rater.
        samples: label maps that were drawn from the model; may be empty.
        most_likely: `prediction` again if it holds the most likely classes of the probabilities, or
            None.
    """

    reference: Volume
    prediction: NDArray[Any]
    probabilities: NDArray[Any] | None
    structures: list[Structure]
    names: dict[int, str]
    regions: bool
    ignore_index: int | None
    roi: NDArray[np.bool_] | None
    raters: tuple[NDArray[Any], ...] = ()
    samples: tuple[NDArray[Any], ...] = ()
    most_likely: NDArray[Any] | None = None


def read_case(
    case: Case,
    label_set: LabelSet | None,
    *,
    tolerance: float,
    reader: str | None = None,
    threshold: float | None = None,
    arrived: ArrivedWithReference | None = None,
    note: Note = lambda text: None,
) -> CaseArrays:
    """Read one case.

    If a label map lies beside a ``.npz``, it is the prediction for overlap and surfaces, since
    nnU-Net post-processes label maps only. If it has little in common with the probabilities, the
    two are oriented differently, and the case is refused.

    Args:
        case: files to read.
        label_set: names and ignore label; None names labels by their value.
        tolerance: how far, in voxels, the geometry of a prediction may deviate from its reference.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        threshold: a structure (foreground or a region) is where its probability is above this
            value, even if a label map lies beside the probabilities. None uses that label map, or
            the most likely classes.
        arrived: called with the reference, its ignore label, the probabilities while they are
            being read, and the number of classes that are there; see
            :func:`segcal.io.probabilities.read_probabilities`. Not called for regions, nor where
            several raters make the reference.
        note: called with a sentence on anything unusual, and how it was read.

    Raises:
        ValueError: names the file and what is wrong with it.
    """
    reference = _read_reference(case, label_set, tolerance, note)
    if reference.note:
        note(f"{case.reference.name}: {reference.note}")
    ignore_index = None if label_set is None else label_set.ignore_index
    regions = label_set is not None and bool(label_set.regions)
    at = reference.geometry
    of_classes = None
    if arrived is not None and not regions and not case.raters:
        of_classes = partial(arrived, reference.array, ignore_index)
    prediction, probabilities = _read_prediction(
        case, at, label_set, tolerance, reader, note, of_classes
    )
    decided = not regions and case.label_map is None and probabilities is not None
    if threshold is not None:
        decided, prediction = False, _above(case.prediction, probabilities, threshold, label_set)
    raters = (
        reference.array, *(_read_on(path, at, tolerance, note) for path in case.raters[1:])
    )  # fmt: skip
    samples = tuple(_read_on(path, at, tolerance, note) for path in case.samples)
    found = [distinct_labels(one) for one in (*raters, *samples)]
    there = np.concatenate(found)
    structures, names, allowed = _structures(prediction, probabilities, there, label_set)
    structures = _with_files(case, structures, label_set, note)
    predicted = case.label_map or case.prediction
    in_reference = _check_labels(case.reference, found[0], allowed, ignore_index)
    for path, labels in zip((*case.raters[1:], *case.samples), found[1:], strict=True):
        _check_labels(path, labels, allowed, ignore_index)
    if case.raters:
        raters = _ignored_alike(raters, ignore_index)
        reference = replace(reference, array=majority(raters))
    in_prediction = _check_labels(predicted, distinct_labels(prediction), allowed, ignore_index)
    if label_set is None and probabilities is None:
        _check_common(case, in_reference, in_prediction, note)
    roi = None if case.roi is None else _read_on(case.roi, at, tolerance, note) != 0
    return CaseArrays(
        reference, prediction, probabilities, structures, names, regions, ignore_index, roi,
        raters if case.raters else (), samples, prediction if decided else None,
    )  # fmt: skip


def _ignored_alike(
    raters: tuple[NDArray[Any], ...], ignore_index: int | None
) -> tuple[NDArray[Any], ...]:
    """Label maps of raters in which a voxel that one rater ignores is ignored by all."""
    if ignore_index is None:
        return raters
    ignored = np.any([one == ignore_index for one in raters], axis=0)
    return tuple(np.where(ignored, ignore_index, one) for one in raters)


@dataclass(frozen=True)
class PredictionArrays:
    """What the files of a prediction without a reference hold.

    Attributes:
        geometry: geometry of its voxels.
        prediction: label map, ``(z, y, x)``.
        probabilities: ``(K, z, y, x)``.
        structures: labels or regions to report.
        names: names of the labels in the label map.
        regions: whether the channels are regions.
    """

    geometry: Geometry
    prediction: NDArray[Any]
    probabilities: NDArray[Any]
    structures: list[Structure]
    names: dict[int, str]
    regions: bool


def read_prediction(
    case: Case,
    label_set: LabelSet | None,
    *,
    tolerance: float,
    reader: str | None = None,
    note: Note = lambda text: None,
) -> PredictionArrays:
    """Read one case of :func:`segcal.io.pairing.unpaired`, which has no reference.

    Args:
        case: files to read.
        label_set: names and ignore label; None names labels by their value.
        tolerance: how far, in voxels, geometries of the files may deviate from each other.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        note: called with a sentence on anything unusual, and how it was read.

    Raises:
        ValueError: names the file and what is wrong with it; a label map without probabilities
            is refused, too.
    """
    at, _ = read_geometry(case.reference)
    prediction, probabilities = _read_prediction(case, at, label_set, tolerance, reader, note)
    if probabilities is None:
        raise ValueError(
            f"{case.prediction}: holds no probabilities, from which confidence is computed; let "
            "the predictor save them, too (nnU-Net: save_probabilities)"
        )
    structures, names, allowed = _structures(prediction, probabilities, prediction, label_set)
    structures = _with_files(case, structures, label_set, note)
    _check_labels(case.label_map or case.prediction, distinct_labels(prediction), allowed, None)
    regions = label_set is not None and bool(label_set.regions)
    return PredictionArrays(at, prediction, probabilities, structures, names, regions)


def _above(
    path: Path, probabilities: NDArray[Any] | None, threshold: float, label_set: LabelSet | None
) -> NDArray[Any]:
    """Label map of the voxels whose probability is above a threshold."""
    order = None if label_set is None or not label_set.regions else label_set.class_order
    if probabilities is None:
        raise ValueError(
            f"{path}: is a label map, to which no threshold can be applied; probabilities "
            "are floating values from 0 to 1"
        )
    if order is not None:
        return regions_to_labels(probabilities, order, [threshold] * len(order))
    if len(probabilities) != 2:
        raise ValueError(
            f"{path}: has {len(probabilities)} classes; a threshold is for foreground against "
            "background, or for regions"
        )
    return (probabilities[1] > threshold).astype(np.int32)


def _read_reference(case: Case, label_set: LabelSet | None, tolerance: float, note: Note) -> Volume:
    """Labels from a file, or from a folder with a mask per class."""
    path = case.reference
    if path.is_file():
        volume = read_labels(path)
        image = image_of_box(case, volume.geometry)
        return volume if image is None else put_into(path, volume, image)
    geometry = class_geometry(path, label_set)
    labels = read_class_files(
        path, geometry, label_set, tolerance=tolerance, note=note, overlaps=True
    )
    if labels.ndim == 4:
        raise ValueError(f"{path}: expected masks of 0 and 1, got probabilities")
    return Volume(labels, geometry)


def image_of_box(case: Case, reference: Geometry) -> Geometry | None:
    """Grid of a prediction's image, if the reference holds only the box of segments within it."""
    path = case.prediction
    if not is_segmentation(case.reference) or path.is_dir() or is_array(path):
        return None
    return grid_around(reference, read_geometry(path)[0])


def _with_files(
    case: Case, structures: list[Structure], label_set: LabelSet | None, note: Note
) -> list[Structure]:
    """Structures without those that have no file in a folder with a file per class."""
    for path in (case.prediction, case.reference):
        if path.is_dir() and label_set is not None:
            missing = missing_classes(path, label_set)
            for text in note_missing(path, label_set):
                note(text)
            structures = [one for one in structures if one.name not in missing]
    return structures


def _read_prediction(
    case: Case,
    at: Geometry,
    label_set: LabelSet | None,
    tolerance: float,
    reader: str | None,
    note: Note,
    arrived: Arrived | None = None,
) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Label map of a prediction, and its probabilities if it has some."""
    regions = label_set is not None and bool(label_set.regions)
    if case.prediction.is_dir():
        read = read_class_files(case.prediction, at, label_set, tolerance=tolerance, note=note)
        if read.ndim != 4:
            return read, None
        probabilities = read
    elif holds_probabilities(case.prediction):
        probabilities = read_probabilities(
            case.prediction,
            at,
            num_classes=None if label_set is None else label_set.num_channels,
            regions=regions,
            reader=reader,
            tolerance=tolerance,
            arrived=arrived,
            note=note,
        )
    else:
        check_place(case.prediction, at, tolerance)
        volume = read_volume(case.prediction)
        foreground = read_foreground(
            case.prediction,
            volume,
            at,
            num_classes=None if label_set is None else label_set.num_foreground_channels,
            regions=regions,
            tolerance=tolerance,
            note=note,
        )
        if foreground is None:
            return _put_labels_on(case.prediction, volume, at, tolerance, note), None
        probabilities = foreground
    class_order = label_set.class_order if label_set is not None and regions else None
    prediction = decide_argmax(probabilities, class_order=class_order)
    kept: NDArray[Any] | None = probabilities
    if probabilities[0].size >= MANY and holds_masks(probabilities):
        note(f"{case.prediction.name}: read as a label map, so its calibration is left out")
        kept = None
    if case.label_map is None:
        if case.decision == DECISION_HEAD:
            note(
                f"{case.prediction.name}: the mask of the decision head is not beside it, so "
                "overlap and surfaces are those of the probabilities' argmax"
            )
        return prediction, kept
    label_map = _read_on(case.label_map, at, tolerance, note)
    _compare(case, prediction, label_map, note)
    return label_map, kept


def _structures(
    prediction: NDArray[Any],
    probabilities: NDArray[Any] | None,
    reference: NDArray[Any],
    label_set: LabelSet | None,
) -> tuple[list[Structure], dict[int, str], set[int]]:
    """Structures to report, names of the labels in the label maps, and allowed label values."""
    if label_set is not None:
        structures = [
            Structure(name, labels, index if label_set.regions else labels[0])
            for index, (name, labels) in enumerate(label_set.foreground.items())
        ]
        return structures, label_set.map_names, label_set.values
    if probabilities is not None:
        values = list(range(1, len(probabilities)))
    else:
        found = np.union1d(distinct_labels(prediction), distinct_labels(reference))
        values = [int(v) for v in found if v > 0]
    names = {v: str(v) for v in values}
    return [Structure(name, (v,), v) for v, name in names.items()], names, {0, *values}


def _read_on(path: Path, reference: Geometry, tolerance: float, note: Note) -> NDArray[Any]:
    """Read a label map that must lie on the reference; the header is checked first."""
    check_place(path, reference, tolerance)
    return _put_labels_on(path, read_volume(path), reference, tolerance, note)


def _put_labels_on(
    path: Path, volume: Volume, reference: Geometry, tolerance: float, note: Note
) -> NDArray[Any]:
    array, done = put_on(path, to_labels(path, volume), reference, tolerance)
    for text in filter(None, (volume.note, done)):
        note(f"{path.name}: {text}")
    return array


def check_label_map(
    prediction: Path, argmax: NDArray[Any], path: Path, label_map: NDArray[Any]
) -> None:
    """Refuse a label map that is oriented differently than the probabilities beside it.

    Post-processing only removes foreground, so foreground elsewhere means another orientation.

    Args:
        prediction: path of the probabilities.
        argmax: label map of the probabilities, ``(*S)``.
        path: path of the label map beside them.
        label_map: content of that label map, ``(*S)``.

    Raises:
        ValueError: most foreground voxels of the label map have another label in `argmax`.
    """
    foreground = int(np.count_nonzero(label_map))
    elsewhere = int(np.count_nonzero((argmax != label_map) & (label_map != 0)))
    if elsewhere > 0.5 * foreground:
        raise ValueError(
            f"{prediction}: {elsewhere} of the {foreground} foreground voxels of {path} beside it "
            "have another label here. If they were predicted with a reader that reorients, keep "
            "nnU-Net's plans.json beside the predictions. Or do they belong to different cases?"
        )


def _compare(case: Case, argmax: NDArray[Any], label_map: NDArray[Any], note: Note) -> None:
    """Refuse a label map that is oriented differently; note how many other voxels differ."""
    if case.label_map is not None and case.decision == "argmax":
        check_label_map(case.prediction, argmax, case.label_map, label_map)
    differ = int(np.count_nonzero(argmax != label_map))
    if differ:
        why = "post-processed?" if case.decision == "argmax" else f"decided by {case.decision}"
        note(
            f"{case.prediction.name}: {differ} voxels have another label in the label map beside "
            f"it ({why}); overlap and surfaces are measured on the label map, calibration on the "
            "probabilities"
        )


def _check_labels(
    path: Path, labels: NDArray[Any], allowed: set[int], ignore_index: int | None
) -> set[int]:
    """Refuse labels that are not among the classes; return all of them as a set."""
    found = set(labels.tolist())
    if unknown := sorted(found - allowed - {ignore_index}):
        hint = "renumber the labels to these"
        if unknown == [WHITE]:
            hint = f"store a mask of 0 and {WHITE} as 0 and 1"
        elif said := _scaled(found, allowed):
            hint = said
        raise ValueError(
            f"{path}: labels {unknown[:5]} are not among the classes "
            f"{', '.join(map(str, sorted(allowed)))}; {hint}, or if one of them means 'ignore', "
            "say so in dataset.json"
        )
    return found


def _scaled(found: set[int], labels: set[int]) -> str:
    """Say what to do if values look like probabilities of foreground stored as whole numbers."""
    if len(found) <= FEW or labels != {0, 1} or not 1 < max(found) <= WHITE or min(found) < 0:
        return ""
    most = WHITE if max(found) > 100 else 100
    return (
        f"if they are probabilities of foreground from 0 to {most}, store value / {most} as float32"
    )


def _check_common(case: Case, reference: set[int], prediction: set[int], note: Note) -> None:
    """Note label maps that have no label in common, and refuse files that are not label maps."""
    if said := _scaled(prediction, {0, *reference}):
        raise ValueError(f"{case.prediction}: holds {len(prediction)} values; {said}")
    of_reference, predicted = sorted(reference - {0}), sorted(prediction - {0})
    if not of_reference or not predicted or reference & prediction - {0}:
        return
    said = f"holds labels {predicted[:5]}, its reference {case.reference.name} {of_reference[:5]}"
    if sorted(of_reference + predicted) == [1, WHITE]:
        raise ValueError(
            f"{case.prediction}: {said}; store a mask of 0 and {WHITE} as 0 and 1, or if {WHITE} "
            "means 'ignore', say so in dataset.json"
        )
    note(
        f"{case.prediction.name}: {said}, none in common; if they mean the same structures, store "
        "the same values in both"
    )
