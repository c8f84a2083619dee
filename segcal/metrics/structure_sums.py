"""Sums over the voxels of a structure that its confidence and its volume are made of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import special

from segcal.neighbourhood import outer_region
from segcal.surface import label_boxes

__all__ = ["StructureSums", "structure_sums"]


@dataclass(frozen=True)
class StructureSums:
    """Sums of one structure of one case.

    Attributes:
        mask_voxels: voxels that were decided to be it.
        total: sum of its probability p.
        in_mask: sum of p in the mask.
        variance: sum of ``p (1 - p)``.
        largest: largest p.
        surely: voxels whose p is above ``(1 + level) / 2``.
        possibly: voxels whose p is above ``(1 - level) / 2``.
        undecided_inside: voxels of the mask within the tie of the strongest rival.
        undecided_outside: such voxels beside the mask.
        shell_voxels: voxels of the mask's shell, whose ``3^d`` patch is partly in the mask.
        shell_bits: sum of the binary entropy of p there, in bits.
        voxel_ml: size of a voxel.
    """

    mask_voxels: int
    total: float
    in_mask: float
    variance: float
    largest: float
    surely: int
    possibly: int
    undecided_inside: int
    undecided_outside: int
    shell_voxels: int
    shell_bits: float
    voxel_ml: float

    @property
    def shell_entropy(self) -> float:
        """Mean entropy in the shell; NaN of an empty mask."""
        return self.shell_bits / self.shell_voxels if self.shell_voxels else math.nan

    @property
    def undecided_share(self) -> float:
        """Undecided voxels among those of the mask and the undecided; NaN without any."""
        all_of_it = self.mask_voxels + self.undecided_outside
        undecided = self.undecided_inside + self.undecided_outside
        return undecided / all_of_it if all_of_it else math.nan

    @property
    def volume_swing(self) -> float:
        """Share by which the mask would shrink or grow, whichever is more, by undecided voxels."""
        most = max(self.undecided_inside, self.undecided_outside)
        if not self.mask_voxels:
            return math.inf if most else 0.0
        return most / self.mask_voxels

    @property
    def range_ml(self) -> tuple[float, float]:
        """Volume if all voxels err together, at both ends of the level.

        Of a number u that is uniform on (0, 1) and the same for all voxels, the structure is where
        p > u: no dependence of voxels gives a volume of larger variance. Widened to hold sum p.
        """
        low, high = min(self.surely, self.total), max(self.possibly, self.total)
        return low * self.voxel_ml, high * self.voxel_ml


def structure_sums(
    probabilities: NDArray[Any],
    prediction: NDArray[Any],
    *,
    channels: Sequence[int],
    labels: Sequence[Sequence[int]],
    spacing_mm: Sequence[float],
    regions: bool = False,
    valid: NDArray[np.bool_] | None = None,
    level: float = 0.95,
    tie: float = 0.1,
) -> list[StructureSums]:
    """Sum over the voxels of a case, slice by slice along the first axis of S.

    Args:
        probabilities: floating ``(K, *S)``.
        prediction: integer ``(*S)``: what was decided.
        channels: of every structure.
        labels: in `prediction`, of every structure.
        spacing_mm: voxel size along S.
        regions: whether channels are regions that may overlap: the rival of each is not to be in
            it. Else it is the strongest of the other classes.
        valid: bool ``(*S)``; False leaves a voxel out. None keeps all.
        level: of the volume's range.
        tie: difference of p and its strongest rival up to which a voxel is undecided.

    Returns:
        a structure each.

    Raises:
        ValueError: shapes that do not fit each other.
    """
    if probabilities.shape[1:] != prediction.shape:
        raise ValueError(
            f"probabilities {probabilities.shape} and prediction {prediction.shape}: expected "
            "(K, *S) and (*S)"
        )
    sums = np.zeros((len(channels), 8))
    largest = np.zeros(len(channels))
    for z in range(len(prediction)):
        slab, decided = probabilities[:, z], prediction[z]
        if valid is not None:
            slab, decided = slab[:, valid[z]], decided[valid[z]]
        slab = slab.astype(np.float64)
        two = None if regions else _two_largest(slab)
        for i, (channel, values) in enumerate(zip(channels, labels, strict=True)):
            p = slab[channel]
            rival = 1 - p if two is None else np.where(p < two[0], *two)
            undecided = np.abs(p - rival) <= tie
            sums[i] += _sums_of(p, _in(decided, values), undecided, level)
            largest[i] = max(largest[i], p.max(initial=0))
    voxel_ml = math.prod(spacing_mm) / 1000
    found = []
    for i, (channel, values) in enumerate(zip(channels, labels, strict=True)):
        decided = _in(prediction, values)
        if valid is not None:
            decided &= valid
        voxels, total, in_mask, variance, surely, possibly, inside, outside = sums[i].tolist()
        shell_voxels, shell_bits = _shell(probabilities[channel], decided, valid)
        found.append(
            StructureSums(
                mask_voxels=int(voxels),
                total=total,
                in_mask=in_mask,
                variance=max(variance, 0.0),
                largest=float(largest[i]),
                surely=int(surely),
                possibly=int(possibly),
                undecided_inside=int(inside),
                undecided_outside=int(outside),
                shell_voxels=shell_voxels,
                shell_bits=shell_bits,
                voxel_ml=voxel_ml,
            )
        )
    return found


def _sums_of(
    p: NDArray[np.float64], mask: NDArray[np.bool_], undecided: NDArray[np.bool_], level: float
) -> NDArray[np.float64]:
    """Sums over the voxels of a slice, in the order of :class:`StructureSums` but for the rest."""
    total, inside = p.sum(), np.count_nonzero(undecided & mask)
    found = (
        np.count_nonzero(mask),
        total,
        p[mask].sum(),
        total - np.vdot(p, p),
        np.count_nonzero(p > (1 + level) / 2),
        np.count_nonzero(p > (1 - level) / 2),
        inside,
        np.count_nonzero(undecided) - inside,
    )
    return np.array(found, dtype=np.float64)


def _in(label_map: NDArray[Any], values: Sequence[int]) -> NDArray[np.bool_]:
    return label_map == values[0] if len(values) == 1 else np.isin(label_map, values)


def _two_largest(slab: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Largest and second largest of the first axis."""
    first = np.full(slab.shape[1:], -np.inf, slab.dtype)
    second = first.copy()
    for p in slab:
        second = np.maximum(second, np.minimum(first, p))
        first = np.maximum(first, p)
    return first, second


def _shell(
    p: NDArray[Any], mask: NDArray[np.bool_], valid: NDArray[np.bool_] | None
) -> tuple[int, float]:
    """Voxels of the shell of a mask, and the sum of their binary entropy in bits."""
    box = label_boxes((mask.view(np.uint8),), [1])[1]
    around = tuple(
        slice(max(0, s.start - 1), min(n, s.stop + 1)) for s, n in zip(box, mask.shape, strict=True)
    )
    if not mask[box].size:
        return 0, 0.0
    inside = np.ascontiguousarray(mask[around]).view(np.uint8)
    shell = outer_region(torch.from_numpy(inside)[None])[0].numpy()
    if valid is not None:
        shell &= valid[around]
    q = np.clip(p[around][shell].astype(np.float64), 0, 1)
    return len(q), float((special.entr(q) + special.entr(1 - q)).sum() / math.log(2))
