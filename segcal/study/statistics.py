"""Comparing the methods of a study: paired, over patients nested in seeds.

The unit is a patient of a seed, represented by the mean over its cases. A mean over a group of
patients is the mean over seeds of the mean over the patients of each seed, so that every training
counts equally.

Intervals are percentile bootstraps in two stages: with three seeds or more, seeds are drawn with
replacement, and patients within every drawn seed. Two seeds are too few to draw from, and then, as
with one seed, the interval describes only these trainings.

Tests are paired over patients; a patient in several seeds counts once, with the mean over seeds.
P-values are corrected for the number of methods (Holm 1979) within a metric of a set and network.
They describe these trainings only and ignore that another seed may train a better network. In
simulated studies of eight methods without effect (three seeds of 15 patients), at least one method
is found significant in 5 % of studies if trainings do not differ, but in 17 % and 76 % if trainings
spread by 0.2 and 0.5 of the spread of patients. A t-test over the means of the seeds, ``p_seeds``,
does not have this fault but has little power, so it is reported in addition, and a direction is
given only where all seeds agree (then 16 % and 65 %).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import special, stats

from segcal.evaluation.compare import LEVEL

__all__ = [
    "MARGIN",
    "Change",
    "MeanRanks",
    "MeanValue",
    "PatientChanges",
    "cliques",
    "differences",
    "duels",
    "holm",
    "means",
    "nemenyi",
    "non_inferior",
    "p_value",
    "pareto",
    "patient_changes",
    "ranks",
    "resample",
]

RESAMPLES = 2000
ENOUGH_SEEDS = 3
"""Smallest number of seeds for which seeds are drawn too."""
FEWEST = 6
"""Smallest number of pairs for Wilcoxon's test, which cannot be significant with fewer."""
ALPHA = 1 - LEVEL
ROUNDING = 1e-12
"""Relative tolerance for values that differ only in the last digits of files."""
MARGIN = 0.005
"""DSC that may be lost."""
Test = Literal["t", "wilcoxon"]
Tables = Mapping[str, pd.DataFrame]
"""Values by method: rows by ``(seed, patient)``, one column per metric."""


@dataclass(frozen=True)
class Change:
    """One metric of a method compared with the baseline's, over the patients that both have.

    Attributes:
        method: the method.
        baseline: the method that it is compared with.
        metric: column.
        patients: number of patients in all seeds; a patient in two seeds counts once.
        seeds: number of seeds with a patient.
        base: mean of the baseline over these patients.
        mean: mean of the method.
        difference: method minus baseline.
        ci95: 95 % interval of the difference; None for a single patient.
        relative: difference as a share of the baseline's mean.
        relative_ci95: 95 % interval of that share.
        p: p-value of no difference, not corrected; None if it cannot be computed.
        p_holm: corrected for the number of methods.
        p_seeds: t-test over the means of the seeds, not corrected; None for a single seed.
        lower_seeds: seeds in which the method's mean is lower.
        higher_seeds: seeds in which it is higher.
        same_as: simpler method with exactly the same values, which is tested in place of this one.
    """

    method: str
    baseline: str
    metric: str
    patients: int
    seeds: int
    base: float
    mean: float
    difference: float
    ci95: tuple[float, float] | None
    relative: float
    relative_ci95: tuple[float, float] | None
    p: float | None
    p_holm: float | None
    p_seeds: float | None
    lower_seeds: int
    higher_seeds: int
    same_as: str = ""

    @property
    def direction(self) -> int:
        """-1 if lower beyond chance, 1 if higher, 0 if undecided.

        The corrected test, the interval and all seeds must agree.
        """
        if self.p_holm is None or self.ci95 is None or self.p_holm > ALPHA:
            return 0
        lower = self.ci95[1] < 0 and self.lower_seeds == self.seeds
        higher = self.ci95[0] > 0 and self.higher_seeds == self.seeds
        return -1 if lower else 1 if higher else 0


@dataclass(frozen=True)
class MeanValue:
    """Mean of a metric of a method over its own patients.

    Attributes:
        method: the method.
        metric: column.
        patients: number of patients with a value.
        seeds: number of seeds with a patient.
        mean: of the seeds' means.
        ci95: 95 % interval; None for a single patient.
        deviation: standard deviation of the seeds' means; None for a single seed.
    """

    method: str
    metric: str
    patients: int
    seeds: int
    mean: float
    ci95: tuple[float, float] | None
    deviation: float | None


