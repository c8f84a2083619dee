"""A cohort: folders of predictions and references in, a table and its summary out."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from segcal.evaluation.case import CaseResult, Settings, Structure, evaluate_case
from segcal.evaluation.compare import interval, result_columns
from segcal.evaluation.engine import run
from segcal.evaluation.store import Outcome, Store
from segcal.io.class_files import read_class_files
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case, Pairing
from segcal.io.probabilities import holds_probabilities, read_probabilities
from segcal.io.volumes import Geometry, Volume, check_place, put_on, read_labels
from segcal.tally import Tally, predicted_classes

SURFACE_METRICS = (
    "hd_mm",
    "hd95_pooled_mm",
    "hd95_max_directed_mm",
    "assd_pooled_mm",
    "assd_mean_of_means_mm",
)


@dataclass
class Cohort:
    """Results of all cases that could be evaluated.

    Attributes:
        rows: one row per case, indexed by case name; columns as in
            :class:`segcal.evaluation.case.CaseResult`.
        calibration: sums over the voxels of all cases, by scope.
        failed: why a case could not be evaluated, by name.
        notes: what was odd about a case that was evaluated, by name.
        pairing: what was matched with what.
        interrupted: whether the user stopped before the last case.
    """

    rows: pd.DataFrame
    calibration: dict[str, Tally]
    failed: dict[str, str]
    notes: dict[str, list[str]]
    pairing: Pairing
    interrupted: bool = False

    @property
    def calibrated(self) -> pd.Series[bool]:
        """Which cases have probabilities, where some have."""
        return self.rows[f"voxels_{next(iter(self.calibration))}"].notna()

    @property
    def label_names(self) -> list[str]:
        """Foreground labels with results, in the order of the table."""
        return [c.removeprefix("dsc/") for c in self.rows.columns if c.startswith("dsc/")]


def evaluate_cohort(
    pairing: Pairing,
    *,
    label_set: LabelSet | None = None,
    reader: str | None = None,
    settings: Settings | None = None,
    jobs: int = 1,
    engine: Callable[..., Generator[tuple[int, Outcome]]] = run,
    store: Store | None = None,
    progress: Callable[[Case], None] = lambda case: None,
) -> Cohort:
    """Evaluate every case; one that fails is noted and does not stop the others.

    Ctrl-C stops after what is done, which is returned. The result depends on neither `jobs` nor
    `engine`, nor on what comes from the store. Memory does not grow with the number of cases, but
    for a row of numbers each.

    Args:
        pairing: cases to evaluate.
        label_set: names and ignore label; None names labels by their value.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        settings: bins, thresholds, scopes and tolerance.
        jobs: processes.
        engine: called as :func:`segcal.evaluation.engine.run` to run the cases.
        store: where results of cases are kept until all are there, and taken from.
        progress: called after each case.
    """
    one = partial(_outcome, label_set=label_set, reader=reader, settings=settings or Settings())
    known = [store is not None and store.holds(case) for case in pairing.cases]
    unknown = [case for case, there in zip(pairing.cases, known, strict=True) if not there]
    fresh = engine(one, unknown, lost=lost, jobs=jobs)
    cohort = Cohort(pd.DataFrame(), {}, {}, {}, pairing)
    rows: dict[str, dict[str, float]] = {}
    try:
        for case, there in zip(pairing.cases, known, strict=True):
            outcome = store.load(case) if store is not None and there else None
            if outcome is None:  # or what is stored is damaged
                outcome = one(case) if there else next(fresh)[1]
                if store is not None:
                    store.save(case, outcome)
            _add(cohort, rows, case.name, outcome)
            progress(case)
    except KeyboardInterrupt:
        cohort.interrupted = True
    finally:
        fresh.close()
    cohort.rows = pd.DataFrame.from_dict(rows, orient="index")
    cohort.rows.index.name = "case"
    if cohort.calibration:
        for name in cohort.rows.index[~cohort.calibrated]:
            cohort.notes.setdefault(name, []).append("a label map: not in the calibration errors")
    return cohort


def _add(cohort: Cohort, rows: dict[str, dict[str, float]], name: str, outcome: Outcome) -> None:
    if outcome.notes:
        cohort.notes[name] = outcome.notes
    if isinstance(outcome.result, str):
        cohort.failed[name] = outcome.result
        return
    pooled = cohort.calibration
    for scope, arrays in outcome.calibration.items():
        one = Tally.from_arrays(arrays)
        if scope in pooled and one.num_classes != pooled[scope].num_classes:
            cohort.failed[name] = (
                f"has {one.num_classes} classes where the cases before have "
                f"{pooled[scope].num_classes}; give the dataset.json that says what they are"
            )
            return
        pooled[scope] = pooled[scope] + one if scope in pooled else one
    rows[name] = outcome.result


def _outcome(
    case: Case, *, label_set: LabelSet | None, reader: str | None, settings: Settings
) -> Outcome:
    notes: list[str] = []
    try:
        result = evaluate_files(
            case, label_set, reader=reader, settings=settings, note=notes.append
        )
    except ValueError as error:
        return Outcome(str(error), [])
    except Exception as error:  # noqa: BLE001 - hours of other cases must not be lost
        return Outcome(f"{case.prediction}: {type(error).__name__}: {error}", [])
    return Outcome(result.row, notes, {k: t.to_arrays() for k, t in result.calibration.items()})


def lost(case: Case, why: str) -> Outcome:
    """What became of a case without a result."""
    return Outcome(f"{case.prediction}: {why}", [])


@dataclass(frozen=True)
class CaseArrays:
    """What the files of a case hold, on the reference's grid.

    Attributes:
        reference: labels.
        prediction: label map, ``(z, y, x)``.
        probabilities: ``(K, z, y, x)``, or None.
        structures: labels or regions to report.
        names: of the labels in the maps.
        regions: whether the channels are regions.
        ignore_index: reference label that is left out.
        roi: mask of the region of interest, or None.
    """

    reference: Volume
    prediction: NDArray[Any]
    probabilities: NDArray[Any] | None
    structures: list[Structure]
    names: dict[int, str]
    regions: bool
    ignore_index: int | None
    roi: NDArray[np.bool_] | None


def evaluate_files(
    case: Case,
    label_set: LabelSet | None,
    *,
    settings: Settings,
    reader: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> CaseResult:
    """Read one case and evaluate it; arguments and errors as in :func:`read_case`."""
    arrays = read_case(case, label_set, settings=settings, reader=reader, note=note)
    geometry = arrays.reference.geometry
    result = evaluate_case(
        arrays.prediction,
        arrays.reference.array,
        spacing_mm=geometry.spacing_mm,
        structures=arrays.structures,
        probabilities=arrays.probabilities,
        regions=arrays.regions,
        ignore_index=arrays.ignore_index,
        roi=arrays.roi,
        settings=settings,
    )
    spacing = zip("zyx", geometry.spacing_mm, strict=True)
    return replace(result, row={**{f"spacing_{a}_mm": s for a, s in spacing}, **result.row})


def read_case(
    case: Case,
    label_set: LabelSet | None,
    *,
    settings: Settings,
    reader: str | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> CaseArrays:
    """Read one case.

    Where a label map lies beside a ``.npz`` it is the prediction for overlap and surfaces (nnU-Net
    post-processes label maps only); if it has little in common with the probabilities, the two do
    not share a frame.

    Args:
        case: files to read.
        label_set: names and ignore label; None names labels by their value.
        settings: bins, thresholds, scopes and tolerance.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        note: called with what is odd and was decided.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    reference = read_labels(case.reference)
    if reference.note:
        note(f"{case.reference.name}: {reference.note}")
    ignore_index = None if label_set is None else label_set.ignore_index
    regions = label_set is not None and bool(label_set.regions)
    at, tolerance = reference.geometry, settings.tolerance
    probabilities = None
    if case.prediction.is_dir():
        prediction = read_class_files(
            case.prediction, at, label_set, tolerance=tolerance, note=note
        )
        probabilities = prediction if prediction.ndim == 4 else None
    elif holds_probabilities(case.prediction):
        probabilities = read_probabilities(
            case.prediction,
            at,
            num_classes=None if label_set is None else label_set.num_channels,
            regions=regions,
            reader=reader,
            tolerance=tolerance,
            note=note,
        )
    else:
        prediction = _read_on(case.prediction, at, tolerance, note)
    if probabilities is not None:
        prediction = (
            predicted_classes(probabilities)
            if label_set is None or not regions
            else _regions_to_labels(probabilities, label_set.class_order)
        )
        if case.label_map is not None:
            label_map = _read_on(case.label_map, at, tolerance, note)
            _compare(case, prediction, label_map, note)
            prediction = label_map
        structures = [Structure(str(k), (k,), k) for k in range(1, len(probabilities))]
    else:
        found = np.union1d(np.unique(prediction), np.unique(reference.array))
        structures = [Structure(str(v), (int(v),), int(v)) for v in found if v > 0]
    names = {s.labels[0]: s.name for s in structures}
    allowed = {0, *names}
    if label_set is not None:
        names = label_set.map_names
        structures = [
            Structure(name, labels, index if regions else labels[0])
            for index, (name, labels) in enumerate(label_set.foreground.items())
        ]
        allowed = label_set.values
    predicted = case.label_map or case.prediction
    for path, array in ((case.reference, reference.array), (predicted, prediction)):
        _check_labels(path, array, allowed, ignore_index)
    roi = None if case.roi is None else _read_on(case.roi, at, tolerance, note) != 0
    return CaseArrays(
        reference, prediction, probabilities, structures, names, regions, ignore_index, roi
    )


