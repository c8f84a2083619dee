"""Evaluates one case: takes arrays, and returns one row of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.binning import BinStatistics
from segcal.evaluation.reported import calibration_metrics, label_means
from segcal.evaluation.settings import EvaluationSettings
from segcal.metrics import table
from segcal.metrics.rater_agreement import rater_disagreement
from segcal.metrics.table import MaskPair, calibration_of
from segcal.surface import Box, label_boxes
from segcal.tally import Tally, Voxels, predicted_classes

OF_A_REGION = "cece"
"""First letters of the calibration errors that are reported for every region, too."""
Scopes = Mapping[str, NDArray[np.bool_] | None] | Iterable[tuple[str, NDArray[np.bool_] | None]]
"""Masks by name; None is every voxel."""
IGNORED = 255
"""Stands for the ignore label among the 0 and 1 of a region."""


@dataclass(frozen=True)
class CaseResult:
    """Numbers of one case.

    Attributes:
        row: scalar results by key; keys of per-class results are ``metric/label``. NaN means
            undefined.
        calibration: sums over voxels by scope (selection of voxels), and over regions if there
            are any; empty without probabilities.
    """

    row: dict[str, float]
    calibration: dict[str, Tally] = field(default_factory=dict)


@dataclass(frozen=True)
class Structure:
    """A structure that is compared as one: a label, or a region of several labels.

    Attributes:
        name: name in the columns.
        labels: label values that it consists of.
        channel: its channel of the probabilities.
    """

    name: str
    labels: tuple[int, ...]
    channel: int


def evaluate_case(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    *,
    spacing_mm: Sequence[float],
    structures: Sequence[Structure],
    probabilities: NDArray[Any] | None = None,
    regions: bool = False,
    ignore_index: int | None = None,
    roi: NDArray[np.bool_] | None = None,
    raters: Sequence[NDArray[Any]] = (),
    most_likely: NDArray[Any] | None = None,
    counted: Callable[[], Voxels | None] = lambda: None,
    settings: EvaluationSettings | None = None,
) -> CaseResult:
    """Evaluate a label map, and the probabilities behind it if there are any.

    Args:
        prediction: integer ``(*S)``.
        reference: integer ``(*S)``.
        spacing_mm: voxel size along the axes of the arrays.
        structures: foreground labels or regions to report.
        probabilities: ``(K, *S)``, background first; with `regions` one channel per structure,
            which need not sum to one. None gives overlap and surface metrics only.
        regions: whether labels overlap in the probabilities.
        ignore_index: reference label that is left out of everything.
        roi: voxels of the scope ``roi``.
        raters: label maps of several raters, whose majority is `reference`; calibration is
            against all of them.
        most_likely: most likely class of every voxel ``(*S)``, where it is known; None finds it.
        counted: see :func:`evaluate_probabilities`.
        settings: bins, thresholds and scopes; None uses the defaults.

    Raises:
        ValueError: arrays do not fit each other, or the scope ``roi`` has no mask.
    """
    settings = settings or EvaluationSettings()
    row = evaluate_mask(
        prediction, reference, spacing_mm=spacing_mm, structures=structures,
        ignore_index=ignore_index, settings=settings,
    )  # fmt: skip
    if settings.compat == "marginloss":
        from segcal.reproduction.marginloss import evaluate_case_marginloss  # which needs torch

        published = evaluate_case_marginloss(
            prediction, reference, probabilities=probabilities,
            labels={one.labels[0]: one.name for one in structures},
        )  # fmt: skip
        row.update({f"marginloss_{key}": value for key, value in published.items()})
    if probabilities is None:
        return CaseResult(row)
    found = evaluate_probabilities(
        probabilities, reference, structures=structures, regions=regions,
        ignore_index=ignore_index, roi=roi, raters=raters, most_likely=most_likely,
        counted=counted, settings=settings,
    )  # fmt: skip
    return CaseResult({**row, **found.row}, found.calibration)


def evaluate_mask(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    *,
    spacing_mm: Sequence[float],
    structures: Sequence[Structure],
    ignore_index: int | None = None,
    settings: EvaluationSettings,
) -> dict[str, float]:
    """Overlap and surface distances of a label map.

    Args:
        prediction: integer ``(*S)``.
        reference: integer ``(*S)``.
        spacing_mm: voxel size along the axes of the arrays.
        structures: foreground labels or regions to report.
        ignore_index: reference label that is left out of everything.
        settings: tolerance of the surface distance.

    Raises:
        ValueError: the arrays have different shapes.
    """
    if prediction.shape != reference.shape:
        raise ValueError(
            f"prediction {prediction.shape} and reference {reference.shape}: expected one shape"
        )
    valid = None if ignore_index is None else reference != ignore_index
    extent = np.asarray(spacing_mm) * reference.shape
    row: dict[str, float] = {"diagonal_mm": float(np.linalg.norm(extent))}
    row.update(_overlap(prediction, reference, structures, spacing_mm, valid, settings))
    row.update(_means_of_labels(row, structures))
    return row


def evaluate_probabilities(
    probabilities: NDArray[Any],
    reference: NDArray[Any],
    *,
    structures: Sequence[Structure],
    regions: bool = False,
    ignore_index: int | None = None,
    roi: NDArray[np.bool_] | None = None,
    raters: Sequence[NDArray[Any]] = (),
    most_likely: NDArray[Any] | None = None,
    counted: Callable[[], Voxels | None] = lambda: None,
    settings: EvaluationSettings,
) -> CaseResult:
    """Calibration of the probabilities of a case.

    Args:
        probabilities: ``(K, *S)``, background first; with `regions` one channel per structure.
        reference: integer ``(*S)``.
        structures: foreground labels or regions to report.
        regions: whether labels overlap in the probabilities.
        ignore_index: reference label that is left out of everything.
        roi: voxels of the scope ``roi``.
        raters: label maps of several raters, whose majority is `reference`.
        most_likely: most likely class of every voxel ``(*S)``, where it is known; None finds it.
        counted: gives these voxels in their :func:`labelled_scopes`, from :func:`prepare_voxels`,
            if some of their classes have been counted already, or else None.
        settings: bins, thresholds and scopes.

    Raises:
        ValueError: the scope ``roi`` has no mask.
    """
    labelled = np.maximum.reduce(raters) if raters else reference
    if raters and ignore_index is not None:
        labelled = np.where(reference == ignore_index, ignore_index, labelled)
    scopes = labelled_scopes(labelled, ignore_index, settings, roi)
    wider = _wider_scopes(
        labelled, ignore_index, probabilities, regions, most_likely, settings
    )  # fmt: skip
    if not raters and not regions:  # masks one at a time
        if (voxels := counted()) is None:
            voxels = prepare_voxels(probabilities, reference, scopes, ignore_index, settings)
        for scope, mask in wider:
            voxels.widen(scope, mask)
            del mask  # it may have the size of the image
        return _calibration(voxels, settings)
    masks = dict(scopes)
    for scope, mask in wider:
        of_labels = masks[scope]
        masks[scope] = None if of_labels is None else of_labels | (mask != 0)
    if regions:
        every, valid = raters or (reference,), None
        if ignore_index is not None:
            valid = reference != ignore_index
        return _region_calibration(probabilities, every, structures, masks, valid, settings)
    return _calibration_of_raters(probabilities, raters, masks, ignore_index, settings)


def prepare_voxels(
    probabilities: NDArray[Any],
    reference: NDArray[Any],
    scopes: Scopes,
    ignore_index: int | None,
    settings: EvaluationSettings,
) -> Voxels:
    """Voxels of a case, ready to be counted; the values of the probabilities may still be missing.

    Args:
        probabilities: ``(K, *S)``.
        reference: integer ``(*S)``.
        scopes: masks by name, such as :func:`labelled_scopes` gives.
        ignore_index: reference label that is left out of everything.
        settings: bins and threshold.
    """
    return Voxels(
        probabilities, reference, scopes, ignore_index=ignore_index, bins=settings.bins,
        threshold=settings.tace_threshold,
    )  # fmt: skip


def _calibration(voxels: Voxels, settings: EvaluationSettings) -> CaseResult:
    tallies = voxels.tally()
    groups = voxels.equal_mass_groups(tallies, settings.bins)
    return CaseResult(_errors(tallies, settings, groups), tallies)


def _calibration_of_raters(
    probabilities: NDArray[Any],
    raters: Sequence[NDArray[Any]],
    scopes: dict[str, NDArray[np.bool_] | None],
    ignore_index: int | None,
    settings: EvaluationSettings,
) -> CaseResult:
    """Calibration against all raters; the sums over raters equal sums against their shares."""
    each = [
        prepare_voxels(probabilities, one, scopes, ignore_index, settings).tally() for one in raters
    ]
    total = {scope: sum((of[scope] for of in each[1:]), each[0][scope]) for scope in scopes}
    row = _errors(total, settings)
    apart = rater_disagreement(raters)
    valid = True if ignore_index is None else raters[0] != ignore_index
    for scope, mask in scopes.items():
        row[f"voxels_{scope}"] /= len(raters)
        here = apart[np.broadcast_to(valid if mask is None else mask & valid, apart.shape)]
        among = float(here.mean(dtype=np.float64)) if here.size else np.nan
        row[table.BRIER_SOFT.column(scope)] = row[f"brier_{scope}"] - among
        for r, of in enumerate(each, 1):
            row[f"ece_{scope}/rater{r}"] = of[scope].top.expected_error()
    return CaseResult(row, total)


def _errors(
    tallies: dict[str, Tally],
    settings: EvaluationSettings,
    groups: dict[str, list[BinStatistics]] | None = None,
) -> dict[str, float]:
    """Numbers of every scope; without exact equal-mass groups, they are built from the cells."""
    row: dict[str, float] = {}
    for scope, one in tallies.items():
        metrics = {m.key: m for m in calibration_metrics() if m.is_of(scope)}
        exact = None if groups is None else groups[scope]
        values = calibration_of(one, metrics.values(), groups=settings.bins, exact=exact)
        row[f"voxels_{scope}"] = float(one.voxels)
        row.update({metrics[key].column(scope): value for key, value in values.items()})
    return row


def _region_calibration(
    probabilities: NDArray[Any],
    references: Sequence[NDArray[Any]],
    structures: Sequence[Structure],
    scopes: dict[str, NDArray[np.bool_] | None],
    valid: NDArray[np.bool_] | None,
    settings: EvaluationSettings,
) -> CaseResult:
    """Mean over the regions, each of which is a question of its own, and the error of each."""
    found: dict[str, CaseResult] = {}
    for one in structures:
        inside = [np.isin(labels, one.labels).astype(np.uint8) for labels in references]
        if valid is not None:
            for mask in inside:
                mask[~valid] = IGNORED
        p = probabilities[one.channel : one.channel + 1]
        ignored = None if valid is None else IGNORED
        if len(inside) > 1:
            found[one.name] = _calibration_of_raters(p, inside, scopes, ignored, settings)
        else:
            voxels = prepare_voxels(p, inside[0], scopes, ignored, settings)
            found[one.name] = _calibration(voxels, settings)
    rows = {name: result.row for name, result in found.items()}
    row = {
        f"{key}/{name}": value
        for name, values in rows.items()
        for key, value in values.items()
        if key.startswith(OF_A_REGION)
    }
    first, *others = found.values()
    row.update({key: float(np.mean([of[key] for of in rows.values()])) for key in first.row})
    total = dict(first.calibration)
    for other in others:
        total = {scope: total[scope] + tally for scope, tally in other.calibration.items()}
    return CaseResult(row, total)


def _overlap(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    structures: Sequence[Structure],
    spacing_mm: Sequence[float],
    valid: NDArray[np.bool_] | None,
    settings: EvaluationSettings,
) -> dict[str, float]:
    """Numbers of every structure, computed in the box around it."""
    row: dict[str, float] = {}
    boxes = label_boxes((prediction, reference), [k for one in structures for k in one.labels])
    for one in structures:
        box = _around([boxes[k] for k in one.labels], reference.shape)
        p, r = (
            x[box] == one.labels[0] if len(one.labels) == 1 else np.isin(x[box], one.labels)
            for x in (prediction, reference)
        )
        if valid is not None:
            p, r = p & valid[box], r & valid[box]
        pair = MaskPair(p, r, spacing_mm, settings.nsd_tolerance_mm)
        row[f"voxels_prediction/{one.name}"] = float(np.count_nonzero(p))
        row[f"voxels_reference/{one.name}"] = float(np.count_nonzero(r))
        row.update({f"{m.key}/{one.name}": m.function(pair) for m in table.STRUCTURE})
    return row


def _means_of_labels(row: dict[str, float], structures: Sequence[Structure]) -> dict[str, float]:
    """Means over the labels that are defined; an infinite distance counts as the image diagonal."""
    means = {}
    for key, metric in label_means().items():
        scores = np.array([row[f"{metric}/{one.name}"] for one in structures])
        scores = np.where(np.isinf(scores), row["diagonal_mm"], scores)
        defined = scores[~np.isnan(scores)]
        means[key] = float(defined.mean()) if defined.size else np.nan
    return means


def _around(boxes: list[Box], shape: tuple[int, ...]) -> Box:
    """Box around several boxes, in which surfaces are computed; boxes of absent labels are empty.

    The box may be one voxel wide only along axes on which the whole image is, since surfaces
    ignore such an axis.
    """
    found = [box for box in boxes if all(s.stop > s.start for s in box)] or boxes[:1]
    sides = (
        (min(s.start for s in sides), max(s.stop for s in sides))
        for sides in zip(*found, strict=True)
    )
    return tuple(
        slice(max(0, min(start, n - 2)), max(stop, min(start + 2, n)))
        for (start, stop), n in zip(sides, shape, strict=True)
    )


def labelled_scopes(
    reference: NDArray[Any],
    ignore_index: int | None,
    settings: EvaluationSettings,
    roi: NDArray[np.bool_] | None = None,
) -> Iterator[tuple[str, NDArray[np.bool_] | None]]:
    """Name and mask of each of the chosen scopes, one at a time; None is every voxel.

    Of the scopes that need probabilities, too, this is the part that the labels define.
    """
    foreground = _foreground(reference, ignore_index)
    for key, scope in zip(settings.scopes, settings.chosen, strict=True):
        if scope == "all":
            yield key, None
        elif scope == "dilated":
            yield key, _near(foreground, settings.dilation)
        elif scope == "roi":
            if roi is None:
                raise ValueError("scope roi: no mask was given")
            yield key, roi
        else:
            yield key, foreground


def _foreground(reference: NDArray[Any], ignore_index: int | None) -> NDArray[np.bool_]:
    """Labelled foreground."""
    foreground = reference != 0
    if ignore_index is not None:
        foreground &= reference != ignore_index
    return foreground


def _wider_scopes(
    reference: NDArray[Any],
    ignore_index: int | None,
    probabilities: NDArray[Any],
    regions: bool,
    most_likely: NDArray[Any] | None,
    settings: EvaluationSettings,
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Voxels by which the probabilities widen scopes (where it is not 0), one scope at a time."""
    for key, scope in zip(settings.scopes, settings.chosen, strict=True):
        if scope == "union":
            yield key, _predicted(probabilities, regions, most_likely)
        elif scope == "crop":
            yield key, _crop(_foreground(reference, ignore_index), probabilities, regions)


