"""The posterior that goes with a multi-label loss, or the lack of one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from segcal.term import Term

__all__ = ["MultiLabelLoss", "bisect"]

BISECTIONS = 100
"""Halvings of a bracket; float64 is exhausted before."""


class MultiLabelLoss(Term):
    """A loss of logits ``(B, T)`` and targets ``(B, T)``, with the posterior of its minimiser.

    Attributes:
        no_posterior: why no posterior goes with the loss; empty where one does.
        bijective: whether :meth:`log_odds` is finite and strictly increasing in the logit of its
            label: then it can be inverted, and ranks samples by a label as the logit does.
        link_name: what to call the way from logits to the posterior.
    """

    no_posterior: str = ""
    bijective: bool = False
    link_name: str = "link"

    def log_odds(self, logits: Tensor) -> Tensor:
        """Return ``log(eta / (1 - eta))``, eta the calibrated posterior at `logits` ``(B, T)``.

        Raises:
            ValueError: no posterior goes with this loss.
        """
        reason = self.no_posterior or "it has no link"
        raise ValueError(
            f"{type(self).__name__}: no posterior goes with this loss: {reason}. segcal classify "
            "evaluate --calibrate fits temperature scaling to the validation samples; in Python, "
            "segcal.posthoc.temperature.Temperature(per_channel=True) does to held-out logits"
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the calibrated posterior ``(B, T)`` at `logits`, at least float32.

        Raises:
            ValueError: no posterior goes with this loss.
        """
        return torch.sigmoid(self.log_odds(logits))


@torch.no_grad()
def bisect(
    increasing: Callable[[Tensor], Tensor], target: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """Return x between `low` and `high` where ``increasing(x) = target``, else the nearer end.

    Args:
        increasing: elementwise and increasing.
        target: floating, any shape.
        low: of the shape of `target`.
        high: of the shape of `target`.
    """
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        below = increasing(middle) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low + (high - low) / 2
