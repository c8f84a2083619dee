"""Floor of ECE: the ECE that perfectly calibrated probabilities have by chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.binning import BinStatistics, equal_width_statistics

__all__ = ["EceFloor", "ece_floor", "floor_of_cells", "floor_over_cases"]

DRAWS = 1999
"""Number of data sets that are simulated; p-values are multiples of 1 / (DRAWS + 1)."""
CELLS = 1024
"""Number of groups of similar confidence, over all bins, whose hits are drawn together."""
NORMAL_FROM = 100.0
"""Variance from which on the hits of a bin are drawn from a normal distribution."""
Float = NDArray[np.float64]


@dataclass(frozen=True)
class EceFloor:
    """Expected calibration error, and what it would be if the probabilities were calibrated.

    Attributes:
        ece: ECE of the data.
        expected: mean ECE of simulated data for which the stated confidences are calibrated.
        q95: 95 % quantile of the ECE of such data.
        p: share of such data whose ECE is at least `ece`; small where the model is miscalibrated,
            NaN without predictions and for fewer than two cases.
        independent: `expected` if all predictions were independent of each other.
        spread: standard deviation of a bin's accuracy about its confidence, ``(M,)``; NaN where
            the bin is empty.
    """

    ece: float
    expected: float
    q95: float
    p: float
    independent: float
    spread: Float

    @property
    def effective_share(self) -> float:
        """Share of the predictions that would have this floor if they were independent.

        The floor falls with the root of their number, so this is ``(independent / expected)^2``.
        """
        return (self.independent / self.expected) ** 2 if self.expected > 0 else float("nan")


def ece_floor(
    probs: Any,
    labels: Any,
    *,
    bins: int = 15,
    mask: Any = None,
    ignore_index: int | None = None,
    seed: int = 0,
) -> EceFloor:
    """Floor of the top-label ECE of independent predictions, such as classes of whole images.

    ECE is a mean of absolute values, and so above 0 even for true probabilities. Voxels of an image
    are not independent; use :func:`floor_over_cases` for them.

    Args:
        probs: probabilities ``(N, K, *S)`` (array or tensor), or ``(K, *S)`` with labels ``(*S)``.
        labels: integer ``(N, *S)``.
        bins: M.
        mask: bool like `labels`, the predictions to count; None counts all.
        ignore_index: label to leave out.
        seed: random seed of the simulation.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    from segcal.tensors import select_voxels

    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    cells = equal_width_statistics(confidence, predicted == y, bins * _per_bin(bins))
    return floor_of_cells(cells, bins, seed=seed)


def floor_of_cells(cells: BinStatistics, bins: int, *, seed: int = 0) -> EceFloor:
    """Floor of the ECE of independent predictions, from narrow cells of their confidence.

    In the simulation, the hits of a group of n predictions of mean confidence p are binomial(n, p).
    Where the sum over the groups of a bin has a variance of 100 or more, it is drawn from the
    normal distribution of the same mean and variance at once: the mean of the bin's gap, which is
    then half-normal with the mean ``sqrt(2 / pi) sqrt(sum p (1 - p)) / n``, differs from that of
    binomial hits by less than 0.1 %, a tenth of the error of the simulation itself.

    Args:
        cells: statistics of cells of equal width, whose number is a multiple of `bins`.
        bins: M.
        seed: random seed of the simulation.

    Returns:
        the floor; NaN without predictions.
    """
    n = int(cells.count.sum())
    coarse = _bins(cells, bins)
    if not n:
        nan = float("nan")
        return EceFloor(nan, nan, nan, nan, nan, np.full(bins, np.nan))
    rng = np.random.default_rng(seed)
    size, promise = (_grouped(x, bins) for x in (cells.count, cells.confidence_sum))
    share = np.clip(promise / np.maximum(size, 1), 0, 1)
    variance = (size * share * (1 - share)).sum(1)
    total = np.zeros(DRAWS)
    for m, promised in enumerate(coarse.confidence_sum):
        if variance[m] >= NORMAL_FROM:
            total += np.abs(rng.normal(0, np.sqrt(variance[m]), DRAWS))
            continue
        used = size[m] > 0
        hits = rng.binomial(size[m, used], share[m, used], (DRAWS, int(used.sum()))).sum(1)
        total += np.abs(hits - promised)
    ece = coarse.expected_error()
    return EceFloor(
        ece=ece,
        expected=float(total.mean() / n),
        q95=float(np.quantile(total, 0.95) / n),
        p=_p_value(total / n, ece),
        independent=float(total.mean() / n),
        spread=_spread(variance, coarse.count),
    )


