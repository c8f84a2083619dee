"""Summarises the results of all cases, for JSON and for everything that is printed.

"Pooled" numbers are computed over all voxels of all cases together. In a "penalised" mean of a
distance, a structure that was missed or falsely predicted counts as the image diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from segcal.evaluation import agreement
from segcal.evaluation.cohort import Cohort
from segcal.evaluation.compare import interval, result_columns
from segcal.evaluation.reported import calibration_metrics
from segcal.metrics import table
from segcal.metrics.ece_floor import EceFloor
from segcal.metrics.table import calibration_of
from segcal.tally import Tally


def summarise(cohort: Cohort, *, resamples: int = 0) -> dict[str, Any]:
    """Summary of all cases as plain numbers for JSON; undefined numbers are None.

    For surface distances, it counts the cases in which a structure was found, missed (labelled, not
    predicted), a false alarm (predicted, not labelled) or absent (neither). It gives the mean over
    the found, and a penalised mean over all but the absent. Without any case, it gives counts only.

    Args:
        cohort: results of all cases.
        resamples: number of bootstrap resamples over cases for ``ci95``; 0 leaves it out.
    """
    rows = cohort.rows
    return {
        "cases": counts(cohort),
        "metrics": {c: _moments(rows[c], resamples) for c in result_columns(rows)},
        "pooled": {
            column: value
            for scope, tally in cohort.calibration.items()
            for column, value in _pooled(tally, scope, cohort.floors[scope]).items()
        },
        "pooled_iou": _pooled_iou(rows, cohort.label_names),
        "classes": {name: _of_label(rows, name, resamples) for name in cohort.label_names},
        **confidence(rows),
        "surface_over_classes": {
            row.key: _combined([_surface(rows, row.key, name) for name in cohort.label_names])
            for row in table.STRUCTURE
            if row.distance
        },
        **({"raters": _of_raters(cohort, resamples)} if "raters" in rows else {}),
    }


def confidence(rows: pd.DataFrame) -> dict[str, Any]:
    """Agreement of predicted DSC and volumes with the reference; empty without probabilities."""
    predicted = agreement.predicted_dsc(rows)
    if not predicted:
        return {}
    found = agreement.volumes(rows)
    return {
        "predicted_dsc": {name: agreement.dsc_agreement(of) for name, of in predicted.items()},
        "volumes": {name: agreement.volume_agreement(of) for name, of in found.items()},
    }


def counts(cohort: Cohort) -> dict[str, Any]:
    """How many cases were evaluated, and why others were not."""
    return {
        "evaluated": len(cohort.rows),
        "interrupted": cohort.interrupted,
        "failed": cohort.failed,
        "notes": cohort.notes,
        "without_prediction": cohort.pairing.without_prediction,
        "without_reference": cohort.pairing.without_reference,
    }


def _of_raters(cohort: Cohort, resamples: int) -> dict[str, Any]:
    """Numbers of the cases that several raters labelled, by label and by rater."""
    rows = cohort.rows
    metrics = [row for row in (*table.RATERS, table.ENERGY) if _of_any(rows, f"{row.key}/")]
    return {
        "cases": int(rows["raters"].notna().sum()),
        "most": int(rows["raters"].max()),
        "classes": {
            name: {row.key: _moments(rows[f"{row.key}/{name}"], resamples) for row in metrics}
            for name in cohort.label_names
        },
        "ece": {
            scope: {c.partition("/")[2]: _moments(rows[c]) for c in _of_any(rows, f"ece_{scope}/")}
            for scope in cohort.calibration
        },
    }


def _of_any(rows: pd.DataFrame, beginning: str) -> list[str]:
    return [str(column) for column in rows.columns if str(column).startswith(beginning)]


def _pooled(tally: Tally, scope: str, floor: EceFloor) -> dict[str, float | None]:
    """Calibration of all voxels of all cases together, by column."""
    metrics = {m.key: m for m in calibration_metrics() if m.is_of(scope, pooled=True)}
    values = calibration_of(tally, metrics.values(), groups=tally.bins)
    found = {metrics[key].column(scope): _number(value) for key, value in values.items()}
    return found | {row.column(scope): _number(row.function(floor)) for row in table.FLOOR}


def _pooled_iou(rows: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    """IoU of all voxels of all cases together, and its mean over labels; None if undefined."""
    found: dict[str, float] = {}
    for name in names:
        sizes = rows[f"voxels_prediction/{name}"] + rows[f"voxels_reference/{name}"]
        both = float((rows[f"dsc/{name}"] * sizes / 2).sum())  # undefined where there is none
        union = float(sizes.sum()) - both
        found[name] = both / union if union else math.nan
    defined = [value for value in found.values() if not math.isnan(value)]
    mean = sum(defined) / len(defined) if defined else math.nan
    return {
        "mean": _number(mean),
        "classes": {name: _number(value) for name, value in found.items()},
    }


def _of_label(rows: pd.DataFrame, name: str, resamples: int) -> dict[str, dict[str, Any]]:
    """Numbers of a label or region: moments first, then the distances with their counts."""
    distances = [row.key for row in table.STRUCTURE if row.distance]
    others = [row.key for row in table.STRUCTURE if not row.distance]
    return {
        **{key: _moments(rows[f"{key}/{name}"], resamples) for key in others},
        **{key: _surface(rows, key, name) for key in distances},
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
    """Sums of the counts, and means over classes of the classes' means."""
    counts = ("n", "found", "missed", "false_alarms", "absent")
    combined: dict[str, Any] = {k: sum(c[k] for c in per_class) for k in counts}
    for key in ("mean_of_found", "penalised_mean"):
        values = [c[key] for c in per_class if c[key] is not None]
        combined[key] = _number(float(np.mean(values))) if values else None
    return combined


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
