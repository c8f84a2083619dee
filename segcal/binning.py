"""Bins of equal width and of equal mass, as statistics that merge by addition.

A bin m keeps three sums over its predictions: their number n, the promise P (the sum of their
confidences) and the number of hits H (right predictions). Every error follows from these, because
``|H - P| / n`` is the gap between accuracy and mean confidence. Counts are int64, sums float64: a
float32 counter stops at 16,777,216, which one case can exceed.

Equal width
-----------
Bin m of M is (m / M, (m + 1) / M], and 0 belongs to the first bin; the statistics of two sets of
predictions are added bin by bin. A value is compared with an edge, or with a threshold, as the
nearest float32, so that a number falls into the same bin in either precision; an edge that is no
float32 itself has a small tolerance above it (:func:`edge_tolerance`).

Equal mass
----------
Along the sorted confidences, promise and hits are curves over the mass, the number of predictions
up to a confidence. R groups are the differences of the curves between R + 1 cuts, which are the
cuts of ``numpy.array_split``. Within a run of tied values the curves are taken to be straight: the
run is shared in proportion, and the order of equal values does not matter (:func:`_groups`).

Groups of two cases cannot be added, because the cuts move. A histogram of narrow cells can be
added, :class:`MassHistogram`, whose groups are taken as if all values of a cell were tied. A group
differs from the exact group only where a cut goes through a cell whose values differ. Let such a
cell have values up to w apart and m predictions with h hits, and let a share s of them lie below
the cut. The histogram puts ``s h`` hits below; in truth they are at most ``min(h, s m)``,
which is more by ``min((1 - s) h, s (m - h))``, and at least ``h - min(h, (1 - s) m)``, which is
fewer by ``min(s h, (1 - s) (m - h))``. The promise above m times the smallest value is between 0
and w per prediction, so it is wrong by at most ``s (1 - s) m w``. Let e be the larger of the first
two differences plus the third; e is 0 where w = 0. A group between two cuts is wrong by at most the
sum of their e, and its true ``|H - P|`` cannot be below 0 or above its size. The expected error,
``sum |H - P| / n``, is off by at most the sum of these bounds over the groups, which is never above
1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import check_choice

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BinStatistics",
    "MassHistogram",
    "MurphyParts",
    "equal_mass_statistics",
    "equal_width_index",
    "equal_width_statistics",
    "mean_gap",
]

Reduction = Literal["expected", "average", "maximum"]

EDGE_TOLERANCE = 1e-6
"""A value within this (in bin widths) above an edge counts as on it, unless bins are so narrow that
it takes more (:func:`edge_tolerance`)."""
FLOAT32_STEP = 2.0**-24
"""Distance of neighbouring float32 values in [1/2, 1]; the nearest to a number is half as far."""


@dataclass(frozen=True)
class BinStatistics:
    """Number of predictions, sum of confidences and number of hits in each bin.

    Attributes:
        count: number of predictions per bin, int64 ``(M,)``.
        confidence_sum: sum of the predicted probabilities, float64 ``(M,)``.
        hit_sum: number of hits, int64 or (with shared tied values) float64 ``(M,)``.
    """

    count: NDArray[np.int64]
    confidence_sum: NDArray[np.float64]
    hit_sum: NDArray[np.int64] | NDArray[np.float64]

    def __add__(self, other: BinStatistics) -> BinStatistics:
        """Statistics of both sets of predictions together, which need the same bins."""
        if len(self.count) != len(other.count):
            raise ValueError(f"bins: cannot add {len(self.count)} and {len(other.count)} bins")
        return BinStatistics(
            self.count + other.count,
            self.confidence_sum + other.confidence_sum,
            self.hit_sum + other.hit_sum,
        )

    @property
    def confidence(self) -> NDArray[np.float64]:
        """Mean predicted probability per bin; NaN where the bin is empty."""
        return _ratio(self.confidence_sum, self.count)

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """Share of hits per bin; NaN where the bin is empty."""
        return _ratio(self.hit_sum, self.count)

    @property
    def gap(self) -> NDArray[np.float64]:
        """``|accuracy - confidence|`` per bin; NaN where the bin is empty."""
        return np.abs(self.accuracy - self.confidence)

    def expected_error(self) -> float:
        """``sum_m (n_m / n) |accuracy_m - confidence_m|``; NaN when there is no prediction."""
        return self._mean(np.abs(self.confidence_sum - self.hit_sum))

    def overconfidence(self) -> float:
        """Part of the expected error from overconfident bins; NaN without predictions."""
        return self._mean(np.maximum(self.confidence_sum - self.hit_sum, 0))

    def underconfidence(self) -> float:
        """Part of the expected error from underconfident bins; NaN without predictions."""
        return self._mean(np.maximum(self.hit_sum - self.confidence_sum, 0))

    def average_error(self) -> float:
        """ACE: mean gap of the non-empty bins; NaN when there is no prediction."""
        gap = self.gap[self.count > 0]
        return float(gap.mean()) if gap.size else float("nan")

    def maximum_error(self) -> float:
        """MCE: largest gap of a non-empty bin; NaN when there is no prediction."""
        gap = self.gap[self.count > 0]
        return float(gap.max()) if gap.size else float("nan")

    def murphy(self) -> MurphyParts:
        """Parts of the Brier score of these predictions (Murphy 1973)."""
        found = self.count > 0
        n = self.count.sum()
        if n == 0:
            return MurphyParts(float("nan"), float("nan"), float("nan"))
        count, frequency = self.count[found], self.accuracy[found]
        base = float(self.hit_sum.sum()) / float(n)
        return MurphyParts(
            reliability=float((count * (self.confidence[found] - frequency) ** 2).sum() / n),
            resolution=float((count * (frequency - base) ** 2).sum() / n),
            uncertainty=base * (1 - base),
        )

    def error(self, reduction: Reduction) -> float:
        """Expected, average or maximum error, by name.

        Raises:
            ValueError: an unknown reduction.
        """
        check_choice("reduction", reduction, get_args(Reduction))
        if reduction == "expected":
            return self.expected_error()
        return self.average_error() if reduction == "average" else self.maximum_error()

    def _mean(self, sums: NDArray[np.float64]) -> float:
        n = self.count.sum()
        return float(sums.sum() / n) if n > 0 else float("nan")

    def to_dict(self) -> dict[str, list[float]]:
        """Plain lists for JSON; :meth:`from_dict` reads them."""
        return {
            "count": self.count.tolist(),
            "confidence_sum": self.confidence_sum.tolist(),
            "hit_sum": self.hit_sum.tolist(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Sequence[float]]) -> BinStatistics:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: entries that are missing or of different lengths.
        """
        try:
            count, confidence, hits = (
                np.asarray(data[key]) for key in ("count", "confidence_sum", "hit_sum")
            )
        except KeyError as error:
            raise ValueError(f"bin statistics: {error} is missing") from None
        if not count.shape == confidence.shape == hits.shape or count.ndim != 1:
            raise ValueError("bin statistics: expected three lists of one length")
        return cls(count.astype(np.int64), confidence.astype(np.float64), hits)


