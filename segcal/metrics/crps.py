"""Continuous ranked probability score: how far a distribution of volumes is from a volume."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import special

from segcal.arrays import as_array

__all__ = ["crps_empirical", "crps_gaussian"]


def crps_gaussian(mean: float, sd: float, value: float) -> float:
    """``integral (F(y) - 1[y >= v])^2 dy`` of a normal distribution F, in the unit of v.

    In closed form, with ``z = (v - mean) / sd`` and the standard normal Phi and phi, it is::

        sd (z (2 Phi(z) - 1) + 2 phi(z) - 1 / sqrt(pi))

    (Gneiting and Raftery 2007, section 4.2). Without a spread it is ``|v - mean|``.

    Args:
        mean: mean of F.
        sd: standard deviation of F, 0 or more.
        value: v.

    Raises:
        ValueError: a negative `sd`.
    """
    if sd < 0:
        raise ValueError(f"sd: expected 0 or more, got {sd}")
    if sd == 0:
        return abs(value - mean)
    z = (value - mean) / sd
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float(sd * (z * (2 * special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi)))


def crps_empirical(members: Any, value: float) -> float:
    """CRPS of the distribution that gives every member the same weight; exact.

    ``mean_r |x_r - v| - mean_rs |x_r - x_s| / 2`` (Gneiting and Raftery 2007, equation 20). The
    sum over all pairs follows from the sorted members.

    Args:
        members: ``(R,)``, one or more.
        value: v.

    Raises:
        ValueError: no members.
    """
    x = np.sort(np.asarray(as_array(members), dtype=np.float64).reshape(-1))
    r = len(x)
    if not r:
        raise ValueError("members: expected at least one, got none")
    pairs = 2 * float(np.sum((2 * np.arange(r) - r + 1) * x)) / r**2  # mean of |x_r - x_s|
    return float(np.abs(x - value).mean() - pairs / 2)
