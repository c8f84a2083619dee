"""Surfaces of binary masks and the distances between them, in millimetres.

A surface voxel is a voxel of the mask with a face neighbour outside it; outside the image counts
as outside the mask. Distances run between voxel centres.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage

from segcal.compiling import compiled
from segcal.tensors import as_array

Distances = NDArray[np.float64]
Box = tuple[slice, ...]
ROWS_PER_VOXEL = 16
"""Search steps per voxel of the box that cost as much as a distance transform of it."""
_loop = cache(compiled)


@dataclass(frozen=True)
class SurfaceDistances:
    """Directed distances between two surfaces, in mm, one per surface voxel, in no order.

    Attributes:
        prediction_to_reference: from each surface voxel of the prediction to the nearest of the
            reference; empty if either mask is.
        reference_to_prediction: the other way.
        prediction_empty: whether the predicted mask has no voxel.
        reference_empty: whether the reference mask has no voxel.
    """

    prediction_to_reference: Distances
    reference_to_prediction: Distances
    prediction_empty: bool
    reference_empty: bool

    def undefined(self) -> float | None:
        """NaN if both masks are empty, inf if one is, None where distances exist."""
        if self.prediction_empty and self.reference_empty:
            return float("nan")
        if self.prediction_empty or self.reference_empty:
            return float("inf")
        return None


def surface_distances(
    prediction: ArrayLike, reference: ArrayLike, *, spacing_mm: Sequence[float] | ArrayLike
) -> SurfaceDistances:
    """Directed distances between the surfaces of two masks.

    Works on the box around both masks, row by row: of the other surface, only the rows that can
    hold a voxel nearer than the nearest found so far are searched.

    Args:
        prediction: bool ``(*S)``, 1 to 3 axes.
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
    box = _box(p, r)
    p_rows, r_rows = _surface(p[box]), _surface(r[box])
    mm = (1.0,) * (3 - p.ndim) + tuple(spacing.tolist())
    return SurfaceDistances(
        _directed(p_rows, r_rows, mm),
        _directed(r_rows, p_rows, mm),
        prediction_empty=False,
        reference_empty=False,
    )


def label_boxes(label_maps: Sequence[ArrayLike], labels: Iterable[int]) -> dict[int, Box]:
    """Smallest box around each label in all maps together, in one pass over each map.

    Cut to its box, a label keeps its surface and its distances: outside is background.

    Args:
        label_maps: integer ``(*S)``, 1 to 3 axes; at least one, all of one shape.
        labels: the labels to find; one that is in no map gets an empty box.

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
    found = [_loop(_extents)(_three_axes(m), values) for m in maps]
    first = np.min([f[..., 0] for f in found], 0)[:, 3 - maps[0].ndim :]
    stop = np.max([f[..., 1] for f in found], 0)[:, 3 - maps[0].ndim :] + 1
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
    """Smallest box around both masks. Cutting there loses nothing: outside is background."""
    box = [slice(None)] * p.ndim
    for axis in range(p.ndim):
        others = tuple(a for a in range(p.ndim) if a != axis)
        (used,) = np.nonzero(p[tuple(box)].any(others) | r[tuple(box)].any(others))
        box[axis] = slice(int(used[0]), int(used[-1]) + 1)
    return tuple(box)


def _three_axes(array: NDArray[Any]) -> NDArray[Any]:
    return array.reshape((1,) * (3 - array.ndim) + array.shape)


class _Rows(NamedTuple):
    """Surface voxels of a mask on the axes ``(z, y, x)``, row by row.

    Attributes:
        start: where row ``z * Y + y`` starts in `places`, and in the end their number.
        places: x of every surface voxel, ascending in each row.
        extent: per plane the first and last y, then the first and last x, that are used; for
            nothing, a last y of -1.
        shape: Z, Y, X.
    """

    start: NDArray[np.int64]
    places: NDArray[np.int32]
    extent: NDArray[np.int64]
    shape: tuple[int, ...]

    def indices(self) -> NDArray[np.int64]:
        """Of the surface voxels in the flattened image."""
        rows = np.repeat(np.arange(self.start.size - 1), np.diff(self.start))
        return rows * self.shape[2] + self.places


def _surface(mask: NDArray[np.bool_]) -> _Rows:
    bytes_ = _three_axes(mask).astype(np.uint8, order="C")
    start, places, extent = _loop(_surface_rows)(bytes_, mask.ndim)
    return _Rows(start, places[: start[-1]], extent, bytes_.shape)


def _surface_rows(
    mask: NDArray[np.uint8], axes: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Rows of a mask of 0 and 1; its last `axes` axes have neighbours; `places` has spare room."""
    Z, Y, X = mask.shape
    outside, edge = np.zeros(X, np.uint8), np.empty(X, np.uint8)
    start, places = np.zeros(Z * Y + 1, np.int64), np.empty(4096 + X, np.int32)
    extent = np.empty((Z, 4), np.int64)
    n = 0
    for z in range(Z):
        extent[z, 0], extent[z, 1], extent[z, 2], extent[z, 3] = Y, -1, X, -1
        for y in range(Y):
            here = mask[z, y]
            before = behind = above = below = here
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
                for x in range(X):
                    places[n] = x
                    n += edge[x]
                extent[z, 0] = min(extent[z, 0], y)
                extent[z, 1] = y
                extent[z, 2] = min(extent[z, 2], places[first])
                extent[z, 3] = max(extent[z, 3], places[n - 1])
            start[z * Y + y + 1] = n
    return start, places, extent