@dataclass(frozen=True)
class MurphyParts:
    """Parts of the Brier score, ``reliability - resolution + uncertainty`` but for binning effects.

    Attributes:
        reliability: mean squared gap between confidence and frequency of a bin; 0 if calibrated.
        resolution: variance of the frequency between bins; larger is better.
        uncertainty: variance of the hits.
    """

    reliability: float
    resolution: float
    uncertainty: float


def mean_gap(statistics: Sequence[BinStatistics]) -> float:
    """Mean of the gaps of all bins that are not empty; NaN where all are."""
    gaps = np.concatenate([s.gap for s in statistics])
    gaps = gaps[~np.isnan(gaps)]
    return float(gaps.mean()) if gaps.size else float("nan")


def _ratio(a: NDArray[np.generic], n: NDArray[np.generic]) -> NDArray[np.float64]:
    out = np.full(len(n), np.nan)
    return np.divide(a, n, out=out, where=np.asarray(n) > 0)


def edge_tolerance(bins: int) -> float:
    """How far above an edge of `bins` bins, in bin widths, a value still counts as on the edge.

    This is enough for the float32 that is nearest to the edge, however narrow the bins are.
    """
    return max(EDGE_TOLERANCE, bins * FLOAT32_STEP)


def above(values: Tensor, threshold: float) -> Tensor:
    """Whether values are above a threshold, both as the nearest float32; bool like `values`."""
    return values.float() > threshold  # which torch casts to the type of the tensor


