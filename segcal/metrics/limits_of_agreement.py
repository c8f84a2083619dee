"""Limits of agreement of two measurements of the same quantity (Bland and Altman)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from segcal.arrays import as_array

__all__ = ["Limits", "limits_of_agreement"]

NORMAL_95 = 1.96


class Limits(NamedTuple):
    """How far two measurements lie apart, in their unit.

    Attributes:
        bias: mean difference.
        low: bias minus 1.96 standard deviations.
        high: bias plus 1.96 standard deviations.
    """

    bias: float
    low: float
    high: float


def limits_of_agreement(measured: Any, reference: Any) -> Limits:
    """Mean difference -+ 1.96 standard deviations, between which 95 % of normal differences lie.

    Bland, Altman, "Statistical methods for assessing agreement between two methods of clinical
    measurement" (1986).

    Args:
        measured: ``(n,)``, finite.
        reference: ``(n,)``, finite.

    Returns:
        bias and limits of measured minus reference. The limits are NaN for fewer than two
        measurements, and all three values are NaN without measurements.

    Raises:
        ValueError: lengths that differ, values that are not finite.
    """
    a, b = (np.asarray(as_array(x), dtype=np.float64) for x in (measured, reference))
    if a.ndim != 1 or a.shape != b.shape:
        raise ValueError(f"measured, reference: expected one length, got {a.shape}, {b.shape}")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("measured, reference: expected finite numbers")
    if not a.size:
        return Limits(np.nan, np.nan, np.nan)
    off = a - b
    bias = float(off.mean())
    reach = NORMAL_95 * float(off.std(ddof=1)) if off.size > 1 else np.nan
    return Limits(bias, bias - reach, bias + reach)