def _directed(a: _Rows, b: _Rows, mm: tuple[float, ...]) -> Distances:
    """Distance from each voxel of a to the nearest of b.

    Where very many voxels are far from all others (noise), a distance transform is faster.
    """
    distances = np.empty(a.places.size)
    most = ROWS_PER_VOXEL * math.prod(b.shape)
    if not _loop(_nearest)(a.start, a.places, b.start, b.places, b.extent, mm, most, distances):
        free = np.ones(b.shape, dtype=np.bool_)
        free.ravel()[b.indices()] = False
        distances = ndimage.distance_transform_edt(free, sampling=mm).ravel()[a.indices()]
    return distances


def _nearest(
    a_start: NDArray[np.int64],
    a_places: NDArray[np.int32],
    b_start: NDArray[np.int64],
    b_places: NDArray[np.int32],
    b_extent: NDArray[np.int64],
    spacing: tuple[float, ...],
    most: int,
    distances: Distances,
) -> bool:
    """Fill the distances from each voxel of a to the nearest of b; give up after `most` rows.

    The search starts from the voxel found for the one before, which is rarely far. Planes and
    rows of b are left out where even the nearest corner of what they hold is further.
    """
    Z = b_extent.shape[0]
    Y = (b_start.size - 1) // Z
    sz, sy, sx = spacing
    rows = 0
    fz, fy, fx = -1, -1, -1
    for row in range(a_start.size - 1):
        if rows > most:
            return False
        z, y = row // Y, row % Y
        for i in range(a_start[row], a_start[row + 1]):
            x = a_places[i]
            best = np.inf
            if fz >= 0:
                best = ((z - fz) * sz) ** 2 + ((y - fy) * sy) ** 2 + ((x - fx) * sx) ** 2
            for side in range(2):  # this plane and those behind, then those before
                w = z - side
                while 0 <= w < Z and ((w - z) * sz) ** 2 < best:
                    low, high, left, right = b_extent[w]
                    apart = max(left - x, x - right, 0)
                    least = ((w - z) * sz) ** 2 + (apart * sx) ** 2
                    for half in range(2):  # this row and those below, then those above
                        v = min(y - 1, high) if half else max(y, low)
                        while low <= v <= high and least + ((v - y) * sy) ** 2 < best:
                            rows += 1
                            so_far = ((w - z) * sz) ** 2 + ((v - y) * sy) ** 2
                            first, last = b_start[w * Y + v], b_start[w * Y + v + 1]
                            p, q = first, last
                            while p < q:
                                middle = (p + q) // 2
                                if b_places[middle] < x:
                                    p = middle + 1
                                else:
                                    q = middle
                            for k in range(max(p - 1, first), min(p + 1, last)):
                                d = so_far + ((b_places[k] - x) * sx) ** 2
                                if d < best:
                                    best, fz, fy, fx = d, w, v, b_places[k]
                            v += -1 if half else 1
                    w += -1 if side else 1
            distances[i] = math.sqrt(best)
    return True


def _extents(label_map: NDArray[Any], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """First and last index ``(labels, 3, 2)`` of each of the ascending values; -1 last for none.

    Labels come in runs along x, so values are looked up once a run.
    """
    Z, Y, X = label_map.shape
    extents = np.empty((values.size, 3, 2), np.int64)
    extents[:, :, 0] = max(Z, Y, X)
    extents[:, :, 1] = -1
    for z in range(Z):
        for y in range(Y):
            x = 0
            while x < X:
                value, first = label_map[z, y, x], x
                while x < X and label_map[z, y, x] == value:
                    x += 1
                k = np.searchsorted(values, value)
                if k < values.size and values[k] == value:
                    e = extents[k]
                    e[0, 0], e[0, 1] = min(e[0, 0], z), max(e[0, 1], z)
                    e[1, 0], e[1, 1] = min(e[1, 0], y), max(e[1, 1], y)
                    e[2, 0], e[2, 1] = min(e[2, 0], first), max(e[2, 1], x - 1)
    return extents
