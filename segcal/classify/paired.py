"""Methods of a study against a baseline: paired over seeds, which both were trained with.

Where every seed draws training, validation and test samples of its own, the trainings share many of
them, and a plain t-test over seeds finds too much. The variance of the mean over J seeds is
therefore taken as ``(1 / J + n_test / n_train)`` times that of a seed (Nadeau and Bengio 2003,
"Inference for the generalization error", Machine Learning 52, section 4). Where all seeds have the
same samples it is ``1 / J``, and intervals speak of these samples alone.
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
    """One metric of one method less the baseline's, over the seeds that both have.

    Attributes:
        method: which is compared.
        metric: which number.
        seeds: that both have a value of.
        difference: mean over seeds of method less baseline.
        ci95: of the difference, by Student's t; None for a single seed.
        p: two-sided, of no difference; None for a single seed.
        p_holm: corrected for the number of methods (Holm 1979).
        lower: seeds in which the method has the lower value.
        higher: seeds in which it has the higher one.
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
        """-1 lower, 1 higher, beyond chance after correction; 0 undecided."""
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
        tables: by method: a row a seed, a column a metric.
        baseline: one of the methods.
        metrics: columns; one that a method lacks is left out for it.
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
