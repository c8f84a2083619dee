"""Several raters: their majority vote, and how a prediction does where they agree or disagree."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import distinct_labels

__all__ = ["RaterSums", "majority", "rater_disagreement", "rater_sums"]

Labels = NDArray[np.integer[Any]]


def majority(raters: Sequence[Labels]) -> Labels:
    """Label that most raters give a voxel; the smallest label where several are tied.

    Args:
        raters: label maps ``(*S)``, one or more.
    """
    best = np.zeros(raters[0].shape, np.uint8)
    found = np.empty_like(raters[0])
    for value in np.unique(np.concatenate([distinct_labels(one) for one in raters])):
        votes = np.zeros(best.shape, np.uint8)
        for one in raters:
            votes += one == value
        found[votes > best] = value
        np.maximum(best, votes, out=best)
    return found


def rater_disagreement(raters: Sequence[Labels]) -> NDArray[np.float32]:
    """Probability that two raters, each drawn from all, label a voxel differently, ``(*S)``.

    This is ``1 - sum_k s_k^2`` of the raters' shares s. By as much is the mean Brier score against
    single raters above the Brier score against their shares.

    Args:
        raters: label maps ``(*S)``, one or more.
    """
    differ = np.zeros(raters[0].shape, np.float32)
    for i, one in enumerate(raters):
        for other in raters[i + 1 :]:
            differ += one != other
    differ *= 2 / len(raters) ** 2
    return differ


@dataclass(frozen=True)
class RaterSums:
    """Sums over the voxels of a case, for one structure that several raters labelled.

    Attributes:
        volumes: number of voxels that every rater put in the structure ``(R,)``.
        inside: number of voxels that all raters put in the structure.
        hits: number of voxels that all raters put in the structure and that are predicted.
        predicted: number of predicted voxels on which all raters agree.
        disagreed: number of voxels on which raters disagree.
        inside_sum: sum of the structure's probability p over `inside`.
        confidence_sum: sum of ``max(p, 1 - p)`` over `disagreed`.
        gap_sum: sum of ``|p - share of the raters|`` over `disagreed`.
        total: sum of p over all voxels.
        variance: sum of ``p (1 - p)`` over all voxels.
        voxel_ml: volume of a voxel in ml.
    """

    volumes: NDArray[np.int64]
    inside: int
    hits: int
    predicted: int
    disagreed: int
    inside_sum: float
    confidence_sum: float
    gap_sum: float
    total: float
    variance: float
    voxel_ml: float

    @property
    def dsc_agreed(self) -> float:
        """DSC over the voxels on which all raters agree; NaN without such voxels in either mask."""
        return _ratio(2 * self.hits, self.predicted + self.inside)

    @property
    def p_agreed(self) -> float:
        """Mean p where all raters see the structure."""
        return _ratio(self.inside_sum, self.inside)

    @property
    def confidence_disagreed(self) -> float:
        """Mean of ``max(p, 1 - p)`` where raters disagree."""
        return _ratio(self.confidence_sum, self.disagreed)

    @property
    def gap_disagreed(self) -> float:
        """Mean of ``|p - share of the raters|`` where raters disagree."""
        return _ratio(self.gap_sum, self.disagreed)


def rater_sums(
    probability: NDArray[Any],
    mask: NDArray[np.bool_],
    raters: Sequence[NDArray[np.bool_]],
    *,
    voxel_ml: float = 1.0,
) -> RaterSums:
    """Sum over the voxels of a structure, slice by slice along the first axis.

    Args:
        probability: p ``(*S)``.
        mask: predicted mask, bool, same shape.
        raters: masks of the raters, bool, same shape, one or more.
        voxel_ml: volume of a voxel in ml.

    Raises:
        ValueError: shapes that differ, no rater.
    """
    if not raters or any(one.shape != probability.shape for one in (mask, *raters)):
        raise ValueError(
            f"raters: expected one or more masks of the shape {probability.shape} of the "
            f"probability, got {[one.shape for one in raters]}, and {mask.shape} of the mask"
        )
    sums = np.zeros(9)
    volumes = np.zeros(len(raters), np.int64)
    for i in range(len(mask)):
        p, predicted = probability[i].astype(np.float64), mask[i]
        votes = np.zeros(p.shape, np.int32)
        for r, one in enumerate(raters):
            votes += one[i]
            volumes[r] += np.count_nonzero(one[i])
        inside, apart = votes == len(raters), (votes > 0) & (votes < len(raters))
        undecided, share = p[apart], votes[apart] / len(raters)
        sums += (
            np.count_nonzero(inside), np.count_nonzero(inside & predicted),
            np.count_nonzero(predicted & ~apart), np.count_nonzero(apart), p[inside].sum(),
            np.maximum(undecided, 1 - undecided).sum(), np.abs(undecided - share).sum(), p.sum(),
            (p * (1 - p)).sum(),
        )  # fmt: skip
    inside_of_all, hits, predicted_agreed, disagreed = (int(n) for n in sums[:4])
    inside_sum, confidence_sum, gap_sum, total, variance = (float(x) for x in sums[4:])
    return RaterSums(
        volumes=volumes, inside=inside_of_all, hits=hits, predicted=predicted_agreed,
        disagreed=disagreed, inside_sum=inside_sum, confidence_sum=confidence_sum,
        gap_sum=gap_sum, total=total, variance=variance, voxel_ml=voxel_ml,
    )  # fmt: skip


def _ratio(a: float, n: float) -> float:
    return a / n if n else math.nan
