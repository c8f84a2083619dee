"""The scale ``s = 1 / T`` of the logits with the smallest negative log-likelihood."""

from __future__ import annotations

import math

from scipy.optimize import brentq

from segcal.posthoc.rows import Rows, softmax

__all__ = ["BOUNDS", "best_scale", "drawn_scale", "is_bound"]

BOUNDS = (0.05, 100.0)
"""Bounds of the search for a temperature, because separable data have their optimum at 0."""
LOW, HIGH = 1 / BOUNDS[1], 1 / BOUNDS[0]


def best_scale(rows: Rows) -> float:
    """Return the s that minimises ``sum_i w_i (logsumexp(s l_i) - s l_iy)`` within the bounds.

    The sum is convex in s, so its derivative ``sum_i w_i (E_p[l_i] - l_iy)`` under
    ``p = softmax(s l_i)`` has at most one root. Brent's method finds it to rounding in a dozen
    passes over the rows, in float64. The result is 1 where no scale changes anything.
    """
    at_low, at_high = _slope(rows, LOW), _slope(rows, HIGH)
    if at_low == at_high == 0:
        return 1.0
    if at_low >= 0:
        return LOW
    if at_high <= 0:
        return HIGH
    return float(brentq(lambda s: _slope(rows, s), LOW, HIGH, xtol=1e-14, rtol=1e-13))


def drawn_scale(rows: Rows, to: float, strength: float) -> float:
    """Return the s that minimises the sum of :func:`best_scale` plus ``strength log(s / to)^2``.

    Outside the interval between `to` and the best scale both parts grow, so the optimum lies within
    it, and the derivative changes its sign there.

    Args:
        rows: rows of one group.
        to: the scale that s is drawn to.
        strength: 0 or more, in the unit of the sum.
    """
    best = best_scale(rows)

    def slope(log_s: float) -> float:
        s = math.exp(log_s)
        return s * _slope(rows, s) + 2 * strength * (log_s - math.log(to))

    ends = sorted((math.log(to), math.log(best)))
    if ends[1] - ends[0] < 1e-12 or not slope(ends[0]) < 0 < slope(ends[1]):
        return best if strength == 0 else to
    return math.exp(brentq(slope, *ends, xtol=1e-13, rtol=1e-12))


def is_bound(scale: float) -> bool:
    """Whether a scale is at a bound of the search, so that the data do not determine it."""
    return math.isclose(scale, LOW) or math.isclose(scale, HIGH)


def _slope(rows: Rows, s: float) -> float:
    total = 0.0
    for part in rows.chunks():
        mean = (softmax(s * part.logits) * part.logits).sum(1)
        total += float((mean - part.of_label(part.logits)) @ part.weights)
    return total
