"""The sweep's loops for losses of overlaps, such as soft Dice, compiled by Numba.

**What is computed.** With p the softmax of a voxel, y its label, and sums over the voxels of image
n that count,

    P_nk = sum_i p_k(i)      O_nk = sum_i p_k(i) [k = y(i)]      T_nk = sum_i [k = y(i)]

are found by :func:`overlap_block`. A loss of these sums with derivatives P' and O' has, at a voxel,

    g_k = P'_nk + O'_nk [k = y]        dL/dl_k = p_k (g_k - sum_j p_j g_j)

which :func:`add_overlap_gradient` adds to the gradient of a stretch while its softmax is at hand.

**Why two passes.** The derivatives are known when all sums are known. The first pass only reads;
the second is the pass of :mod:`segcal.sweep.loops` or of :mod:`segcal.sweep.confidence_loops`,
which computes the exponentials anyway. Nothing of the logits' size is kept between the two.

**Invariants.** They are those of :mod:`segcal.sweep.loops`: blocks do not depend on the number of
threads, and add to sums of their own. A voxel that does not count adds 0, whatever its logits; a
NaN in any other voxel reaches the sums.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from segcal.compiling import compiled
from segcal.sweep.loops import STRETCH, set_exponentials, set_largest, sum_up
from segcal.sweep.terms import NOTHING
from segcal.sweep.vector_math import EXACT

PROBABILITY, OVERLAP, SIZE = 0, 1, 2
"""Tables ``(K,)`` of an image's sums."""
FLOAT_SLOTS = 4
LARGEST, NORM, COUNTED, OF_LABEL = range(FLOAT_SLOTS)
# max l; sum of e^(l - max l), then 1 over it; p of class k in turn where it counts, and where it
# is the label


@njit(inline="always")
def _sum_stretch(logits, codes, at, floats, exps, sums):
    """Add the voxels at ``(n, 0, start, stop)``."""
    width = at[3] - at[2]
    label = codes[at[0], at[2] : at[3]]
    largest, norm = floats[LARGEST, :width], floats[NORM, :width]
    counted, of_label = floats[COUNTED, :width], floats[OF_LABEL, :width]
    zero, one = norm.dtype.type(0), norm.dtype.type(1)
    set_largest(logits, at, largest)
    set_exponentials(logits, at, largest, exps, norm)
    for x in range(width):
        norm[x] = one / norm[x]
    for k in range(logits.shape[1]):
        e, code, hits = exps[k, :width], np.uint8(k), 0
        for x in range(width):
            counted[x] = e[x] * norm[x] if label[x] != NOTHING else zero
            of_label[x] = e[x] * norm[x] if label[x] == code else zero
            hits += label[x] == code
        sums[PROBABILITY, k] += sum_up(counted)
        sums[OVERLAP, k] += sum_up(of_label)
        sums[SIZE, k] += hits


@partial(compiled, fastmath=EXACT)
def overlap_block(logits, codes, per_block, all_sums, block):
    """Sum the stretches of one block.

    Args:
        logits: ``(N, K, 1, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.
        per_block: number of stretches of a block.
        all_sums: float64 ``(N, blocks / N, 3, K)``, zeros.
        block: number of the block.
    """
    classes, size = logits.shape[1], logits.shape[3]
    n, part = block // all_sums.shape[1], block % all_sums.shape[1]
    length = min(size, STRETCH)
    floats, exps = (
        np.empty((FLOAT_SLOTS, length), logits.dtype),
        np.empty((classes, length), logits.dtype),
    )
    begin = part * per_block * STRETCH
    for start in range(begin, min(begin + per_block * STRETCH, size), STRETCH):
        at = (n, 0, start, min(start + STRETCH, size))
        _sum_stretch(logits, codes, at, floats, exps, all_sums[n, part])
