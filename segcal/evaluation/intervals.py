"""Intervals of volumes that were fitted to validation cases."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from segcal import __version__
from segcal.arrays import check_choice
from segcal.io.files import finite, read_json, write_json
from segcal.metrics.volume_interval import (
    conformal_factor,
    fewest_cases,
    highest_level,
    inflated_factor,
    interval,
)

FORMAT = 1
Kind = Literal["conformal", "inflated"]
_MADE = {
    None: "as wide as if all voxels of a structure erred together, since nothing was fitted; "
    "segcal trust fit makes intervals from validation cases",
    "conformal": "expected volume -+ the standard deviation of independent voxels, times the "
    "conformal quantile of the errors of validation cases; no assumption on their distribution",
    "inflated": "expected volume -+ the standard deviation of independent voxels, inflated to the "
    "errors of validation cases, times a quantile of Student's t; assumes that errors are normal",
}


@dataclass(frozen=True)
class StructureIntervals:
    """Errors of the volume of a structure on validation cases.

    Attributes:
        inflation: factor of the variance, see
            :func:`segcal.metrics.volume_interval.variance_inflation`.
        effective_voxels: number of independent voxels with p = 1/2 that would be as uncertain as
            a case: ``4 sum p (1 - p) / inflation``, mean over cases.
        scores: one per case, see :func:`segcal.metrics.volume_interval.conformal_scores`.
    """

    inflation: float
    effective_voxels: float
    scores: tuple[float, ...]

    def factor(self, kind: Kind, level: float) -> float:
        """Half width in standard deviations of independent voxels; infinite for too few cases."""
        if kind == "conformal":
            return conformal_factor(self.scores, level)
        return inflated_factor(self.inflation, level, len(self.scores))


@dataclass(frozen=True)
class VolumeIntervals:
    """Intervals of the volumes of all structures, and the cases they were fitted on.

    Attributes:
        structures: errors of each structure, by name.
        model: record of the predictions, see :func:`segcal.repair.saved.model_of`.
        fitted_on: where the cases came from, and their names.
    """

    structures: dict[str, StructureIntervals]
    model: dict[str, Any] = field(default_factory=dict)
    fitted_on: dict[str, Any] = field(default_factory=dict)

    def factors(self, kind: Kind, level: float) -> dict[str, float]:
        """Half width of every structure's interval in standard deviations, by name."""
        check_choice("kind", kind, get_args(Kind))
        return {name: one.factor(kind, level) for name, one in self.structures.items()}

    def not_fitted(self, names: Sequence[str]) -> str:
        """Message that nothing was fitted for structures of these names."""
        return (
            f"intervals: fitted for {', '.join(self.structures)}, not for {', '.join(names)}; fit "
            "them to validation cases of this model with the same labels"
        )

    def too_few(self, kind: Kind, level: float) -> str:
        """Message that there are too few cases for a level, and what to do; empty if enough."""
        need = fewest_cases(level)
        few = {n: len(one.scores) for n, one in self.structures.items() if len(one.scores) < need}
        if kind != "conformal" or not few:
            return ""
        return (
            f"{min(few.values())} validation cases ({', '.join(few)}) are too few for conformal "
            f"intervals of {100 * level:.4g} %, which need {need}: no finite interval is stated. "
            f"They allow a level of {_floored(highest_level(min(few.values())))}; intervals of the "
            "kind inflated need fewer cases and assume that errors are normal"
        )


def _floored(level: float) -> str:
    """A level, rounded down to hundredths."""
    return f"{math.floor(100 * level) / 100:.2f}"


def stated(level: float, kind: Kind | None) -> str:
    """What intervals promise, and how they were made.

    Args:
        level: level of the intervals.
        kind: kind of the fitted intervals; None if nothing was fitted.
    """
    return f"meant to hold {100 * level:.4g} % of the true volumes: {_MADE[kind]}"


def write_intervals(path: Path, intervals: VolumeIntervals) -> None:
    """Write intervals as JSON, whole or not at all; infinite scores are null."""
    content = {
        "format": FORMAT,
        "segcal": __version__,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "structures": {
            name: {
                "cases": len(one.scores),
                "inflation": finite(one.inflation),
                "effective_voxels": finite(one.effective_voxels),
                "scores": [finite(score) for score in sorted(one.scores)],
            }
            for name, one in intervals.structures.items()
        },
        "model": intervals.model,
        "fitted_on": intervals.fitted_on,
    }
    write_json(path, json.loads(json.dumps(content, default=str)))


def read_intervals(path: Path) -> VolumeIntervals:
    """Read a file that :func:`write_intervals` wrote.

    Raises:
        ValueError: names the file: it is missing, has another format, or is damaged.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("structures"), dict):
        raise ValueError(f"{path}: expected intervals of volumes, which segcal trust fit writes")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: expected format {FORMAT}, got {content.get('format')!r}; fit the intervals "
            "again with this version"
        )
    try:
        structures = {
            name: StructureIntervals(
                _infinite(one["inflation"]),
                float(one["effective_voxels"] or 0),
                tuple(map(_infinite, one["scores"])),
            )
            for name, one in content["structures"].items()
        }
        if not all(one.scores and min(one.scores) >= 0 for one in structures.values()):
            raise ValueError("scores that are none")
        return VolumeIntervals(structures, dict(content["model"]), dict(content["fitted_on"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: damaged intervals of volumes ({error!r})") from None


def _infinite(value: float | None) -> float:
    return math.inf if value is None else float(value)


def with_intervals(
    rows: pd.DataFrame, intervals: VolumeIntervals, kind: Kind, level: float
) -> pd.DataFrame:
    """The table of cases with fitted intervals in ``volume_low_ml`` and ``volume_high_ml``.

    Args:
        rows: rows of a :class:`segcal.evaluation.cohort.Cohort`.
        intervals: fitted intervals of the structures.
        kind: kind of the intervals.
        level: level of the intervals.

    Raises:
        ValueError: no interval was fitted for a structure.
    """
    key = "volume_sd_ml/"
    names = [str(c).removeprefix(key) for c in rows.columns if str(c).startswith(key)]
    factors = intervals.factors(kind, level)
    if unknown := [name for name in names if name not in factors]:
        raise ValueError(intervals.not_fitted(unknown))
    found = rows.copy()
    for name in names:
        expected, sd = rows[f"volume_ml/{name}"], rows[f"{key}{name}"]
        ends = [interval(m, s**2, factors[name]) for m, s in zip(expected, sd, strict=True)]
        for end, values in zip(("low", "high"), np.array(ends).reshape(-1, 2).T, strict=True):
            found[f"volume_{end}_ml/{name}"] = np.where(expected.notna(), values, np.nan)
    return found
