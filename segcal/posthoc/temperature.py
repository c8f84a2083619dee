"""Temperature scaling: all logits are divided by one number."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Tensor

from segcal.posthoc.calibrator import Calibrator, Cases

__all__ = ["Temperature"]

BOUNDS = (0.05, 100.0)
"""Temperatures beyond are not looked for: separable data have their optimum at 0."""


class Temperature(Calibrator):
    """``softmax(l / T)`` with the T of the least negative log-likelihood; the prediction stays.

    The NLL is convex in ``s = 1 / T``, so its derivative ``sum_i E_p[l_i] - l_iy`` under
    ``p = softmax(s l_i)`` has one root at most, which Brent's method finds to rounding: a dozen
    passes over the cases, in float64.

    Source: Guo et al. 2017, "On calibration of modern neural networks". The code of CALS tries 19
    temperatures up to 1.9, or lets L-BFGS stop early; ours is the optimum.

    Attributes:
        value: T; 1 before the fit. At a bound, 0.05 or 100, the data have no optimum between, of
            which the fit warns.
    """

    value: float

    def __init__(self) -> None:
        super().__init__()
        self.value = 1.0

    def _fit(self, cases: Cases) -> None:
        def slope(s: float) -> float:
            return sum(_slope(logits, labels, s) for logits, labels in cases)

        low, high = 1 / BOUNDS[1], 1 / BOUNDS[0]
        at_low, at_high = slope(low), slope(high)
        if at_low == at_high == 0:  # no temperature changes anything
            s = 1.0
        elif at_low >= 0 or at_high <= 0:
            s = low if at_low >= 0 else high
            warnings.warn(
                f"temperature: {1 / s:g} is the bound of what is looked for; the cases are "
                f"{'misclassified' if s == low else 'separable'}, or too few",
                stacklevel=3,
            )
        else:
            s = brentq(slope, low, high, xtol=1e-14, rtol=1e-13)
        self.value = 1 / s

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits / self.value, 1)

    def _learned(self) -> dict[str, Any]:
        return {"value": self.value}

    def _load(self, learned: dict[str, Any]) -> None:
        self.value = float(learned["value"])
        if not 0 < self.value < math.inf:
            raise ValueError(f"state: expected a positive temperature, got {self.value}")


def _slope(logits: Tensor, labels: Tensor, s: float) -> float:
    """Derivative in s of the NLL of rows ``(n, K)``, summed."""
    mean = (torch.softmax(s * logits, 1) * logits).sum(1)
    return float((mean - logits.gather(1, labels[:, None])[:, 0]).sum())
