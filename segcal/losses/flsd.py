"""Focal loss with a sample-dependent gamma (FLSD-53)."""

from __future__ import annotations

import math
from collections.abc import Sequence

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

__all__ = ["FLSD", "flsd"]

Thresholds = Sequence[tuple[float, float]]
FLSD_53: Thresholds = ((0.2, 5.0), (0.5, 3.0))


def flsd(
    logits: Tensor,
    labels: Tensor,
    *,
    thresholds: Thresholds = FLSD_53,
    gamma: float = 3.0,
    reduction: Reduction = "mean",
    ignore_index: int | None = None,
) -> Tensor:
    """Focal loss whose gamma depends on the probability of the label.

    ``L = -(1/N) sum_i (1 - p_{y_i})^{gamma_i} log p_{y_i}``, where gamma_i belongs to the first
    threshold strictly above ``p_{y_i}``, or is `gamma` where no threshold is. No gradient flows
    through this choice (Mukhoti et al. 2020, whose code has the same steps).

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        thresholds: (probability, gamma) pairs with rising probabilities and gammas >= 1.
        gamma: gamma of probabilities at or above the last threshold, >= 1.
        reduction: ``mean``, ``sum``, or ``none`` for ``(N, *S)``.
        ignore_index: label to leave out.

    Returns:
        scalar, or ``(N, *S)``; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check(thresholds, gamma)
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    valid = valid_mask(labels, ignore_index)
    index = label_index(labels, valid, logits.shape[1])
    with full_precision(logits) as x:
        nll = F.nll_loss(F.log_softmax(x, dim=1), index, reduction="none")
        p = torch.exp(-nll.detach())
        gammas = torch.full_like(p, gamma)
        for bound, value in reversed(thresholds):
            gammas = torch.where(p < bound, value, gammas)
        miss = (-torch.expm1(-nll)).clamp(min=0)
        return reduce_voxels(miss**gammas * nll, valid, reduction)


class FLSD(Term):
    """Module form of :func:`flsd`.

    Raises:
        ValueError: thresholds or gamma out of range.
    """

    def __init__(
        self,
        num_classes: int,
        gamma: float = 3.0,
        *,
        thresholds: Thresholds = FLSD_53,
        reduction: Reduction = "mean",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        _check(thresholds, gamma)
        self.num_classes = num_classes
        self.gamma = gamma
        self.thresholds = tuple((float(p), float(g)) for p, g in thresholds)
        self.reduction: Reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return flsd(
            logits,
            labels,
            thresholds=self.thresholds,
            gamma=self.gamma,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
        )


def _check(thresholds: Thresholds, gamma: float) -> None:
    bounds = [p for p, _ in thresholds]
    gammas = [*(g for _, g in thresholds), gamma]
    if bounds != sorted(bounds) or not all(1 <= g < math.inf for g in gammas):
        raise ValueError(
            f"thresholds, gamma: expected rising probabilities and gammas >= 1, "
            f"got {tuple(thresholds)} and {gamma}"
        )
