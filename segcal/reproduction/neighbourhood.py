"""Kernels of the published NACL program that are kept only to reproduce its numbers.

``max``, ``min``, ``median`` and ``mode`` treat class labels as ordered numbers. ``bilateral`` and
``gradient`` give more weight to neighbours that differ *more* in intensity, and do not normalise
the weights, so they vanish where the image is flat.
:func:`segcal.neighbourhood.class_proportions` has the useful kernels.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.arrays import check_choice

__all__ = ["published_proportions"]

PublishedKernel = Literal["max", "min", "median", "mode", "bilateral", "gradient"]


def published_proportions(
    labels: Tensor,
    num_classes: int,
    kernel: PublishedKernel,
    *,
    kernel_size: int = 3,
    image: Tensor | None = None,
) -> Tensor:
    """Target tau of the published NACL program for one of its less useful kernels.

    The patch around voxel i has n voxels, labels y and intensities I, which are 0 outside the
    image. The first four kernels give ``tau_k(i) = 1[s = k]``, where s is the statistic of the
    labels (``median``: the lower of two; ``mode``: the smallest of several). ``gradient`` gives
    ``tau_k(i) = (1/n) sum_j w_j 1[y_j = k]`` with ``w_j = |I_j - I_i|``, and ``bilateral``
    multiplies ``w_j`` by a normalised Gaussian of sigma 1.

    Args:
        labels: integer ``(N, Y, X)`` in ``[0, K)``; the program supports only slices, without an
            ignore label.
        num_classes: K.
        kernel: name of the kernel.
        kernel_size: odd size of the patch.
        image: intensities ``(N, 1, Y, X)``, for ``bilateral`` and ``gradient``.

    Returns:
        tau ``(N, K, Y, X)`` float64.

    Raises:
        ValueError: the kernel is unknown, or the image is missing where it is needed.
    """
    check_choice("kernel", kernel, get_args(PublishedKernel))
    around = _around(labels.unsqueeze(1), kernel_size)
    if kernel in ("bilateral", "gradient"):
        if image is None:
            raise ValueError("image: this kernel weighs by intensities and needs it, (N, 1, Y, X)")
        weight = (_around(image, kernel_size) - image.double()).abs()
        if kernel == "bilateral":
            weight = weight * _gaussian(kernel_size).to(weight).view(1, -1, 1, 1)
        of_class = [(weight * (around == k)).mean(1) for k in range(num_classes)]
        return torch.stack(of_class, dim=1)
    statistic = {
        "max": around.amax(1),
        "min": around.amin(1),
        "median": around.median(1).values,
        "mode": around.mode(1).values,
    }[kernel]
    return F.one_hot(statistic.long(), num_classes).movedim(-1, 1).double()


def _around(x: Tensor, size: int) -> Tensor:
    """The patch of every voxel of ``(N, 1, Y, X)``, 0 outside: float64 ``(N, size^2, Y, X)``."""
    patches = F.unfold(x.double(), size, padding=size // 2)
    return patches.view(x.shape[0], size * size, *x.shape[2:])


def _gaussian(size: int) -> Tensor:
    """Weights ``(size^2,)`` of a Gaussian of sigma 1 voxel, sum 1."""
    weights = [math.exp(-0.5 * (j - size // 2) ** 2) for j in range(size)]
    profile = torch.tensor(weights, dtype=torch.float64)
    weights_2d = torch.outer(profile, profile).flatten()
    return weights_2d / weights_2d.sum()
