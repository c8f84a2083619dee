"""L_p norm of the logits, and the L1 distance of probabilities to the uniform distribution."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from segcal.arrays import check_choice
from segcal.tensors import (
    check_logits_labels,
    check_num_classes,
    full_precision,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["LogitNorm", "logit_norm"]

Space = Literal["logits", "softmax"]
ROOT_GUARD = 1e-12


def logit_norm(
    logits: Tensor,
    labels: Tensor,
    *,
    p: float = 1.0,
    space: Space = "logits",
    ignore_index: int | None = None,
) -> Tensor:
    """Mean over voxels of ``||l||_p = (sum_k |l_k|^p)^(1/p)``.

    Unlike the softmax it changes when a constant is added to all logits, and it keeps them small.
    (The code of CALS has another "PenaltyL1", ``sum_k |p_k - 1/K|``, which is ``space="softmax"``.)

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``; they only say which voxels are ignored.
        p: order of the norm, >= 1 and finite.
        space: ``logits`` takes the norm of the logits, ``softmax`` that of the probabilities minus
            1/K.
        ignore_index: label to leave out.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid. The gradient at l = 0 is 0.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check(p, space)
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    with full_precision(logits) as x:
        if space == "softmax":
            x = torch.softmax(x, dim=1) - 1 / x.shape[1]
        size = x.abs()
        if p == 1:
            norm = size.sum(1)
        else:
            # scaled by the largest, so that no power overflows
            largest = size.detach().amax(1, keepdim=True).clamp(min=ROOT_GUARD)
            scaled = (size / largest).pow(p).sum(1)
            norm = largest.squeeze(1) * (scaled + ROOT_GUARD).pow(1 / p)
        return reduce_voxels(norm, valid_mask(labels, ignore_index))


class LogitNorm(Term):
    """``alpha`` times :func:`logit_norm`, to be added to cross-entropy.

    Args:
        num_classes: K.
        alpha: weight; none is published, 0.01 is our choice and needs tuning.
        p: order of the norm, >= 1 and finite.
        space: `logits` takes the norm of the logits, ``softmax`` that of the probabilities minus
            1/K.
        ignore_index: label to leave out.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.01,
        *,
        p: float = 1.0,
        space: Space = "logits",
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha: expected a finite weight >= 0, got {alpha}")
        _check(p, space)
        self.num_classes = num_classes
        self.alpha = alpha
        self.p = p
        self.space: Space = space
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted penalty of `logits` ``(N, K, *S)``; `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return self.alpha * logit_norm(
            logits,
            labels,
            p=self.p,
            space=self.space,
            ignore_index=self.ignore_index,
        )


def _check(p: float, space: str) -> None:
    if not 1 <= p < math.inf:
        raise ValueError(f"p: expected a finite number >= 1, got {p}")
    check_choice("space", space, get_args(Space))
