"""Label pair regulariser (LPR): which of two unequal labels is the positive one."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from segcal.arrays import check_choice
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.tensors import full_precision, label_masks

__all__ = ["LPR", "lpr"]

Link = Literal["base", "identity"]
PAIRS_AT_ONCE = 2**20
"""Number of label pairs that are in memory at a time."""


def lpr(log_odds: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of which label of a pair is positive, given that exactly one of them is.

    Of two labels t and t' with log-odds z, t is the positive one with probability
    ``sigmoid(z_t - z_t')``. The loss of a sample is
    ``L_i = 2 / (T (T - 1)) sum_{p positive, n negative} softplus(z_n - z_p)``, where T counts its
    known labels. The result is the mean over the samples that have a known label (Cheng &
    Vasconcelos 2024, eqs. 18 to 20). A sample without positives or without negatives counts as 0.

    The pairs and their gradient are computed in parts, so memory grows with B T, not B T^2.

    Args:
        log_odds: floating ``(B, T)``, finite; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is in no pair.

    Returns:
        scalar, which can be differentiated once; 0 with zero gradient when there is no pair.

    Raises:
        ValueError: shapes or targets that do not fit.
    """
    positive, negative = label_masks(log_odds, targets, name="log_odds")
    with full_precision(log_odds) as z:
        values: Tensor = _Pairs.apply(z, positive, negative)
        return values.sum() / (positive | negative).any(1).sum().clamp(min=1)


class _Pairs(torch.autograd.Function):
    """Sum over the pairs of every sample ``(B,)``, with a gradient known in closed form."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        known = (positive | negative).sum(1)
        scale = 2 / (known * (known - 1)).clamp(min=1).to(z)
        # visit the rarer of the two: each brings a row of pairs with the other kind
        rare_positive = positive.sum(1) <= negative.sum(1)
        rare = torch.where(rare_positive[:, None], positive, negative)
        frequent = torch.where(rare_positive[:, None], negative, positive)
        sign = torch.where(rare_positive, 1.0, -1.0).to(z)
        loss, slope = z.new_zeros(len(z)), torch.zeros_like(z)
        entries = rare.nonzero()
        for part in torch.split(entries, max(1, PAIRS_AT_ONCE // max(1, z.shape[1]))):
            row, column = part.unbind(1)
            s = sign[row, None]
            gap = s * (z[row] - z[row, column, None])  # z_n - z_p
            weight = frequent[row] * scale[row, None]
            loss.index_add_(0, row, (F.softplus(gap) * weight).sum(1))
            pull = s * torch.sigmoid(gap) * weight
            slope.index_add_(0, row, pull)
            slope[row, column] -= pull.sum(1)
        ctx.save_for_backward(slope)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad[:, None] * slope, None, None


class LPR(MultiLabelLoss):
    """A base loss plus `weight` times :func:`lpr`; its posterior is that of the base loss.

    Args:
        base: the loss that the regulariser is added to.
        weight: weight of the regulariser, >= 0; the paper names no value.
        link: ``base`` compares the log-odds of the base loss's posterior; ``identity`` compares the
            logits themselves, as the paper does with losses that have no posterior.

    Raises:
        ValueError: a base loss whose log-odds can be infinite or do not exist, with
            ``link="base"``; a weight out of range.
    """

    def __init__(self, base: MultiLabelLoss, weight: float = 1.0, *, link: Link = "base") -> None:
        super().__init__()
        check_choice("link", link, get_args(Link))
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight: expected a number >= 0, got {weight}")
        if link == "base" and not base.bijective:
            raise ValueError(
                f"link: {type(base).__name__} has no finite log-odds for every logit; use "
                'link="identity", which compares the logits'
            )
        self.base = base
        self.weight = weight
        self.link: Link = link
        self.bijective = base.bijective
        self.no_posterior = base.no_posterior
        self.link_name = base.link_name

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        z = self.base.log_odds(logits) if self.link == "base" else logits
        total: Tensor = self.base(logits, targets) + self.weight * lpr(z, targets)
        return total

    def log_odds(self, logits: Tensor) -> Tensor:
        """Return the log-odds of the base loss's posterior at `logits` ``(B, T)``.

        Raises:
            ValueError: the base loss has no known posterior.
        """
        return self.base.log_odds(logits)
