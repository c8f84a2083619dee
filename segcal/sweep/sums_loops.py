"""The sweep's loops for losses of sums, such as soft Dice and mL1-ACE, compiled by Numba.

**What is computed.** With p the softmax of a voxel, y its label, and sums over the voxels of image
n that count, :func:`sum_blocks` finds the cross-entropy, by choice the sums of overlaps

    P_nk = sum_i p_k(i)      O_nk = sum_i p_k(i) [k = y(i)]      T_nk = sum_i [k = y(i)]

and the sums by bin of :mod:`segcal.sweep.bins_loops`, and the first class of the largest logit. A
loss of these sums has some slope g_k by p_k at a voxel. That of a loss of overlaps is
``P'_nk + O'_nk [k = y]``, that of a loss of bins a straight line in p_k in every cell; slopes of
several losses are added. Then

    dL/dl_k = p_k (g_k - sum_j p_j g_j)

**Why two passes.** The slopes are known when all sums are known. The first pass leaves the softmax
in the memory that will hold the gradient; the second, in :mod:`segcal.sweep.loops` or
:mod:`segcal.sweep.confidence_loops`, turns it into the gradient in place. So exponentials are
computed once, and nothing else of the logits' size is kept. :func:`set_slopes` is what the second
pass needs of this module.

**Invariants.** A block is consecutive stretches of one image. Which stretches make a block depends
on shape and number of bins alone, and every block has sums of its own, so results have the same
bits on any number of threads. A voxel that does not count adds 0, whatever its logits; a NaN in any
other voxel reaches the sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from segcal.compiling import compiled
from segcal.sweep.bins_loops import (
    EXTRA_CELLS,
    LANES,
    SLOTS,
    Bins,
    add,
    add_lines,
    bin_buffers,
)
from segcal.sweep.sharing import take
from segcal.sweep.stretches import (
    STRETCH,
    cross_entropy,
    of_class,
    set_ce_weights,
    set_exponentials,
    set_largest,
    set_largest_class,
    sum_of,
)
from segcal.sweep.terms import NOTHING
from segcal.sweep.vector_math import ANY_ORDER, EXACT

PROBABILITY, OVERLAP, SIZE = 0, 1, 2
"""Tables ``(K,)`` of an image's overlaps."""


class SumNumbers(NamedTuple):
    """A :class:`segcal.sweep.terms.SumsPlan` in the form for compiled code.

    Attributes:
        ce_weight: ``(K,)``, weight of a voxel's cross-entropy by its label.
        one_ce_weight: whether all classes have the same weight.
        bins: the bins.
        gaps: whether some codes are ``NOTHING``.
        with_ce: whether to compute the cross-entropy.
        with_overlaps: whether to sum overlaps.
        with_bins: whether to sum by bin.
        with_predicted: whether to find the first class of the largest logit.
        with_softmax: whether to keep the softmax.
    """

    ce_weight: NDArray[np.float64]
    one_ce_weight: bool
    bins: Bins
    gaps: bool
    with_ce: bool
    with_overlaps: bool
    with_bins: bool
    with_predicted: bool
    with_softmax: bool


class SumSlopes(NamedTuple):
    """Slopes of losses of sums, for the second pass.

    Attributes:
        overlaps: ``(N, 2, K)``, P' and O'; empty without a loss of overlaps.
        lines: ``(N, K, 2 * (M + 1) * LINE)`` of the logits' type: the slope of a loss of bins as a
            line in p by cell, first for voxels that are no hit and then for hits; empty without
            such a loss.
        bins: the bins.
    """

    overlaps: NDArray[np.float64]
    lines: NDArray[Any]
    bins: Bins


FLOAT_SLOTS = 4
LARGEST, NORM, WEIGHT, GAP = range(FLOAT_SLOTS)
# max l; sum of e^(l - max l); w_y; the cross-entropy


@njit(**ANY_ORDER)
def _add_overlaps(p, code, gaps, label, sums):
    """Add a stretch of one class to P, O and T, which are `sums` ``(3,)``."""
    probability, overlap, hits = 0.0, 0.0, np.int32(0)
    if gaps:
        for x in range(p.shape[0]):
            probability += np.float64(p[x]) if label[x] != NOTHING else 0.0
    else:
        probability = sum_of(p)
    for x in range(p.shape[0]):
        hit = label[x] == code
        overlap += np.float64(p[x]) if hit else 0.0
        hits = np.int32(hits + hit)
    sums[PROBABILITY] += probability
    sums[OVERLAP] += overlap
    sums[SIZE] += hits


