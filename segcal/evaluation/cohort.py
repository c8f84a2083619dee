"""A cohort: folders of predictions and references in, a table and its summary out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from segcal.binning import BinStatistics
from segcal.evaluation.case import CaseResult, Settings, evaluate_case
from segcal.evaluation.compare import interval, result_columns
from segcal.evaluation.engine import run
from segcal.io.cases import Case, LabelSet, Pairing
from segcal.io.probabilities import holds_probabilities, read_probabilities
from segcal.io.volumes import Volume, read_labels

SURFACE_METRICS = ("hd_mm", "hd95_pooled_mm", "hd95_max_directed_mm", "assd_pooled_mm")


@dataclass
class Cohort:
    """Results of all cases that could be evaluated.

    Attributes:
        rows: one row per case, indexed by case name; columns as in
            :class:`segcal.evaluation.case.CaseResult`.
        reliability: bin statistics over all cases, by scope.
        failed: why a case could not be evaluated, by name.
        notes: what was odd about a case that was evaluated, by name.
        pairing: what was matched with what.
        interrupted: whether the user stopped before the last case.
    """

    rows: pd.DataFrame
    reliability: dict[str, BinStatistics]
    failed: dict[str, str]
    notes: dict[str, list[str]]
    pairing: Pairing
    interrupted: bool = False

    @property
    def label_names(self) -> list[str]:
        """Foreground labels with results, in the order of the table."""
        return [c.removeprefix("dsc/") for c in self.rows.columns if c.startswith("dsc/")]


@dataclass(frozen=True)
class Outcome:
    """What became of a case: its numbers, or why there are none; and what was odd."""

    result: CaseResult | str
    notes: list[str]


def evaluate_cohort(
    pairing: Pairing,
    *,
    label_set: LabelSet | None = None,
    reader: str | None = None,
    settings: Settings | None = None,
    jobs: int = 1,
    engine: Callable[..., Iterator[tuple[int, Outcome]]] = run,
    progress: Callable[[Case], None] = lambda case: None,
) -> Cohort:
    """Evaluate every case; one that fails is noted and does not stop the others.

    Ctrl-C stops after what is done, which is returned. The result depends on neither `jobs` nor
    `engine`.

    Args:
        pairing: cases to evaluate.
        label_set: names and ignore label; None names labels by their value.
        reader: see :func:`segcal.io.probabilities.read_probabilities`.
        settings: bins, thresholds, scopes and tolerance.
        jobs: processes.
        engine: called as :func:`segcal.evaluation.engine.run` to run the cases.
        progress: called after each case.
    """
    one = partial(_outcome, label_set=label_set, reader=reader, settings=settings or Settings())
    outcomes: dict[int, Outcome] = {}
    interrupted = False
    try:
        for index, outcome in engine(one, pairing.cases, jobs=jobs):
            outcomes[index] = outcome
            progress(pairing.cases[index])
    except KeyboardInterrupt:
        interrupted = True
    rows: dict[str, dict[str, float]] = {}
    pooled: dict[str, BinStatistics] = {}
    failed: dict[str, str] = {}
    notes: dict[str, list[str]] = {}
    for index in sorted(outcomes):  # so that sums do not depend on who was first
        name, outcome = pairing.cases[index].name, outcomes[index]
        if outcome.notes:
            notes[name] = outcome.notes
        if isinstance(outcome.result, str):
            failed[name] = outcome.result
            continue
        rows[name] = outcome.result.row
        for scope, statistics in outcome.result.reliability.items():
            pooled[scope] = pooled[scope] + statistics if scope in pooled else statistics
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "case"
    if "ece_all" in table:
        for name in table.index[table["ece_all"].isna()]:
            notes.setdefault(name, []).append("a label map: not in the calibration errors")
    return Cohort(table, pooled, failed, notes, pairing, interrupted)


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
    return Outcome(result, notes)


@dataclass(frozen=True)
class CaseArrays:
    """What the files of a case hold, on the reference's grid.

    Attributes:
        reference: labels.
        prediction: label map, ``(z, y, x)``.
        probabilities: ``(K, z, y, x)``, or None.
        names: foreground labels to report.
        ignore_index: reference label that is left out.
    """

    reference: Volume
    prediction: NDArray[Any]
    probabilities: NDArray[Any] | None
    names: Mapping[int, str]
    ignore_index: int | None


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
        labels=arrays.names,
        probabilities=arrays.probabilities,
        ignore_index=arrays.ignore_index,
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
    probabilities = None
    if holds_probabilities(case.prediction):
        probabilities = read_probabilities(
            case.prediction,
            reference.geometry,
            num_classes=None if label_set is None else num_channels(label_set),
            reader=reader,
            tolerance=settings.tolerance,
        )
        prediction = probabilities.argmax(0)
        if case.label_map is not None:
            label_map = _read_on(case.label_map, reference, settings)
            _compare(case, prediction, label_map, note)
            prediction = label_map
        names = {k: str(k) for k in range(1, len(probabilities))}
    else:
        prediction = _read_on(case.prediction, reference, settings)
        found = np.union1d(np.unique(prediction), np.unique(reference.array))
        names = {int(v): str(v) for v in found if v > 0 and v != ignore_index}
    if label_set is not None:
        names = label_set.foreground
    predicted = case.label_map or case.prediction
    for path, array in ((case.reference, reference.array), (predicted, prediction)):
        _check_labels(path, array, names, ignore_index)
    return CaseArrays(reference, prediction, probabilities, names, ignore_index)


def num_channels(label_set: LabelSet) -> int:
    """Channels that probabilities have, background included.

    Raises:
        ValueError: label values that are not 0 to K - 1.
    """
    if sorted(label_set.names) != list(range(len(label_set.names))):
        raise ValueError(
            f"{label_set.source}: label values {sorted(label_set.names)} are not 0 to K - 1, so "
            "channels of probabilities cannot be told apart"
        )
    return len(label_set.names)


def _read_on(path: Path, reference: Volume, settings: Settings) -> NDArray[Any]:
    """Read a label map that must lie on the reference."""
    volume = read_labels(path)
    if differences := volume.geometry.differences(reference.geometry, settings.tolerance):
        raise ValueError(f"{path}: does not lie on the reference: {'; '.join(differences)}")
    return volume.array


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
    path: Path, array: NDArray[Any], names: Mapping[int, str], ignore_index: int | None
) -> None:
    found = set(np.unique(array).tolist())
    if unknown := sorted(found - {0, *names} - {ignore_index}):
        raise ValueError(
            f"{path}: labels {unknown[:5]} are not among the classes "
            f"{', '.join(map(str, sorted({0, *names})))}; if one of them means 'ignore', say so in "
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
            f"ece_{scope}": _number(statistics.expected_error())
            for scope, statistics in cohort.reliability.items()
        },
        "classes": {
            name: {
                **{
                    metric: _moments(rows[f"{metric}/{name}"], resamples)
                    for metric in ("dsc", "iou", "volume_difference_ml")
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
