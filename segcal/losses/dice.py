"""Soft Dice loss. The recipe ``dice_ce`` adds cross-entropy to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from segcal.sweep.terms import OverlapTerm
from segcal.tensors import (
    check_background,
    check_channels,
    check_logits_labels,
    check_num_classes,
    check_shares,
    full_precision,
    is_soft,
    one_hot,
    valid_mask,
)
from segcal.term import Term

__all__ = ["SoftDiceLoss", "soft_dice_loss"]


def soft_dice_loss(
    logits: Tensor,
    labels: Tensor,
    *,
    include_background: bool = True,
    batch: bool = False,
    smooth: float = 1e-5,
    gamma: float = 1.0,
    surgery: bool = False,
    skip_empty: bool = False,
    per_channel: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    """One minus the soft Dice of softmax probabilities, averaged over samples and classes.

    ``D = (2 sum_i p t + s) / (sum_i p + sum_i t + s)``, ``L = mean_{b,k} (1 - D_{b,k})``
    (Milletari et al., V-Net, 2016, without squares), where t is 1 for the labelled class and 0
    otherwise. The defaults are MONAI's. (The published margin code means to leave the background
    out: its combined loss does so, but its Dice wrapper never passes the option on. nnU-Net leaves
    the background out, and sums over the batch where the plan says so.)

    Dice makes a model overconfident, because it always rewards a step towards 0 or 1. There are two
    remedies:

    `gamma` > 1 is Dice++ (Yeung et al. 2023, "Calibrating the Dice loss to handle neural network
    overconfidence for biomedical image segmentation"), ``D = (2 TP + s) / (2 TP + FP + FN + s)``
    with ``TP = sum_i p t`` and ``FP + FN = sum_i |p - t|^gamma``, so that small errors cost less.
    With gamma = 1 this is the form above. The published code has gamma 2 and s = 2e-7; it also
    moves p and t away from 0 and 1 by 1e-7, which we do not.

    `surgery` changes the gradient alone, not the value (Lux et al. 2026, "Beyond scalar losses:
    calibrating segmentation models via gradient vector field surgery"): the partial derivative
    with respect to every p is multiplied by ``|p - t|``, so that voxels which are nearly right are
    left alone. The result is not the gradient of any function, so no difference quotient can check
    it.

    Where t are the shares of several raters, ``p + t - 2 p t`` is not 0 at p = t, and the loss of
    the first form is smallest at 0 and 1 whatever the shares. Against shares the second form is
    therefore used, with gamma 1 too: the loss of ``D = (2 TP + s) / (2 TP + sum_i |p - t| + s)`` is
    the same for labels, and smallest at p = t (the Dice semimetric loss of Wang et al. 2023, "Dice
    semimetric losses: optimizing the Dice score with soft labels").

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``; or the raters' shares, floating ``(N, K, *S)``.
        include_background: whether class 0 takes part.
        batch: sum over the batch before the ratio, as nnU-Net does for small patches.
        smooth: s, in voxels.
        gamma: exponent of the errors; 1 is Dice, 2 is Dice++ as published.
        surgery: multiply the gradient by the error ``|p - t|``.
        skip_empty: leave out (sample, class) pairs without a labelled voxel; the loss is 0 if no
            pair is left. Otherwise an absent class costs about 1 as soon as it has any probability
            mass.
        per_channel: `labels` are ``(N, K, *S)`` of 0 and 1 that may overlap, and the probabilities
            are a sigmoid per channel; no channel is the background.
        ignore_index: label to leave out.

    Returns:
        scalar; 0 with zero gradient for an empty batch.

    Raises:
        ValueError: shapes or label values that do not fit, `smooth` not positive, `gamma` below 1.
    """
    _check(smooth, gamma)
    check_background(include_background, per_channel)
    soft = not per_channel and is_soft(logits, labels)
    if not soft:
        (check_channels if per_channel else check_logits_labels)(
            logits, labels, ignore_index=ignore_index
        )
    if logits.ndim == 2:  # classification: every row is a voxel of one sample
        logits = logits.t().unsqueeze(0)
        labels = labels.t().unsqueeze(0) if per_channel or soft else labels.unsqueeze(0)
    k = logits.shape[1]
    valid = check_shares(logits, labels) if soft else valid_mask(labels, ignore_index)
    with full_precision(logits) as x:
        if not x.numel():
            return x.sum()
        if per_channel:
            p, t = torch.sigmoid(x), torch.where(valid, labels, 0).to(x)
        else:
            p = torch.softmax(x, dim=1)
            t = (
                labels.to(x)
                if soft
                else one_hot(labels, k, ignore_index=ignore_index, dtype=x.dtype)
            )
            valid = valid.unsqueeze(1)
        p, t = torch.where(valid, p, 0.0).flatten(2), t.flatten(2)
        first = 0 if include_background else 1
        p, t = p[:, first:], t[:, first:]
        p = _scaled_by_error(p, t) if surgery else p
        overlap, labelled = (p * t).sum(2), t.sum(2)
        if gamma == 1 and not soft:  # |p - t| = p + t - 2 p t
            size = p.sum(2) + labelled
        else:
            size = 2 * overlap + ((p - t).abs() ** gamma).sum(2)
        return _of_sums(size, overlap, labelled, batch, smooth, skip_empty)


def _of_sums(
    size: Tensor, overlap: Tensor, labelled: Tensor, batch: bool, smooth: float, skip_empty: bool
) -> Tensor:
    """Loss of ``sum p + sum t``, ``sum p t`` and ``sum t`` by sample and class ``(N, K)``."""
    if batch:
        size, overlap, labelled = (x.sum(0) for x in (size, overlap, labelled))
    loss = 1 - (2 * overlap + smooth) / (size + smooth)
    if skip_empty:
        kept = labelled > 0
        return torch.where(kept, loss, 0.0).sum() / kept.sum().clamp(min=1)
    return loss.mean()


def of_all_classes(slope: Tensor, classes: Tensor) -> Tensor:
    """Derivatives like `classes` ``(N, K)``, 0 where the first classes have none.

    Args:
        slope: ``(N, F)``, of the last F classes; or ``(F,)``, of sums over the batch.
        classes: what the derivatives are by.
    """
    found = torch.zeros_like(classes)
    found[:, classes.shape[1] - slope.shape[-1] :] = slope
    return found


def _scaled_by_error(p: Tensor, t: Tensor) -> Tensor:
    """Return `p`; its gradient is multiplied by ``|p - t|`` in the backward pass."""
    held = p.detach()
    return held + (p - held) * (held - t).abs()


class SoftDiceLoss(Term):
    """Module form of :func:`soft_dice_loss`.

    In an objective with cross-entropy, a penalty or mL1-ACE it can share a sweep over the voxels
    with them (:mod:`segcal.sweep`), unless `gamma` or `surgery` need more than sums of overlaps.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        include_background: bool = True,
        batch: bool = False,
        smooth: float = 1e-5,
        gamma: float = 1.0,
        surgery: bool = False,
        skip_empty: bool = False,
        per_channel: bool = False,
        ignore_index: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        _check(smooth, gamma)
        check_background(include_background, per_channel)
        self.num_classes = num_classes
        self.include_background = include_background
        self.batch = batch
        self.smooth = smooth
        self.gamma = gamma
        self.surgery = surgery
        self.skip_empty = skip_empty
        self.per_channel = per_channel
        self.ignore_index = ignore_index
        self.fused = fused

    def swept(self) -> OverlapTerm | None:
        """Describe the loss to :mod:`segcal.sweep`; None where it needs more than overlap sums."""
        if not self.fused or self.per_channel or self.gamma != 1 or self.surgery:
            return None
        return OverlapTerm(self.num_classes, self._of_overlaps, self.ignore_index)

    def _of_overlaps(
        self, probability: Tensor, overlap: Tensor, labelled: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = 0 if self.include_background else 1
        p, o, t = (x[:, first:] for x in (probability, overlap, labelled))
        value = _of_sums(p + t, o, t, self.batch, self.smooth, self.skip_empty)
        if self.batch:
            p, o, t = (x.sum(0) for x in (p, o, t))
        kept = (t > 0).to(t) if self.skip_empty else torch.ones_like(t)
        share = kept / kept.sum().clamp(min=1)
        size, twice = p + t + self.smooth, 2 * o + self.smooth
        by_probability, by_overlap = share * twice / size**2, -2 * share / size
        return (
            value,
            of_all_classes(by_probability, probability),
            of_all_classes(by_overlap, overlap),
        )

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return soft_dice_loss(
            logits,
            labels,
            include_background=self.include_background,
            batch=self.batch,
            smooth=self.smooth,
            gamma=self.gamma,
            surgery=self.surgery,
            skip_empty=self.skip_empty,
            per_channel=self.per_channel,
            ignore_index=self.ignore_index,
        )


def _check(smooth: float, gamma: float) -> None:
    if not 0 < smooth < math.inf:
        raise ValueError(f"smooth: expected a positive number, got {smooth}")
    if not 1 <= gamma < math.inf:
        raise ValueError(f"gamma: expected a number >= 1, got {gamma}")
