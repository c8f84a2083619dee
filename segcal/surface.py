"""Surfaces of binary masks and the distances between them, in millimetres.

A surface voxel is a voxel of the mask with a face neighbour outside it; outside the image counts
as outside the mask. An axis of length 1 has no neighbours and takes no part: one slice is an image
of two axes. Distances run between voxel centres.

Memory
------
Images are treated as (z, y, x), with axes of length 1 in front where there are fewer than three.
A *row* is all x at one (z, y). A surface is kept as in a sparse matrix
(:class:`segcal.nearest.VoxelRows`): the x of its voxels, ascending, row after row, the position at
which every row starts, and for every plane z the box around its voxels. The order is that of the
flattened image.

The distances themselves are found in :mod:`segcal.nearest`.

Loops are compiled when first called. The plain functions they call are registered with Numba then,
so that importing this module does not import Numba.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.arrays import as_array
from segcal.nearest import FIRST_X, FIRST_Y, LAST_X, LAST_Y, VoxelRows, loop, nearest_distances
from segcal.threads import in_threads

__all__ = ["SurfaceDistances", "label_boxes", "surface_distances"]

Distances = NDArray[np.float64]
Box = tuple[slice, ...]
FIRST, LAST = 0, 1
"""Slots of the extent of a label along an axis."""
ENOUGH = 2**20
"""Voxels of a box from which on a thread for each mask is worth its start."""
SPARE = 4096
"""Number of surface voxels that there is room for at first."""


@dataclass(frozen=True)
class SurfaceDistances:
    """Directed distances between two surfaces, in mm, one per surface voxel, in no order.

    Attributes:
        prediction_to_reference: distance from each surface voxel of the prediction to the nearest
            surface voxel of the reference; empty if either mask is empty.
        reference_to_prediction: distance from each surface voxel of the reference to the nearest
            surface voxel of the prediction; empty if either mask is empty.
        prediction_empty: whether the predicted mask has no voxel.
        reference_empty: whether the reference mask has no voxel.
    """

    prediction_to_reference: Distances
    reference_to_prediction: Distances
    prediction_empty: bool
    reference_empty: bool

    def undefined(self) -> float | None:
        """NaN if both masks are empty, inf if one mask is empty, None where distances exist."""
        if self.prediction_empty and self.reference_empty:
            return float("nan")
        if self.prediction_empty or self.reference_empty:
            return float("inf")
        return None


def surface_distances(
    prediction: ArrayLike, reference: ArrayLike, *, spacing_mm: Sequence[float] | ArrayLike
) -> SurfaceDistances:
    """Directed distances between the surfaces of two masks.

    This works on the box around both masks, row by row: of the other surface, only the rows that
    can hold a voxel nearer than the nearest found so far are searched.

    Args:
        prediction: bool ``(*S)``, 1 to 3 axes; one of length 1 takes no part, as in one slice.
        reference: bool, same shape.
        spacing_mm: voxel size along each axis of the arrays, in their order.

    Raises:
        ValueError: masks that are not bool or differ in shape; spacing of another length, not
            positive or not finite.
    """
    p, r = _mask("prediction", prediction), _mask("reference", reference)
    if p.shape != r.shape:
        raise ValueError(f"prediction {p.shape} and reference {r.shape}: expected one shape")
    spacing = np.asarray(spacing_mm, dtype=np.float64)
    if spacing.shape != (p.ndim,) or not np.all(np.isfinite(spacing)) or np.any(spacing <= 0):
        raise ValueError(
            f"spacing_mm: expected {p.ndim} positive numbers, one per array axis, "
            f"got {spacing.tolist()}"
        )
    empty = np.zeros(0)
    if not p.any() or not r.any():
        return SurfaceDistances(empty, empty, not p.any(), not r.any())
    axes = [axis for axis, n in enumerate(p.shape) if n > 1] or [0]
    shape = [p.shape[axis] for axis in axes]
    p, r, spacing = p.reshape(shape), r.reshape(shape), spacing[axes]
    box = _box(p, r)
    parts = [p[box], r[box]]
    many = parts[0].size >= ENOUGH
    p_rows, r_rows = in_threads(_surface, parts) if many else map(_surface, parts)
    mm = (1.0,) * (3 - p.ndim) + tuple(spacing.tolist())
    return SurfaceDistances(
        nearest_distances(p_rows, r_rows, mm),
        nearest_distances(r_rows, p_rows, mm),
        prediction_empty=False,
        reference_empty=False,
    )


def label_boxes(label_maps: Sequence[ArrayLike], labels: Iterable[int]) -> dict[int, Box]:
    """Smallest box around each label in all maps together, in one pass over each map.

    A label that is cut to its box keeps its surface and its distances, because outside is
    background. Only a side of one voxel must be made longer where the map is longer, or its axis
    would take no part in surfaces.

    Args:
        label_maps: integer ``(*S)``, 1 to 3 axes; at least one map, all of the same shape.
        labels: the labels to find; a label that is in no map gets an empty box.

    Raises:
        ValueError: maps that are not of integers or differ in shape.
    """
    maps = [as_array(m) for m in label_maps]
    maps = [m if m.dtype.isnative else m.astype(m.dtype.newbyteorder("=")) for m in maps]
    for m in maps:
        if m.dtype.kind not in "iu" or not 1 <= m.ndim <= 3 or m.shape != maps[0].shape:
            raise ValueError(
                "label_maps: expected integers, one shape of 1 to 3 axes, got "
                f"{', '.join(f'{m.dtype} {m.shape}' for m in maps)}"
            )
    values = np.unique(np.fromiter(labels, np.int64))
    found = [loop(_extents)(_three_axes(m), values) for m in maps]
    first = np.min([f[..., FIRST] for f in found], 0)[:, 3 - maps[0].ndim :]
    stop = np.max([f[..., LAST] for f in found], 0)[:, 3 - maps[0].ndim :] + 1
    ends = np.stack([np.minimum(first, stop), stop], -1)
    return {
        value: tuple(itertools.starmap(slice, sides))
        for value, sides in zip(values.tolist(), ends.tolist(), strict=True)
    }


def _mask(name: str, value: ArrayLike) -> NDArray[np.bool_]:
    array = as_array(value)
    if array.dtype != np.bool_:
        raise ValueError(
            f"{name}: expected a bool mask, got {array.dtype}; compare a label map with one label"
        )
    if not 1 <= array.ndim <= 3:
        raise ValueError(f"{name}: expected 1 to 3 axes, got shape {array.shape}")
    return array


def _box(p: NDArray[np.bool_], r: NDArray[np.bool_]) -> Box:
    """Smallest box around both masks. Cutting there loses nothing, as outside is background."""
    box = [slice(None)] * p.ndim
    for axis in range(p.ndim):
        others = tuple(a for a in range(p.ndim) if a != axis)
        (used,) = np.nonzero(p[tuple(box)].any(others) | r[tuple(box)].any(others))
        box[axis] = slice(int(used[0]), int(used[-1]) + 1)
    return tuple(box)


def _three_axes(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape((1,) * (3 - array.ndim) + array.shape)


def _surface(mask: NDArray[np.bool_]) -> VoxelRows:
    bytes_ = _three_axes(mask).astype(np.uint8, order="C")
    start, places, extent = loop(_surface_rows)(bytes_, mask.ndim)
    return VoxelRows(start, places[: start[-1]], extent, bytes_.shape)


def _surface_rows(
    mask: NDArray[np.uint8], axes: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Rows of a mask of 0 and 1; its last `axes` axes have neighbours; `places` has spare room.

    Bits instead of branches, and loops that do one thing, so that they become vector instructions.
    """
    Z, Y, X = mask.shape
    outside, edge = np.zeros(X, np.uint8), np.empty(X, np.uint8)
    start, places = np.zeros(Z * Y + 1, np.int64), np.empty(SPARE + X, np.int32)
    extent = np.empty((Z, 4), np.int64)
    n = 0
    for z in range(Z):
        extent[z, FIRST_Y], extent[z, LAST_Y] = Y, -1
        extent[z, FIRST_X], extent[z, LAST_X] = X, -1
        for y in range(Y):
            here = mask[z, y]
            before = behind = above = below = here  # along an axis without neighbours: inside
            if axes > 2:
                before = mask[z - 1, y] if z > 0 else outside
                behind = mask[z + 1, y] if z + 1 < Z else outside
            if axes > 1:
                above = mask[z, y - 1] if y > 0 else outside
                below = mask[z, y + 1] if y + 1 < Y else outside
            for x in range(X):
                edge[x] = here[x] & ~(before[x] & behind[x] & above[x] & below[x])
            for x in range(1, X - 1):
                edge[x] |= here[x] & ~(here[x - 1] & here[x + 1])
            edge[0], edge[X - 1] = here[0], here[X - 1]
            used = np.uint8(0)
            for x in range(X):
                used |= edge[x]
            if used:
                if n + X > places.size:
                    more = np.empty(2 * places.size + X, np.int32)
                    for k in range(n):
                        more[k] = places[k]
                    places = more
                first = n
                for x in range(X):  # each x is written, and kept by counting it: no branch
                    places[n] = x
                    n += edge[x]
                extent[z, FIRST_Y] = min(extent[z, FIRST_Y], y)
                extent[z, LAST_Y] = y
                extent[z, FIRST_X] = min(extent[z, FIRST_X], places[first])
                extent[z, LAST_X] = max(extent[z, LAST_X], places[n - 1])
            start[z * Y + y + 1] = n
    return start, places, extent


def _extents(label_map: NDArray[Any], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """FIRST and LAST index ``(labels, 3, 2)`` of each of the ascending values; -1 last for none.

    Labels come in runs along x, so values are looked up once per run.
    """
    Z, Y, X = label_map.shape
    extents = np.empty((values.size, 3, 2), np.int64)
    extents[:, :, FIRST] = max(Z, Y, X)
    extents[:, :, LAST] = -1
    for z in range(Z):
        for y in range(Y):
            x = 0
            while x < X:
                value, first = label_map[z, y, x], x
                while x < X and label_map[z, y, x] == value:
                    x += 1
                k = np.searchsorted(values, value)
                if k < values.size and values[k] == value:
                    run = ((z, z), (y, y), (first, x - 1))
                    for axis in range(3):
                        side = extents[k, axis]
                        side[FIRST] = min(side[FIRST], run[axis][FIRST])
                        side[LAST] = max(side[LAST], run[axis][LAST])
    return extents