def equal_width_index(values: Tensor, bins: int) -> Tensor:
    """Index of the bin (lo, hi] of width 1 / `bins` that each value of [0, 1] falls into.

    0 belongs to the first bin; a value within :func:`edge_tolerance` above an edge counts as on it;
    values slightly outside [0, 1] go to the first or last bin, and NaN to any.

    Args:
        values: floating, any shape.
        bins: M.

    Returns:
        int64 like `values`.

    Raises:
        ValueError: `bins` is not positive.
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}")
    position = (values.float().double() * bins).sub_(edge_tolerance(bins)).ceil_().sub_(1)
    return position.long().clamp_(0, bins - 1)  # of NaN, long() makes an integer of any size


def equal_width_statistics(confidence: Tensor, hits: Tensor, bins: int) -> BinStatistics:
    """Statistics of `bins` equal-width bins.

    Args:
        confidence: predicted probabilities ``(n,)``, floating.
        hits: whether each prediction is right ``(n,)``, bool.
        bins: M.

    Raises:
        ValueError: `bins` is not positive.
    """
    import torch  # here, since the sums of cases are added up and cut into bins without it

    index = equal_width_index(confidence, bins)
    return BinStatistics(
        torch.bincount(index, minlength=bins).numpy(force=True),
        torch.bincount(index, confidence.double(), minlength=bins).numpy(force=True),
        torch.bincount(index[hits], minlength=bins).numpy(force=True),
    )


def equal_mass_statistics(confidence: Tensor, hits: Tensor, groups: int) -> BinStatistics:
    """Statistics of `groups` groups of equal size along the sorted confidence, exact.

    Sizes are those of ``numpy.array_split``: the first ``n mod groups`` groups hold one more. A run
    of tied values that spans a cut is shared in proportion, hits along with mass, so the result
    does not depend on the order of the predictions. With fewer predictions than groups the last
    groups are empty.

    Args:
        confidence: predicted probabilities ``(n,)``, floating.
        hits: whether each prediction is right ``(n,)``, bool.
        groups: R.

    Raises:
        ValueError: `groups` is not positive.
    """
    import torch

    ordered = torch.sort(confidence).values
    value, count = torch.unique_consecutive(ordered, return_counts=True)
    hit_values = torch.sort(confidence[hits]).values
    mass, promise, hit = (
        np.concatenate([[0.0], x.double().numpy(force=True)])
        for x in (
            torch.cumsum(count, 0),
            torch.cumsum(value.double() * count, 0),
            torch.searchsorted(hit_values, value, right=True),
        )
    )
    return _groups(mass, promise, hit, groups)


def _groups(
    mass: NDArray[np.float64],
    promise: NDArray[np.float64],
    hit: NDArray[np.float64],
    groups: int,
) -> BinStatistics:
    """Cut cumulative mass, promise and hits, which start at 0, into groups of equal mass.

    Between two entries all three rise linearly, so that ties are shared in proportion.
    """
    cuts = _cuts(int(mass[-1]), groups)
    return BinStatistics(
        np.diff(cuts),
        np.diff(np.interp(cuts, mass, promise)),
        np.diff(np.interp(cuts, mass, hit)),
    )


def _cuts(n: int, groups: int) -> NDArray[np.int64]:
    """Bounds of `groups` groups of n predictions, as in ``numpy.array_split``."""
    if groups < 1:
        raise ValueError(f"bins: expected at least 1, got {groups}")
    size, rest = divmod(n, groups)
    return np.concatenate([[0], np.cumsum([size + (r < rest) for r in range(groups)])])


@dataclass(frozen=True)
class MassHistogram:
    """Predictions sorted into narrow cells, to be cut into groups of equal mass.

    Predictions of a cell count as tied at their mean. The groups are thus the exact groups of
    predictions that were moved by at most the width of a cell; :meth:`error_bound` says how much
    this can change the expected error.

    Attributes:
        statistics: statistics of the cells, in the order of confidence.
        width: largest difference between the predictions of a cell, 0 where they are equal.
    """

    statistics: BinStatistics
    width: NDArray[np.float64]

    def groups(self, groups: int) -> BinStatistics:
        """Statistics of groups of equal mass, as :func:`equal_mass_statistics` cuts them.

        Raises:
            ValueError: `groups` is not positive.
        """
        return _groups(*self._cumulative(), groups)

    def cuts_by_cell(self, groups: int) -> dict[int, NDArray[np.int64]]:
        """Cuts between groups that go through a cell, by its index.

        Returns:
            of every such cell, how many of its predictions are below each cut, ascending.
        """
        index, share = self._cuts(groups)
        through = share > 0
        below = np.rint(share * self.statistics.count[index]).astype(np.int64)
        return {int(i): below[through & (index == i)] for i in np.unique(index[through])}

    def error_bound(self, groups: int) -> float:
        """Largest possible difference to the exact expected error of the groups, at most 1.

        The documentation of this module derives it; cells whose predictions are tied add nothing.
        """
        n = int(self.statistics.count.sum())
        if not n:
            return 0.0
        index, s = self._cuts(groups)
        m, h, w = (x[index] for x in (self.statistics.count, self.statistics.hit_sum, self.width))
        hits = np.maximum(
            np.minimum((1 - s) * h, s * (m - h)), np.minimum(s * h, (1 - s) * (m - h))
        )
        at_cut = np.pad(np.where(w > 0, hits + s * (1 - s) * m * w, 0.0), 1)
        cut = self.groups(groups)
        gap = np.abs(cut.hit_sum - cut.confidence_sum)
        most = np.maximum(gap, cut.count - gap)
        return float(np.minimum(at_cut[:-1] + at_cut[1:], most).sum() / n)

    def _cuts(self, groups: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Cells that hold the R - 1 inner cuts, and the share of each that lies below its cut.

        A cut between two cells belongs to the upper cell with a share of 0. A cut behind the last
        cell (with fewer predictions than groups) belongs to it with a share of 1, which is set to
        0.
        """
        mass = np.concatenate([[0], np.cumsum(self.statistics.count)])
        cuts = _cuts(int(mass[-1]), groups)[1:-1]
        index = np.clip(np.searchsorted(mass, cuts, side="right") - 1, 0, len(mass) - 2)
        return index, (cuts - mass[index]) / np.maximum(self.statistics.count[index], 1) % 1

    def _cumulative(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """Mass, promise and hits up to the end of every cell that is not empty.

        Empty cells would give ``numpy.interp`` two values for one mass.
        """
        found = self.statistics.count > 0
        mass, promise, hit = (
            np.concatenate([[0.0], np.cumsum(x[found], dtype=np.float64)])
            for x in (
                self.statistics.count,
                self.statistics.confidence_sum,
                self.statistics.hit_sum,
            )
        )
        return mass, promise, hit
