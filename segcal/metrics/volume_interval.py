"""Intervals of the volume of a structure: ``sum p`` and how far the truth may be from it.

The variance of a volume is ``s^2 = sum p (1 - p)`` if voxels err independently. They do not:
neighbours err together, and a network errs along a whole border. The validation cases therefore
give one number per structure, the factor f of the interval ``sum p +- f s``:

- *inflated*: the volume V is normal around ``sum p`` with the variance ``kappa s^2``. The
  maximum-likelihood estimate over cases is ``kappa = mean (V - sum p)^2 / s^2``; since it comes
  from n cases, the factor is a quantile of Student's t with n degrees of freedom, times
  ``sqrt(kappa)``.
- *conformal*: the factor is the ``ceil((n + 1) (1 - alpha))``-th smallest of the n scores
  ``|V - sum p| / s`` (split conformal prediction, Vovk et al. 2005; Lei et al. 2018). For cases
  that are exchangeable with the validation cases the interval holds the true volume with
  probability ``1 - alpha`` or more, whatever the distribution. Fewer than ``ceil(1 / alpha) - 1``
  cases give an infinite factor, because no finite interval has that probability.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import as_array

__all__ = [
    "conformal_factor", "conformal_scores", "fewest_cases", "highest_level", "inflated_factor",
    "interval", "variance_inflation",
]  # fmt: skip

Numbers = NDArray[np.float64]
ROUNDING = 1e-9
"""Rounding error of ``(n + 1) (1 - alpha)``, which should be whole for n = 19 and 0.95, say."""


def interval(expected: float, variance: float, factor: float) -> tuple[float, float]:
    """Interval ``expected -+ factor sqrt(variance)``, not below 0.

    Args:
        expected: expected volume.
        variance: variance of the volume if voxels err independently, in the square of its unit.
        factor: factor from :func:`inflated_factor` or :func:`conformal_factor`. 1.96 gives the 95 %
            interval of independent voxels, which is far too narrow.
    """
    if math.isinf(factor):
        return 0.0, math.inf
    reach = factor * math.sqrt(max(variance, 0.0))
    return max(0.0, expected - reach), expected + reach


def conformal_scores(truth: Any, expected: Any, variance: Any) -> Numbers:
    """Score ``|V - sum p| / s`` of every case; infinite where s is 0 and V is not ``sum p``.

    Args:
        truth: ``(n,)``, reference volumes V.
        expected: ``(n,)``, expected volumes ``sum p``.
        variance: ``(n,)``, variances ``sum p (1 - p)`` in the square of the volumes' unit.

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

    About kappa voxels err together, as if there were fewer independent voxels by this factor.

    Args:
        truth: ``(n,)``, reference volumes V.
        expected: ``(n,)``, expected volumes ``sum p``.
        variance: ``(n,)``, variances ``sum p (1 - p)`` in the square of the volumes' unit.

    Returns:
        kappa, about 1 where voxels are independent and calibrated; NaN without cases.

    Raises:
        ValueError: as :func:`conformal_scores`.
    """
    scores = conformal_scores(truth, expected, variance)
    return float(np.mean(scores**2)) if scores.size else float("nan")


def inflated_factor(inflation: float, level: float, cases: int) -> float:
    """Factor of the interval with an inflated variance: ``t_{cases, 1 - alpha/2} sqrt(kappa)``.

    Args:
        inflation: kappa, from :func:`variance_inflation`.
        level: 1 - alpha, between 0 and 1.
        cases: number of cases from which kappa was estimated, 1 or more.

    Raises:
        ValueError: a level outside (0, 1), or no cases.
    """
    _check_level(level)
    if cases < 1:
        raise ValueError(f"cases: expected 1 or more, got {cases}")
    from scipy import stats  # here, since it takes half a second to import

    return float(stats.t.ppf((1 + level) / 2, cases)) * math.sqrt(inflation)


def conformal_factor(scores: Any, level: float) -> float:
    """The ``ceil((n + 1) level)``-th smallest score; infinite where there are too few cases.

    Args:
        scores: ``(n,)``, from :func:`conformal_scores`.
        level: 1 - alpha, between 0 and 1.

    Raises:
        ValueError: a level outside (0, 1).
    """
    _check_level(level)
    found = np.sort(np.asarray(as_array(scores), dtype=np.float64))
    rank = math.ceil((len(found) + 1) * level - ROUNDING)
    return float(found[rank - 1]) if rank <= len(found) else math.inf


def fewest_cases(level: float) -> int:
    """Number of cases that a finite conformal interval needs: ``ceil(1 / alpha) - 1``.

    Args:
        level: 1 - alpha, between 0 and 1.

    Raises:
        ValueError: a level outside (0, 1).
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
