"""Names of a study's metrics, their units, and which values are better."""

from __future__ import annotations

from typing import Literal

from segcal.evaluation.reported import metric_of

__all__ = ["better", "definition", "digits", "is_relative", "metric_name", "unit"]

SCOPES = {"fg": "fg", "union": "union", "dilated5": "near", "all": "all"}
"""Names of a metric's voxels, by the end of its column."""
KL = "kl"
KL_MEANING = "KL divergence from the true posterior to the prediction, mean over voxels, nats"


def metric_name(column: str) -> str:
    """Name in tables and figures: near is within five voxels of the labelled foreground."""
    row = metric_of(column)
    key, heading = (KL, "KL") if row is None else (row.key, row.heading)
    scope = column.removeprefix(key).removeprefix("_")
    return f"{heading} {SCOPES.get(scope, scope)}".strip()


def better(column: str) -> Literal["higher", "lower"]:
    """Whether lower or higher values are better."""
    row = metric_of(column)
    return "higher" if row is not None and row.better == "higher" else "lower"


def digits(column: str) -> int:
    """Digits in tables."""
    row = metric_of(column)
    return 4 if row is None else row.digits


def unit(column: str) -> str:
    """Unit; empty for a fraction of 1 and for nats."""
    row = metric_of(column)
    return "" if row is None else row.unit


def is_relative(column: str) -> bool:
    """Whether a difference is shown as a share of the baseline, as for errors but not overlaps."""
    return better(column) == "lower" and not unit(column)


def definition(column: str) -> str:
    """What it means."""
    row = metric_of(column)
    if row is None:
        return KL_MEANING
    return row.meaning.format(bins=15, tace_threshold=1e-3, nsd_tolerance_mm=2, unit="mm")
