"""Sums over the voxels of a structure, from which its confidence and volume are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from segcal.arrays import copy_floats
from segcal.structure_counting import (
    BLOCK,
    IN_MASK,
    INSIDE,
    LARGEST,
    OUTSIDE,
    POSSIBLY,
    SQUARES,
    SUMS,
    SURELY,
    TOTAL,
    VOXELS,
    add_structures,
)
from segcal.surface import Box, label_boxes
from segcal.threads import in_threads, threads_for

__all__ = ["StructureSums", "structure_sums"]


PIECE = 2**17
"""Smallest number of voxels, in whole slices, whose sums are added up before those of others."""
COPIED = 16 * BLOCK
"""Number of voxels of one call of compiled code; whole blocks, so that it does not change a sum."""
SLAB = 4
"""Number of slices in which a shell is looked for at a time."""


@dataclass(frozen=True)
class StructureSums:
    """Sums of one structure of one case.

    Attributes:
        mask_voxels: number of voxels in the mask, the voxels predicted as the structure.
        total: sum of the structure's probability p over all voxels.
        in_mask: sum of p in the mask.
        variance: sum of ``p (1 - p)`` over all voxels.
        largest: largest p.
        surely: number of voxels whose p is above ``(1 + level) / 2``.
        possibly: number of voxels whose p is above ``(1 - level) / 2``.
        undecided_inside: number of undecided voxels in the mask, where p and the probability of the
            strongest rival differ by `tie` or less.
        undecided_outside: number of undecided voxels outside the mask.
        shell_voxels: number of voxels in the mask's shell, whose ``3^d`` patch is partly in the
            mask.
        shell_bits: sum of the binary entropy of p over the shell, in bits.
        voxel_ml: volume of a voxel in ml.
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
        """Mean entropy in the shell; NaN for an empty mask."""
        return self.shell_bits / self.shell_voxels if self.shell_voxels else math.nan

    @property
    def undecided_share(self) -> float:
        """Share of undecided voxels among those in the mask or undecided; NaN without any."""
        all_of_it = self.mask_voxels + self.undecided_outside
        undecided = self.undecided_inside + self.undecided_outside
        return undecided / all_of_it if all_of_it else math.nan

    @property
    def volume_swing(self) -> float:
        """Share of the mask by which undecided voxels could shrink or grow it; the larger one."""
        most = max(self.undecided_inside, self.undecided_outside)
        if not self.mask_voxels:
            return math.inf if most else 0.0
        return most / self.mask_voxels

    @property
    def range_ml(self) -> tuple[float, float]:
        """Volume if all voxels err together, at both ends of the level.

        The structure is taken to be where p > u, for a number u that is uniform on (0, 1) and the
        same for all voxels. No other dependence between voxels gives a volume of larger variance.
        The range is widened to hold sum p.
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
    """Sum over the voxels of a case, some slices of the first axis of S at a time.

    Args:
        probabilities: floating ``(K, *S)``.
        prediction: predicted label map, integer ``(*S)``.
        channels: the channel of every structure in `probabilities`.
        labels: the labels of every structure in `prediction`.
        spacing_mm: voxel size along S.
        regions: whether channels are regions that may overlap. The rival of a region is to be
            outside it, 1 - p; the rival of a class is the strongest of the other classes.
        valid: bool ``(*S)``; False leaves a voxel out. None keeps all.
        level: level of the range of the volume.
        tie: largest difference of p and its strongest rival at which a voxel is undecided.

    Returns:
        the sums of every structure, in their order.

    Raises:
        ValueError: shapes that do not match.
    """
    if probabilities.shape[1:] != prediction.shape:
        raise ValueError(
            f"probabilities {probabilities.shape} and prediction {prediction.shape}: expected "
            "(K, *S) and (*S)"
        )
    sums = _summed(probabilities, prediction, channels, labels, regions, valid, level, tie)
    voxel_ml = math.prod(spacing_mm) / 1000
    boxes = label_boxes((prediction,), [value for values in labels for value in values])

    def shell(structure: tuple[int, Sequence[int]]) -> tuple[int, float]:
        channel, values = structure
        around = _around([boxes[value] for value in values], prediction.shape)
        keep = None if valid is None else valid[around]
        return _shell(probabilities[channel][around], prediction[around], values, keep)

    shells = in_threads(shell, list(zip(channels, labels, strict=True)))
    found = []
    for of, (shell_voxels, shell_bits) in zip(sums.tolist(), shells, strict=True):
        found.append(
            StructureSums(
                mask_voxels=int(of[VOXELS]),
                total=of[TOTAL],
                in_mask=of[IN_MASK],
                variance=max(of[TOTAL] - of[SQUARES], 0.0),
                largest=of[LARGEST],
                surely=int(of[SURELY]),
                possibly=int(of[POSSIBLY]),
                undecided_inside=int(of[INSIDE]),
                undecided_outside=int(of[OUTSIDE]),
                shell_voxels=shell_voxels,
                shell_bits=shell_bits,
                voxel_ml=voxel_ml,
            )
        )
    return found


def _summed(
    probabilities: NDArray[Any],
    prediction: NDArray[Any],
    channels: Sequence[int],
    labels: Sequence[Sequence[int]],
    regions: bool,
    valid: NDArray[np.bool_] | None,
    level: float,
    tie: float,
) -> NDArray[np.float64]:
    """Sums ``(structures, 9)`` by :func:`add_structures`, added piece by piece in order."""
    most = max((len(values) for values in labels), default=1)
    filled = np.array([[*values, *[values[0]] * (most - len(values))] for values in labels])
    filled = filled.astype(np.int32).reshape(len(channels), most)
    of_channels = np.array(channels, np.int64)
    ends = ((1 - level) / 2, (1 + level) / 2)
    step = max(1, PIECE // max(1, prediction[:1].size))
    wide = np.float64 if probabilities.dtype.itemsize > 4 else np.float32

    starts = range(0, len(prediction), step)
    found = np.zeros((len(starts), len(channels), SUMS))

    ready = probabilities.dtype == wide and probabilities.flags.c_contiguous and valid is None

    def add(pieces: range) -> None:
        room = np.empty(0 if ready else len(probabilities) * COPIED, wide)  # for one copy at a time
        for i in pieces:
            part = slice(starts[i], starts[i] + step)
            slab, decided, before = probabilities[:, part], prediction[part], 0
            if ready:
                slab, before = probabilities, prediction[: starts[i]].size
            elif valid is not None:
                slab, decided = slab[:, valid[part]], decided[valid[part]]
            slab, decided = slab.reshape(len(slab), -1), decided.reshape(-1)
            for at in range(0, len(decided), COPIED):
                labelled, p, first = decided[at : at + COPIED].astype(np.int32), slab, before + at
                if not ready:
                    some, first = slab[:, at : at + COPIED], 0
                    p = copy_floats(some, room[: some.size].reshape(some.shape))
                add_structures(
                    p, first, labelled, of_channels, filled, regions, ends, tie, found[i]
                )  # fmt: skip

    threads = threads_for(len(starts))
    in_threads(add, [range(t, len(starts), threads) for t in range(threads)])
    total = np.zeros((len(channels), SUMS))
    for sums in found:
        largest = np.maximum(total[:, LARGEST], sums[:, LARGEST])
        total += sums
        total[:, LARGEST] = largest
    return total


def _in(label_map: NDArray[Any], values: Sequence[int]) -> NDArray[np.bool_]:
    return label_map == values[0] if len(values) == 1 else np.isin(label_map, values)


def _around(boxes: Sequence[Box], shape: tuple[int, ...]) -> Box:
    """Smallest box around boxes, with one more voxel on every side within the image."""
    found = [box for box in boxes if all(s.stop > s.start for s in box)] or boxes[:1]
    return tuple(
        slice(max(0, min(s.start for s in sides) - 1), min(n, max(s.stop for s in sides) + 1))
        for sides, n in zip(zip(*found, strict=True), shape, strict=True)
    )


def _near(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Voxels whose ``3^d`` patch is partly in a mask; bytes are fast, so one axis at a time."""
    near = mask
    for axis in range(mask.ndim):
        before = np.moveaxis(near, axis, 0)
        after = before.copy()
        after[1:] |= before[:-1]
        after[:-1] |= before[1:]
        near = np.moveaxis(after, 0, axis)
    return near


def _shell(
    p: NDArray[Any],
    label_map: NDArray[Any],
    values: Sequence[int],
    valid: NDArray[np.bool_] | None,
) -> tuple[int, float]:
    """Voxels of the shell of a structure, and the sum of their binary entropy in bits.

    Some slices at a time, and one more on either side, so that no copy has the size of the image.
    """
    found = []
    for start in range(0, len(label_map), SLAB):
        before = min(start, 1)
        here, around = slice(start, start + SLAB), slice(start - before, start + SLAB + 1)
        mask = _in(label_map[around], values)
        if valid is not None:
            mask &= valid[around]
        shell = (_near(mask) & _near(~mask))[before : before + SLAB]
        if valid is not None:
            shell &= valid[here]
        found.append(p[here][shell])
    q = np.clip(np.concatenate(found).astype(np.float64), 0, 1)
    return len(q), float((special.entr(q) + special.entr(1 - q)).sum() / math.log(2))