@dataclass(frozen=True)
class MeanRanks:
    """Mean ranks of methods; 1 is best.

    Attributes:
        metric: column.
        mean: rank by method, the best first.
        blocks: number of patients that were ranked.
        p: p-value of Friedman's test that all methods are alike; None if it cannot be computed.
        distance: Nemenyi's critical difference at the level 5 %; None without blocks.
    """

    metric: str
    mean: dict[str, float]
    blocks: int
    p: float | None
    distance: float | None


@dataclass(frozen=True)
class PatientChanges:
    """How an error that should be low changes from patient to patient.

    A mean over patients is dominated by the patients with the largest errors, so this says what
    happened to most of them, and how much of the rest belongs to a few.

    Attributes:
        patients: number of patients that both methods have; one in several seeds counts once, with
            the mean over the seeds that both have.
        median: median of the patients' own relative changes.
        lower: number of patients whose error fell.
        halved: number of patients whose error fell by half or more.
        worst_share: share of the sum of the method's errors that the tenth of the patients (at
            least one) with its largest errors has.
        with_dsc: Spearman's rank correlation of the method's error and DSC over the patients; NaN
            where one of them does not vary.
    """

    patients: int
    median: float
    lower: int
    halved: int
    worst_share: float
    with_dsc: float


def patient_changes(
    rows: pd.DataFrame, baseline: pd.DataFrame, metric: str
) -> PatientChanges | None:
    """Compare a method's error with the baseline's, patient by patient.

    Args:
        rows: values by ``(seed, patient)``, with the metric and ``dsc``.
        baseline: the same of the baseline.
        metric: name of an error.

    Returns:
        None without a patient whose error is known, and above 0 before.
    """
    shared = rows.index.intersection(baseline.index)
    before = baseline.loc[shared, metric].groupby("patient").mean()
    own = rows.loc[shared, [metric, "dsc"]].groupby("patient").mean()
    known = own[metric].notna() & (before > 0)
    before, own = before[known], own[known]
    if own.empty:
        return None
    after, ratio = own[metric].to_numpy(), (own[metric] / before - 1).to_numpy()
    worst = np.sort(after)[-max(1, round(len(after) / 10)) :]
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        correlation = stats.spearmanr(after, own["dsc"], nan_policy="omit").statistic
    return PatientChanges(
        patients=len(after),
        median=float(np.median(ratio)),
        lower=int((ratio < 0).sum()),
        halved=int((ratio <= -0.5).sum()),
        worst_share=float(worst.sum() / after.sum()) if after.sum() > 0 else 0.0,
        with_dsc=float(correlation) if len(after) > 1 else float("nan"),
    )


def resample(
    values: NDArray[np.float64],
    seeds: NDArray[np.int64],
    resamples: int = RESAMPLES,
    *,
    seed: int = 0,
) -> NDArray[np.float64]:
    """Means over bootstrap draws of patients within seeds, and of seeds if there are three or more.

    All columns share the same draws.

    Args:
        values: ``(P, C)``, one row for each patient of a seed; NaN is left out of its column.
        seeds: seed of each row, ``(P,)``.
        resamples: B.
        seed: of the draws.

    Returns:
        ``(B, C)`` means over seeds of means over patients; NaN where nothing was drawn.
    """
    known = np.isfinite(values)
    filled, counts = np.where(known, values, 0.0), known.astype(np.float64)
    total = np.zeros((resamples, values.shape[1]))
    drawn = np.zeros_like(total)
    for weight in _weights(tuple(seeds.tolist()), resamples, seed):
        n = weight @ counts
        with np.errstate(invalid="ignore"):
            mean = (weight @ filled) / n
        total += np.where(n > 0, mean, 0.0)
        drawn += n > 0
    with np.errstate(invalid="ignore"):
        return total / drawn


