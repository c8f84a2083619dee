"""Loops that sum probabilities by bin, and slopes of a loss of the sums, for CPUs.

**What is computed.** For a voxel with label y and softmax p, every p_k belongs to bins m of M by
weights w_m: all of it to the bin of :func:`segcal.binning.equal_width_index` (hard), or 1 - f to
bin a and f to bin a + 1, where ``t = min(max(M p_k - 1/2, 0), M - 1)``, a is its integer part and f
the rest (soft). Per image n, class k and bin m, sums are

    W = sum w_m      C = sum w_m p_k      A = sum w_m [k = y]

A loss L of these has, for p_k, the slope

    g_k = sum_m w_m dL/dC_m + sum_m w_m' (dL/dW_m + p_k dL/dC_m + [k = y] dL/dA_m)

where w' is 0 for hard bins, and -M and M for soft bins if t is not at a bound. Within a cell (see
below) g_k is a straight line in p_k, whose two numbers are looked up.

**Cells.** Numbers are summed by cell. There are M + 1 cells: a; or ``M`` where t is held at 0 (so
that w' is 0; at its upper bound a + 1 is a). A cell has sums of 1 - f and f, each times 1, p, and
[k = y]. Most probabilities of a segmentation are near 0 or 1: those of the lowest and of the
highest cell, where f is 0, are summed as vectors, and only the others, about a tenth, one after the
other. Additions to the same number wait for each other, so neighbours in the list of these go to
``LANES`` tables in turn.

These functions see a stretch (:mod:`segcal.sweep.stretches`); :mod:`segcal.sweep.sums_loops` calls
them. A NaN has a cell, so that it reaches the sums.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from segcal.sweep.terms import NOTHING
from segcal.sweep.vector_math import ANY_ORDER, IN_VECTORS

LANES = 4
SLOTS = 6
"""Sums of a cell: of 1 - f and f; times p; and over the voxels whose label is the class."""
EXTRA_CELLS = 1
"""Beyond one for each bin: t held at 0."""
LINE = 2
"""Numbers of a cell in the second pass: intercept and slope of g over p."""


class Bins(NamedTuple):
    """The bins.

    Attributes:
        number: M.
        tolerance: :func:`segcal.binning.edge_tolerance` of hard bins.
        soft: whether the bins are soft.
    """

    number: int
    tolerance: float
    soft: bool


@njit(**IN_VECTORS)
def _cell(p, x, bins):
    """Return the cell of p[x], and f; selections are written so that NaN has a cell."""
    zero, top = p.dtype.type(0), p.dtype.type(bins.number - 1)
    if not bins.soft:
        m = np.ceil(np.float64(np.float32(p[x])) * bins.number - bins.tolerance) - 1.0
        m = m if m > 0.0 else 0.0
        return np.int64(m if m < bins.number - 1.0 else bins.number - 1.0), zero
    position = p[x] * p.dtype.type(bins.number) - p.dtype.type(0.5)
    inside = top if position > top else position
    inside = zero if inside < zero else inside
    left = np.floor(inside)
    cell = np.int64(left) if left > zero else np.int64(0)
    return np.int64(bins.number) if position < zero else cell, inside - left


@njit(**IN_VECTORS)
def _ends(bins):
    """Cells of the lowest and the highest probabilities, in which f is 0 and no line rises."""
    return bins.number if bins.soft else 0, bins.number - 1


@njit(**IN_VECTORS)
def _set_kinds(p, label, bins, lowest, others):
    """Say which voxels that count are in the lowest cell, and which between the ends."""
    T = p.dtype.type
    if bins.soft:
        count, half, zero, top = T(bins.number), T(0.5), T(0), T(bins.number - 1)
        for x in range(p.shape[0]):
            position, counts = p[x] * count - half, label[x] != NOTHING
            low = position < zero
            high = position >= top  # of NaN neither
            lowest[x] = counts & low
            others[x] = counts & (not low) & (not high)
    else:
        for x in range(p.shape[0]):
            position = np.float64(np.float32(p[x])) * bins.number - bins.tolerance
            counts = label[x] != NOTHING
            low = not position > 1.0  # NaN, too
            high = position > bins.number - 1.0
            lowest[x] = counts & low
            others[x] = counts & (not low) & (not high)


@njit(**ANY_ORDER)
def _add_ends(p, label, code, lowest, others, low, high):
    """Add the voxels of the lowest and of the highest cell to their sums."""
    low_voxels, low_hits, low_sum = np.int32(0), np.int32(0), 0.0
    high_voxels, high_hits, high_sum = np.int32(0), np.int32(0), 0.0
    for x in range(p.shape[0]):
        v, hit, at_low = np.float64(p[x]), label[x] == code, lowest[x] != 0
        at_high = (others[x] == 0) & (lowest[x] == 0) & (label[x] != NOTHING)
        low_voxels = np.int32(low_voxels + at_low)
        high_voxels = np.int32(high_voxels + at_high)
        low_hits = np.int32(low_hits + (at_low & hit))
        high_hits = np.int32(high_hits + (at_high & hit))
        low_sum += v if at_low else 0.0
        high_sum += v if at_high else 0.0
    low[0] += low_voxels
    low[2] += low_sum
    low[4] += low_hits
    high[0] += high_voxels
    high[2] += high_sum
    high[4] += high_hits


@njit(**IN_VECTORS)
def _list(marks, words, end, places):
    """List the places of the first `end` marks that are 1, and return how many there are.

    Args:
        marks: uint8, 0 or 1, 0 from `end` to the next multiple of eight.
        words: the same memory as uint64.
        end: number of marks.
        places: int32, set.
    """
    number = 0
    for i in range((end + 7) // 8):
        if words[i]:  # mostly none of eight
            for x in range(8 * i, 8 * i + 8):  # a branch would often be guessed wrong
                places[number] = x
                number += marks[x]
    return number


class BinBuffers(NamedTuple):
    """Buffers of a stretch.

    Attributes:
        lowest: uint8 ``(length,)``, whether a voxel is in the lowest cell.
        others: uint8 ``(length,)``, whether it is in a cell between the lowest and the highest.
        words: the memory of `others` as uint64.
        places: int32 ``(length + 1,)``, list of these voxels.
    """

    lowest: Any
    others: Any
    words: Any
    places: Any


@njit
def bin_buffers(length):
    """Buffers for stretches of up to `length` voxels."""
    others = np.zeros(8 * ((length + 7) // 8), np.uint8)
    return BinBuffers(
        np.empty(length, np.uint8), others, others.view(np.uint64), np.empty(length + 1, np.int32)
    )


@njit(**IN_VECTORS)
def _mark(p, label, bins, buffers):
    """Set the buffers for a stretch, and return the number of voxels between the ends."""
    width = p.shape[0]
    _set_kinds(p, label, bins, buffers.lowest, buffers.others[:width])
    for x in range(width, min(8 * ((width + 7) // 8), buffers.others.shape[0])):
        buffers.others[x] = 0
    return _list(buffers.others, buffers.words, width, buffers.places)


@njit(**IN_VECTORS)
def add(p, k, label, bins, buffers, table):
    """Add a stretch of one class to its sums ``(LANES * cells * SLOTS,)``.

    Args:
        p: probabilities of the class.
        k: the class.
        label: labels.
        bins: the bins.
        buffers: of :func:`bin_buffers`.
        table: the sums.
    """
    per_lane, code = bins.number + EXTRA_CELLS, np.uint8(k)
    lowest, highest = _ends(bins)
    number = _mark(p, label, bins, buffers)
    _add_ends(
        p, label, code, buffers.lowest, buffers.others, table[SLOTS * lowest :],
        table[SLOTS * highest :],
    )  # fmt: skip
    for j in range(number):
        x = buffers.places[j]
        cell, share = _cell(p, x, bins)
        i = SLOTS * ((j & (LANES - 1)) * per_lane + cell)
        f, v, hit = np.float64(share), np.float64(p[x]), np.float64(label[x] == code)
        w = 1.0 - f
        table[i] += w
        table[i + 1] += f
        table[i + 2] += w * v
        table[i + 3] += f * v
        table[i + 4] += w * hit
        table[i + 5] += f * hit


@njit(**IN_VECTORS)
def _add_at_ends(label, buffers, low, high, g):
    """Add two numbers to g in the lowest and in the highest cell, where hits make no difference."""
    lowest, others, zero = buffers.lowest, buffers.others, g.dtype.type(0)
    for x in range(g.shape[0]):
        at_high = (others[x] == 0) & (lowest[x] == 0) & (label[x] != NOTHING)
        g[x] += low if lowest[x] != 0 else zero
        g[x] += high if at_high else zero


@njit(**IN_VECTORS)
def add_lines(p, k, label, bins, buffers, lines, g):
    """Add to g the slope that a loss of the sums gives p of class k.

    Args:
        p: probabilities of the class.
        k: the class.
        label: labels.
        bins: the bins.
        buffers: of :func:`bin_buffers`.
        lines: ``(2 * cells * LINE,)``, for voxels that are no hit and for hits.
        g: the slopes.
    """
    code, hits = np.uint8(k), lines.shape[0] // 2
    lowest, highest = _ends(bins)
    number = _mark(p, label, bins, buffers)
    _add_at_ends(label, buffers, lines[LINE * lowest], lines[LINE * highest], g)
    for j in range(number):
        x = buffers.places[j]
        i = LINE * _cell(p, x, bins)[0] + (hits if label[x] == code else 0)
        g[x] += lines[i] + lines[i + 1] * p[x]
