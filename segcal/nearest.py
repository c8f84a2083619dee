"""Distance from each voxel of one surface to the nearest of another, exact, in millimetres.

Surfaces come as :class:`VoxelRows`. For a voxel (z, y, x) of one of them, the nearest voxel
(w, v, u) of the other minimises ::

    (w - z)^2 sz^2 + (v - y)^2 sy^2 + (u - x)^2 sx^2

Two searches find it. Both start from `best`, the distance to the voxel of the other surface that
was nearest to the previous voxel. Neighbours on a surface are close, so `best` is rarely much too
large, and it is the distance of an existing voxel, never a guess.

Row by row
----------
Where surfaces are close, as for good predictions, few rows can hold a nearer voxel:

- Planes are tried outwards from z, and in each plane rows outwards from y. The squares grow on the
  way, so the first plane or row that alone is as far as `best` ends its direction. The box of a
  plane adds the distance of x from its columns, and moves the first row to where the box starts.
- Within a row only two voxels can be nearest, one on either side of x; a binary search finds them.

Through a tree
--------------
The number of rows within reach grows with the square of the distance. A voxel for which PATIENCE
rows were not enough is left to a tree of boxes over the other surface. Its smallest boxes are cells
of some CELL voxels along each axis (fewer where voxels are longer); eight boxes make one of the
next level, up to a single box, and each box is as tight as its voxels allow. Boxes that are as far
as `best` are skipped, and of the others the nearest are entered first. The time depends on how much
of the surface lies in the shell between the true distance and the first `best`, not on the
distance. A voxel that follows one left to the tree gets only IMPATIENCE rows. The tree is built
when the first voxel needs it.

Bounds of rows, planes and boxes are sums of squares like the distances, of integer steps that are
no larger, so that rounding cannot make a bound exceed a distance: both searches give the same
numbers, bit for bit.

Loops are compiled when first called. The plain functions they call are registered with Numba then,
so that importing this module does not import Numba.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from segcal.compiling import compiled
from segcal.threads import in_threads, threads_for

__all__ = ["VoxelRows", "nearest_distances"]

Distances = NDArray[np.float64]
P = ParamSpec("P")
R = TypeVar("R")
PATIENCE, IMPATIENCE = 96, 6
"""Number of rows that are searched before a voxel is left to the tree; and after such a voxel."""
CELL = 4
"""Side of the smallest boxes, in the shortest side of a voxel."""
MOST_CELLS = 16
"""Largest number of cells per voxel of the surface; a small surface gets larger cells."""
ENOUGH = 8192
"""Number of voxels that are worth a thread."""
STACK = 8 * 32
"""Number of nodes that may wait: the children of one node on each of 32 levels."""
FIRST_Y, LAST_Y, FIRST_X, LAST_X = 0, 1, 2, 3
"""Slots of the box of a plane."""


@cache
def loop(function: Callable[P, R], *parts: Callable[..., Any]) -> Callable[P, R]:
    """Compile a loop, and with it the plain functions that it calls.

    The functions are inlined before the loop is optimised, because calls would count references to
    their arrays, which costs as much as a step of the search.
    """
    from numba.extending import register_jitable

    for part in parts:
        register_jitable(inline="always")(part)
    return compiled(function)


class VoxelRows(NamedTuple):
    """Voxels of an image on the axes ``(z, y, x)``, row by row, as a sparse matrix holds them.

    Attributes:
        start: where row ``z * Y + y`` starts in `places`; the last entry is the number of voxels.
        places: x of every voxel, ascending in each row.
        extent: ``(Z, 4)``, the box of a plane: FIRST_Y, LAST_Y, FIRST_X, LAST_X of its voxels; an
            empty plane has a last y of -1 and a first y of Y, and likewise x.
        shape: Z, Y, X.
    """

    start: NDArray[np.int64]
    places: NDArray[np.int32]
    extent: NDArray[np.int64]
    shape: tuple[int, ...]


class _Tree(NamedTuple):
    """Boxes over voxels; the root is the last node.

    Attributes:
        box: ``(nodes, 6)``, first and last z, y, x.
        child: ``(nodes, 2)``, where the children of a node, or the voxels of a cell, begin and end.
        voxels: ``(n, 3)``: z, y, x, cell by cell.
        leaves: nodes before this one are cells.
    """

    box: NDArray[np.int32]
    child: NDArray[np.int32]
    voxels: NDArray[np.int32]
    leaves: int


def nearest_distances(a: VoxelRows, b: VoxelRows, spacing_mm: Sequence[float]) -> Distances:
    """Distance in mm from each voxel of a, row by row, to the nearest voxel of b.

    Args:
        a: at least one voxel.
        b: of the same shape, at least one voxel.
        spacing_mm: voxel size along z, y, x.
    """
    spacing = tuple(float(s) for s in spacing_mm)
    distances = np.empty(a.places.size)
    by_rows = loop(_by_rows, _nearest_in_plane, _squared)
    by_tree = loop(_by_tree, _squared, _squared_to_box)
    pieces = _pieces(a, threads_for(distances.size // ENOUGH))

    def search(piece: tuple[int, int]) -> int:
        return by_rows(*a[:2], *piece, *b[:3], spacing, PATIENCE, IMPATIENCE, distances)

    def finish(piece: tuple[int, int]) -> None:
        by_tree(*a[:2], *piece, a.shape[1], *tree, spacing, distances)

    if sum(in_threads(search, pieces)):
        tree = _tree(b, spacing)
        in_threads(finish, pieces)
    return distances


def _pieces(a: VoxelRows, number: int) -> list[tuple[int, int]]:
    """First row, and row after the last, of parts with about equally many voxels."""
    shares = np.arange(1, number) * a.places.size // number
    ends = [0, *np.searchsorted(a.start, shares).tolist(), a.start.size - 1]
    return list(itertools.pairwise(ends))


def _squared(w: int, v: int, u: int, z: int, y: int, x: int, spacing: tuple[float, ...]) -> float:
    """Squared distance of two voxels."""
    sz, sy, sx = spacing
    return ((w - z) * sz) ** 2 + ((v - y) * sy) ** 2 + ((u - x) * sx) ** 2


def _by_rows(
    a_start: NDArray[np.int64],
    a_places: NDArray[np.int32],
    first_row: int,
    stop_row: int,
    b_start: NDArray[np.int64],
    b_places: NDArray[np.int32],
    b_extent: NDArray[np.int64],
    spacing: tuple[float, ...],
    patience: int,
    impatience: int,
    distances: Distances,
) -> int:
    """Fill the distances of the voxels of the given rows for which few rows are enough.

    Other voxels get the negative square of a distance to some voxel, or -inf.

    Returns:
        the number of other voxels.
    """
    Z = b_extent.shape[0]
    Y = (b_start.size - 1) // Z
    left, most = 0, patience
    found = (-1, -1, -1)  # the voxel of b that was nearest to the one before
    for row in range(first_row, stop_row):
        z, y = row // Y, row % Y
        for i in range(a_start[row], a_start[row + 1]):
            x = a_places[i]
            best = np.inf
            if found[0] >= 0:
                best = _squared(found[0], found[1], found[2], z, y, x, spacing)
            rows = 0
            for step in (1, -1):  # this plane and those behind, then those before
                w = z if step > 0 else z - 1
                while 0 <= w < Z and ((w - z) * spacing[0]) ** 2 < best and rows <= most:
                    best, found, rows = _nearest_in_plane(
                        b_start, b_places, b_extent, spacing, w, w * Y, z, y, x, best, found, rows,
                        most,
                    )  # fmt: skip
                    w += step
            if rows <= most:
                distances[i] = math.sqrt(best)
                most = patience
            else:
                distances[i] = -best
                left += 1
                most = impatience
    return left


def _nearest_in_plane(
    start: NDArray[np.int64],
    places: NDArray[np.int32],
    extent: NDArray[np.int64],
    spacing: tuple[float, ...],
    w: int,
    plane: int,
    z: int,
    y: int,
    x: int,
    best: float,
    found: tuple[int, int, int],
    rows: int,
    most: int,
) -> tuple[float, tuple[int, int, int], int]:
    """Nearest voxel of plane w, whose rows start at `plane`, to (z, y, x), if nearer than `best`.

    Returns:
        its squared distance and the voxel itself, or else `best` and `found`; and the number of
        rows searched so far, which is more than `most` where the search was given up.
    """
    sz, sy, sx = spacing
    low, high = extent[w, FIRST_Y], extent[w, LAST_Y]
    across = max(extent[w, FIRST_X] - x, x - extent[w, LAST_X], 0)
    least = ((w - z) * sz) ** 2 + (across * sx) ** 2  # even in the row of y
    for step in (1, -1):  # this row and those below, then those above
        v = max(y, low) if step > 0 else min(y - 1, high)
        while low <= v <= high and least + ((v - y) * sy) ** 2 < best and rows <= most:
            rows += 1
            so_far = ((w - z) * sz) ** 2 + ((v - y) * sy) ** 2
            first, last = start[plane + v], start[plane + v + 1]
            behind, end = first, last  # of all, the first that is not below x
            while behind < end:
                middle = (behind + end) // 2
                if places[middle] < x:
                    behind = middle + 1
                else:
                    end = middle
            for k in range(max(behind - 1, first), min(behind + 1, last)):
                d = so_far + ((places[k] - x) * sx) ** 2
                if d < best:
                    best, found = d, (w, v, int(places[k]))
            v += step
    return best, found, rows


def _tree(b: VoxelRows, spacing: tuple[float, ...]) -> _Tree:
    sides = [max(1, round(CELL * min(spacing) / s)) for s in spacing]
    while math.prod(cells := _cells(b.shape, sides)) > MOST_CELLS * b.places.size:
        sides = [2 * side for side in sides]
    return _Tree(*loop(_grown, _include)(b.start, b.places, b.shape[1], tuple(sides), cells))


def _cells(shape: tuple[int, ...], sides: Sequence[int]) -> tuple[int, ...]:
    return tuple(-(-n // side) for n, side in zip(shape, sides, strict=True))


def _grown(
    start: NDArray[np.int64],
    places: NDArray[np.int32],
    Y: int,
    sides: tuple[int, int, int],
    cells: tuple[int, int, int],
) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], int]:
    """Make the :class:`_Tree` of voxels in rows.

    Level by level, `first` and `number` say what every box of a raster holds: voxels in a cell,
    nodes in the boxes above. Nodes of a level are made box by box of the next raster, so that the
    nodes of a box stand together.

    Args:
        start: where rows start, as in :class:`VoxelRows`.
        places: x of every voxel, as in :class:`VoxelRows`.
        Y: number of rows of a plane.
        sides: sides of the cells, in voxels.
        cells: number of cells along each axis.
    """
    number = np.zeros(cells, np.int32)
    for row in range(start.size - 1):
        c, d = row // Y // sides[0], row % Y // sides[1]
        for i in range(start[row], start[row + 1]):
            number[c, d, places[i] // sides[2]] += 1
    first, total = np.empty(cells, np.int32), 0
    room, filled, at = 1, 0, first.ravel()
    for cell, n in enumerate(number.ravel()):
        at[cell] = total
        total += n
        filled += int(n > 0)
    free = first.copy()
    voxels = np.empty((total, 3), np.int32)
    for row in range(start.size - 1):
        z, y = row // Y, row % Y
        c, d = z // sides[0], y // sides[1]
        for i in range(start[row], start[row + 1]):
            e = places[i] // sides[2]
            voxel = voxels[free[c, d, e]]
            voxel[0], voxel[1], voxel[2] = z, y, places[i]
            free[c, d, e] += 1
    Z, H, W = cells
    while Z * H * W > 1:  # no level has more nodes than boxes, or than cells with voxels
        room += min(filled, Z * H * W)
        Z, H, W = (Z + 1) // 2, (H + 1) // 2, (W + 1) // 2
    box, child = np.empty((room, 6), np.int32), np.empty((room, 2), np.int32)
    leaves = used = 0
    Z, H, W = cells
    while True:
        above = ((Z + 1) // 2, (H + 1) // 2, (W + 1) // 2)
        up_first, up_number = np.empty(above, np.int32), np.empty(above, np.int32)
        for c in range(above[0]):
            for d in range(above[1]):
                for e in range(above[2]):
                    up_first[c, d, e] = used
                    for z in range(2 * c, min(2 * c + 2, Z)):
                        for y in range(2 * d, min(2 * d + 2, H)):
                            for x in range(2 * e, min(2 * e + 2, W)):
                                if number[z, y, x]:
                                    held, stop = first[z, y, x], first[z, y, x] + number[z, y, x]
                                    child[used, 0], child[used, 1] = held, stop
                                    _include(box, used, voxels, held, stop, leaves == 0)
                                    used += 1
                    up_number[c, d, e] = used - up_first[c, d, e]
        if leaves == 0:
            leaves = used
        if Z * H * W == 1:
            return box[:used], child[:used], voxels, leaves
        first, number = up_first, up_number
        Z, H, W = above


def _include(
    box: NDArray[np.int32],
    node: int,
    voxels: NDArray[np.int32],
    held: int,
    stop: int,
    cell: bool,
) -> None:
    """Fit the box of a node to what it holds: voxels of a cell, or other nodes."""
    for axis in range(3):
        low, high = 2 * axis, 2 * axis + 1
        if cell:
            box[node, low] = box[node, high] = voxels[held, axis]
            for i in range(held + 1, stop):
                box[node, low] = min(box[node, low], voxels[i, axis])
                box[node, high] = max(box[node, high], voxels[i, axis])
        else:
            box[node, low], box[node, high] = box[held, low], box[held, high]
            for i in range(held + 1, stop):
                box[node, low] = min(box[node, low], box[i, low])
                box[node, high] = max(box[node, high], box[i, high])


def _by_tree(
    a_start: NDArray[np.int64],
    a_places: NDArray[np.int32],
    first_row: int,
    stop_row: int,
    Y: int,
    box: NDArray[np.int32],
    child: NDArray[np.int32],
    voxels: NDArray[np.int32],
    leaves: int,
    spacing: tuple[float, ...],
    distances: Distances,
) -> None:
    """Replace the negative squares, which are bounds, by the distances."""
    root = box.shape[0] - 1
    # Depth first: on every level the siblings of the node entered wait, seven at most.
    node_of, bound_of = np.empty(STACK, np.int32), np.empty(STACK, np.float64)
    found = -1
    for row in range(first_row, stop_row):
        z, y = row // Y, row % Y
        for i in range(a_start[row], a_start[row + 1]):
            if distances[i] >= 0:
                continue
            x, best = a_places[i], -distances[i]
            if found >= 0:
                w, v, u = voxels[found, 0], voxels[found, 1], voxels[found, 2]
                best = min(best, _squared(w, v, u, z, y, x, spacing))
            waiting = 1
            node_of[0], bound_of[0] = root, 0.0
            while waiting:
                waiting -= 1
                if bound_of[waiting] >= best:
                    continue
                node = node_of[waiting]
                first, stop = child[node, 0], child[node, 1]
                if node < leaves:
                    for k in range(first, stop):
                        d = _squared(voxels[k, 0], voxels[k, 1], voxels[k, 2], z, y, x, spacing)
                        if d < best:
                            best, found = d, k
                    continue
                bottom = waiting
                for k in range(first, stop):
                    bound = _squared_to_box(box, k, z, y, x, spacing)
                    if bound < best:
                        place = waiting  # the nearest on top
                        while place > bottom and bound_of[place - 1] < bound:
                            node_of[place] = node_of[place - 1]
                            bound_of[place] = bound_of[place - 1]
                            place -= 1
                        node_of[place], bound_of[place] = k, bound
                        waiting += 1
            distances[i] = math.sqrt(best)


def _squared_to_box(
    box: NDArray[np.int32], node: int, z: int, y: int, x: int, spacing: tuple[float, ...]
) -> float:
    """Squared distance of a voxel to the nearest place in a box."""
    dz = max(box[node, 0] - z, z - box[node, 1], 0)
    dy = max(box[node, 2] - y, y - box[node, 3], 0)
    dx = max(box[node, 4] - x, x - box[node, 5], 0)
    return (dz * spacing[0]) ** 2 + (dy * spacing[1]) ** 2 + (dx * spacing[2]) ** 2
