"""What one sweep over the logits can compute: a cross-entropy and a penalty on a residual."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from segcal.neighbourhood import KernelSize, Normaliser, Padding, outer_region
from segcal.tensors import valid_mask

Shape = Literal["abs", "upper", "lower"]
RegionMap = Callable[[Tensor], Tensor]
"""Takes labels ``(N, *S)`` and returns the region of every voxel, in [0, R), -1 for none."""

# Numbers from here are compiled into what ``cpu`` keeps on disk, which is renewed when the file
# ``cpu.py`` changes: change it, too.
NOTHING = 255
"""Code of a voxel that does not count, as a centre or as a neighbour."""
NO_CLASS = 254
"""Code of what lies outside the image under padding ``zeros``: it counts, but has no class."""
Z_LINEAR = 1e6
"""Above this constraint value the penalties continue along their tangent, which keeps value and
slope inside float32 (P2 grows with the cube of z)."""
PHR, P2, P3, RELU, EQUALITY = range(5)
ABS, UPPER, LOWER = range(3)
ONE, PATCH, MAP = range(3)
FUNCTION_CODES = {"phr": PHR, "p2": P2, "p3": P3, "relu": RELU, "equality": EQUALITY}
SHAPE_CODES = {"abs": ABS, "upper": UPPER, "lower": LOWER}


@dataclass(frozen=True)
class CrossEntropyTerm:
    """Cross-entropy, weighted by the class of the voxel.

    Attributes:
        num_classes: K.
        ignore_index: label of voxels that do not count.
        class_weight: ``(K,)``, or None for 1.
    """

    num_classes: int
    ignore_index: int | None = None
    class_weight: Tensor | None = None


@dataclass(frozen=True)
class Residual:
    """A penalty ``sum_i w(i) sum_k P(z_k(i); lam[r(i), k], rho[r(i), k])`` on a residual u.

    ``u_k = l_k - m_r tau_k`` (`patch` given) or ``(max_j l_j - l_k - m_r) scale`` (None).

    Attributes:
        lam: ``(R, K)``.
        rho: ``(R, K)``.
        function: name of P in :mod:`segcal.alm.functions`.
        shape: z is the size of u (``abs``), u (``upper``), or -u (``lower``).
        margins: m, one per region.
        scale: see above.
        patch: size and padding of the patch of the class proportions tau.
        regions: None for one region; ``patch``: 0 where the patch holds one class, 1 where it holds
            several; or a function of the labels.
        normaliser: see :func:`segcal.neighbourhood.region_weights`.
        divisor: w is that divided by this.
        ignore_index: label of voxels that do not count.
        clip: bounds of every P' in the statistics.
    """

    lam: Tensor
    rho: Tensor
    function: str
    shape: Shape
    margins: tuple[float, ...]
    scale: float = 1.0
    patch: tuple[KernelSize, Padding] | None = None
    regions: Literal["patch"] | RegionMap | None = None
    normaliser: Normaliser = "all"
    divisor: float = 1.0
    ignore_index: int | None = None
    clip: tuple[float, float] = (-math.inf, math.inf)


@dataclass(frozen=True)
class Job:
    """One sweep with everything looked up.

    Attributes:
        residual: the penalty.
        penalty_weight: float64 ``(R, K)``, w by region and label.
        cross_entropy_weight: float64 ``(K,)``, factor on a voxel's cross-entropy by label; None
            leaves it out.
        factors: of cross-entropy and penalty in the gradient.
        sizes: of the patch along Z, Y, X.
        gaps: some codes are :data:`NOTHING`.
        gradient: compute the gradient.
        statistics: compute the sums of P' and z per region and class.
    """

    residual: Residual
    penalty_weight: Tensor
    cross_entropy_weight: Tensor | None
    factors: tuple[float, float]
    sizes: tuple[int, int, int]
    gaps: bool
    gradient: bool
    statistics: bool


def region_map(labels: Tensor, residual: Residual) -> Tensor:
    """Region of every voxel ``(N, *S)``, int64 in [0, R), -1 for voxels that do not count.

    Raises:
        ValueError: a function of the labels that gives another shape or other numbers.
    """
    valid = valid_mask(labels, residual.ignore_index)
    if residual.regions is None:
        return torch.where(valid, 0, -1)
    if residual.regions == "patch":
        size, padding = residual.patch or (3, "replicate")
        outer = outer_region(
            labels, kernel_size=size, padding=padding, ignore_index=residual.ignore_index
        )
        return torch.where(valid, outer.long(), -1)
    region = residual.regions(labels)
    last = len(residual.margins) - 1
    if region.shape != labels.shape or region.is_floating_point() or region.dtype == torch.bool:
        raise ValueError(
            f"regions: expected integers {tuple(labels.shape)}, "
            f"got {region.dtype} {tuple(region.shape)}"
        )
    region = torch.where(valid, region.long(), -1)
    if region.numel() and not bool((region >= -1).all() & (region <= last).all()):
        raise ValueError(
            f"regions: expected -1 to {last}, got {int(region.min())} to {int(region.max())}"
        )
    return region


def region_code(residual: Residual, with_map: bool) -> int:
    """Where compiled loops find the regions: in a map, in the patch, or there is one."""
    if with_map:
        return MAP
    return PATCH if residual.regions == "patch" else ONE
