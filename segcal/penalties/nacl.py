"""NACL: logits pulled to the class proportions of the neighbourhood, with a constant weight."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from segcal.arrays import check_choice
from segcal.neighbourhood import (
    ImageKernel,
    Kernel,
    KernelSize,
    Padding,
    channel_proportions,
    check_options,
    class_proportions,
)
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

__all__ = ["NACL", "nacl"]

AnyKernel = Kernel | ImageKernel
Distance = Literal["l1", "l2"]
Space = Literal["logits", "softmax"]


def nacl(
    logits: Tensor,
    labels: Tensor,
    *,
    distance: Distance = "l1",
    space: Space = "logits",
    class_reduction: ClassReduction = "mean",
    include_background: bool = True,
    kernel_size: KernelSize = 3,
    kernel: AnyKernel = "mean",
    sigma: float = 1.0,
    padding: Padding = "replicate",
    image: Tensor | None = None,
    bandwidth: float = 1.0,
    per_channel: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    """Mean distance of the logits to the class proportions tau of the patch, unweighted.

    ``R = (1/N) sum_i mean_k |tau_k(i) - l_k(i)|``, or its square with ``l2`` (Murugesan et al.
    2024, "Neighbor-aware calibration of segmentation networks with penalty-based constraints"). The
    paper sums over classes, its code averages; we follow the code, with which the published weight
    0.1 was found. The target of the logits is tau itself, inside an object the one-hot vector. The
    published code has further kernels, by rank of the labels and by dissimilarity of the image,
    which :mod:`segcal.reproduction.neighbourhood` keeps.

    Args:
        logits: floating ``(N, K, *S)``, S of 1 to 3 axes.
        labels: integer ``(N, *S)``.
        distance: ``l1`` or ``l2``.
        space: compare ``logits``, or probabilities (``softmax``).
        class_reduction: ``mean`` (published code) or ``sum`` (paper) over K.
        include_background: whether the logit of class 0 is compared too.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        kernel: weights of the patch, listed in :func:`segcal.neighbourhood.class_proportions`.
        sigma: standard deviation of the Gaussian kernels, in voxels.
        padding: labels outside the image, as in :func:`segcal.neighbourhood.class_proportions`; the
            published code has ``background``, MONAI ``zeros``.
        image: intensities ``(N, C, *S)``, for the kernels that weigh by intensities.
        bandwidth: bandwidth of the kernels that weigh by intensities, in units of the intensities.
        per_channel: `labels` are ``(N, K, *S)`` of 0 and 1 that may overlap. tau_k is the
            proportion of 1 in channel k, and ``softmax`` space means the sigmoid of a channel.
            (With the two logits 0 and l that a sigmoid stands for, this is the form above.)
        ignore_index: label to leave out of the penalty and of neighbourhoods.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check_options(distance, space, class_reduction)
    check_background(include_background, per_channel)
    options: dict[str, Any] = {
        "kernel_size": kernel_size,
        "kernel": kernel,
        "sigma": sigma,
        "padding": padding,
        "image": image,
        "bandwidth": bandwidth,
        "ignore_index": ignore_index,
    }
    if per_channel:
        check_channels(logits, labels, ignore_index=ignore_index)
        with full_precision(logits) as x:
            tau = channel_proportions(labels, dtype=x.dtype, **options)
            difference = tau - (x if space == "logits" else torch.sigmoid(x))
            per_voxel = difference.abs() if distance == "l1" else difference.square()
            channels = 1 if class_reduction == "mean" else x.shape[1]
            return channels * reduce_voxels(per_voxel, valid_mask(labels, ignore_index))
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    with full_precision(logits) as x:
        tau = class_proportions(labels, x.shape[1], dtype=x.dtype, validate=False, **options)
        difference = tau - (x if space == "logits" else torch.softmax(x, dim=1))
        per_class = difference.abs() if distance == "l1" else difference.square()
        per_class = per_class if include_background else per_class[:, 1:]
        return reduce_voxels(
            reduce_classes(per_class, class_reduction), valid_mask(labels, ignore_index)
        )


