"""Explicit confidence penalty (ECP), which rewards the entropy of the prediction."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.tensors import (
    ClassReduction,
    check_logits_labels,
    check_num_classes,
    full_precision,
    reduce_classes,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["Entropy", "entropy"]


def entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    class_reduction: ClassReduction = "sum",
    ignore_index: int | None = None,
) -> Tensor:
    """Mean entropy ``H = -sum_k p_k log p_k`` of the softmax, in nats.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``; they only say which voxels are ignored.
        class_reduction: ``sum`` is the entropy; ``mean`` divides it by K, as the published code
            behind the ECP rows of tables does (that code also clamps p to 1e-10, with gradient 0
            below).
        ignore_index: label to leave out.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    with full_precision(logits) as x:
        # p log p is 0 where p underflows, log p being finite: also for a logit of -inf
        log_p = F.log_softmax(x.clamp(min=torch.finfo(x.dtype).min / 2), dim=1)
        per_class = -torch.exp(log_p) * log_p
        return reduce_voxels(
            reduce_classes(per_class, class_reduction), valid_mask(labels, ignore_index)
        )


class Entropy(Term):
    """``-alpha`` times :func:`entropy`, to be added to cross-entropy (Pereyra et al. 2017).

    Args:
        num_classes: K.
        alpha: weight, 0.1 as published.
        class_reduction: ``sum`` is the entropy; ``mean`` divides it by K, as the published rows and
            the recipe do.
        ignore_index: label to leave out.

    Raises:
        ValueError: alpha out of range.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.1,
        *,
        class_reduction: ClassReduction = "sum",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha: expected a finite weight >= 0, got {alpha}")
        self.num_classes = num_classes
        self.alpha = alpha
        self.class_reduction: ClassReduction = class_reduction
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted penalty of `logits` ``(N, K, *S)``; `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return -self.alpha * entropy(
            logits,
            labels,
            class_reduction=self.class_reduction,
            ignore_index=self.ignore_index,
        )
