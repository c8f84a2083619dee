"""The loop of :mod:`segcal.metrics.structure_sums` over voxels, compiled.

Voxels are processed in blocks, whose two largest probabilities stay in a fast cache. Each structure
takes a loop over the block without branches, so that it becomes vector instructions. The compiler
may choose the order of the additions in a block (``reassoc``), but it is always the same: first
within a block, then over the blocks of a piece, whichever thread did it. A structure that adds
nothing to a block is skipped: its probability is 0 there, no voxel was predicted as it, and none is
undecided against 0. Of many classes nearly all are skipped nearly everywhere. What is counted by
comparing (above the level, undecided) is skipped where the largest probability of the block says
that there is nothing to count.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from segcal.compiling import compiled

__all__ = ["add_structures"]

BLOCK = 2048
SUMS = 9
VOXELS, TOTAL, IN_MASK, SQUARES, SURELY, POSSIBLY, INSIDE, OUTSIDE, LARGEST = range(SUMS)
"""Sums of a structure: voxels of the mask; sums of p, of p in the mask, of p^2; voxels above both
ends of the level; undecided voxels of the mask, and beside it; and the largest p."""


@partial(compiled, fastmath=("reassoc",))
def add_structures(p, at, decided, channels, labels, regions, ends, tie, sums):
    """Add the voxels of a piece to the sums of every structure.

    Args:
        p: probabilities ``(K, N)``, float32 or float64, contiguous.
        at: index of the first voxel in `p`.
        decided: labels int32 ``(n,)``.
        channels: channel of every structure, int64 ``(structures,)``.
        labels: labels of every structure, int32 ``(structures, most)``, filled up by repetition.
        regions: whether the rival of a structure is to be outside it; else the strongest class.
        ends: bounds above which p is counted as POSSIBLY and as SURELY.
        tie: largest difference of p and its rival at which a voxel is undecided.
        sums: float64 ``(structures, 9)``.
    """
    k, n = len(p), len(decided)
    low, high = ends
    first, second = np.empty(BLOCK, p.dtype), np.empty(BLOCK, p.dtype)
    mask = np.empty(BLOCK, np.uint8)
    seen = np.empty(k, np.bool_)
    for start in range(0, n, BLOCK):
        size = min(BLOCK, n - start)
        for i in range(size):
            first[i], second[i] = -np.inf, -np.inf
        for c in range(k):
            row, found = p[c, at + start : at + start + size], False
            for i in range(size):
                v, most = row[i], first[i]
                lesser = v if v < most else most
                second[i] = lesser if lesser > second[i] else second[i]
                first[i] = v if v > most else most
                found |= v != 0
            seen[c] = found
        least = np.inf
        for i in range(size):
            least = min(least, np.float64(first[i]))
        against_zero = regions or least <= tie
        for s in range(len(channels)):
            c, part = channels[s], sums[s]
            row = p[c, at + start : at + start + size]
            voxels = 0
            for i in range(size):
                mask[i] = decided[start + i] == labels[s, 0]
            for j in range(1, labels.shape[1]):
                for i in range(size):
                    mask[i] |= decided[start + i] == labels[s, j]
            for i in range(size):
                voxels += mask[i]
            if not (seen[c] or voxels or against_zero):
                continue
            total, in_mask, squares, largest = 0.0, 0.0, 0.0, 0.0
            for i in range(size):
                v = np.float64(row[i])
                total += v
                in_mask += v if mask[i] != 0 else 0.0
                squares += v * v
                largest = max(largest, v)
            part[VOXELS] += voxels
            part[TOTAL] += total
            part[IN_MASK] += in_mask
            part[SQUARES] += squares
            part[LARGEST] = max(part[LARGEST], largest)
            nearest = 1 - largest if regions else least
            if largest <= low and largest - nearest < -tie:
                continue
            surely, possibly, inside, outside = 0, 0, 0, 0
            for i in range(size):
                v = np.float64(row[i])
                strongest = np.float64(first[i])
                rival = (
                    1 - v if regions else (strongest if v < strongest else np.float64(second[i]))
                )
                open_ = abs(v - rival) <= tie
                inside_mask = mask[i] != 0
                surely += v > high
                possibly += v > low
                inside += open_ & inside_mask
                outside += open_ & (not inside_mask)
            part[SURELY] += surely
            part[POSSIBLY] += possibly
            part[INSIDE] += inside
            part[OUTSIDE] += outside
