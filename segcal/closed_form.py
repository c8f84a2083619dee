"""Penalties on ``z = |t - l|`` in one sweep: value and gradient without a graph of their parts.

For z >= 0 every penalty is a polynomial ``c1 z + c2 z^2 + c3 z^3`` with coefficients per region
and class, so all that is needed of a class is the sum of z, z^2 and z^3 per region, and the
gradient ``-(c1 + 2 c2 z + 3 c3 z^2) sign(t - l)``. The sweep goes over one class at a time, in
blocks that stay in the processor's cache, and keeps a single tensor of the logits' size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from segcal.neighbourhood import Patches

BLOCK = 1 << 16
"""Voxels of a class that are worked on at a time."""


@dataclass(frozen=True)
class Target:
    """Target ``t = margin[r] * tau`` of the logits, and the region r of every voxel.

    Attributes:
        patches: label neighbourhoods, whose class proportions are tau.
        outer: bool ``(N, *S)``, the voxels of region 1; None when there is one region.
        margins: factor on tau, per region.
    """

    patches: Patches
    outer: Tensor | None
    margins: tuple[float, ...]

    @property
    def num_regions(self) -> int:
        """R: 1 or 2."""
        return 1 if self.outer is None else 2


@dataclass(frozen=True)
class Moments:
    """Sums over the voxels of a region.

    Attributes:
        powers: sums of z, z^2 and z^3, float64 ``(3, R, K)``; z^3 is 0 where nobody asked.
        count: valid voxels, int64 ``(R,)``.
    """

    powers: Tensor
    count: Tensor


def moments(logits: Tensor, target: Target, *, cubes: bool = False) -> Moments:
    """Sum z, z^2 (and z^3) per region and class, without a gradient.

    Args:
        logits: float32 or float64 ``(N, K, *S)``.
        target: what they are compared with.
        cubes: whether z^3 is wanted.
    """
    return _sweep(logits, target, None, None, cubes=cubes)


def residual_penalty(
    logits: Tensor, target: Target, coefficients: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """Mean over valid voxels, K and R of ``c1 z + c2 z^2 + c3 z^3``.

    Differentiable once in the logits, by one backward pass.

    Args:
        logits: float32 or float64 ``(N, K, *S)``.
        target: what they are compared with.
        coefficients: c1, c2, c3, each ``(R, K)``, not negative.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.
    """
    value: Tensor = _ResidualPenalty.apply(logits, target, coefficients)
    return value


class _ResidualPenalty(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Target, coefficients: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        regions, k = coefficients[0].shape
        c = torch.stack(coefficients).double()
        # tiny tensors on the CPU: their numbers become scalars of the sweep
        table = c.cpu()
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        sums = _sweep(logits, target, gradient, table, cubes=bool(table[2].any()))
        n = sums.count.sum().clamp(min=1) * (k * regions)
        if gradient is not None:
            gradient.div_(n.to(gradient.dtype))
        ctx.gradient = gradient
        return ((c * sums.powers).sum() / n).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a closed-form penalty has no second derivative; build it with closed_form=False"
            )
        gradient, ctx.gradient = ctx.gradient, None
        if gradient is None:
            raise RuntimeError(
                "a closed-form penalty keeps its gradient for one backward pass; build it with "
                "closed_form=False to pass backward again"
            )
        return gradient.mul_(upstream), None, None


def _sweep(
    logits: Tensor,
    target: Target,
    gradient: Tensor | None,
    coefficients: Tensor | None,
    *,
    cubes: bool,
) -> Moments:
    """Fill `gradient` (times N K R) and return the moments."""
    n_images, k = logits.shape[:2]
    regions, dtype = target.num_regions, logits.dtype
    valid = target.patches.centre_valid
    all_valid = bool(valid.all())
    scale = (1.0 / target.patches.total(dtype)).flatten(1)
    if target.outer is None:
        scale *= target.margins[0]
        outer = None
    else:
        scale *= torch.where(target.outer.flatten(1), target.margins[1], target.margins[0])
        outer = target.outer.flatten(1).to(dtype)
    left_out = None if all_valid else ~valid.flatten(1)
    l_flat = logits.reshape(n_images, k, -1)
    g_flat = None if gradient is None else gradient.view(n_images, k, -1)
    size = l_flat.shape[2]
    # blocks keep the work in the cache of a processor; a GPU has threads for all at once
    block = BLOCK if logits.device.type == "cpu" else max(size, 1)
    powers = torch.zeros(3, regions, k, dtype=torch.float64, device=logits.device)
    for j in range(k):
        proportion = target.patches.of_class(j, dtype).flatten(1)
        c = None if coefficients is None else coefficients[:, :, j].tolist()
        for i in range(n_images):
            for start in range(0, size, block):
                at = slice(start, min(start + block, size))
                d = torch.mul(scale[i, at], proportion[i, at]).sub_(l_flat[i, j, at])
                if left_out is not None:
                    d.masked_fill_(left_out[i, at], 0.0)
                z = d.abs()
                weight = None if outer is None else outer[i, at]
                _add_powers(powers[:, :, j], z, weight, cubes)
                if g_flat is not None and c is not None:
                    _gradient(g_flat[i, j, at], d, z, weight, c, cubes)
    in_outer = torch.zeros_like(valid) if target.outer is None else target.outer
    count = torch.stack([(valid & ~in_outer).sum(), (valid & in_outer).sum()])[:regions]
    return Moments(powers, count)


def _add_powers(powers: Tensor, z: Tensor, outer: Tensor | None, cubes: bool) -> None:
    """Add the sums of z, z^2, z^3 of a block to ``(3, R)``; region 0 is what is left of 1."""
    z2 = z * z if cubes else None
    total = [z.sum(), torch.dot(z, z), torch.dot(z, z2) if z2 is not None else None]
    for power, value in enumerate(total):
        if value is not None:
            powers[power, 0] += value
    if outer is None:
        return
    zo = z * outer
    part = [zo.sum(), torch.dot(zo, z), torch.dot(zo, z2) if z2 is not None else None]
    for power, value in enumerate(part):
        if value is not None:
            powers[power, 1] += value
            powers[power, 0] -= value


def _gradient(
    out: Tensor,
    d: Tensor,
    z: Tensor,
    outer: Tensor | None,
    c: list[list[float]],
    cubes: bool,
) -> None:
    """Write ``-(c1 + 2 c2 z + 3 c3 z^2) sign(d)`` with the coefficients of each voxel's region."""

    def weight(power: int) -> Tensor | float:
        factor, row = power + 1.0, c[power]
        if outer is None or row[0] == row[1]:
            return factor * row[0]
        return torch.mul(outer, factor * (row[1] - row[0])).add_(factor * row[0])

    first = weight(0)
    slope = torch.mul(z, weight(1)).add_(first)
    if cubes:
        slope.add_(z * z * weight(2))
    torch.mul(slope, torch.sign(d).neg_(), out=out)
