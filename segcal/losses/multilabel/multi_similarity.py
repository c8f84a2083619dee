"""Multi-similarity loss: compares positive and negative labels of a sample with zero."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.losses.multilabel.contrast import check_temperatures, soft_maximum
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.tensors import full_precision, label_masks

__all__ = ["MultiSimilarity", "multi_similarity"]


def multi_similarity(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature_pos: float = 1.0,
    temperature_neg: float = 1.0,
) -> Tensor:
    """Sum of the softplus losses of the lowest positive and the highest negative scores, both soft.

    The loss of a sample is
    ``softplus(T_P log sum exp(-x_p / T_P)) + softplus(T_N log sum exp(x_n / T_N))``, and the result
    is the mean over the samples that have a known label (Kobayashi 2023, eq. 20, with both
    temperatures 1). A sample without positives, or without negatives, has no loss of that side.

    Args:
        logits: floating ``(B, T)``; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is in neither set.
        temperature_pos: T_P >= 0; 0 takes the smallest positive score.
        temperature_neg: T_N >= 0; 0 takes the largest negative score.

    Returns:
        scalar; 0 with zero gradient when nothing is known.

    Raises:
        ValueError: shapes, targets or options that do not fit.
    """
    check_temperatures(temperature_pos, temperature_neg)
    positive, negative = label_masks(logits, targets)
    with full_precision(logits) as x:
        high, has_positive = soft_maximum(-x, positive, temperature_pos)
        low, has_negative = soft_maximum(x, negative, temperature_neg)
        values = torch.where(has_positive, F.softplus(high), 0.0)
        values = values + torch.where(has_negative, F.softplus(low), 0.0)
        return values.sum() / (has_positive | has_negative).sum().clamp(min=1)


class MultiSimilarity(MultiLabelLoss):
    """Module form of :func:`multi_similarity`.

    Raises:
        ValueError: temperatures out of range.
    """

    no_posterior = "the weight of each score depends on the scores of the other labels"

    def __init__(self, temperature_pos: float = 1.0, temperature_neg: float = 1.0) -> None:
        super().__init__()
        check_temperatures(temperature_pos, temperature_neg)
        self.temperature_pos = temperature_pos
        self.temperature_neg = temperature_neg

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        return multi_similarity(
            logits,
            targets,
            temperature_pos=self.temperature_pos,
            temperature_neg=self.temperature_neg,
        )
