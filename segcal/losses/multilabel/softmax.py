"""Softmax cross-entropy against the share of every positive label."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from segcal.arrays import check_choice
from segcal.losses.multilabel.contrast import Along, masked_logsumexp
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.tensors import full_precision, label_masks

__all__ = ["Softmax", "softmax"]


def softmax(logits: Tensor, targets: Tensor, *, along: Along = "sample") -> Tensor:
    """Cross-entropy of a softmax over the labels against ``y / sum y``.

    ``L_i = -sum_c ytilde_c log softmax(x_i)_c`` with ``ytilde = y / sum y`` (Kobayashi 2023, eq.
    18); the result is the mean over the samples that have a positive. Along classes, the softmax
    runs over the samples of a class, and the mean over the classes that have a positive.

    Args:
        logits: floating ``(B, T)``; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out of the softmax.
        along: ``sample``, ``class``, or ``both`` for their sum.

    Returns:
        scalar; 0 with zero gradient when there is no positive.

    Raises:
        ValueError: shapes, targets or options that do not fit.
    """
    check_choice("along", along, get_args(Along))
    positive, negative = label_masks(logits, targets)
    with full_precision(logits) as x:
        total = x.new_zeros(())
        if along != "class":
            total = total + _mean_of_rows(x, positive, positive | negative)
        if along != "sample":
            total = total + _mean_of_rows(x.T, positive.T, (positive | negative).T)
        return total


def _mean_of_rows(x: Tensor, positive: Tensor, known: Tensor) -> Tensor:
    normaliser, _ = masked_logsumexp(x, known)
    count = positive.sum(-1)
    mean_positive = torch.where(positive, x, 0.0).sum(-1) / count.clamp(min=1)
    values = torch.where(count > 0, normaliser - mean_positive, 0.0)
    return values.sum() / (count > 0).sum().clamp(min=1)


class Softmax(MultiLabelLoss):
    """Module form of :func:`softmax`.

    Raises:
        ValueError: an unknown `along`.
    """

    no_posterior = "its softmax divides a total of 1 among the labels of a sample"

    def __init__(self, along: Along = "sample") -> None:
        super().__init__()
        check_choice("along", along, get_args(Along))
        self.along: Along = along

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        return softmax(logits, targets, along=self.along)
