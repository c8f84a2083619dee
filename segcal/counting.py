"""Loops of the tally over voxels, compiled."""

from __future__ import annotations

import numpy as np
from numba import njit

from segcal.binning import EDGE_TOLERANCE
from segcal.compiling import compiled
from segcal.tensors import PROBABILITY_TOLERANCE

UNITS = 2**40
"""Units of a confidence of 1."""
NLL_FLOOR = 1e-12
ROUNDING = 2.0**52
"""A number plus this, less this, is the nearest integer."""
BLOCK = 2048
"""Voxels whose intermediate results stay in the fastest cache."""
WRONG_VALUE, WRONG_LABEL = 1, 2


@njit(inline="always")
def cell_of(value, bins, per):
    """Cell of a confidence: the bin (lo, hi], by the rule of equal_width_index, then within it.

    Rounding is done by additions, which become vector instructions; floor and ceil are calls.
    """
    x = value * bins
    above = x - EDGE_TOLERANCE
    m = (above + ROUNDING) - ROUNDING
    m = m - 1.0 if m >= above else m  # ceil - 1
    m = min(max(m, 0.0), bins - 1.0)
    within = (x - m) * per
    s = (within + ROUNDING) - ROUNDING
    s = s - 1.0 if s > within else s  # floor
    return m * per + min(max(s, 0.0), per - 1.0)


@compiled
def count_cells(p, y, zone, threshold, bins, packed, sums):
    """Add some voxels to `packed` (zones, 1 + K, F + 1, 2) and `sums` (zones, 2).

    The first number of a cell holds its predictions and, times 2^32, its hits; the second the
    distances from the lower edge.
    """
    k, n = p.shape
    fine = packed.shape[2] - 1
    per = fine // bins
    step = UNITS // fine
    edge = cell_of(threshold, bins, per)
    flat = packed.reshape(-1)
    row, zones_apart = 2 * (fine + 1), 2 * (fine + 1) * (k + 1)
    top = np.empty(BLOCK)
    best = np.empty(BLOCK)
    own = np.empty(BLOCK)
    square = np.empty(BLOCK)
    cells = np.empty(BLOCK)
    distance = np.empty(BLOCK)
    part = np.empty_like(sums)
    for first in range(0, n, BLOCK):
        size = min(BLOCK, n - first)
        top[:size] = -1.0
        best[:size] = 0
        own[:size] = 0.0
        square[:size] = 0.0
        for c in range(k):
            good = True
            for i in range(size):  # without branches, so that it becomes vector instructions
                v = np.float64(p[c, first + i])
                good &= (v >= -PROBABILITY_TOLERANCE) & (v <= 1.0 + PROBABILITY_TOLERANCE)
                more = v > top[i]
                top[i] = v if more else top[i]
                best[i] = c if more else best[i]
                own[i] = v if y[first + i] == c else own[i]
                square[i] += v * v
                cell = cell_of(v, bins, per)
                distance[i] = ((v * UNITS + ROUNDING) - ROUNDING) - cell * step
                cells[i] = fine if (cell == edge) & (v > threshold) else cell
            if not good:
                return WRONG_VALUE
            for i in range(size):
                z = zone[first + i]
                if z >= 0:
                    hit = np.int64(y[first + i] == c)
                    at = z * zones_apart + (1 + c) * row + 2 * np.int64(cells[i])
                    flat[at] += 1 + (hit << 32)
                    flat[at + 1] += np.int64(distance[i])
        for i in range(size):
            cells[i] = cell_of(top[i], bins, per)
            distance[i] = ((top[i] * UNITS + ROUNDING) - ROUNDING) - cells[i] * step
        part[:] = 0.0
        for i in range(size):
            z = zone[first + i]
            if z < 0:
                continue
            label = y[first + i]
            if label < 0 or label >= k:
                return WRONG_LABEL
            at = z * zones_apart + 2 * np.int64(cells[i])
            flat[at] += 1 + (np.int64(best[i] == label) << 32)
            flat[at + 1] += np.int64(distance[i])
            part[z, 0] -= np.log(max(own[i], NLL_FLOOR))
            part[z, 1] += square[i] - 2 * own[i] + 1
        sums += part
    return 0


@compiled
def count_values(
    p, y, zone, channel, threshold, bins, place, begin, listed, table, bits, marks, ends
):
    """Count predictions and hits of every distinct float32 value in some cells.

    Arguments as of :func:`count_cells`, but `p` of one class alone (of all for the top label, whose
    channel is -1). By cell, `place` (F + 1,) is its number among those to look at, or -1. By that
    number: if `listed`, the bits of its predictions go to `bits`, and twice the zone plus the hit
    to `marks`, from `begin` on up to `ends`; if not, they are counted in `table` (zones, values,
    2), where the value with bits 0 would be at `begin`.
    """
    k, n = p.shape
    fine = len(place) - 1
    per = fine // bins
    edge = cell_of(threshold, bins, per)
    value = np.empty(BLOCK, np.float32)
    pattern = value.view(np.int32)
    best = np.empty(BLOCK, np.int32)
    cells = np.empty(BLOCK, np.int32)
    for first in range(0, n, BLOCK):
        size = min(BLOCK, n - first)
        for i in range(size):
            value[i] = p[0, first + i]
            best[i] = max(channel, 0)
        for c in range(1, k):
            for i in range(size):
                v = p[c, first + i]
                more = v > value[i]
                value[i] = v if more else value[i]
                best[i] = c if more else best[i]
        for i in range(size):
            cell = cell_of(np.float64(value[i]), bins, per)
            cells[i] = np.int32(fine if (channel >= 0) & (cell == edge) else cell)
        for i in range(size):
            j = place[cells[i]]
            z = zone[first + i]
            if j < 0 or z < 0 or (channel >= 0 and value[i] <= threshold):
                continue
            hit = y[first + i] == best[i]
            if listed[j]:
                bits[ends[j]] = pattern[i]
                marks[ends[j]] = 2 * z + hit
                ends[j] += 1
            else:
                table[z, begin[j] + pattern[i], 0] += 1
                table[z, begin[j] + pattern[i], 1] += hit


@compiled
def most_likely(p, found):
    """Write the class of the largest of `p` (K, n), the lowest of equals, to `found` (n,)."""
    k, n = p.shape
    for i in range(n):
        best = 0
        for c in range(1, k):
            if p[c, i] > p[best, i]:
                best = c
        found[i] = best