def floor_over_cases(
    cells: BinStatistics, cases: Sequence[BinStatistics], *, seed: int = 0
) -> EceFloor:
    """Floor of the pooled ECE, the ECE of all voxels of all cases together.

    Cases are independent of each other, the voxels of a case are not: they are right or wrong
    together, so the gap of a bin (hits minus summed confidence) varies far more from case to case
    than the gap of independent voxels. With g the gaps ``(C, M)`` of C cases and n their counts, a
    wild bootstrap over the cases draws signs s and takes::

        sum_m |sum_c s_c e_cm| sqrt(C / (C - 1)) / n
        e_cm = g_cm - n_cm (sum_c g_cm / sum_c n_cm)

    as the ECE of calibrated data, whose gaps vary as these do about a mean of 0. The floor is never
    below the floor of independent predictions, which is used for a single case. The test takes
    ``|sum_c s_c g_cm|``: under calibration a case's gap is as likely as its opposite, so p is valid
    for few cases too, and never below ``2^(1 - C)`` (Wu 1986; Cameron, Gelbach and Miller
    2008).

    Args:
        cells: cells of equal width with the voxels of all cases, as for :func:`floor_of_cells`.
        cases: equal-width bins of every case.
        seed: random seed of the simulation.

    Returns:
        the floor; p is NaN for fewer than two cases.
    """
    used = [case for case in cases if case.count.any()]
    alone = floor_of_cells(cells, len(cases[0].count) if cases else 1, seed=seed)
    if len(used) < 2:
        return EceFloor(**{**vars(alone), "p": float("nan")})
    size = np.stack([case.count for case in used]).astype(np.float64)
    gap = np.stack([case.hit_sum - case.confidence_sum for case in used])
    total = size.sum(0)
    rest = gap - size * (gap.sum(0) / np.maximum(total, 1))
    rest *= np.sqrt(len(used) / (len(used) - 1))
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (DRAWS, len(used)))
    drawn = np.abs(signs @ rest).sum(1) / total.sum()
    spread = _spread((rest**2).sum(0), total)
    return EceFloor(
        ece=alone.ece,
        expected=max(float(drawn.mean()), alone.expected),
        q95=max(float(np.quantile(drawn, 0.95)), alone.q95),
        p=_p_value(np.abs(signs @ gap).sum(1) / total.sum(), alone.ece),
        independent=alone.independent,
        spread=np.fmax(spread, alone.spread),
    )


def _p_value(drawn: Float, ece: float) -> float:
    """Share of the drawn values that are as large, counting the data; equal up to rounding."""
    return float((1 + np.sum(drawn >= ece * (1 - 1e-9))) / (1 + len(drawn)))


def _spread(variance: Float, count: NDArray[Any]) -> Float:
    out = np.full(len(count), np.nan)
    return np.divide(np.sqrt(variance), count, out=out, where=count > 0)


def _per_bin(bins: int) -> int:
    return max(1, CELLS // bins)


def _bins(cells: BinStatistics, bins: int) -> BinStatistics:
    """Sums of the cells of each bin."""
    if bins < 1 or len(cells.count) % bins:
        raise ValueError(f"bins: expected a divisor of {len(cells.count)} cells, got {bins}")
    return BinStatistics(
        *(x.reshape(bins, -1).sum(1) for x in (cells.count, cells.confidence_sum, cells.hit_sum))
    )


def _grouped(values: NDArray[Any], bins: int) -> NDArray[Any]:
    """Sums over groups of cells ``(M, groups)``, in which confidences are nearly alike."""
    rows = values.reshape(bins, -1)
    step = max(1, rows.shape[1] // _per_bin(bins))
    return np.add.reduceat(rows, np.arange(0, rows.shape[1], step), axis=1)