def _regions_to_labels(
    probabilities: NDArray[Any], class_order: tuple[int, ...]
) -> NDArray[np.int32]:
    """Label map of overlapping regions, later ones over earlier, as nnU-Net makes it."""
    labels = np.zeros(probabilities.shape[1:], np.int32)
    for channel, value in zip(probabilities, class_order, strict=True):
        labels[channel > 0.5] = value
    return labels


def _read_on(
    path: Path, reference: Geometry, tolerance: float, note: Callable[[str], None]
) -> NDArray[Any]:
    """Read a label map that must lie on the reference, which its header tells before the rest."""
    check_place(path, reference, tolerance)
    array, done = put_on(path, read_labels(path), reference, tolerance)
    if done:
        note(f"{path.name}: {done}")
    return array


def _compare(
    case: Case, argmax: NDArray[Any], label_map: NDArray[Any], note: Callable[[str], None]
) -> None:
    """Post-processing removes foreground; foreground that is elsewhere is of another frame."""
    differs = argmax != label_map
    foreground = int(np.count_nonzero(label_map))
    elsewhere = int(np.count_nonzero(differs & (label_map != 0)))
    if elsewhere > 0.5 * foreground:
        raise ValueError(
            f"{case.prediction}: {elsewhere} of the {foreground} foreground voxels of "
            f"{case.label_map} beside it have another label here; predicted with a reader that "
            "reorients? Then keep nnU-Net's plans.json beside the predictions. Or are they of "
            "different cases?"
        )
    differ = int(np.count_nonzero(differs))
    if differ:
        note(
            f"{case.prediction.name}: {differ} voxels have another label in the label map beside "
            "it (post-processed?); overlap and surfaces are of the label map, calibration of the "
            "probabilities"
        )


