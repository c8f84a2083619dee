"""Label neighbourhoods: soft class proportions tau, and the inner and outer regions.

The patch of a voxel is the box of `kernel_size` voxels around it, an odd number along each axis.
Outside the image there are no labels; there are four conventions for what to put there:

============== ==================================================================================
``replicate``  the nearest voxel of the image (default): a crop through an organ invents no edge
``background`` class 0 (the published NACL and CRaC code)
``renormalize`` nothing: weights are renormalised over the voxels that exist
``zeros``      no class, but counted in the denominator (MONAI): tau sums to less than 1 there
============== ==================================================================================
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from segcal.arrays import check_choice
from segcal.tensors import check_label_values, valid_mask

__all__ = [
    "Patches",
    "channel_proportions",
    "check_options",
    "check_reaches",
    "class_proportions",
    "distance_bands",
    "kernel_sizes",
    "outer_region",
    "pad_labels",
    "share_proportions",
]

Padding = Literal["replicate", "background", "renormalize", "zeros"]
Kernel = Literal["mean", "svls", "gaussian_full"]
ImageKernel = Literal["image_l1", "image_l2"]
KernelSize = int | Sequence[int]

_BEYOND = 2**62  # larger than any label, and exact as the float that torch's padding takes


def class_proportions(
    labels: Tensor,
    num_classes: int,
    *,
    kernel_size: KernelSize = 3,
    kernel: Kernel | ImageKernel = "mean",
    sigma: float = 1.0,
    padding: Padding = "replicate",
    ignore_index: int | None = None,
    image: Tensor | None = None,
    bandwidth: float = 1.0,
    dtype: torch.dtype = torch.float64,
    validate: bool = True,
) -> Tensor:
    """Proportion tau of each class in the patch around every voxel.

    ``tau_k(i) = sum_j w_j v_j 1[y_j = k] / sum_j w_j v_j`` over the patch of voxel i, where w are
    the weights of the kernel, and v is 0 for ignored voxels and else 1. This is the prior of NACL
    (Murugesan et al.) and of CRaC, and with the kernel ``svls`` that of SVLS (Islam and Glocker).

    Args:
        labels: integer ``(N, *S)``, S of 1 to 3 axes, values in ``[0, K)`` or `ignore_index`.
        num_classes: K.
        kernel_size: odd size of the patch, one number or one per spatial axis (``(1, 3, 3)`` for
            thick slices).
        kernel: ``mean`` weighs all voxels alike; ``svls`` falls off from the centre as a Gaussian
            does, but the centre has half the weight (the kernel called "gaussian" in the published
            NACL code); ``gaussian_full`` is a Gaussian that reaches 4 sigma, whatever
            `kernel_size` (MONAI's "gaussian"). ``image_l1``, exp(-abs(d) / h), and ``image_l2``,
            exp(-(d / h)^2), weigh a voxel by the difference d of its intensity to the centre.
        sigma: standard deviation of the Gaussians, in voxels.
        padding: ``replicate``, ``background``, ``renormalize`` or ``zeros``: labels outside the
            image, as in the table above. Intensities outside the image are replicated or 0.
        ignore_index: label of voxels that do not count.
        image: intensities ``(N, C, *S)`` for the kernels that weigh by intensities; with several
            channels d is their mean absolute, or root mean square, difference.
        bandwidth: h, in units of the intensities.
        dtype: floating type of the result; losses pass that of their logits.
        validate: False skips the check of label values, for callers that have done it.

    Returns:
        tau ``(N, K, *S)``; sums to 1 over K at valid voxels (less at the border with ``zeros``),
        all 0 at ignored ones.

    Raises:
        ValueError: even or negative kernel size, unknown kernel or padding, labels out of range, no
            image or one that does not fit.
    """
    labels = labels.long()
    check_options(kernel_size, kernel, padding, sigma, bandwidth, (Kernel, ImageKernel))
    if kernel in get_args(ImageKernel):
        if validate:
            check_label_values(labels, num_classes, ignore_index)
        return _image_proportions(
            labels, num_classes, _check_image(image, labels), kernel_size, kernel, padding,
            ignore_index, bandwidth, dtype,
        )  # fmt: skip
    patches = Patches(labels, kernel_size, cast(Kernel, kernel), sigma, padding, ignore_index)
    if validate:
        check_label_values(labels, num_classes, ignore_index)
    total = patches.total(dtype)
    tau = torch.stack([patches.of_class(k, dtype) / total for k in range(num_classes)], dim=1)
    return tau * patches.centre_valid.unsqueeze(1)


def channel_proportions(labels: Tensor, **options: Any) -> Tensor:
    """Proportion of 1 in the patch around every voxel of every channel, labels overlapping.

    Args:
        labels: integer or bool ``(N, K, *S)`` of 0 and 1, or the ignored value.
        **options: options of :func:`class_proportions`.

    Returns:
        tau ``(N, K, *S)``.
    """
    if (image := options.pop("image", None)) is not None:
        options["image"] = image.repeat_interleave(labels.shape[1], 0)
    tau = class_proportions(labels.flatten(0, 1).long(), 2, validate=False, **options)
    return tau[:, 1].view(labels.shape)


def share_proportions(
    shares: Tensor,
    *,
    kernel_size: KernelSize = 3,
    kernel: Literal["mean", "svls"] = "mean",
    sigma: float = 1.0,
    padding: Padding = "replicate",
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Proportion of each class in the patch around every voxel, of soft labels.

    ``tau_k(i) = sum_j w_j s_jk / sum_j w_j v_j`` equals :func:`class_proportions` where all shares
    are 0 or 1. For the shares of raters it is the mean of the raters' class proportions.

    Args:
        shares: floating ``(N, K, *S)``, S of 1 to 3 axes, that sum to 1 over K; all 0 in voxels
            that do not count.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        kernel: weights of the patch, as in :func:`class_proportions`.
        sigma: standard deviation of the Gaussians, in voxels.
        padding: labels outside the image, as in :func:`class_proportions`.
        dtype: floating type of the result.

    Returns:
        tau ``(N, K, *S)``; all 0 where the voxel does not count.

    Raises:
        ValueError: as :func:`class_proportions`.
    """
    check_options(kernel_size, kernel, padding, sigma, kernels=(Literal["mean", "svls"],))
    counts = shares.sum(1) > 0
    sizes, smooth = _sizes_for(counts, kernel_size), _smoother(kernel, sigma)

    def summed(x: Tensor, outside: bool) -> Tensor:
        x = x.to(dtype)
        replicated = padding == "replicate"
        x = _replicate(x, sizes) if replicated else _pad_constant(x, sizes, float(outside))
        return smooth(x, sizes)

    whole = summed(counts, padding in ("background", "zeros")).clamp(min=torch.finfo(dtype).tiny)
    parts = [
        summed(share, padding == "background" and k == 0) / whole
        for k, share in enumerate(shares.unbind(1))
    ]
    return torch.stack(parts, dim=1) * counts.unsqueeze(1)


class Patches:
    """Weighted sums over the patch around every voxel, one class at a time.

    Args:
        labels: int64 ``(N, *S)``.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        kernel: weights of the patch, as in :func:`class_proportions`.
        sigma: standard deviation of the Gaussians, in voxels.
        padding: labels outside the image, as in :func:`class_proportions`.
        ignore_index: label of voxels that do not count.

    Attributes:
        centre_valid: bool ``(N, *S)``, where the label is not the ignored one.
    """

    def __init__(
        self,
        labels: Tensor,
        kernel_size: KernelSize = 3,
        kernel: Kernel = "mean",
        sigma: float = 1.0,
        padding: Padding = "replicate",
        ignore_index: int | None = None,
    ) -> None:
        check_options(kernel_size, kernel, padding, sigma)
        sizes = _sizes_for(labels, kernel_size)
        if kernel == "gaussian_full":
            sizes = tuple(1 if k == 1 else 2 * int(4 * sigma + 0.5) + 1 for k in sizes)
        self._sizes = sizes
        self._smooth = _smoother(kernel, sigma)
        self._whole = kernel == "mean"  # sums are counts, exact in integers
        self._padding = padding
        self._ignore_index = ignore_index
        self.centre_valid = valid_mask(labels, ignore_index)
        self._labels = _replicate(labels, sizes) if padding == "replicate" else labels

    def of_class(self, k: int, dtype: torch.dtype) -> Tensor:
        """Weight of class `k` in each patch, ``(N, *S)``, in `dtype`, or as an integer count."""
        outside = 1.0 if self._padding == "background" and k == 0 else 0.0
        return self._sum((self._labels == k) & (self._labels != self._ignored), outside, dtype)

    def total(self, dtype: torch.dtype) -> Tensor:
        """Weight of all voxels that count in each patch, ``(N, *S)``, floating and positive."""
        outside = 1.0 if self._padding in ("background", "zeros") else 0.0
        valid = valid_mask(self._labels, self._ignore_index)
        return self._sum(valid, outside, dtype).to(dtype).clamp(min=torch.finfo(dtype).tiny)

    @property
    def _ignored(self) -> int:
        return -_BEYOND if self._ignore_index is None else self._ignore_index

    def _sum(self, mask: Tensor, outside: float, dtype: torch.dtype) -> Tensor:
        if self._whole:  # counts up to 255 fit a byte
            dtype = torch.uint8 if math.prod(self._sizes) <= 255 else torch.int32
        x = mask.to(dtype)
        if self._padding != "replicate":
            x = _pad_constant(x, self._sizes, outside)
        return self._smooth(x, self._sizes)


def outer_region(
    labels: Tensor,
    *,
    kernel_size: KernelSize = 3,
    padding: Padding = "replicate",
    ignore_index: int | None = None,
) -> Tensor:
    """Voxels whose patch holds more than one class: the outer region of CRaC.

    The test is exact: the largest label of the patch differs from the smallest. (The published
    CRaC code asks whether ``sum_j (mean - y_j)`` is non-zero in float32, which is rounding noise
    and misses 4 to 20 % of the mixed patches; it is not reproduced.)

    Args:
        labels: integer ``(N, *S)``, S of 1 to 3 axes.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        padding: labels outside the image, as in :func:`class_proportions`; ``zeros`` and
            ``renormalize`` are the same here.
        ignore_index: label of voxels that do not count.

    Returns:
        bool ``(N, *S)``; False at ignored voxels. The inner region is the rest of the valid voxels.

    Raises:
        ValueError: even or negative kernel size, unknown padding.
    """
    check_options(kernel_size, "mean", padding)
    sizes = _sizes_for(labels, kernel_size)
    if ignore_index is None and padding == "replicate":  # in the type they have: bytes are fast
        labels = _replicate(labels, sizes)
        return _fold(labels, sizes, torch.maximum) != _fold(labels, sizes, torch.minimum)
    low, high = (0, 255) if labels.dtype == torch.uint8 else (-_BEYOND, _BEYOND)
    labels = labels if labels.dtype == torch.uint8 else labels.long()
    centre_valid = valid_mask(labels, ignore_index)
    valid = centre_valid
    if padding == "replicate":
        labels = _replicate(labels, sizes)
        valid = valid_mask(labels, ignore_index)
    largest = labels.masked_fill(~valid, low)
    smallest = labels.masked_fill(~valid, high)
    if padding != "replicate":
        background = padding == "background"
        largest = _pad_constant(largest, sizes, 0 if background else low)
        smallest = _pad_constant(smallest, sizes, 0 if background else high)
    largest = _fold(largest, sizes, torch.maximum)
    smallest = _fold(smallest, sizes, torch.minimum)
    return (largest != smallest) & centre_valid


def distance_bands(
    labels: Tensor,
    reaches: Sequence[int],
    *,
    kernel_size: KernelSize = 3,
    padding: Padding = "replicate",
    ignore_index: int | None = None,
) -> Tensor:
    """Band of the distance of every voxel to the nearest voxel of another class.

    The distance is the largest of the distances along the axes, in voxels. It is r or less where
    the patch of 2 r + 1 voxels holds several classes, so that a reach of 1 gives
    :func:`outer_region`.

    Args:
        labels: integer ``(N, *S)``, S of 1 to 3 axes.
        reaches: largest distance of every band but the last, ascending, from 1 on.
        kernel_size: one number or one per spatial axis; an axis where it is 1 is left out of the
            distance.
        padding: labels outside the image, as in :func:`outer_region`.
        ignore_index: label of voxels that do not count.

    Returns:
        int64 ``(N, *S)``, 0 next to a boundary, ``len(reaches)`` beyond the last reach; the values
        at ignored voxels have no meaning.

    Raises:
        ValueError: reaches that do not ascend from 1 on, and as :func:`outer_region`.
    """
    check_reaches(reaches)
    check_options(kernel_size, "mean", padding)
    looked = [size > 1 for size in _sizes_for(labels, kernel_size)]
    band = torch.zeros(labels.shape, dtype=torch.long, device=labels.device)
    for reach in reaches:
        size = [2 * reach + 1 if along else 1 for along in looked]
        band += ~outer_region(labels, kernel_size=size, padding=padding, ignore_index=ignore_index)
    return band


def check_reaches(reaches: Sequence[int]) -> None:
    """Raise ValueError for reaches that :func:`distance_bands` does not take."""
    whole = all(hasattr(r, "__index__") and not isinstance(r, bool) for r in reaches)
    ends = [0, *reaches]
    if len(ends) < 2 or not whole or any(not a < b for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"bands: expected ascending whole distances in voxels from 1 on, got {list(reaches)}"
        )


def check_options(
    kernel_size: KernelSize,
    kernel: str,
    padding: str,
    sigma: float = 1.0,
    bandwidth: float = 1.0,
    kernels: Sequence[Any] = (Kernel,),
) -> None:
    """Raise ValueError for options that :func:`class_proportions` does not take.

    Args:
        kernel_size: odd size of the patch, one number or one per spatial axis.
        kernel: name of the kernel.
        padding: name of the convention outside the image.
        sigma: standard deviation of the Gaussians, positive.
        bandwidth: bandwidth of the kernels that weigh by intensities, positive.
        kernels: groups of kernels that are accepted.
    """
    for name, number in (("sigma", sigma), ("bandwidth", bandwidth)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {number}")
    for k in kernel_size if isinstance(kernel_size, Sequence) else (kernel_size,):
        whole = hasattr(k, "__index__") and not isinstance(k, bool)
        if not whole or operator.index(k) < 1 or operator.index(k) % 2 == 0:
            raise ValueError(
                f"kernel_size: expected an odd positive integer, or one per axis, "
                f"got {kernel_size!r}"
            )
    accepted = tuple(k for group in kernels for k in get_args(group))
    for name, value, choices in (
        ("kernel", kernel, accepted),
        ("padding", padding, get_args(Padding)),
    ):
        check_choice(name, value, choices)


def _check_image(image: Tensor | None, labels: Tensor) -> Tensor:
    if image is None:
        raise ValueError("image: this kernel weighs by intensities and needs it, (N, C, *S)")
    if image.ndim != labels.ndim + 1 or (image.shape[0], *image.shape[2:]) != tuple(labels.shape):
        raise ValueError(
            f"image: expected (N, C, *S) for labels {tuple(labels.shape)}, got {tuple(image.shape)}"
        )
    if not bool(torch.isfinite(image).all()):
        raise ValueError("image: expected finite intensities, got NaN or infinity")
    return image.detach()


def _image_proportions(
    labels: Tensor,
    num_classes: int,
    image: Tensor,
    kernel_size: KernelSize,
    kernel: str,
    padding: Padding,
    ignore_index: int | None,
    bandwidth: float,
    dtype: torch.dtype,
) -> Tensor:
    """Proportions with weights by intensity, computed one neighbour of all voxels at a time."""
    sizes = _sizes_for(labels, kernel_size)
    centre_valid = valid_mask(labels, ignore_index)
    image = image.to(dtype)
    nothing, no_class = -1, num_classes
    codes = torch.where(centre_valid, labels, nothing)
    outside = {"replicate": None, "background": 0, "renormalize": nothing, "zeros": no_class}
    codes = pad_labels(codes, sizes, outside[padding])
    channels = image.flatten(0, 1)
    channels = pad_labels(channels, sizes, None if padding == "replicate" else 0)
    around = channels.view(*image.shape[:2], *channels.shape[1:])
    whole = torch.zeros_like(centre_valid, dtype=dtype)
    parts = torch.zeros((labels.shape[0], num_classes, *labels.shape[1:]), dtype=dtype).to(
        labels.device
    )
    for shifts in itertools.product(*map(range, sizes)):
        code, other = codes, around
        for axis, shift in enumerate(shifts, start=1):
            code = code.narrow(axis, shift, labels.shape[axis])
            other = other.narrow(axis + 1, shift, labels.shape[axis])
        weight = _similarity(kernel, other - image, bandwidth) * (code != nothing)
        whole += weight
        for k in range(num_classes):
            parts[:, k] += weight * (code == k)
    tau = parts / whole.clamp(min=torch.finfo(dtype).tiny).unsqueeze(1)
    return tau * centre_valid.unsqueeze(1)


def _similarity(kernel: str, d: Tensor, bandwidth: float) -> Tensor:
    """Weight ``(N, *S)`` of a neighbour whose intensities differ by d ``(N, C, *S)``."""
    if kernel == "image_l1":
        return torch.exp(-d.abs().mean(1) / bandwidth)
    return torch.exp(-d.square().mean(1) / bandwidth**2)


def kernel_sizes(axes: int, kernel_size: KernelSize) -> tuple[int, ...]:
    """Return the size of the patch along each of 1 to 3 spatial axes.

    Raises:
        ValueError: another number of sizes.
    """
    sizes = tuple(kernel_size) if isinstance(kernel_size, Sequence) else (kernel_size,) * axes
    if len(sizes) != axes:
        raise ValueError(f"kernel_size: expected one number or {axes}, got {kernel_size!r}")
    return tuple(operator.index(k) for k in sizes)


def _sizes_for(labels: Tensor, kernel_size: KernelSize) -> tuple[int, ...]:
    axes = labels.ndim - 1
    if not 1 <= axes <= 3:
        raise ValueError(
            f"labels: expected (N, *S) with 1 to 3 spatial axes, got {tuple(labels.shape)}"
        )
    return kernel_sizes(axes, kernel_size)


def pad_labels(labels: Tensor, sizes: tuple[int, ...], outside: int | None) -> Tensor:
    """Pad `labels` ``(N, *S)`` by half a patch on every side: with `outside`, or replicated."""
    if outside is None:
        return _replicate(labels, sizes)
    return _pad_constant(labels, sizes, outside)


def _replicate(labels: Tensor, sizes: tuple[int, ...]) -> Tensor:
    shape = (labels.shape[0], *(n + k - 1 for n, k in zip(labels.shape[1:], sizes, strict=True)))
    if labels.numel() == 0:
        return labels.new_zeros(shape)
    padded = labels.new_empty(shape)
    _unpad(padded, sizes).copy_(labels)
    for axis, k in enumerate(sizes, start=1):  # a later axis fills the corners of the earlier
        half, n = k // 2, labels.shape[axis]
        if half:
            padded.narrow(axis, 0, half).copy_(padded.narrow(axis, half, 1))
            padded.narrow(axis, half + n, half).copy_(padded.narrow(axis, half + n - 1, 1))
    return padded


def _unpad(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    for axis, k in enumerate(sizes, start=x.ndim - len(sizes)):
        x = x.narrow(axis, k // 2, x.shape[axis] - 2 * (k // 2))
    return x


def _pad_constant(x: Tensor, sizes: tuple[int, ...], value: float) -> Tensor:
    pad = [k // 2 for k in reversed(sizes) for _ in range(2)]
    return torch.nn.functional.pad(x, pad, value=value)


def _fold(x: Tensor, sizes: tuple[int, ...], combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Combine the shifted copies of padded `x` along each spatial axis in turn."""
    for axis, k in enumerate(sizes, start=x.ndim - len(sizes)):
        n = x.shape[axis] - (k - 1)
        out = x.narrow(axis, 0, n)
        for shift in range(1, k):
            out = combine(out, x.narrow(axis, shift, n))
        x = out
    return x


def _smoother(kernel: Kernel, sigma: float) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
    """Return a function that sums padded x over the patches of the given sizes, weighted."""
    if kernel == "mean":
        return lambda x, sizes: _fold(x, sizes, torch.add)
    if kernel == "svls":
        return lambda x, sizes: _svls_sum(x, sizes, sigma)
    return lambda x, sizes: _separable_sum(x, [_erf_profile(k, sigma) for k in sizes])


def _gaussian_profile(k: int, sigma: float) -> list[float]:
    """Weights of one axis, sum 1: the density at the voxel centres."""
    weights = [math.exp(-0.5 * ((j - k // 2) / sigma) ** 2) for j in range(k)]
    return [w / sum(weights) for w in weights]


def _erf_profile(k: int, sigma: float) -> list[float]:
    """Weights of one axis: the density's integral over each voxel, tails cut off (MONAI)."""
    t = 0.70710678 / abs(sigma)
    return [
        max(0.0, 0.5 * (math.erf(t * (j - k // 2 + 0.5)) - math.erf(t * (j - k // 2 - 0.5))))
        for j in range(k)
    ]


def _separable_sum(x: Tensor, profiles: Sequence[Sequence[float]]) -> Tensor:
    for axis, weights in enumerate(profiles, start=x.ndim - len(profiles)):
        n = x.shape[axis] - (len(weights) - 1)
        out = x.narrow(axis, 0, n) * weights[0]
        for shift, weight in enumerate(weights[1:], start=1):
            out = out + x.narrow(axis, shift, n) * weight
        x = out
    return x


def _svls_sum(x: Tensor, sizes: tuple[int, ...], sigma: float) -> Tensor:
    """Gaussian sum with the centre weight g replaced by 1 - g, over 2 (1 - g): centre 1/2."""
    profiles = [_gaussian_profile(k, sigma) for k in sizes]
    g = math.prod(p[len(p) // 2] for p in profiles)
    centre = _unpad(x, sizes)
    if g == 1.0:  # a patch of one voxel
        return centre
    return (_separable_sum(x, profiles) + (1 - 2 * g) * centre) / (2 * (1 - g))