class NACL(Term):
    """``alpha`` times :func:`nacl`; add it to cross-entropy (published) or to Dice + CE.

    Args:
        num_classes: K.
        alpha: weight, 0.1 as published.
        distance: ``l1`` or ``l2``.
        space: compare `logits`, or probabilities (``softmax``).
        class_reduction: ``mean`` (published code) or ``sum`` (paper) over K.
        include_background: whether the logit of class 0 is compared too.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        kernel: weights of the patch, listed in :func:`segcal.neighbourhood.class_proportions`.
        sigma: standard deviation of the Gaussian kernels, in voxels.
        padding: labels outside the image, as in :func:`segcal.neighbourhood.class_proportions`.
        bandwidth: bandwidth of the kernels that weigh by intensities, in units of the intensities.
        per_channel: labels are ``(N, K, *S)`` of 0 and 1 that may overlap.
        ignore_index: label to leave out of the penalty and of neighbourhoods.
        fused: compute value and gradient in one sweep, a single pass over the voxels, where that is
            possible (:mod:`segcal.sweep`); False keeps to :func:`nacl`, which can be differentiated
            twice.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 0.1,
        *,
        distance: Distance = "l1",
        space: Space = "logits",
        class_reduction: ClassReduction = "mean",
        include_background: bool = True,
        kernel_size: KernelSize = 3,
        kernel: AnyKernel = "mean",
        sigma: float = 1.0,
        padding: Padding = "replicate",
        bandwidth: float = 1.0,
        per_channel: bool = False,
        ignore_index: int | None = None,
        fused: bool = True,
    ) -> None:
        super().__init__()
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha: expected a finite weight >= 0, got {alpha}")
        _check_options(distance, space, class_reduction)
        check_background(include_background, per_channel)
        check_options(kernel_size, kernel, padding, sigma, bandwidth, (Kernel, ImageKernel))
        self.num_classes = num_classes
        self.alpha = alpha
        self.distance: Distance = distance
        self.space: Space = space
        self.class_reduction: ClassReduction = class_reduction
        self.include_background = include_background
        self.kernel_size = kernel_size
        self.kernel: AnyKernel = kernel
        self.sigma = sigma
        self.padding: Padding = padding
        self.bandwidth = bandwidth
        self.needs_image = kernel in get_args(ImageKernel)
        self.per_channel = per_channel
        self.ignore_index = ignore_index
        self.fused = fused

    def swept(self) -> Residual | None:
        """Describe the penalty to :mod:`segcal.sweep`, which counts neighbours (kernel mean)."""
        if not self.fused or self.per_channel:
            return None
        if self.kernel != "mean" or self.space != "logits":
            return None
        absolute = self.distance == "l1"
        first = 0 if self.include_background else 1
        weight = torch.full((1, self.num_classes), self.alpha, dtype=torch.float64)
        weight[:, :first] = 0
        return Residual(
            lam=weight if absolute else 0 * weight,
            rho=0 * weight if absolute else 2 * weight,
            function="relu" if absolute else "phr",
            shape="abs",
            margins=(1.0,),
            patch=(self.kernel_size, self.padding),
            divisor=self.num_classes - first if self.class_reduction == "mean" else 1,
            ignore_index=self.ignore_index,
        )

    def forward(self, logits: Tensor, labels: Tensor, image: Tensor | None = None) -> Tensor:
        """Return the weighted penalty of `logits` ``(N, K, *S)`` given `labels` ``(N, *S)``.

        Args:
            logits: floating ``(N, K, *S)``, S of 1 to 3 axes.
            labels: integer ``(N, *S)``; per channel ``(N, K, *S)``.
            image: intensities ``(N, C, *S)``; needed if and only if :attr:`needs_image`.
        """
        residual = self.swept()
        if residual is not None and supports(logits, residual):
            return sweep(logits, labels, Together(residual))[0]
        check_num_classes(logits, self.num_classes)
        return self.alpha * nacl(
            logits,
            labels,
            distance=self.distance,
            space=self.space,
            class_reduction=self.class_reduction,
            include_background=self.include_background,
            kernel_size=self.kernel_size,
            kernel=self.kernel,
            sigma=self.sigma,
            padding=self.padding,
            image=image if self.needs_image else None,
            bandwidth=self.bandwidth,
            per_channel=self.per_channel,
            ignore_index=self.ignore_index,
        )

    def extra_repr(self) -> str:
        """Name what distinguishes this penalty when it is printed."""
        return f"num_classes={self.num_classes}, alpha={self.alpha}, padding={self.padding!r}"


def _check_options(distance: str, space: str, class_reduction: str) -> None:
    for name, value, choices in (
        ("distance", distance, Distance),
        ("space", space, Space),
        ("class_reduction", class_reduction, ClassReduction),
    ):
        check_choice(name, value, get_args(choices))
