"""Margin-based label smoothing (MbLS): logit distances beyond a margin are penalised."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from segcal.sweep.fused import supports, sweep
from segcal.sweep.terms import Residual, Together
from segcal.tensors import (
    ClassReduction,
    check_background,
    check_channels,
    check_logits_labels,
    check_num_classes,
    full_precision,
    reduce_classes,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["Margin", "margin"]

Power = Literal[1, 2]


def margin(
    logits: Tensor,
    labels: Tensor,
    *,
    margin: float = 10.0,
    power: Power = 1,
    two_sided: bool = False,
    class_reduction: ClassReduction = "mean",
    include_background: bool = True,
    per_channel: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    """Mean of ``relu(d_k - m)^power`` with ``d_k = max_j l_j - l_k``.

    Source: Liu et al. 2022, "The devil is in the margin". The paper sums over classes, its code
    averages; we follow the code, with which the published weight was found. Ties for the largest
    logit share the gradient (the code takes the first), and the slope at d = m is 1 (in the code it
    is 0). The squared form of the published medical code is ``relu((d - m)^2) = (d - m)^2``, which
    also pulls logits apart; ``two_sided`` reproduces it.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``; they only say which voxels are ignored.
        margin: m >= 0; 10 in the paper, 5 in the medical runs.
        power: 1, or 2 for the squared form.
        two_sided: with power 2, penalise distances below the margin too.
        class_reduction: ``mean`` or ``sum`` over K.
        include_background: whether the distance of class 0 is penalised too.
        per_channel: `labels` are ``(N, K, *S)`` of 0 and 1 that may overlap. A sigmoid of l stands
            for two logits, 0 and l, whose distance is ``d = |l|``.
        ignore_index: label to leave out.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check(margin, power, two_sided)
    check_background(include_background, per_channel)
    (check_channels if per_channel else check_logits_labels)(
        logits, labels, ignore_index=ignore_index
    )
    with full_precision(logits) as x:
        distance = x.abs() if per_channel else x.amax(1, keepdim=True) - x
        excess = distance - margin
        if not two_sided:
            excess = torch.where(excess < 0, 0.0, excess)  # NaN stays
        if per_channel:
            per_voxel = excess if power == 1 else excess.square()
            channels = 1 if class_reduction == "mean" else x.shape[1]
            return channels * reduce_voxels(per_voxel, valid_mask(labels, ignore_index))
        excess = excess if include_background else excess[:, 1:]
        return reduce_voxels(
            reduce_classes(excess if power == 1 else excess.square(), class_reduction),
            valid_mask(labels, ignore_index),
        )


class Margin(Term):
    """``alpha`` times :func:`margin`, to be added to cross-entropy.

    Args:
        num_classes: K.
        alpha: weight, 0.1 as published.
        margin: m >= 0; 10 as in the paper. The recipe has 5, as in the medical runs.
        power: 1, or 2 for the squared form.
        two_sided: with power 2, penalise distances below the margin too.
        class_reduction: ``mean`` or ``sum`` over K.
        include_background: whether the distance of class 0 is penalised too.
        per_channel: labels are ``(N, K, *S)`` of 0 and 1 that may overlap.
        ignore_index: label to leave out.
        fused: compute value and gradient in one sweep, a single pass over the voxels, where that is
            possible (:mod:`segcal.sweep`); False keeps to :func:`margin`, which can be
            differentiated twice.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.1,
        *,
        margin: float = 10.0,
        power: Power = 1,
        two_sided: bool = False,
        class_reduction: ClassReduction = "mean",
        include_background: bool = True,
        per_channel: bool = False,
        ignore_index: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha: expected a finite weight >= 0, got {alpha}")
        _check(margin, power, two_sided)
        check_background(include_background, per_channel)
        self.num_classes = num_classes
        self.alpha = alpha
        self.margin = margin
        self.power: Power = power
        self.two_sided = two_sided
        self.class_reduction: ClassReduction = class_reduction
        self.include_background = include_background
        self.per_channel = per_channel
        self.ignore_index = ignore_index
        self.fused = fused

    def swept(self) -> Residual | None:
        """Describe the penalty to :mod:`segcal.sweep`."""
        if not self.fused or self.per_channel:
            return None
        linear = self.power == 1
        first = 0 if self.include_background else 1
        weight = torch.full((1, self.num_classes), self.alpha, dtype=torch.float64)
        weight[:, :first] = 0
        return Residual(
            lam=weight if linear else 0 * weight,
            rho=0 * weight if linear else 2 * weight,
            function="relu" if linear else "phr",
            shape="abs" if self.two_sided else "upper",
            margins=(self.margin,),
            divisor=self.num_classes - first if self.class_reduction == "mean" else 1,
            ignore_index=self.ignore_index,
        )

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the weighted penalty of `logits` ``(N, K, *S)``; `labels` ``(N, *S)``."""
        residual = self.swept()
        if residual is not None and supports(logits, residual):
            return sweep(logits, labels, Together(residual))[0]
        check_num_classes(logits, self.num_classes)
        return self.alpha * margin(
            logits,
            labels,
            margin=self.margin,
            power=self.power,
            two_sided=self.two_sided,
            class_reduction=self.class_reduction,
            include_background=self.include_background,
            per_channel=self.per_channel,
            ignore_index=self.ignore_index,
        )


def _check(margin: float, power: int, two_sided: bool) -> None:
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin: expected a finite number >= 0, got {margin}")
    if power not in (1, 2) or (two_sided and power == 1):
        raise ValueError(
            f"power: expected 1 or 2, and 2 if two_sided, got {power} with two_sided={two_sided}"
        )