def _predicted(
    probabilities: NDArray[Any], regions: bool, most_likely: NDArray[Any] | None
) -> NDArray[Any]:
    """Predicted foreground, where it is not 0."""
    if not regions:
        return predicted_classes(probabilities) if most_likely is None else most_likely
    predicted = np.zeros(probabilities.shape[1:], bool)
    for channel in probabilities:
        predicted |= channel > 0.5
    return predicted


def _crop(
    foreground: NDArray[np.bool_], probabilities: NDArray[Any], regions: bool
) -> NDArray[np.bool_]:
    """Box around all voxels that are labelled, or have a probability, as foreground."""
    used = foreground.copy()
    for channel in probabilities if regions else probabilities[1:]:
        used |= channel > 0
    used[label_boxes((used.view(np.uint8),), [1])[1]] = True
    return used


def _near(mask: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Dilate by a box of `reach` voxels to every side."""
    near = np.zeros_like(mask)
    box = label_boxes((mask.view(np.uint8),), [1])[1]
    if not mask[box].size:
        return near
    around = tuple(
        slice(max(0, s.start - reach), min(n, s.stop + reach))
        for s, n in zip(box, mask.shape, strict=True)
    )
    near[around] = mask[around]
    for axis in range(mask.ndim):  # a box is separable
        line = np.moveaxis(near[around], axis, 0)
        for way in (line, line[::-1]):
            done = 0
            while done < reach:
                step = min(done + 1, reach - done)  # as far as leaves no gap
                way[step:] |= way[:-step]
                done += step
    return near