@lru_cache(maxsize=4)
def _weights(seeds: tuple[int, ...], resamples: int, seed: int) -> list[NDArray[np.float64]]:
    """Number of times that every patient is drawn, ``(B, P)``, for every seed that is drawn."""
    rng, of = np.random.default_rng(seed), np.asarray(seeds)
    names = np.unique(of)
    slots = np.tile(np.arange(len(names)), (resamples, 1))
    if len(names) >= ENOUGH_SEEDS:
        slots = rng.integers(len(names), size=slots.shape)
    found = []
    for slot in slots.T:
        weight = np.zeros((resamples, len(of)))
        for index, name in enumerate(names):
            drawn, own = np.flatnonzero(slot == index), np.flatnonzero(of == name)
            share = np.full(len(own), 1 / len(own))
            weight[np.ix_(drawn, own)] = rng.multinomial(len(own), share, size=len(drawn))
        found.append(weight)
    return found


def means(
    tables: Tables, metrics: Sequence[str], *, resamples: int = RESAMPLES, seed: int = 0
) -> list[MeanValue]:
    """Mean of every metric of every method, with its interval and the spread of the seeds.

    Args:
        tables: by method.
        metrics: columns; a method without any value in a column gets no mean.
        resamples: of the bootstrap.
        seed: of the bootstrap.
    """
    found = []
    for method, rows in tables.items():
        values, seeds = _values(rows, metrics), _seeds(rows)
        drawn, of_seeds = resample(values, seeds, resamples, seed=seed), _group_means(values, seeds)
        for column, metric in enumerate(metrics):
            known, by_seed = np.isfinite(values[:, column]), _known(of_seeds[:, column])
            if not known.any():
                continue
            found.append(
                MeanValue(
                    method=method, metric=metric,
                    patients=_patients(rows, known), seeds=len(by_seed),
                    mean=float(by_seed.mean()),
                    ci95=_interval(drawn[:, column]) if known.sum() > 1 else None,
                    deviation=float(by_seed.std(ddof=1)) if len(by_seed) > 1 else None,
                )
            )  # fmt: skip
    return found


def differences(
    tables: Tables,
    baseline: str,
    metrics: Sequence[str],
    *,
    test: Test = "t",
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Change]:
    """Compare every method with the baseline, metric by metric, on the patients that both have.

    A method with exactly the values of an earlier one (a temperature changes no mask) is not tested
    again: it takes the earlier p-value, and both count as one method in the correction.

    Args:
        tables: by method; simple methods first.
        baseline: one of them.
        metrics: columns.
        test: paired t-test or Wilcoxon's signed-rank test over patients.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        ValueError: no such method.
    """
    if baseline not in tables:
        raise ValueError(f"baseline: expected one of {', '.join(tables)}, got {baseline}")
    found = []
    for method, rows in tables.items():
        if method != baseline:
            found += _changes(
                method, rows, baseline, tables[baseline], metrics, test, resamples, seed
            )
    same = {(m, metric): twin for metric in metrics for m, twin in _twins(tables, metric).items()}
    return [c for metric in metrics for c in _corrected(metric, found, same, baseline)]


def _changes(
    method: str,
    rows: pd.DataFrame,
    baseline: str,
    base_rows: pd.DataFrame,
    metrics: Sequence[str],
    test: Test,
    resamples: int,
    seed: int,
) -> list[Change]:
    """Changes of one method, not corrected yet."""
    shared = base_rows.index.intersection(rows.index)
    if not len(shared):
        return []
    base, own = _values(base_rows.loc[shared], metrics), _values(rows.loc[shared], metrics)
    delta = own - base
    base = np.where(np.isfinite(delta), base, np.nan)
    index = base_rows.loc[shared]
    seeds = _seeds(index)
    both = np.concatenate([delta, base], axis=1)
    drawn = resample(both, seeds, resamples, seed=seed)
    of_seeds = _group_means(both, seeds)
    of_patients = _group_means(delta, index.index.get_level_values("patient"))
    found = []
    for i, metric in enumerate(metrics):
        known = np.isfinite(delta[:, i])
        if not known.any():
            continue
        by_seed, base_mean = (
            _known(of_seeds[:, i]),
            float(np.nanmean(of_seeds[:, len(metrics) + i])),
        )
        difference, several = float(by_seed.mean()), known.sum() > 1
        change, of_base = drawn[:, i], drawn[:, len(metrics) + i]
        with np.errstate(divide="ignore", invalid="ignore"):
            share = change / of_base
        found.append(
            Change(
                method=method, baseline=baseline, metric=metric,
                patients=_patients(index, known), seeds=len(by_seed),
                base=base_mean, mean=base_mean + difference, difference=difference,
                ci95=_interval(change) if several else None,
                relative=difference / base_mean if base_mean else float("nan"),
                relative_ci95=_interval(share) if several and base_mean else None,
                p=p_value(of_patients[:, i], test=test), p_holm=None,
                p_seeds=p_value(by_seed),
                lower_seeds=int((by_seed < 0).sum()), higher_seeds=int((by_seed > 0).sum()),
            )
        )  # fmt: skip
    return found


