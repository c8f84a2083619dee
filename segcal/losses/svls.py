"""Spatially varying label smoothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.neighbourhood import (
    KernelSize,
    Padding,
    channel_proportions,
    check_options,
    class_proportions,
    share_proportions,
)
from segcal.tensors import (
    check_channels,
    check_logits_labels,
    check_num_classes,
    check_shares,
    full_precision,
    is_soft,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["SVLS", "svls"]


def svls(
    logits: Tensor,
    labels: Tensor,
    *,
    kernel_size: KernelSize = 3,
    sigma: float = 1.0,
    padding: Padding = "replicate",
    per_channel: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    """Cross-entropy against labels smoothed over their neighbourhood, at boundaries only.

    ``L = -(1/N) sum_i sum_k q_k(i) log p_k(i)``, where the soft label q is the class proportion
    under a Gaussian whose centre has half the weight (Islam and Glocker 2021). The published code
    finds the centre of kernels of size 3 only, ignores the size in two dimensions, and has no
    ignore label; ours takes any odd size.

    Args:
        logits: floating ``(N, K, *S)``, S of 1 to 3 axes; half precision is promoted to float32.
        labels: integer ``(N, *S)``, or ``(N, R, *S)`` of R raters, whose soft labels are averaged
            (a voxel is left out where any rater left it out); or the raters' shares ``(N, K, *S)``,
            floating, which are smoothed likewise (:func:`segcal.tensors.check_shares`).
        kernel_size: odd size of the patch, one number or one per spatial axis.
        sigma: standard deviation of the Gaussian, in voxels; shifts weight among the neighbours.
        padding: labels outside the image, as in :func:`segcal.neighbourhood.class_proportions`.
        per_channel: `labels` are ``(N, K, *S)`` of 0 and 1 that may overlap; every channel is
            smoothed as two classes, 0 and 1, and compared with its sigmoid.
        ignore_index: label to leave out of the loss and of the neighbourhoods.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    options: dict[str, Any] = {
        "kernel_size": kernel_size,
        "kernel": "svls",
        "sigma": sigma,
        "padding": padding,
        "ignore_index": ignore_index,
    }
    if per_channel:
        check_channels(logits, labels, ignore_index=ignore_index)
        with full_precision(logits) as x:
            target = channel_proportions(labels, dtype=x.dtype, **options)
            bce = F.binary_cross_entropy_with_logits(x, target, reduction="none")
            return reduce_voxels(bce, valid_mask(labels, ignore_index))
    if is_soft(logits, labels):
        valid = check_shares(logits, labels)
        with full_precision(logits) as x:
            soft = share_proportions(
                labels, kernel_size=kernel_size, kernel="svls", sigma=sigma, padding=padding,
                dtype=x.dtype,
            )  # fmt: skip
            return reduce_voxels(-(soft * F.log_softmax(x, dim=1)).sum(1), valid)
    raters = labels.unbind(1) if labels.ndim == logits.ndim else (labels,)
    with full_precision(logits) as x:
        soft = torch.zeros_like(x)
        valid = torch.ones_like(raters[0], dtype=torch.bool)
        for one in raters:
            check_logits_labels(logits, one, ignore_index=ignore_index)
            valid &= valid_mask(one, ignore_index)
            soft += class_proportions(one, x.shape[1], dtype=x.dtype, validate=False, **options)
        soft /= len(raters)
        return reduce_voxels(-(soft * F.log_softmax(x, dim=1)).sum(1), valid)


class SVLS(Term):
    """Module form of :func:`svls`.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        kernel_size: KernelSize = 3,
        sigma: float = 1.0,
        padding: Padding = "replicate",
        per_channel: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        check_options(kernel_size, "svls", padding, sigma)
        self.num_classes = num_classes
        self.kernel_size = kernel_size
        self.sigma = sigma
        self.padding: Padding = padding
        self.per_channel = per_channel
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of `logits` ``(N, K, *S)`` against `labels` ``(N, [R,] *S)``."""
        check_num_classes(logits, self.num_classes)
        return svls(
            logits,
            labels,
            kernel_size=self.kernel_size,
            sigma=self.sigma,
            padding=self.padding,
            per_channel=self.per_channel,
            ignore_index=self.ignore_index,
        )