@njit(inline="always")
def _sum_stretch(logits, codes, plan, at, floats, probs, buffers, out):
    """Add the voxels at ``(n, 0, start, stop)``."""
    width = at[3] - at[2]
    label = codes[at[0], at[2] : at[3]]
    largest, norm, weight = floats[LARGEST, :width], floats[NORM, :width], floats[WEIGHT, :width]
    gap = floats[GAP, :width]
    softmax, predicted, sums, overlaps, table = out
    if plan.with_predicted:
        set_largest_class(logits, at, largest, predicted[at[0], at[2] : at[3]])
    else:
        set_largest(logits, at, largest)
    set_exponentials(logits, at, largest, probs, norm)
    if plan.with_ce:
        set_ce_weights(plan.ce_weight, plan.one_ce_weight, label, weight)
        sums[0] += cross_entropy(logits, at, label, largest, norm, weight, gap)
    for k in range(logits.shape[1]):
        p = probs[k, :width]
        for x in range(width):
            p[x] /= norm[x]
        if plan.with_softmax:
            of_class(softmax, k, at)[:] = p
        if plan.with_overlaps:
            _add_overlaps(p, np.uint8(k), plan.gaps, label, overlaps[:, k])
        if plan.with_bins:
            add(p, k, label, plan.bins, buffers, table[k])


@partial(compiled, fastmath=EXACT)
def sum_blocks(
    logits, codes, plan, per_block, softmax, predicted, all_sums, all_overlaps, all_cells, counter
):
    """Sum the stretches of the blocks that `counter` gives.

    Args:
        logits: ``(N, K, 1, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.
        plan: :class:`SumNumbers`.
        per_block: number of stretches of a block.
        softmax: like `logits`, set; empty where it is not wanted.
        predicted: uint8 ``(N, V)``, set; empty where it is not wanted.
        all_sums: float64 ``(N, blocks / N, 1)``, zeros: weighted sums of the cross-entropy.
        all_overlaps: float64 ``(N, blocks / N, 3, K)``, zeros.
        all_cells: float64 ``(N, blocks / N, K, M + 1, SLOTS)``, zeros.
        counter: see :func:`segcal.sweep.sharing.take`.
    """
    images, classes, _, size = logits.shape
    per_image, per_lane = all_sums.shape[1], plan.bins.number + EXTRA_CELLS
    length = min(size, STRETCH)
    floats = np.empty((FLOAT_SLOTS, length), logits.dtype)
    probs = np.empty((classes, length), logits.dtype)
    buffers = bin_buffers(length)
    table = np.zeros((classes, (LANES if plan.with_bins else 0) * per_lane * SLOTS))
    block = take(counter)
    while block < images * per_image:
        n, part = block // per_image, block % per_image
        table[:] = 0.0
        out = (softmax, predicted, all_sums[n, part], all_overlaps[n, part], table)
        begin = part * per_block * STRETCH
        for start in range(begin, min(begin + per_block * STRETCH, size), STRETCH):
            at = (n, 0, start, min(start + STRETCH, size))
            _sum_stretch(logits, codes, plan, at, floats, probs, buffers, out)
        if plan.with_bins:
            by_lane = table.reshape((classes, LANES, per_lane, SLOTS))
            for lane in range(LANES):
                all_cells[n, part] += by_lane[:, lane]
        block = take(counter)


@njit(inline="always")
def set_slopes(softmax, at, slopes, label, g, total, buffers):
    """Set g of every class of a stretch, and total to the sum of p g.

    Args:
        softmax: ``(N, K, Z, V)``.
        at: the stretch.
        slopes: :class:`SumSlopes`.
        label: labels of the stretch.
        g: ``(K, length)`` of the logits' type.
        total: ``(width,)`` of the logits' type.
        buffers: of :func:`segcal.sweep.bins_loops.bin_buffers`.
    """
    T, width = total.dtype.type, total.shape[0]
    for x in range(width):
        total[x] = T(0)
    for k in range(softmax.shape[1]):
        p, row, code = of_class(softmax, k, at), g[k, :width], np.uint8(k)
        miss, hit = T(0), T(0)
        if slopes.overlaps.shape[0]:
            of_image = slopes.overlaps[at[0]]
            miss, hit = T(of_image[0, k]), T(of_image[0, k] + of_image[1, k])
        for x in range(width):
            row[x] = hit if label[x] == code else miss
        if slopes.lines.shape[0]:
            add_lines(p, k, label, slopes.bins, buffers, slopes.lines[at[0], k], row)
        for x in range(width):
            total[x] += p[x] * row[x]