def _corrected(
    metric: str, found: Iterable[Change], same: Mapping[tuple[str, str], str], baseline: str
) -> list[Change]:
    """Changes of one metric, with corrected p-values."""
    own = [c for c in found if c.metric == metric]
    tested = [c for c in own if not same[c.method, metric] and c.p is not None]
    adjusted = holm([c.p for c in tested if c.p is not None])
    p_of = {c.method: p for c, p in zip(tested, adjusted, strict=True)}
    p_of[baseline] = 1.0  # the baseline's own repair that changes nothing
    return [
        _replaced(c, p_of.get(same[c.method, metric] or c.method), same[c.method, metric])
        for c in own
    ]


def _replaced(change: Change, p_holm: float | None, same_as: str) -> Change:
    return Change(**{**vars(change), "p_holm": p_holm, "same_as": same_as})


def _twins(tables: Tables, metric: str) -> dict[str, str]:
    """First method with the same values in all patients, by method; empty for the first itself."""
    first: dict[tuple[bytes, bytes], str] = {}
    found = {}
    for method, rows in tables.items():
        values = _values(rows, [metric]) + 0.0  # no -0
        key = (_patient_key(rows), values.tobytes())
        other = first.setdefault(key, method)
        found[method] = "" if other == method else other
    return found


def _patient_key(rows: pd.DataFrame) -> bytes:
    return repr([list(rows.index.get_level_values(k)) for k in ("seed", "patient")]).encode()


def duels(
    tables: Tables, metrics: Sequence[str], *, test: Test = "t", resamples: int = RESAMPLES
) -> list[Change]:
    """Compare every method with every other; p-values are corrected for the number of pairs.

    Args:
        tables: by method.
        metrics: columns.
        test: see :func:`differences`.
        resamples: of the bootstrap.
    """
    names = list(tables)
    found = [
        change
        for place, baseline in enumerate(names)
        for method in names[place + 1 :]
        for change in _changes(
            method, tables[method], baseline, tables[baseline], metrics, test, resamples, 0
        )
    ]
    corrected = []
    for metric in metrics:
        own = [c for c in found if c.metric == metric]
        p = iter(holm([c.p for c in own if c.p is not None]))
        corrected += [_replaced(c, None if c.p is None else next(p), "") for c in own]
    return corrected


def p_value(delta: NDArray[np.float64], *, test: Test = "t") -> float | None:
    """Two-sided p of no difference; None for too few patients.

    Args:
        delta: paired differences, one per patient; NaN is left out.
        test: ``t`` for a paired t-test (two patients or more), ``wilcoxon`` for a signed-rank test
            (six or more).
    """
    delta = delta[np.isfinite(delta)]
    if len(delta) < (2 if test == "t" else FEWEST):
        return None
    if not delta.any():
        return 1.0
    if test == "wilcoxon":
        return float(stats.wilcoxon(delta).pvalue)
    if np.ptp(delta) <= ROUNDING * np.abs(delta).max():  # the same in all patients: no chance
        return 0.0
    n = len(delta)
    statistic = abs(delta.mean()) / (delta.std(ddof=1) / np.sqrt(n))
    return float(2 * special.stdtr(n - 1, -statistic))  # scipy's test takes a hundred times as long


def holm(p: Sequence[float]) -> list[float]:
    """P-values corrected for their number by Holm's step-down method, in the given order.

    At a given level they control the chance of any false finding among all.
    """
    order = np.argsort(p, kind="stable")
    stepped = np.asarray(p, dtype=np.float64)[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(stepped), 1.0) if len(p) else stepped
    return [float(value) for value in adjusted]


