"""Compares methods on the same cases: intervals over cases, paired differences, Wilcoxon's test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

__all__ = [
    "Difference",
    "SharedMean",
    "as_records",
    "case_table",
    "compare",
    "interval",
    "paired",
    "result_columns",
    "shared_means",
]

LEVEL = 0.95
BATCH = 1000
"""Resamples that are in memory at a time."""
DESCRIBED = ("diagonal_mm", "spacing_", "voxels_", "raters")
"""First letters of columns that describe a case and are not results."""


def result_columns(rows: pd.DataFrame) -> list[str]:
    """Columns with one result per case, without columns per label or that describe the case."""
    return [c for c in rows.columns if "/" not in c and not c.startswith(DESCRIBED)]


def interval(
    values: NDArray[np.float64], resamples: int, seed: int = 0
) -> tuple[float, float] | None:
    """95 % percentile bootstrap interval of the mean over cases.

    It is that of ``scipy.stats.bootstrap``, which takes half a second to import, and then a
    millisecond for each of hundreds of intervals.

    Args:
        values: one per case, finite.
        resamples: how often cases are drawn with replacement; 0 gives None.
        seed: random seed, so that the same cases give the same interval.

    Returns:
        lower and upper end; None for fewer than two cases.
    """
    if resamples < 1 or len(values) < 2:
        return None
    rng, n = np.random.default_rng(seed), len(values)
    means = np.concatenate(
        [
            values[rng.integers(0, n, (min(BATCH, resamples - done), n))].mean(axis=1)
            for done in range(0, resamples, BATCH)
        ]
    )
    means.sort()
    outside = (1 - LEVEL) / 2
    return _quantile(means, outside), _quantile(means, 1 - outside)


def _quantile(ascending: NDArray[np.float64], share: float) -> float:
    """Quantile, linear between the two values around it (type 7 of Hyndman and Fan)."""
    place = share * len(ascending) + (1 - share)  # counted from 1
    above, part = int(place), place % 1
    low, high = ascending[max(above - 1, 0)], ascending[min(above, len(ascending) - 1)]
    return float((1 - part) * low + part * high)


@dataclass(frozen=True)
class Difference:
    """Difference (method - baseline) in one metric, over the cases that both have.

    Attributes:
        metric: column of the tables.
        method: method that is compared with the baseline.
        baseline: first method.
        n: number of cases in which both are finite.
        mean: mean of the differences.
        ci95: bootstrap interval of that mean; None for fewer than two cases.
        p_wilcoxon: two-sided Wilcoxon signed-rank test of no difference; None for fewer than six
            cases, which cannot be significant, or if all differences are 0. It is not corrected
            for the number of comparisons.
    """

    metric: str
    method: str
    baseline: str
    n: int
    mean: float | None
    ci95: tuple[float, float] | None
    p_wilcoxon: float | None


def compare(
    tables: Mapping[str, pd.DataFrame], *, resamples: int = 2000, seed: int = 0
) -> list[Difference]:
    """Compare every method with the first, metric by metric, case by case.

    Args:
        tables: rows of :class:`segcal.evaluation.cohort.Cohort` by method; the first is the
            baseline.
        resamples: number of bootstrap resamples.
        seed: random seed of the bootstrap.

    Raises:
        ValueError: there are fewer than two methods.
    """
    if len(tables) < 2:
        raise ValueError("tables: expected at least two methods")
    (baseline, first), *others = tables.items()
    found = []
    for method, rows in others:
        for metric in result_columns(first):
            if metric not in rows:
                continue
            delta = paired(first, rows, metric)
            found.append(
                Difference(
                    metric=metric,
                    method=method,
                    baseline=baseline,
                    n=len(delta),
                    mean=float(delta.mean()) if len(delta) else None,
                    ci95=interval(delta, resamples, seed),
                    p_wilcoxon=_wilcoxon(delta),
                )
            )
    return found


@dataclass(frozen=True)
class SharedMean:
    """Mean of one metric of one method over the cases in which every method has it.

    Attributes:
        metric: column of the tables.
        method: name of the method.
        n: number of cases.
        mean: mean over these cases; None without a case.
        ci95: bootstrap interval of the mean; None for fewer than two cases.
    """

    metric: str
    method: str
    n: int
    mean: float | None
    ci95: tuple[float, float] | None


def shared_means(
    tables: Mapping[str, pd.DataFrame],
    metrics: Sequence[str],
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> list[SharedMean]:
    """Means of every method over the same cases, so that they can stand in one column.

    A method that has a metric in no case has no mean of it, and does not reduce the cases of the
    other methods.

    Args:
        tables: rows of :class:`segcal.evaluation.cohort.Cohort` by method.
        metrics: columns of the tables.
        resamples: number of bootstrap resamples.
        seed: random seed of the bootstrap.
    """
    found = []
    for metric in metrics:
        columns = {m: rows[metric] for m, rows in tables.items() if metric in rows}
        joined = pd.DataFrame({m: c for m, c in columns.items() if np.isfinite(c).any()})
        values = joined.to_numpy(dtype=np.float64)
        values = values[np.isfinite(values).all(axis=1)]
        found += [
            SharedMean(
                metric=metric,
                method=method,
                n=len(values),
                mean=float(column.mean()) if len(values) else None,
                ci95=interval(column, resamples, seed),
            )
            for method, column in zip(joined, values.T, strict=True)
        ]
    return found


def paired(a: pd.DataFrame, b: pd.DataFrame, metric: str) -> NDArray[np.float64]:
    """Differences b - a over the cases in which both are finite, in the order of a."""
    delta = (b[metric].reindex(a.index) - a[metric]).to_numpy(dtype=np.float64)
    return delta[np.isfinite(delta)]


def _wilcoxon(delta: NDArray[np.float64]) -> float | None:
    if len(delta) < 6 or not delta.any():
        return None
    from scipy import stats  # here, since it takes half a second to import

    return float(stats.wilcoxon(delta).pvalue)


def case_table(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """One row per case and method, for further statistics of your own."""
    parts = [
        rows[result_columns(rows)].assign(method=method).set_index("method", append=True)
        for method, rows in tables.items()
    ]
    return pd.concat(parts).sort_index(level=0, sort_remaining=False)


def as_records(differences: list[Difference]) -> list[dict[str, Any]]:
    """Plain data for JSON."""
    return [dict(vars(d)) for d in differences]
