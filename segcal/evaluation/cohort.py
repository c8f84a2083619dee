"""A cohort: folders of predictions and references in, a table and its summary out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from segcal.binning import BinStatistics
from segcal.evaluation.case import CaseResult, Settings, evaluate_case
from segcal.io.cases import Case, LabelSet, Pairing
from segcal.io.probabilities import holds_probabilities, read_probabilities
from segcal.io.volumes import Volume, read_labels

SURFACE_METRICS = ("hd_mm", "hd95_pooled_mm", "hd95_max_directed_mm", "assd_pooled_mm")


@dataclass
class Cohort:
    """Results of all cases that could be evaluated.

    Attributes:
        rows: one row per case, indexed by case name; columns as in :class:`CaseResult`.
        reliability: bin statistics over all cases, by scope.
        failed: why a case could not be evaluated, by name.
        pairing: what was matched with what.
    """

    rows: pd.DataFrame
    reliability: dict[str, BinStatistics]
    failed: dict[str, str]
    pairing: Pairing
    label_set: LabelSet | None = None
    settings: Settings = field(default_factory=Settings)

    @property
    def label_names(self) -> list[str]:
        """Foreground labels with results, in the order of the table."""
        return [c.removeprefix("dsc/") for c in self.rows.columns if c.startswith("dsc/")]


def evaluate_cohort(
    pairing: Pairing,
    *,
    label_set: LabelSet | None = None,
    reoriented: bool = False,
    settings: Settings | None = None,
    progress: Callable[[Case], None] = lambda case: None,
) -> Cohort:
    """Evaluate every case; one that fails is noted and does not stop the others.

    Args:
        pairing: cases to evaluate.
        label_set: names and ignore label; None names labels by their value.
        reoriented: see :func:`segcal.io.probabilities.read_probabilities`.
        settings: bins, thresholds and scopes.
        progress: called after each case.
    """
    settings = settings or Settings()
    rows: dict[str, dict[str, float]] = {}
    pooled: dict[str, BinStatistics] = {}
    failed: dict[str, str] = {}
    for case in pairing.cases:
        try:
            result = evaluate_files(case, label_set, reoriented=reoriented, settings=settings)
        except (ValueError, MemoryError) as error:
            failed[case.name] = str(error) or type(error).__name__
        else:
            rows[case.name] = result.row
            for scope, statistics in result.reliability.items():
                pooled[scope] = pooled[scope] + statistics if scope in pooled else statistics
        progress(case)
    table = pd.DataFrame.from_dict(rows, orient="index")
    table.index.name = "case"
    return Cohort(table, pooled, failed, pairing, label_set, settings)


def evaluate_files(
    case: Case, label_set: LabelSet | None, *, reoriented: bool, settings: Settings
) -> CaseResult:
    """Read one case and evaluate it.

    Raises:
        ValueError: naming the file and what is wrong with it.
    """
    reference = read_labels(case.reference)
    ignore_index = None if label_set is None else label_set.ignore_index
    num_classes = None if label_set is None else len(label_set.names)
    probabilities = None
    if holds_probabilities(case.prediction):
        probabilities = read_probabilities(
            case.prediction, reference.geometry, num_classes=num_classes, reoriented=reoriented
        )
        prediction = probabilities.argmax(0)
        names = {k: str(k) for k in range(1, len(probabilities))}
    else:
        volume = read_labels(case.prediction)
        if differences := volume.geometry.differences(reference.geometry):
            raise ValueError(
                f"{case.prediction}: does not lie on {case.reference}: {'; '.join(differences)}"
            )
        prediction = volume.array
        found = np.union1d(np.unique(prediction), np.unique(reference.array))
        names = {int(v): str(v) for v in found if v not in (0, ignore_index)}
    if label_set is not None:
        names = label_set.foreground
    _check_reference(case, reference, names, ignore_index)
    return evaluate_case(
        prediction,
        reference.array,
        spacing_mm=reference.geometry.spacing_mm,
        labels=names,
        probabilities=probabilities,
        ignore_index=ignore_index,
        settings=settings,
    )


def _check_reference(
    case: Case, reference: Volume, names: dict[int, str], ignore_index: int | None
) -> None:
    found = set(np.unique(reference.array).tolist())
    if unknown := sorted(found - {0, *names} - {ignore_index}):
        raise ValueError(
            f"{case.reference}: labels {unknown[:5]} are not among the classes 0 to "
            f"{max(names, default=0)}; if one of them means 'ignore', say so in dataset.json"
        )


def summarise(cohort: Cohort) -> dict[str, Any]:
    """Summary of a cohort as plain numbers for JSON; undefined is None.

    Surface distances show how many were found, missed (labelled, not predicted), false alarms
    (predicted, not labelled) and absent (neither); their mean over the found; and a penalised
    mean over all but the absent, in which a miss or a false alarm costs the image diagonal.
    """
    rows = cohort.rows
    per_case = [c for c in rows.columns if "/" not in c and c != "diagonal_mm"]
    return {
        "cases": {
            "evaluated": len(rows),
            "failed": cohort.failed,
            "without_prediction": cohort.pairing.without_prediction,
            "without_reference": cohort.pairing.without_reference,
        },
        "metrics": {c: _moments(rows[c]) for c in per_case if not c.startswith("voxels_")},
        "pooled": {
            f"ece_{scope}": _number(statistics.expected_error())
            for scope, statistics in cohort.reliability.items()
        },
        "classes": {
            name: {
                "dsc": _moments(rows[f"dsc/{name}"]),
                **{metric: _surface(rows, metric, name) for metric in SURFACE_METRICS},
            }
            for name in cohort.label_names
        },
        "surface_over_classes": {
            metric: _combined([_surface(rows, metric, name) for name in cohort.label_names])
            for metric in SURFACE_METRICS
        },
    }


def _moments(values: pd.Series[float]) -> dict[str, Any]:
    defined = values.dropna()
    return {
        "n": len(defined),
        "undefined": len(values) - len(defined),
        "mean": _number(defined.mean()),
        "std": _number(defined.std(ddof=1)),
        "median": _number(defined.median()),
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
