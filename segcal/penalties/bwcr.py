"""BWCR: logits of two random views of an image must agree, most of all near boundaries.

The model is called twice, so this penalty has an interface of its own, which fits any framework::

    first, second = bwcr.draw(images)                      # two random transforms
    a, b = model(first.image(images)), model(second.image(images))
    consistency = bwcr(first.back(a), second.back(b), labels, first.inside(b) & second.inside(b))
    supervised = loss(a, first.labels(labels)) + loss(b, second.labels(labels))

:meth:`segcal.objective.Objective.step` does this for a recipe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from segcal.arrays import as_array
from segcal.tensors import check_label_values, full_precision, valid_mask
from segcal.term import TwoViewTerm

__all__ = ["BWCR", "AffineView", "boundary_weight", "consistency"]


def boundary_weight(
    labels: Tensor,
    num_classes: int,
    *,
    radius: float = 10.0,
    power: float = 1.0,
    weight_max: float = 1.0,
    weight_min: float | None = None,
    spacing: Sequence[float] | None = None,
    ignore_index: int | None = None,
) -> Tensor:
    """Weight of a voxel by its distance to the nearest boundary of a foreground class.

    ``lambda(i) = w_max (max(R - d(i), 0) / R)^a + w_min``, the largest over the foreground classes
    (Karani et al. 2023, "Boundary-weighted logit consistency improves calibration of segmentation
    networks"). Outside a class, d is the distance to its nearest voxel; inside, d is the distance
    to the nearest voxel outside minus one voxel, so that d = 0 on the boundary voxels of the class.
    A class that is absent, or fills the image, gives the weight `weight_min` everywhere.

    Args:
        labels: integer ``(N, *S)``, S of 1 to 3 axes.
        num_classes: K; class 0 is the background.
        radius: R, in voxels, or in mm with `spacing`.
        power: a.
        weight_max: largest weight, without `weight_min`.
        weight_min: smallest weight; None takes a hundredth of `weight_max`.
        spacing: voxel size in mm along each axis; "one voxel" is then the smallest of them.
        ignore_index: label of voxels that belong to no class.

    Returns:
        ``(N, *S)`` float32 on the device of `labels`.

    Raises:
        ValueError: options or labels out of range.
    """
    _check_weights(radius, power, weight_max, weight_min)
    axes = labels.ndim - 1
    if not 1 <= axes <= 3 or (spacing is not None and len(spacing) != axes):
        raise ValueError(
            f"labels, spacing: expected (N, *S) with 1 to 3 axes and as many spacings, got "
            f"{tuple(labels.shape)} and {spacing}"
        )
    check_label_values(labels, num_classes, ignore_index)
    weight_min = weight_max / 100 if weight_min is None else weight_min
    sampling = np.ones(axes) if spacing is None else np.asarray(spacing, dtype=float)
    array = as_array(labels)
    weight = np.full(array.shape, weight_min, dtype=np.float32)
    for n, one in enumerate(array if array.size else ()):
        for k in set(range(1, num_classes)) - {ignore_index}:
            box, distance = _distance(one == k, radius, sampling)
            if distance is not None:
                near = np.maximum(radius - distance, 0) / radius
                part = weight[n][box]
                np.maximum(part, weight_max * near**power + weight_min, out=part)
    return torch.from_numpy(weight).to(labels.device)


def _distance(
    mask: NDArray[np.bool_], radius: float, sampling: NDArray[np.float64]
) -> tuple[tuple[slice, ...], NDArray[np.float64] | None]:
    """Distance to the boundary, in the box that the radius reaches; None without a boundary."""
    found = ndimage.find_objects(mask.astype(np.uint8))
    if not found or mask.all():
        return (), None
    reach = np.ceil(radius / sampling).astype(int) + 1
    box = tuple(
        slice(max(0, s.start - r), s.stop + r) for s, r in zip(found[0], reach, strict=True)
    )
    inside = mask[box]
    voxel = sampling.min()
    within = ndimage.distance_transform_edt(inside, sampling) - voxel
    beyond = ndimage.distance_transform_edt(~inside, sampling)
    return box, np.where(inside, np.maximum(within, 0), beyond)


def consistency(
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    inside: Tensor | None = None,
) -> Tensor:
    """Weighted mean square of the difference of two views' logits; the gradient reaches both.

    ``L = sum_i lambda(i) M(i) sum_k (z1_k - z2_k)^2 / (K sum_i M(i))``.

    Args:
        first: logits ``(N, K, *S)`` of one view, in the original frame.
        second: logits ``(N, K, *S)`` of the other view, in the original frame.
        weight: lambda, ``(N, *S)``.
        inside: M, bool ``(N, *S)``: voxels that both views saw; None for all.

    Returns:
        scalar; 0 with zero gradient when nothing is inside.

    Raises:
        ValueError: shapes that do not match.
    """
    expected = (first.shape[0], *first.shape[2:])
    for name, shape, right in (
        ("second", tuple(second.shape), tuple(first.shape)),
        ("weight", tuple(weight.shape), expected),
        ("inside", expected if inside is None else tuple(inside.shape), expected),
    ):
        if shape != right:
            raise ValueError(f"{name}: expected {right}, got {shape}")
    with full_precision(first) as a, full_precision(second) as b:
        square = (a - b).square().mean(1)
        if inside is None:
            inside = torch.ones_like(weight, dtype=torch.bool)
        total = torch.where(inside, square * weight.to(square), 0.0).sum()
        return total / inside.sum().clamp(min=1)


@dataclass(frozen=True)
class AffineView:
    """One random transform of a batch: an affine map of space, and of intensities.

    Attributes:
        matrix: ``(N, D, D + 1)`` in the normalised coordinates of PyTorch's ``affine_grid``, from
            the view's frame to the original frame. It fits every resolution.
        inverse: the map from the original frame to the view's frame.
        gain: ``(N, 1, ...)`` factor on the deviation from the image's mean.
        shift: ``(N, 1, ...)`` added to the image, in standard deviations of the image.
        noise: standard deviation of Gaussian noise, in standard deviations of the image.
        seed: random seed of the noise.
    """

    matrix: Tensor
    inverse: Tensor
    gain: Tensor
    shift: Tensor
    noise: float
    seed: int

    def image(self, image: Tensor) -> Tensor:
        """Return the view ``(N, C, *S)`` of `image`; beyond its edges, edge values are repeated.

        Raises:
            ValueError: an image that is not floating.
        """
        if not image.is_floating_point():
            raise ValueError(f"images: expected floating (N, C, *S), got {image.dtype}")
        if not image.numel():
            return image
        with full_precision(image) as x:
            axes = tuple(range(2, x.ndim))
            mean, std = x.mean(axes, keepdim=True), x.std(axes, keepdim=True, correction=0)
            changed = (x - mean) * self.gain.to(x) + mean + self.shift.to(x) * std
            if self.noise:
                generator = torch.Generator(x.device).manual_seed(self.seed)
                noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
                changed = changed + self.noise * std * noise
            return self._warp(changed, self.matrix, "bilinear").to(image.dtype)

    def labels(self, labels: Tensor) -> Tensor:
        """Return `labels` ``(N, *S)`` or ``(N, C, *S)`` of any resolution in the view's frame."""
        channel = labels.ndim == self.matrix.shape[1] + 1
        x = labels.unsqueeze(1) if channel else labels
        with full_precision(x.float()) as y:
            moved = self._warp(y, self.matrix, "nearest").to(labels.dtype)
        return moved.squeeze(1) if channel else moved

    def back(self, logits: Tensor) -> Tensor:
        """Return the view's `logits` ``(N, K, *S)`` in the original frame."""
        with full_precision(logits) as x:
            return self._warp(x, self.inverse, "bilinear")

    def inside(self, logits: Tensor) -> Tensor:
        """Return bool ``(N, *S)``: which voxels of the original frame the view contains."""
        if not logits.numel():
            return torch.ones_like(logits[:, 0], dtype=torch.bool)
        with full_precision(logits) as x:
            grid = F.affine_grid(self.inverse.to(x), list(x.shape), align_corners=False)
            return (grid.abs() <= 1).all(-1)

    @staticmethod
    def _warp(x: Tensor, matrix: Tensor, mode: str) -> Tensor:
        if not x.numel():
            return x
        grid = F.affine_grid(matrix.to(x), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, mode=mode, padding_mode="border", align_corners=False)


class BWCR(TwoViewTerm):
    """``alpha`` times the boundary-weighted consistency of two views' logits.

    ``L_con = sum_i lambda(i) M(i) sum_k (z1_k(i) - z2_k(i))^2 / (K sum_i M(i))`` with the weight
    ``lambda(i) = w_max (max(R - d(i), 0) / R)^a + w_min``. Here d is the distance to a boundary,
    and M marks the voxels that both views saw (Karani et al. 2023, "Boundary-weighted logit
    consistency improves calibration of segmentation networks"). Training minimises
    ``(L(view 1) + L(view 2) + alpha L_con) / (2 + alpha)``, where L is a supervised loss on each
    view; the published code weighs its three terms in the same way.

    We differ from the published code (:class:`segcal.reproduction.bwcr.PublishedBWCR`). It rounds
    distances, treats objects of two voxels' thickness as absent, and divides by all voxels, so that
    wide warps lower the loss. Its transforms include elastic ones; ours are affine (in the plane of
    the last two axes, so that thick slices stay where they are), contrast, brightness and noise.
    Its supervised loss is also averaged over the K classes, so that its consistency weighs K times
    what ``alpha=1`` weighs beside plain cross-entropy; the recipe ``bwcr_published`` has that
    weight.

    Args:
        num_classes: K.
        alpha: weight of the consistency.
        radius: R, in voxels, or in mm with `spacing`.
        power: a.
        weight_max: largest weight, without `weight_min`.
        weight_min: smallest weight; None takes a hundredth of `weight_max`.
        spacing: voxel size in mm along each axis; rotations need it where voxels are not square.
        rotation: largest angle, degrees.
        scaling: largest deviation of the zoom from 1.
        translation: largest shift, as a fraction of each axis.
        contrast: largest deviation of the contrast from 1.
        brightness: largest shift, in standard deviations of the image.
        noise: standard deviation of the noise, in standard deviations of the image.
        ignore_index: label to leave out of the penalty and of the boundaries.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        alpha: float = 1.0,
        *,
        radius: float = 10.0,
        power: float = 1.0,
        weight_max: float = 1.0,
        weight_min: float | None = None,
        spacing: Sequence[float] | None = None,
        rotation: float = 15.0,
        scaling: float = 0.1,
        translation: float = 0.05,
        contrast: float = 0.2,
        brightness: float = 0.2,
        noise: float = 0.05,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= alpha < math.inf:
            raise ValueError(f"alpha: expected a finite weight >= 0, got {alpha}")
        _check_weights(radius, power, weight_max, weight_min)
        if spacing is not None and not all(0 < mm < math.inf for mm in spacing):
            raise ValueError(f"spacing: expected positive numbers, got {spacing}")
        for name, value, limit in (
            ("rotation", rotation, 180.0),
            ("scaling", scaling, 0.99),
            ("translation", translation, 1.0),
            ("contrast", contrast, 0.99),
            ("brightness", brightness, math.inf),
            ("noise", noise, math.inf),
        ):
            if not 0 <= value <= limit or value == math.inf:
                raise ValueError(f"{name}: expected 0 to {limit:g}, got {value}")
        self.num_classes = num_classes
        self.alpha = alpha
        self.radius = radius
        self.power = power
        self.weight_max = weight_max
        self.weight_min = weight_min
        self.spacing = None if spacing is None else tuple(spacing)
        self.rotation = rotation
        self.scaling = scaling
        self.translation = translation
        self.contrast = contrast
        self.brightness = brightness
        self.noise = noise
        self.ignore_index = ignore_index

    def draw(
        self, images: Tensor, generator: torch.Generator | None = None
    ) -> tuple[AffineView, AffineView]:
        """Draw two views of `images` ``(N, C, *S)``, S of 2 or 3 axes.

        Args:
            images: the batch; only its shape and device matter.
            generator: random generator on the CPU; None takes torch's global generator.

        Raises:
            ValueError: images with another number of axes.
        """
        axes = images.ndim - 2
        if axes not in (2, 3):
            raise ValueError(
                f"images: expected (N, C, *S) with 2 or 3 axes, got {tuple(images.shape)}"
            )
        if self.spacing is not None and len(self.spacing) != axes:
            raise ValueError(f"spacing: expected {axes} values, got {self.spacing}")
        return self._view(images, generator), self._view(images, generator)

    def _view(self, images: Tensor, generator: torch.Generator | None) -> AffineView:
        n, axes = images.shape[0], images.ndim - 2

        def uniform(largest: float, *shape: int) -> Tensor:
            unit = 2 * torch.rand(n, *shape, generator=generator, dtype=torch.float64) - 1
            return largest * unit

        angle = uniform(math.radians(self.rotation))
        zoom = 1 + uniform(self.scaling)
        spacing = (1.0,) * axes if self.spacing is None else self.spacing
        extent = [max(s, 1) * mm for s, mm in zip(images.shape[2:], spacing, strict=True)]
        ratio = extent[-2] / extent[-1]  # the grid's coordinates are -1 to 1 on either axis
        matrix = torch.eye(axes + 1, dtype=torch.float64).repeat(n, 1, 1)
        matrix[:, 0, 0] = matrix[:, 1, 1] = torch.cos(angle) * zoom
        matrix[:, 0, 1] = -torch.sin(angle) * zoom * ratio
        matrix[:, 1, 0] = torch.sin(angle) * zoom / ratio
        matrix[:, :2, -1] = uniform(2 * self.translation, 2)  # rows 0, 1 are the last two axes
        inverse = torch.linalg.inv(matrix)
        ones = (1,) * (axes + 1)
        return AffineView(
            matrix=matrix[:, :-1].to(images.device),
            inverse=inverse[:, :-1].to(images.device),
            gain=(1 + uniform(self.contrast)).view(n, *ones).to(images.device),
            shift=uniform(self.brightness).view(n, *ones).to(images.device),
            noise=self.noise,
            seed=int(torch.randint(2**62, (), generator=generator)),
        )

    def forward(
        self, first: Tensor, second: Tensor, labels: Tensor, inside: Tensor | None = None
    ) -> Tensor:
        """Return the weighted consistency of two views' logits in the original frame.

        Args:
            first: logits ``(N, K, *S)`` of one view.
            second: logits ``(N, K, *S)`` of the other view.
            labels: integer ``(N, *S)`` of the original frame.
            inside: bool ``(N, *S)``: voxels that both views saw (:meth:`AffineView.inside`).
        """
        if first.ndim < 3 or first.shape[1] != self.num_classes:
            raise ValueError(
                f"logits: expected {self.num_classes} classes on axis 1, got {tuple(first.shape)}"
            )
        counts = valid_mask(labels, self.ignore_index)
        counts = counts if inside is None else counts & inside
        return self.alpha * consistency(first, second, self.weight(labels), counts)

    def weight(self, labels: Tensor) -> Tensor:
        """Return the weight lambda ``(N, *S)`` that :func:`boundary_weight` gives for `labels`."""
        return boundary_weight(
            labels,
            self.num_classes,
            radius=self.radius,
            power=self.power,
            weight_max=self.weight_max,
            weight_min=self.weight_min,
            spacing=self.spacing,
            ignore_index=self.ignore_index,
        )


def _check_weights(
    radius: float, power: float, weight_max: float, weight_min: float | None
) -> None:
    for name, value in (("radius", radius), ("power", power), ("weight_max", weight_max)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {value}")
    if weight_min is not None and not 0 <= weight_min < math.inf:
        raise ValueError(f"weight_min: expected a number >= 0, got {weight_min}")
