"""Comparing methods of a study with a baseline, paired over the seeds of both.

If every seed draws its own training, validation and test samples, the trainings share many of
them, and a plain t-test over seeds reports too many differences. The variance of the mean over J
seeds is therefore taken as ``(1 / J + n_test / n_train)`` times the variance of a seed (Nadeau and
Bengio 2003, "Inference for the generalization error", Machine Learning 52, section 4). If all seeds
have the same samples, the factor is ``1 / J``, and intervals hold for these samples only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special

from segcal.study.statistics import holm

__all__ = ["LEVEL", "PairedChange", "paired_changes"]

LEVEL = 0.95


@dataclass(frozen=True)
class PairedChange:
    """One metric of a method minus the baseline's, over the seeds that both have.

    Attributes:
        method: the method.
        metric: its column.
        seeds: number of seeds in which both have a value.
        difference: mean over seeds of method minus baseline.
        ci95: 95 % interval of the difference, by Student's t; None for a single seed.
        p: two-sided p-value of no difference; None for a single seed.
        p_holm: corrected for the number of methods (Holm 1979).
        lower: number of seeds in which the method has the lower value.
        higher: number of seeds in which the method has the higher value.
    """

    method: str
    metric: str
    seeds: int
    difference: float
    ci95: tuple[float, float] | None
    p: float | None
    p_holm: float | None
    lower: int
    higher: int

    @property
    def direction(self) -> int:
        """-1 if lower beyond chance after correction, 1 if higher, 0 if undecided."""
        decided = self.p_holm is not None and self.p_holm <= 1 - LEVEL
        return int(np.sign(self.difference)) if decided else 0


def paired_changes(
    tables: Mapping[str, pd.DataFrame],
    baseline: str,
    metrics: Sequence[str],
    *,
    redrawn: float = 0.0,
) -> list[PairedChange]:
    """Compare every method with the baseline, metric by metric.

    Args:
        tables: by method, with one row per seed and one column per metric.
        baseline: one of the methods.
        metrics: columns; a column that a method lacks is left out for it.
        redrawn: ``n_test / n_train`` where every seed draws its samples, 0 where all have the same.

    Raises:
        ValueError: no such baseline.
    """
    if baseline not in tables:
        raise ValueError(f"baseline: expected one of {', '.join(tables)}, got {baseline!r}")
    found = []
    for metric in metrics:
        own = [
            _change(method, metric, rows[metric] - tables[baseline][metric], redrawn)
            for method, rows in tables.items()
            if method != baseline and metric in rows and metric in tables[baseline]
        ]
        known = [change for change in own if change.seeds]
        corrected = iter(holm([c.p for c in known if c.p is not None]))
        found += [replace(c, p_holm=None if c.p is None else next(corrected)) for c in known]
    return found


def _change(method: str, metric: str, delta: pd.Series[float], redrawn: float) -> PairedChange:
    values = delta.to_numpy(dtype=np.float64)
    values = values[np.isfinite(values)]
    mean = float(values.mean()) if len(values) else float("nan")
    ci95, p = _student(values, redrawn) if len(values) > 1 else (None, None)
    return PairedChange(
        method=method, metric=metric, seeds=len(values), difference=mean, ci95=ci95, p=p,
        p_holm=None, lower=int((values < 0).sum()), higher=int((values > 0).sum()),
    )  # fmt: skip


def _student(values: NDArray[np.float64], redrawn: float) -> tuple[tuple[float, float], float]:
    """95 % interval of the mean, and two-sided p of a mean of 0."""
    n, mean = len(values), float(values.mean())
    error = float(values.std(ddof=1) * np.sqrt(1 / n + redrawn))
    if error == 0:  # the same in all seeds
        return (mean, mean), float(mean == 0)
    half = float(special.stdtrit(n - 1, (1 + LEVEL) / 2)) * error
    return (mean - half, mean + half), float(2 * special.stdtr(n - 1, -abs(mean) / error))
