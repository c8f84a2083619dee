"""ACLS: adaptive and conditional label smoothing, as a penalty on logits."""

from __future__ import annotations

import math

from torch import Tensor

from segcal.tensors import (
    check_logits_labels,
    check_num_classes,
    full_precision,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["ACLS", "acls"]


def acls(
    logits: Tensor,
    labels: Tensor,
    *,
    margin: float = 10.0,
    top: float = 1.0,
    others: float = 0.1,
    ignore_index: int | None = None,
) -> Tensor:
    """Squared excess over a margin of the largest logit, and of its distances to the other logits.

    ``R = (1/N) sum_i [a relu(l_max - m)^2 + b / (K - 1) sum_k relu(l_max - l_k - m)^2]``. In the
    second part no gradient flows through ``l_max``, so it raises the small logits and does not
    lower the largest (Park et al. 2023, "ACLS: Adaptive and Conditional Label Smoothing for Network
    Calibration"). The penalty acts like label smoothing whose strength grows with the excess
    (adaptive) and is 0 below the margin (conditional). This is the form of the published code.
    Where several logits are the largest, they count once here and share the gradient; in the
    published code each of them counts.

    The first part depends on logits, not on probabilities: adding a constant to all logits of a
    voxel changes it.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``; they only say which voxels are ignored.
        margin: m >= 0.
        top: a >= 0, weight of the predicted class.
        others: b >= 0, weight of the other classes.
        ignore_index: label to leave out.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check(margin=margin, top=top, others=others)
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    with full_precision(logits) as x:
        largest = x.amax(1)
        beyond = (largest - margin).clamp(min=0).square()
        distance = largest.detach().unsqueeze(1) - x  # 0 for the predicted class, which adds none
        apart = (distance - margin).clamp(min=0).square().sum(1) / (x.shape[1] - 1)
        return reduce_voxels(top * beyond + others * apart, valid_mask(labels, ignore_index))


class ACLS(Term):
    """``alpha`` times :func:`acls`, to be added to cross-entropy.

    Args:
        num_classes: K.
        alpha: weight, 0.1 in the published code.
        margin: m >= 0, 10 in the published code.
        top: a >= 0, weight of the predicted class.
        others: b >= 0, weight of the other classes.
        ignore_index: label to leave out.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.1,
        *,
        margin: float = 10.0,
        top: float = 1.0,
        others: float = 0.1,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        _check(alpha=alpha, margin=margin, top=top, others=others)
        self.num_classes = num_classes
        self.alpha = alpha
        self.margin = margin
        self.top = top
        self.others = others
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted penalty of `logits` ``(N, K, *S)`` given `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return self.alpha * acls(
            logits,
            labels,
            margin=self.margin,
            top=self.top,
            others=self.others,
            ignore_index=self.ignore_index,
        )


def _check(**weights: float) -> None:
    for name, value in weights.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}: expected a finite number >= 0, got {value}")
