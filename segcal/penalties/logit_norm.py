"""L_p norm of the logits, and the L1 distance of probabilities to the uniform distribution."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from segcal.tensors import (
    check_choice,
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

    Unlike the softmax it is not invariant to a constant added to all logits, which it pins to
    small values. (CALS's code has a "PenaltyL1" of another kind, ``sum_k |p_k - 1/K|``: that is
    ``space="softmax"``.)

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``, for the ignored voxels alone.
        p: order of the norm, >= 1 and finite.
        space: of the ``logits``, or of ``softmax`` probabilities minus 1/K.
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
        alpha: weight; none is published, 0.01 is ours and needs tuning.
        p: see :func:`logit_norm`.
        space: see there.
        ignore_index: see there.

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
