"""The calibrated posterior of a multi-label loss, where it is known."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from segcal.term import Term

__all__ = ["MultiLabelLoss", "bisect"]

BISECTIONS = 100
"""Number of times the bracket is halved; float64 is exhausted before."""


class MultiLabelLoss(Term):
    """A multi-label loss of logits and targets ``(B, T)``, with its link to the posterior.

    :meth:`probabilities` returns calibrated posteriors; losses without a known posterior raise an
    error. The map from logits to the posterior is called the link of the loss.

    Attributes:
        no_posterior: why the loss has no known posterior; empty if it has one.
        bijective: whether :meth:`log_odds` is finite and strictly increasing in the logit of its
            label, so that it can be inverted and ranks the samples of a label as the logit does.
        link_name: name of the link.
    """

    no_posterior: str = ""
    bijective: bool = False
    link_name: str = "link"

    def log_odds(self, logits: Tensor) -> Tensor:
        """Return ``log(eta / (1 - eta))`` of the calibrated posterior eta at `logits` ``(B, T)``.

        Raises:
            ValueError: this loss has no known posterior.
        """
        reason = self.no_posterior or "it has no link"
        raise ValueError(
            f"{type(self).__name__}: no posterior goes with this loss, because {reason}. Run "
            "segcal classify evaluate --calibrate, which fits temperature scaling to the "
            "validation samples; in Python, fit "
            "segcal.posthoc.temperature.Temperature(per_channel=True) to held-out logits"
        )

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the calibrated posterior ``(B, T)`` at `logits`, at least float32.

        Raises:
            ValueError: this loss has no known posterior.
        """
        return torch.sigmoid(self.log_odds(logits))


@torch.no_grad()
def bisect(
    increasing: Callable[[Tensor], Tensor], target: Tensor, low: Tensor, high: Tensor
) -> Tensor:
    """Return x between `low` and `high` where ``increasing(x) = target``, else the nearer end.

    Args:
        increasing: elementwise, increasing function.
        target: floating, any shape.
        low: lower ends, of the shape of `target`.
        high: upper ends, of the shape of `target`.
    """
    for _ in range(BISECTIONS):
        middle = low + (high - low) / 2
        below = increasing(middle) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low + (high - low) / 2
