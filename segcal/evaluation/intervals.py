"""Intervals of volumes that were fitted to validation cases, and tables of cases with them."""

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
from segcal.io.files import finite, read_json, write_json
from segcal.metrics.volume_interval import (
    conformal_factor,
    fewest_cases,
    highest_level,
    inflated_factor,
    interval,
)
from segcal.tensors import check_choice

FORMAT = 1
Kind = Literal["conformal", "inflated"]
_MADE = {
    None: "as if all voxels of a structure erred together, wide, since nothing was fitted; segcal "
    "trust fit makes intervals from validation cases",
    "conformal": "expected volume and as many independent SD as the conformal quantile of the "
    "errors of validation cases: covers so often whatever their distribution is",
    "inflated": "expected volume and a quantile of Student's t of an independent SD that was "
    "inflated to the errors of validation cases: trusts that they are normal",
}


@dataclass(frozen=True)
class StructureIntervals:
    """What validation cases say about the volume of a structure.

    Attributes:
        inflation: of the variance, see :func:`segcal.metrics.volume_interval.variance_inflation`.
        effective_voxels: undecided voxels a case, were they independent and at p = 1/2:
            ``4 sum p (1 - p) / inflation``, mean over cases.
        scores: see :func:`segcal.metrics.volume_interval.conformal_scores`, one a case.
    """

    inflation: float
    effective_voxels: float
    scores: tuple[float, ...]

    def factor(self, kind: Kind, level: float) -> float:
        """Standard deviations of independent voxels to each side; infinite for too few cases."""
        if kind == "conformal":
            return conformal_factor(self.scores, level)
        return inflated_factor(self.inflation, level, len(self.scores))


@dataclass(frozen=True)
class VolumeIntervals:
    """Intervals of the volumes of all structures, and what they were fitted on.

    Attributes:
        structures: by name.
        model: record of the predictions, see :func:`segcal.repair.saved.model_of`.
        fitted_on: where the cases came from, and which they were.
    """

    structures: dict[str, StructureIntervals]
    model: dict[str, Any] = field(default_factory=dict)
    fitted_on: dict[str, Any] = field(default_factory=dict)

    def factors(self, kind: Kind, level: float) -> dict[str, float]:
        """Factor of every structure by name."""
        check_choice("kind", kind, get_args(Kind))
        return {name: one.factor(kind, level) for name, one in self.structures.items()}

    def not_fitted(self, names: Sequence[str]) -> str:
        """Say that nothing was fitted for structures of these names."""
        return (
            f"intervals: fitted for {', '.join(self.structures)}, not for {', '.join(names)}; fit "
            "them to validation cases of this model with the same labels"
        )

    def too_few(self, kind: Kind, level: float) -> str:
        """Say that there are too few cases for a level, and what to do; empty if there are not."""
        need = fewest_cases(level)
        few = {n: len(one.scores) for n, one in self.structures.items() if len(one.scores) < need}
        if kind != "conformal" or not few:
            return ""
        return (
            f"{min(few.values())} validation cases ({', '.join(few)}) are too few for conformal "
            f"intervals of {100 * level:.4g} %, which need {need}: no finite interval is stated. "
            f"They allow a level of {_floored(highest_level(min(few.values())))}; intervals of the "
            "kind inflated need fewer cases and trust that errors are normal"
        )


def _floored(level: float) -> str:
    """A level that is no higher, in hundredths."""
    return f"{math.floor(100 * level) / 100:.2f}"


def stated(level: float, kind: Kind | None) -> str:
    """What intervals promise, and how they were made.

    Args:
        level: of the intervals.
        kind: of fitted ones; None without a fit.
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
    """Read what :func:`write_intervals` wrote.

    Raises:
        ValueError: naming the file: no such file, another format, or a damaged one.
    """
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("structures"), dict):
        raise ValueError(f"{path}: no intervals of volumes; segcal trust fit writes them")
    if content.get("format") != FORMAT:
        raise ValueError(
            f"{path}: of format {content.get('format')!r}, expected {FORMAT}; fit them again with "
            "this version"
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
        rows: of :class:`segcal.evaluation.cohort.Cohort`.
        intervals: of the structures.
        kind: of the intervals.
        level: of the intervals.

    Raises:
        ValueError: a structure that no interval was fitted for.
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
