"""Temperature scaling: all logits are divided by one number."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from segcal.posthoc.calibrator import PointwiseCalibrator
from segcal.posthoc.rows import Rows, log_softmax
from segcal.posthoc.scale import best_scale, is_bound

__all__ = ["Temperature"]


class Temperature(PointwiseCalibrator):
    """``softmax(l / T)`` with the T of smallest negative log-likelihood; the prediction stays.

    Source: Guo et al. 2017, "On calibration of modern neural networks". The code of CALS tries 19
    temperatures up to 1.9, or lets L-BFGS stop early; ours is the optimum
    (:func:`segcal.posthoc.scale.best_scale`).

    Args:
        per_channel: whether every channel is a sigmoid of its own, with a temperature of its own.

    Attributes:
        value: T; 1 before the fit. If T is at a bound, 0.05 or 100, the data have no optimum
            between the bounds, and the fit warns about it.
    """

    value: float

    def __init__(self, *, per_channel: bool = False) -> None:
        super().__init__(per_channel=per_channel)
        self.value = 1.0

    def _fit(self, rows: Rows) -> None:
        scale = best_scale(rows)
        self.value = 1 / scale
        if is_bound(scale):
            self._note(
                f"temperature {self.value:g} is at the bound of the search: the cases do not "
                f"determine it, as they are {'separable' if scale > 1 else 'misclassified'} or few"
            )

    def _log_probabilities(self, logits: Tensor, groups: Tensor) -> Tensor:
        return log_softmax(logits / self.value)

    def _learned(self) -> dict[str, Any]:
        return {"value": self.value}

    def _load(self, learned: dict[str, Any]) -> None:
        self.value = float(learned["value"])
        if not 0 < self.value < math.inf:
            raise ValueError(f"state: expected a positive temperature, got {self.value}")
