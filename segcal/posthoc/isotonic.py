"""Isotonic calibration: the ascending step function of p that is nearest to the observed hits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression
from scipy.special import entr
from torch import Tensor

from segcal.posthoc.one_vs_rest import OneVsRest

__all__ = ["IsotonicCalibration"]

Curve = NDArray[np.float64]

LEVELS = 1 << 14
"""Levels of p that a map is fitted to; more distinct values are merged to levels of equal mass."""
TIED = 1e-13
"""Values of p that differ by no more than this share, by rounding, count as equal."""
POINTS = 1 << 13
"""Number of points that the maps of all classes keep together."""
FEWEST = 32
"""Number of points that a map keeps at least, however many classes there are."""


class IsotonicCalibration(OneVsRest):
    """Map p by the ascending map with the least squared error, for every class against the rest.

    Source: Zadrozny and Elkan 2002, "Transforming classifier scores into accurate multiclass
    probability estimates". Maps are found by the pool-adjacent-violators algorithm. They are linear
    between the ends of neighbouring steps, and constant beyond the first and last step, as in
    scikit-learn's ``IsotonicRegression(out_of_bounds="clip")``. With more than two classes the p'
    are divided by their sum; with two classes there is one map, for class 1. A class that is
    nowhere or everywhere in the cases keeps its p, and where all maps give 0 the probabilities
    stay.

    A probability of exactly 0 is possible, so the NLL of other cases may be infinite.

    More than 16,384 distinct values of p are merged to 16,384 levels of equal mass, each at its
    mean. The maps together keep 8,192 points (at least 32 each); if there are more, neighbouring
    steps are joined where this raises the NLL least.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.

    Attributes:
        maps: p and p' of the ends of the steps, float64 ``(2, m)``, of each class, or of class 1
            of two; None for a class that keeps its p.
    """

    def _map_of(
        self, log_p: Tensor, log_q: Tensor, hits: Tensor, weights: Tensor, num_classes: int
    ) -> Curve:
        p, share, mass = _levels(log_p.exp().clip(max=1).numpy(), hits.numpy(), weights.numpy())
        found = isotonic_regression(share, weights=mass)
        most = max(FEWEST, POINTS // (num_classes if num_classes > 2 else 1)) // 2
        return _points(p, mass, found.x, _joined(found.blocks, mass, found.x, most))

    def _mapped(self, found: Curve, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        value = torch.from_numpy(np.interp(log_p.exp().numpy(), *found))
        return value.log(), torch.log1p(-value)

    def _is_map(self, found: Curve) -> bool:
        if found.ndim != 2 or found.shape[0] != 2 or not found.shape[1]:
            return False
        ascending = (np.diff(found[0]) > 0).all() and (np.diff(found[1]) >= 0).all()
        return bool(ascending and ((found >= 0) & (found <= 1)).all())


def _levels(
    p: NDArray[np.float64], hits: NDArray[np.bool_], weights: NDArray[np.float64]
) -> tuple[Curve, Curve, Curve]:
    """Distinct values of p, ascending, with share of hits and mass of each; merged if many."""
    order = p.argsort(kind="stable")
    p, mass, hit_mass = p[order], weights[order], (weights * hits)[order]
    first = np.flatnonzero(np.append(True, p[1:] > p[:-1] * (1 + TIED)))
    if len(first) > LEVELS:
        begin = (mass.cumsum() - mass)[first] / mass.sum()
        first = first[np.unique((begin * LEVELS).astype(np.int64), return_index=True)[1]]
    last = np.append(first[1:], len(p)) - 1
    pooled = np.add.reduceat(mass, first)
    mean = np.add.reduceat(mass * p, first) / pooled
    values = mean.clip(p[first], p[last])  # so that rounding lets none pass another
    return values, np.add.reduceat(hit_mass, first) / pooled, pooled


def _joined(blocks: NDArray[np.int64], mass: Curve, share: Curve, most: int) -> NDArray[np.int64]:
    """Bounds of at most `most` steps, joined where this raises the NLL least."""
    while len(blocks) - 1 > most:
        m = np.add.reduceat(mass, blocks[:-1])
        y = np.add.reduceat(mass * share, blocks[:-1]) / m
        both = m[1:] + m[:-1]
        own = m * (entr(y) + entr(1 - y))
        mean = (m[1:] * y[1:] + m[:-1] * y[:-1]) / both
        cost = both * (entr(mean) + entr(1 - mean)) - own[1:] - own[:-1]
        blocks = np.delete(blocks, cost.argmin() + 1)
    return blocks


def _points(p: Curve, mass: Curve, share: Curve, blocks: NDArray[np.int64]) -> Curve:
    """Both ends of every step, or its only level."""
    m = np.add.reduceat(mass, blocks[:-1])
    y = np.maximum.accumulate(np.add.reduceat(mass * share, blocks[:-1]) / m).clip(0, 1)
    first, last = blocks[:-1], blocks[1:] - 1
    ends = np.stack([first, last], 1)
    kept = np.stack([np.ones(len(first), bool), last > first], 1)
    return np.stack([p[ends[kept]], np.repeat(y, 2).reshape(-1, 2)[kept]])
