"""Intervals of the volume of a structure: ``sum p`` and how far the truth may be from it.

The variance of a volume is ``s^2 = sum p (1 - p)`` if voxels err independently. They do not:
neighbours err together, and a network errs about a whole border. What validation cases say about it
becomes one number a structure, the factor f of the interval ``sum p +- f s``:

- *inflated*: the variance is ``kappa s^2``, the volume normal around ``sum p``. The maximum of the
  likelihood over cases is ``kappa = mean (V - sum p)^2 / s^2``; since it is estimated from n cases,
  the factor is a quantile of Student's t with n degrees of freedom, times ``sqrt(kappa)``.
- *conformal*: the ``ceil((n + 1) (1 - alpha))``-th smallest of the n scores ``|V - sum p| / s``
  (split conformal prediction, Vovk et al. 2005; Lei et al. 2018). Over cases that are exchangeable
  with those of validation it covers with ``1 - alpha`` or more, whatever the distribution. Fewer
  than ``ceil(1 / alpha) - 1`` cases give an infinite factor: nothing finite can be promised.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from segcal.tensors import as_array

__all__ = [
    "conformal_factor", "conformal_scores", "fewest_cases", "highest_level", "inflated_factor",
    "interval", "variance_inflation",
]  # fmt: skip

Numbers = NDArray[np.float64]
ROUNDING = 1e-9
"""Of ``(n + 1) (1 - alpha)``, which is meant to be whole for n = 19 and 0.95, say."""


def interval(expected: float, variance: float, factor: float) -> tuple[float, float]:
    """``expected -+ factor sqrt(variance)``, not below 0.

    Args:
        expected: volume.
        variance: of it if voxels err independently, in the square of its unit.
        factor: see :func:`inflated_factor`, :func:`conformal_factor`; 1.96 is the interval of 95 %
            that takes voxels for independent and is far too narrow.
    """
    if math.isinf(factor):
        return 0.0, math.inf
    reach = factor * math.sqrt(max(variance, 0.0))
    return max(0.0, expected - reach), expected + reach


def conformal_scores(truth: Any, expected: Any, variance: Any) -> Numbers:
    """``|V - sum p| / s`` of every case; infinite where s is 0 and the volume another.

    Args:
        truth: ``(n,)``, volumes of the references.
        expected: ``(n,)``, sums of probabilities.
        variance: ``(n,)``, ``sum p (1 - p)`` in the square of their unit.

    Raises:
        ValueError: lengths that differ, values that are not finite.
    """
    v, m, s2 = (np.asarray(as_array(x), dtype=np.float64) for x in (truth, expected, variance))
    if v.ndim != 1 or not v.shape == m.shape == s2.shape:
        raise ValueError(
            f"truth, expected, variance: expected one length, got {v.shape}, {m.shape}, {s2.shape}"
        )
    if not all(np.isfinite(x).all() for x in (v, m, s2)):
        raise ValueError("truth, expected, variance: expected finite numbers")
    off, s = np.abs(v - m), np.sqrt(np.maximum(s2, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(off == 0, 0.0, off / s)


def variance_inflation(truth: Any, expected: Any, variance: Any) -> float:
    """Maximum-likelihood kappa of volumes that are normal with variance ``kappa s^2``.

    Kappa voxels or so err together: as many independent ones there are, fewer by that factor.

    Args:
        truth: see :func:`conformal_scores`.
        expected: see there.
        variance: see there.

    Returns:
        1 where voxels are independent and calibrated; NaN without cases.

    Raises:
        ValueError: as :func:`conformal_scores`.
    """
    scores = conformal_scores(truth, expected, variance)
    return float(np.mean(scores**2)) if scores.size else float("nan")


def inflated_factor(inflation: float, level: float, cases: int) -> float:
    """Factor of the interval with an inflated variance: ``t_{cases, 1 - alpha/2} sqrt(kappa)``.

    Args:
        inflation: see :func:`variance_inflation`.
        level: 1 - alpha, between 0 and 1.
        cases: from which the inflation was estimated, 1 or more.

    Raises:
        ValueError: a level that is none, or no cases.
    """
    _check_level(level)
    if cases < 1:
        raise ValueError(f"cases: expected 1 or more, got {cases}")
    return float(stats.t.ppf((1 + level) / 2, cases)) * math.sqrt(inflation)


def conformal_factor(scores: Any, level: float) -> float:
    """The ``ceil((n + 1) level)``-th smallest score; infinite where there are too few cases.

    Args:
        scores: ``(n,)``, see :func:`conformal_scores`.
        level: 1 - alpha, between 0 and 1.

    Raises:
        ValueError: a level that is none.
    """
    _check_level(level)
    found = np.sort(np.asarray(as_array(scores), dtype=np.float64))
    rank = math.ceil((len(found) + 1) * level - ROUNDING)
    return float(found[rank - 1]) if rank <= len(found) else math.inf


def fewest_cases(level: float) -> int:
    """Cases that a finite conformal interval needs: ``ceil(1 / alpha) - 1``.

    Args:
        level: 1 - alpha, between 0 and 1.

    Raises:
        ValueError: a level that is none.
    """
    _check_level(level)
    return math.ceil(1 / (1 - level) - ROUNDING) - 1


def highest_level(cases: int) -> float:
    """Highest level of a finite conformal interval: ``n / (n + 1)``.

    Args:
        cases: n.
    """
    return cases / (cases + 1)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level: expected a number between 0 and 1, got {level}")
