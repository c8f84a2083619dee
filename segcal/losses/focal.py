"""Focal loss."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.tensors import (
    Reduction,
    check_logits_labels,
    check_num_classes,
    full_precision,
    label_index,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["Focal", "focal"]

SLOPE_GUARD = 1e-12
"""Added to 1 - p for 0 < gamma < 1, where the slope at p = 1 is infinite."""


def focal(
    logits: Tensor,
    labels: Tensor,
    *,
    gamma: float = 3.0,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
) -> Tensor:
    """Cross-entropy weighted by ``(1 - p_y)^gamma``.

    ``L = -(1/N) sum_i (1 - p_y)^gamma log p_y`` (Lin et al. 2017; Mukhoti et al. 2020 use it for
    calibration, and their code sums by default). With gamma = 0 it is cross-entropy.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        gamma: >= 0; 3 as published for calibration.
        reduction: ``mean``, ``sum``, or ``none`` for ``(N, *S)``.
        ignore_index: label to leave out.

    Returns:
        scalar, or ``(N, *S)``; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check_gamma(gamma)
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    valid = valid_mask(labels, ignore_index)
    index = label_index(labels, valid, logits.shape[1])
    with full_precision(logits) as x:
        nll = F.nll_loss(F.log_softmax(x, dim=1), index, reduction="none")
        if gamma == 0:
            return reduce_voxels(nll, valid, reduction)
        miss = (-torch.expm1(-nll)).clamp(min=0)  # 1 - p_y, exact near p_y = 1
        if gamma < 1:
            miss = miss + SLOPE_GUARD
        return reduce_voxels(miss**gamma * nll, valid, reduction)


class Focal(Term):
    """Module form of :func:`focal`.

    Raises:
        ValueError: gamma out of range.
    """

    def __init__(
        self,
        num_classes: int,
        gamma: float = 3.0,
        *,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        _check_gamma(gamma)
        self.num_classes = num_classes
        self.gamma = gamma
        self.reduction: Reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return focal(
            logits,
            labels,
            gamma=self.gamma,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
        )


def _check_gamma(gamma: float) -> None:
    if not 0 <= gamma < math.inf:
        raise ValueError(f"gamma: expected a number >= 0, got {gamma}")