def ranks(tables: Tables, metric: str, *, higher: bool) -> MeanRanks:
    """Rank methods patient by patient, over the patients that all methods have.

    A patient in several seeds counts once, with the mean over them. Ties share a rank.

    Args:
        tables: by method.
        metric: column.
        higher: whether higher values are better.
    """
    joined = pd.DataFrame({m: rows[metric] for m, rows in tables.items() if metric in rows})
    joined = joined[np.isfinite(joined.to_numpy(dtype=np.float64)).all(axis=1)]
    blocks = joined.groupby(level="patient").mean().to_numpy(dtype=np.float64)
    n, k = blocks.shape
    if not n or not k:
        return MeanRanks(metric, {}, 0, None, None)
    ranked = stats.rankdata(-blocks if higher else blocks, axis=1)
    mean = dict(zip(joined.columns, ranked.mean(axis=0).tolist(), strict=True))
    p = None
    if k >= 3 and n >= 2 and np.ptp(blocks, axis=1).any():
        p = float(stats.friedmanchisquare(*blocks.T).pvalue)
    ordered = dict(sorted(mean.items(), key=lambda item: item[1]))
    return MeanRanks(metric, ordered, n, p, nemenyi(k, n) if k > 1 else None)


def nemenyi(methods: int, blocks: int, *, alpha: float = ALPHA) -> float:
    """Critical difference of mean ranks (Nemenyi; Demšar 2006, section 3.2.2).

    ``CD = q_alpha sqrt(k (k + 1) / (6 n))`` with q of the studentised range over sqrt 2.

    Args:
        methods: k, at least 2.
        blocks: n.
        alpha: level.
    """
    q = float(stats.studentized_range.ppf(1 - alpha, methods, np.inf)) / np.sqrt(2)
    return float(q * np.sqrt(methods * (methods + 1) / (6 * blocks)))


def cliques(mean: Mapping[str, float], distance: float) -> list[tuple[str, ...]]:
    """Largest groups of two or more methods whose ranks lie less than a distance apart.

    Args:
        mean: rank by method, the best first.
        distance: critical difference.
    """
    names, values = list(mean), list(mean.values())
    found: list[tuple[int, int]] = []
    for start in range(len(names)):
        end = max(i for i in range(start, len(names)) if values[i] - values[start] < distance)
        if end > start and (not found or end > found[-1][1]):
            found.append((start, end))
    return [tuple(names[a : b + 1]) for a, b in found]


def pareto(points: NDArray[np.float64], *, higher: Sequence[bool]) -> NDArray[np.bool_]:
    """Which points are on the Pareto front: no other is as good everywhere and better somewhere.

    Args:
        points: ``(M, Q)``; a point with NaN is never on the front.
        higher: of each quantity, whether higher values are better.

    Returns:
        bool ``(M,)``.
    """
    signed = points * np.where(higher, 1.0, -1.0)
    known: NDArray[np.bool_] = np.asarray(np.isfinite(signed).all(axis=1))
    as_good = (signed[:, None] >= signed[None]).all(axis=2)
    better = (signed[:, None] > signed[None]).any(axis=2)
    beaten = (as_good & better & known[:, None]).any(axis=0)
    return np.asarray(known & ~beaten)


def non_inferior(change: Change, *, margin: float = MARGIN) -> bool | None:
    """Whether a metric that should be high is preserved: its interval lies above -margin.

    Returns:
        None if there is no interval.
    """
    return None if change.ci95 is None else change.ci95[0] > -margin


def _interval(drawn: NDArray[np.float64]) -> tuple[float, float] | None:
    known = drawn[np.isfinite(drawn)]
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _values(rows: pd.DataFrame, metrics: Sequence[str]) -> NDArray[np.float64]:
    return rows.reindex(columns=list(metrics)).to_numpy(dtype=np.float64)


def _seeds(rows: pd.DataFrame) -> NDArray[np.int64]:
    return rows.index.get_level_values("seed").to_numpy(dtype=np.int64)


def _patients(rows: pd.DataFrame, known: NDArray[np.bool_]) -> int:
    return int(rows.index.get_level_values("patient")[known].nunique())


def _group_means(
    values: NDArray[np.float64], groups: pd.Index[Any] | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Means of the rows of every group ``(G, C)``; NaN where a group has no value."""
    codes, names = pd.factorize(groups, sort=True)
    of = (codes[None] == np.arange(len(names))[:, None]).astype(np.float64)
    known = np.isfinite(values)
    with np.errstate(invalid="ignore"):
        return (of @ np.where(known, values, 0.0)) / (of @ known.astype(np.float64))


def _known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[np.isfinite(values)]
