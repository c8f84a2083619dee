"""The loops of :mod:`segcal.tally` over voxels, compiled; how they count and where.

Cells
-----
[0, 1] is cut into F cells: M bins of equal width, each cut into S = F / M cells of width 1 / F. A
confidence v lies in cell ``S m + s``, where::

    m = clip(ceil(M v - edge_tolerance(M)) - 1, 0, M - 1)   the bin, by equal_width_index's rule
    s = clip(floor(S (M v - m)), 0, S - 1)                  within it

Here v is the nearest float32, which is also compared with the threshold. A cell divided by S is
thus the bin that :func:`segcal.binning.equal_width_index` gives. Bins are (lo, hi] and cells [lo,
hi): the last cell of a bin also takes the bin's upper edge and the tolerance above it, the first
cell takes 0 and smaller values, the last cell takes values above 1. One more cell, number F,
belongs to the cell that the threshold of TACE lies in (the *edge*): in the channel of a class it
takes the values above the threshold from the edge, so that "the probabilities above the threshold"
are whole cells. Channel 0 is the top label, whose edge is not divided, channel 1 + k is class k.

What is counted
---------------
``packed`` of a channel is int64 ``(zones, F + 1, 2)``, contiguous. A zone is a set of voxels that
lie in the same scopes, so every voxel is counted once per channel, however many scopes it is in.
Looking up a cell takes most of the time. So the two words of a cell lie side by side, to be read
together, and one channel is counted after the other, whose cells then stay in a fast cache::

    [..., PACKED_COUNTS]      n + 2^32 h, for n predictions of which h are right
    [..., PACKED_DISTANCES]   sum of round(2^40 v) - cell * floor(2^40 / F)

A case has less than 2^31 voxels (:class:`segcal.tally.Voxels` refuses more), so hits cannot run
into the sign nor predictions into the hits, not even when zones, pieces and threads are added up.
The absolute value of a distance is less than 2^31 (``PROBABILITY_TOLERANCE`` allows values that far
outside [0, 1]; inside it is about 2^24), so the sum of distances stays below 2^62.

The sums are exact for this reason: a float32 of at least 2^-17 is an integer multiple of 2^-40,
thus its distance is an integer, and integers may be added in any order, by any number of threads,
and over cases. Smaller values, and float64, are rounded to the nearest 2^-40. The lower edge of a
cell need not be its true edge, because any integer that the reader adds again gives the same sum.
What was counted can also be taken away again exactly, with a `sign` of -1.

``extremes`` is float64 ``(zones, F + 1, 2)``, contiguous: the smallest confidence of the top labels
of a cell, and the smallest of the negated confidences; infinity in an empty cell. Two pieces are
merged by taking the smaller number, entry by entry.

``sums`` is float64 ``(zones, 2)``, the negative log-likelihood in nats [NLL] and the squared errors
[BRIER]. Floats do depend on the order of addition, so it is fixed: the voxels of a block one by
one, the blocks of a piece in their order; every piece has ``sums`` of its own, which the caller
adds in the order of the pieces, whichever thread did them. A logarithm takes longer than all else
that is done to a voxel, so the likelihoods of a block are multiplied, and the logarithm is taken of
the product: at the end of the block, or before the product could get too small for full precision.
The rounding of a block's product is below 2048 * 2^-53, about 2e-13 nats.

How
---
Voxels are processed in blocks of 2048, whose intermediate results stay in a fast cache. Each
channel takes two loops over the block. The first does arithmetic alone, without branches, calls or
scattered writes, so that it becomes vector instructions; the second adds to the cells, which cannot
become vector instructions. Rounding is done by adding 2^52 and subtracting it again, because
doubles from 2^52 on are integers. Hence no loop here may be compiled with ``fastmath``, which would
cancel the two. Named tuples are unpacked before a loop, classes are sliced to one-dimensional rows,
what is compared or chosen has one width, and arrays are filled by loops, not slices: otherwise a
loop does not become vector instructions, and takes up to four times as long.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numba.extending import register_jitable
from numpy.typing import NDArray

from segcal.arrays import PROBABILITY_TOLERANCE
from segcal.binning import EDGE_TOLERANCE, FLOAT32_STEP
from segcal.compiling import compiled

UNITS = 2**40
"""Number of units in a confidence of 1."""
NLL_FLOOR = 1e-12
SMALL = 1e-280
"""A product of likelihoods below this is replaced by its logarithm; times the floor it is still a
normal number."""
ROUNDING = 2.0**52
"""A number plus this, minus this, is the nearest integer (to the half where it is negative)."""
NEAR_SHIFT = 10
"""Bits of a float32 that :attr:`Sought.near` leaves out: its entries are four cells wide near 1."""
BLOCK = 2048
"""Number of voxels whose intermediate results stay in the fastest cache."""

PACKED_COUNTS, PACKED_DISTANCES = 0, 1
"""The words of a cell in ``packed``."""
WORDS = 2
HIT_SHIFT = 32
"""Predictions are the lower bits of PACKED_COUNTS; hits start at this one."""
NLL, BRIER = 0, 1
"""Slots of ``sums``."""
PREDICTIONS, HITS, DISTANCES = 0, 1, 2
"""Slots of a cell of :class:`segcal.tally.Tally`; a table of values has the first two."""
SLOTS = 3
TOP = 0
"""Channel of the top label; class k has the channel k + 1."""

COUNTED, WRONG_VALUE, WRONG_LABEL = 0, 1, 2
"""Result of :func:`count_class` and :func:`count_top` for a piece."""


class Sought(NamedTuple):
    """Cells whose distinct values are wanted, J of them, numbered in the order of their index."""

    place: NDArray[np.int32]
    """``(F + 1,)``: number of a cell among them, or -1."""
    listed: NDArray[np.bool_]
    """``(J,)``: whether the predictions of a cell are listed one by one, or counted by value."""
    begin: NDArray[np.int64]
    """``(J,)``: where the cell's list begins in `bits` and `marks`; or what to add to the bits of a
    value to get its row in `table`."""
    end: NDArray[np.int64]
    """``(J,)``: where the space for each list ends."""
    near: NDArray[np.uint8]
    """1 where values of a cell may be; the index is the upper bits of a value, from NEAR_SHIFT on.
    It is quicker to look up than a cell is to compute."""
    few: bool
    """Whether so few predictions are in the cells that `near` leaves out most."""


class Found(NamedTuple):
    """Predictions that a thread has found in the cells of a :class:`Sought`."""

    table: NDArray[np.int32]
    """``(zones, values, 2)``: PREDICTIONS and HITS of every value of the cells counted by value."""
    bits: NDArray[np.int32]
    """``(rows,)``: confidences of the predictions of the cells listed, as bits of float32."""
    marks: NDArray[np.uint8]
    """``(rows,)``: twice the zone, plus 1 for a hit."""
    ends: NDArray[np.int64]
    """``(J,)``: where the next entry of each list goes; at first as :attr:`Sought.begin`."""


@register_jitable(forceinline=True)
def cell_of(value, bins, per):
    """Cell of a confidence, by the formula above; callable from Python too.

    Ceil and floor are computed by rounding, which becomes vector instructions; they would be calls.
    """
    x = np.float64(np.float32(value)) * bins
    above = x - max(EDGE_TOLERANCE, bins * FLOAT32_STEP)
    m = (above + ROUNDING) - ROUNDING
    m = m - 1.0 if m >= above else m  # ceil - 1
    m = min(max(m, 0.0), bins - 1.0)
    within = (x - m) * per
    s = (within + ROUNDING) - ROUNDING
    s = s - 1.0 if s > within else s  # floor
    return m * per + min(max(s, 0.0), per - 1.0)


@njit(forceinline=True)
def _units_above(value, cell, step):
    """Units of a value from the lower edge of its cell."""
    return ((value * UNITS + ROUNDING) - ROUNDING) - cell * step


@njit(forceinline=True)
def _add(packed, z, cell, hit, distance, sign):
    """Add a prediction to a cell, or take it away."""
    packed[z, cell, PACKED_COUNTS] += sign * (1 + (np.int64(hit) << HIT_SHIFT))
    packed[z, cell, PACKED_DISTANCES] += sign * distance


@compiled
def count_class(p, y, zone, k, sign, threshold, bins, packed):
    """Add the probabilities of class k of a piece to `packed`, described at the top of this module.

    Args:
        p: probabilities ``(n,)`` of the class, float32 or float64, contiguous.
        y: labels uint8 or int32 ``(n,)``; only used where the zone is not -1.
        zone: int8 ``(n,)``, -1 for voxels that do not count (their probabilities are checked).
        k: the class.
        sign: 1 to add, or -1 to take away what was added.
        threshold: threshold of TACE.
        bins: M.
        packed: int64 ``(zones, F + 1, 2)``.

    Returns:
        COUNTED, or WRONG_VALUE where a value is no probability; `packed` is invalid then.
    """
    n = len(p)
    above = packed.shape[1] - 1
    per, step = above // bins, UNITS // above
    edge, least = cell_of(threshold, bins, per), np.float32(threshold)
    cells, distance = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    for first in range(0, n, BLOCK):
        size = min(BLOCK, n - first)
        good = True
        for i in range(size):  # vector instructions, see above
            v = np.float64(p[first + i])
            good &= (v >= -PROBABILITY_TOLERANCE) & (v <= 1.0 + PROBABILITY_TOLERANCE)
            cell = cell_of(v, bins, per)
            distance[i] = np.int32(_units_above(v, cell, step))
            cells[i] = np.int32(above if (cell == edge) & (np.float32(v) > least) else cell)
        if not good:  # or NaN
            return WRONG_VALUE
        for i in range(size):
            z = zone[first + i]
            if z >= 0:
                _add(packed, z, cells[i], y[first + i] == k, np.int64(distance[i]), sign)
    return COUNTED


@compiled
def count_top(p, at, y, zone, bins, packed, extremes, sums):
    """Add the top labels of a piece to `packed`, their `extremes`, and the losses to `sums`.

    The squared error ``sum_k (p_k - [y = k])^2`` is ``sum_k p_k^2 - 2 p_y + 1``.

    Args:
        p: probabilities ``(K, N)``, float32 or float64, contiguous; :func:`count_class` checks all
            of them, this function checks the largest of each voxel.
        at: index of the first voxel in `p`.
        y: labels uint8 or int32 ``(n,)``; only used where the zone is not -1.
        zone: int8 ``(n,)``, -1 for voxels that do not count.
        bins: M.
        packed: int64 ``(zones, F + 1, 2)``.
        extremes: float64 ``(zones, F + 1, 2)``.
        sums: float64 ``(zones, 2)``.

    Returns:
        COUNTED; WRONG_VALUE where a value is no probability, or WRONG_LABEL where a label is no
        class. What was added to is invalid then.
    """
    k, n = len(p), len(y)
    fine = packed.shape[1] - 1
    per, step = fine // bins, UNITS // fine
    value, square = np.empty(BLOCK, p.dtype), np.empty(BLOCK)
    cells, distance = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.int32)
    part, product = np.zeros_like(sums), np.ones(len(sums))
    for first in range(0, n, BLOCK):
        size = min(BLOCK, n - first)
        for i in range(size):
            value[i], square[i] = -np.inf, 0.0
        for c in range(k):
            row = p[c, at + first : at + first + size]
            for i in range(size):
                v, before = row[i], value[i]
                value[i] = v if v > before else before
                square[i] += np.float64(v) * np.float64(v)
        good = True
        for i in range(size):
            v = np.float64(value[i])
            good &= (v >= -PROBABILITY_TOLERANCE) & (v <= 1.0 + PROBABILITY_TOLERANCE)
            cell = cell_of(v, bins, per)
            distance[i] = np.int32(_units_above(v, cell, step))
            cells[i] = np.int32(cell)
        if not good:
            return WRONG_VALUE
        for i in range(size):
            z = zone[first + i]
            if z < 0:
                continue
            label = np.int64(y[first + i])
            if label < 0 or label >= k:
                return WRONG_LABEL
            own = np.float64(p[label, at + first + i])
            v, cell = np.float64(value[i]), cells[i]
            hit = _is_first(p, at + first + i, label, v)
            _add(packed, z, cell, hit, np.int64(distance[i]), 1)
            if v < extremes[z, cell, 0]:  # hardly ever, and what is not written is not waited for
                extremes[z, cell, 0] = v
            if -v < extremes[z, cell, 1]:
                extremes[z, cell, 1] = -v
            product[z] *= max(own, NLL_FLOOR)
            if product[z] < SMALL:
                part[z, NLL] -= np.log(product[z])
                product[z] = 1.0
            part[z, BRIER] += square[i] - 2 * own + 1
        for z in range(len(sums)):
            sums[z, NLL] += part[z, NLL] - np.log(product[z])
            sums[z, BRIER] += part[z, BRIER]
            part[z, NLL] = part[z, BRIER] = 0.0
            product[z] = 1.0
    return COUNTED


@njit(forceinline=True)
def _is_first(p, at, label, largest):
    """Whether a class is the first of the most likely classes of a voxel."""
    first = p[label, at] == largest
    for c in range(label if first else 0):
        first &= p[c, at] < largest
    return first


@compiled
def count_values(p, at, y, zone, channel, threshold, bins, sought, found):
    """Count predictions and hits of every distinct float32 value in some cells.

    The bits of float32 values from 0 on, read as int32, rise with the values, so the values of a
    cell are a short range of integers. A table has a row for each of them; where a list is shorter,
    the predictions are listed instead, to be sorted later. Only the cells that a cut between groups
    of equal mass goes through are used.

    Args:
        p: ``(1, N)`` of one class, or ``(K, N)`` of all classes for the top label; float32,
            contiguous.
        at: index of the first voxel in `p`.
        y: labels ``(n,)``, as for :func:`count_class`.
        zone: int8 ``(n,)``, -1 for voxels that do not count.
        channel: 0 for the top label, 1 + k for class k.
        threshold: threshold of TACE; in the channel of a class, values not above it are left out.
        bins: M.
        sought: cells whose values are counted.
        found: where to add; its arrays have enough room.
    """
    n, of_class = len(y), channel != TOP
    above = len(sought.place) - 1
    per = above // bins
    edge, least = cell_of(threshold, bins, per), np.float32(threshold if of_class else -np.inf)
    value, cells = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.int32)
    chosen, index = np.empty(BLOCK + 1, np.int32), np.empty(BLOCK + 1, np.int32)
    pattern, near, place = value.view(np.int32), sought.near, sought.place
    for first in range(0, n, BLOCK):
        size = min(BLOCK, n - first)
        for i in range(size):
            value[i] = -np.inf
        for c in range(len(p)):
            row = p[c, at + first : at + first + size]
            for i in range(size):
                v, before = row[i], value[i]
                value[i] = v if v > before else before
        number = size
        if sought.few:
            number = 0
            for i in range(size):  # each is written, and kept by counting it: no branch
                chosen[number] = i
                number += near[max(pattern[i], 0) >> NEAR_SHIFT]
            for j in range(number):
                value[j] = value[chosen[j]]  # j is at most chosen[j]
        else:
            for i in range(size):
                chosen[i] = i
        for j in range(number):  # vector instructions
            cell = cell_of(np.float64(value[j]), bins, per)
            cells[j] = np.int32(above if of_class & (cell == edge) else cell)
        kept = 0
        for j in range(number):
            index[kept] = j
            kept += place[cells[j]] >= 0
        _note(
            p, at, y, zone, first, index[:kept], chosen, channel, least, value, cells, sought, found
        )  # fmt: skip


@njit(forceinline=True)
def _note(p, at, y, zone, first, index, chosen, channel, least, value, cells, sought, found):
    """List or count the chosen predictions of a block; a list's end shows if it is too long."""
    place, listed, begin, end, _, _ = sought
    table, bits, marks, ends = found
    pattern = value.view(np.int32)
    for number in index:
        i = first + chosen[number]
        j, z = place[cells[number]], zone[i]
        if z < 0 or value[number] <= least:
            continue
        label = np.int64(y[i])
        hit = label == channel - 1
        if channel == TOP:
            hit = _is_first(p, at + i, label, value[number])
        if listed[j]:
            row = ends[j]
            ends[j] = row + 1
            if row < end[j]:
                bits[row] = pattern[number]
                marks[row] = 2 * z + hit
        else:
            row = begin[j] + pattern[number]
            table[z, row, PREDICTIONS] += 1
            table[z, row, HITS] += hit


@compiled
def most_likely(p, at, found):
    """Write the class of the largest `p` (K, N), the lowest of equal ones, to `found` (n,).

    Its first voxel has the index `at` in `p`.
    """
    value, best = np.empty(BLOCK, p.dtype), np.empty(BLOCK, np.int32)
    for first in range(0, len(found), BLOCK):
        size = min(BLOCK, len(found) - first)
        for i in range(size):
            value[i], best[i] = -np.inf, 0
        for c in range(len(p)):
            row, this = p[c, at + first : at + first + size], np.int32(c)
            for i in range(size):
                v, before, class_ = row[i], value[i], best[i]
                more = v > before
                value[i] = v if more else before
                best[i] = this if more else class_
        for i in range(size):
            found[first + i] = best[i]
