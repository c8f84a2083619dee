"""Loops that sum probabilities by bin, and the gradient of a loss of the sums, for CPUs.

**What is computed.** For a voxel with label y and logits l, p is the softmax, and every p_k belongs
to bins m of M by weights w_m: all of it to the bin of :func:`segcal.binning.equal_width_index`
(hard), or 1 - f to bin a and f to bin a + 1, where ``t = min(max(M p_k - 1/2, 0), M - 1)``, a is
its integer part and f the rest (soft). :func:`sum_block` finds, per image n, class k and bin m,

    W = sum w_m      C = sum w_m p_k      A = sum w_m [k = y]

From a loss L of these, by its derivatives, :func:`pull_block` finds the gradient

    dL/dl_k = p_k (g_k - sum_j p_j g_j)
    g_k = sum_m w_m dL/dC_m + sum_m w_m' (dL/dW_m + p_k dL/dC_m + [k = y] dL/dA_m)

where w' is 0 for hard bins, and -M and M for soft bins if t is not at a bound. Within a cell (see
below) g_k is a straight line in p_k, whose two numbers are looked up.

**Why two passes.** The loss is known when all voxels are summed. The second pass computes the
softmax anew, so that the gradient is all that is kept in the size of the logits.

**Cells.** Numbers are summed by cell. There are M + 2 cells: a; or ``M`` where t is held at 0 (so
that w' is 0; at its upper bound a + 1 is a); or ``M + 1`` for voxels that do not count. A cell has
sums of 1 - f, f, (1 - f) p and f p. Additions to the same number wait for each other, and mostly
the same cell comes again, so neighbouring voxels go to ``LANES`` tables in turn. Hits are added
once per voxel, by the probability of its label, not once per class.

**Layout.** Logits are ``(N, K, V)``, contiguous; the loops need no neighbours of a voxel. Stretches
are defined in :mod:`segcal.sweep.loops`; a block is consecutive stretches of one image.

**Invariants.** Which stretches make a block depends on shape and number of bins alone, and every
block adds to tables of its own, so results have the same bits on any number of threads. A voxel
with label ``NOTHING`` gives exactly 0 to sums and gradient. A NaN in the logits of any other voxel
reaches the sums, in some bin. Sums are float64; everything else has the type of the logits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from segcal.compiling import compiled
from segcal.sweep.loops import STRETCH, of_class, set_exponentials, set_largest
from segcal.sweep.terms import NOTHING
from segcal.sweep.vector_math import EXACT

LANES = 4
SLOTS = 4
"""Sums of a cell: of 1 - f, f, (1 - f) p and f p."""
HIT_SLOTS = 2
"""Sums of a cell over the voxels whose label is the class: of 1 - f and f."""
EXTRA_CELLS = 2
"""Beyond one for each bin: t held at 0, and voxels that do not count."""
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


class BinBuffers(NamedTuple):
    """Buffers of a stretch, with one number per voxel.

    Attributes:
        floats: ``(FLOAT_SLOTS, length)`` of the logits' type.
        cells: int32 ``(length,)``, cells of the current class.
        probs: ``(K, length)``, e^(l - max l), then p.
        slopes: ``(K, length)``, g; for no class in the first pass.
    """

    floats: Any
    cells: Any
    probs: Any
    slopes: Any


FLOAT_SLOTS = 4
LARGEST = 0  # max l
NORM = 1  # the sum of e^(l - max l)
SHARE = 2  # f, of the class in turn
OWN = 3  # p of the label; in the second pass the sum of p g


@njit
def _buffers(logits, classes_of_slopes):
    length = min(logits.shape[3], STRETCH)
    return BinBuffers(
        np.empty((FLOAT_SLOTS, length), logits.dtype),
        np.empty(length, np.int32),
        np.empty((logits.shape[1], length), logits.dtype),
        np.empty((classes_of_slopes, length), logits.dtype),
    )


@njit(forceinline=True, fastmath=EXACT)
def _set_probabilities(logits, at, largest, norm, probs):
    """Set the softmax of a stretch."""
    set_largest(logits, at, largest)
    set_exponentials(logits, at, largest, probs, norm)
    for k in range(logits.shape[1]):
        e = probs[k, : norm.shape[0]]
        for x in range(norm.shape[0]):
            e[x] /= norm[x]


@njit(forceinline=True, fastmath=EXACT)
def _set_cells(p, label, bins, cells, share):
    """Set the cell of every p, and f; selections are written so that NaN has a cell."""
    T = p.dtype.type
    zero, half, count, top = T(0), T(0.5), T(bins.number), T(bins.number - 1)
    if bins.soft:
        for x in range(p.shape[0]):
            position = p[x] * count - half
            inside = top if position > top else position
            inside = zero if inside < zero else inside
            left = np.floor(inside)
            share[x] = inside - left
            left = left if left > zero else zero
            cells[x] = np.int32(count if position < zero else left)
    else:
        for x in range(p.shape[0]):
            m = np.ceil(np.float64(np.float32(p[x])) * bins.number - bins.tolerance) - 1.0
            m = m if m > 0.0 else 0.0
            cells[x] = np.int32(m if m < bins.number - 1.0 else bins.number - 1.0)
            share[x] = zero
    nothing = np.int32(bins.number + 1)
    for x in range(p.shape[0]):
        cells[x] = nothing if label[x] == NOTHING else cells[x]


@njit(forceinline=True, fastmath=EXACT)
def _add(p, cells, share, per_lane, table):
    """Add a stretch of one class to its sums ``(LANES * cells * SLOTS,)``."""
    for x in range(p.shape[0]):
        i = SLOTS * ((x & (LANES - 1)) * per_lane + cells[x])
        f, v = np.float64(share[x]), np.float64(p[x])
        w = 1.0 - f
        a, b, c, d = table[i], table[i + 1], table[i + 2], table[i + 3]
        table[i] = a + w
        table[i + 1] = b + f
        table[i + 2] = c + w * v
        table[i + 3] = d + f * v


@njit(forceinline=True, fastmath=EXACT)
def _add_hits(label, cells, share, per_lane, table):
    """Add a stretch to the hits ``(K * LANES * cells * HIT_SLOTS,)``."""
    for x in range(label.shape[0]):
        y = np.int64(label[x]) if label[x] != NOTHING else 0
        i = HIT_SLOTS * ((y * LANES + (x & (LANES - 1))) * per_lane + cells[x])
        f = np.float64(share[x])
        a, b = table[i], table[i + 1]
        table[i] = a + (1.0 - f)
        table[i + 1] = b + f


@njit(inline="always")
def _sum_stretch(logits, codes, bins, at, buffers, table, hits):
    """Add the voxels at ``(n, 0, start, stop)``."""
    width, per_lane = at[3] - at[2], bins.number + EXTRA_CELLS
    label, floats, cells = codes[at[0], at[2] : at[3]], buffers.floats, buffers.cells[:width]
    largest, norm = floats[LARGEST, :width], floats[NORM, :width]
    share, own = floats[SHARE, :width], floats[OWN, :width]
    _set_probabilities(logits, at, largest, norm, buffers.probs)
    for x in range(width):
        own[x] = logits.dtype.type(0)
    for k in range(logits.shape[1]):
        p, code = buffers.probs[k, :width], np.uint8(k)
        for x in range(width):
            own[x] = p[x] if label[x] == code else own[x]
        _set_cells(p, label, bins, cells, share)
        _add(p, cells, share, per_lane, table[k])
    _set_cells(own, label, bins, cells, share)
    _add_hits(label, cells, share, per_lane, hits)


@partial(compiled, fastmath=EXACT)
def sum_block(logits, codes, bins, per_block, all_sums, all_hits, block):
    """Sum the stretches of one block by cell.

    Args:
        logits: ``(N, K, 1, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.
        bins: :class:`Bins`.
        per_block: number of stretches of a block.
        all_sums: float64 ``(N, blocks / N, K, M + 2, SLOTS)``, set for the block.
        all_hits: float64 ``(N, blocks / N, K, M + 2, HIT_SLOTS)``, set for the block.
        block: number of the block.
    """
    classes, size, per_lane = logits.shape[1], logits.shape[3], bins.number + EXTRA_CELLS
    n, part = block // all_sums.shape[1], block % all_sums.shape[1]
    buffers = _buffers(logits, 0)
    table = np.zeros((classes, LANES * per_lane * SLOTS))
    hits = np.zeros(classes * LANES * per_lane * HIT_SLOTS)
    begin = part * per_block * STRETCH
    for start in range(begin, min(begin + per_block * STRETCH, size), STRETCH):
        at = (n, 0, start, min(start + STRETCH, size))
        _sum_stretch(logits, codes, bins, at, buffers, table, hits)
    lanes = table.reshape((classes, LANES, per_lane, SLOTS))
    hit_lanes = hits.reshape((classes, LANES, per_lane, HIT_SLOTS))
    all_sums[n, part] = lanes[:, 0]
    all_hits[n, part] = hit_lanes[:, 0]
    for lane in range(1, LANES):
        all_sums[n, part] += lanes[:, lane]
        all_hits[n, part] += hit_lanes[:, lane]


@njit(forceinline=True, fastmath=EXACT)
def _set_slopes(p, k, label, cells, lines, g, total):
    """Set g of class k from `lines` ``(2 * cells * LINE,)``, and add p g to total."""
    code, of_hit = np.uint8(k), np.int32(lines.shape[0] // (2 * LINE))
    for x in range(p.shape[0]):
        cells[x] += of_hit if label[x] == code else np.int32(0)
    for x in range(p.shape[0]):
        i = LINE * np.int64(cells[x])
        g[x] = lines[i] + lines[i + 1] * p[x]
    for x in range(p.shape[0]):
        total[x] += p[x] * g[x]


@njit(forceinline=True, fastmath=EXACT)
def _write_gradient(out, label, p, g, total):
    """Write the gradient of a class."""
    zero = out.dtype.type(0)
    for x in range(out.shape[0]):
        out[x] = p[x] * (g[x] - total[x]) if label[x] != NOTHING else zero


@njit(inline="always")
def _pull_stretch(logits, codes, bins, lines, gradient, at, buffers):
    """Write the gradient of the voxels at ``(n, 0, start, stop)``."""
    width = at[3] - at[2]
    label, floats, cells = codes[at[0], at[2] : at[3]], buffers.floats, buffers.cells[:width]
    largest, norm = floats[LARGEST, :width], floats[NORM, :width]
    share, total = floats[SHARE, :width], floats[OWN, :width]
    _set_probabilities(logits, at, largest, norm, buffers.probs)
    for x in range(width):
        total[x] = logits.dtype.type(0)
    for k in range(logits.shape[1]):
        p, g = buffers.probs[k, :width], buffers.slopes[k, :width]
        _set_cells(p, label, bins, cells, share)
        _set_slopes(p, k, label, cells, lines[at[0], k], g, total)
    for k in range(logits.shape[1]):
        p, g = buffers.probs[k, :width], buffers.slopes[k, :width]
        _write_gradient(of_class(gradient, k, at), label, p, g, total)


@partial(compiled, fastmath=EXACT)
def pull_block(logits, codes, bins, per_block, per_image, lines, gradient, block):
    """Write the gradient of the stretches of one block.

    Args:
        logits: ``(N, K, 1, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.
        bins: :class:`Bins`.
        per_block: number of stretches of a block.
        per_image: number of blocks of an image.
        lines: ``(N, K, 2 * (M + 2) * LINE)`` of the logits' type: g as a line in p by cell, first
            for voxels that are no hit and then for hits.
        gradient: like `logits`.
        block: number of the block.
    """
    size = logits.shape[3]
    n, part = block // per_image, block % per_image
    buffers = _buffers(logits, logits.shape[1])
    begin = part * per_block * STRETCH
    for start in range(begin, min(begin + per_block * STRETCH, size), STRETCH):
        at = (n, 0, start, min(start + STRETCH, size))
        _pull_stretch(logits, codes, bins, lines, gradient, at, buffers)