def _check_labels(
    path: Path, array: NDArray[Any], allowed: set[int], ignore_index: int | None
) -> None:
    found = set(np.unique(array).tolist())
    if unknown := sorted(found - allowed - {ignore_index}):
        raise ValueError(
            f"{path}: labels {unknown[:5]} are not among the classes "
            f"{', '.join(map(str, sorted(allowed)))}; if one of them means 'ignore', say so in "
            "dataset.json"
        )


def summarise(cohort: Cohort, *, resamples: int = 0) -> dict[str, Any]:
    """Summary of a cohort as plain numbers for JSON; undefined is None, no case gives counts only.

    Surface distances show how many were found, missed (labelled, not predicted), false alarms
    (predicted, not labelled) and absent (neither); their mean over the found; and a penalised
    mean over all but the absent, in which a miss or a false alarm costs the image diagonal.

    Args:
        cohort: what has been evaluated.
        resamples: of the bootstrap over cases that gives ``ci95``; 0 leaves it out.
    """
    rows = cohort.rows
    return {
        "cases": {
            "evaluated": len(rows),
            "interrupted": cohort.interrupted,
            "failed": cohort.failed,
            "notes": cohort.notes,
            "without_prediction": cohort.pairing.without_prediction,
            "without_reference": cohort.pairing.without_reference,
        },
        "metrics": {c: _moments(rows[c], resamples) for c in result_columns(rows)},
        "pooled": {
            f"{metric}_{scope}": _number(value)
            for scope, one in cohort.calibration.items()
            for metric, value in one.metrics(one.bins).items()
        },
        "classes": {
            name: {
                **{
                    metric: _moments(rows[f"{metric}/{name}"], resamples)
                    for metric in ("dsc", "iou", "nsd", "volume_difference_ml")
                },
                **{metric: _surface(rows, metric, name) for metric in SURFACE_METRICS},
            }
            for name in cohort.label_names
        },
        "surface_over_classes": {
            metric: _combined([_surface(rows, metric, name) for name in cohort.label_names])
            for metric in SURFACE_METRICS
        },
    }


def _moments(values: pd.Series[float], resamples: int = 0) -> dict[str, Any]:
    defined = values.dropna()
    ci95 = interval(defined.to_numpy(dtype=np.float64), resamples)
    return {
        "n": len(defined),
        "undefined": len(values) - len(defined),
        "mean": _number(defined.mean()),
        "std": _number(defined.std(ddof=1)),
        "median": _number(defined.median()),
        **({"ci95": list(ci95)} if ci95 else {}),
    }


def _surface(rows: pd.DataFrame, metric: str, name: str) -> dict[str, Any]:
    values = rows[f"{metric}/{name}"]
    labelled = rows[f"voxels_reference/{name}"].fillna(0) > 0
    found = values[np.isfinite(values)]
    infinite = np.isinf(values)
    penalised = values.where(~infinite, rows["diagonal_mm"]).dropna()
    return {
        "n": len(penalised),
        "found": len(found),
        "missed": int((infinite & labelled).sum()),
        "false_alarms": int((infinite & ~labelled).sum()),
        "absent": int(values.isna().sum()),
        "mean_of_found": _number(found.mean()),
        "penalised_mean": _number(penalised.mean()),
    }


def _combined(per_class: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts added up; means as the mean over classes of the classes' means."""
    counts = ("n", "found", "missed", "false_alarms", "absent")
    combined: dict[str, Any] = {k: sum(c[k] for c in per_class) for k in counts}
    for key in ("mean_of_found", "penalised_mean"):
        values = [c[key] for c in per_class if c[key] is not None]
        combined[key] = _number(float(np.mean(values))) if values else None
    return combined


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
