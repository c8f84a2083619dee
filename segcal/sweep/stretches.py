"""What all loops of the sweep on CPUs do with a stretch of voxels, compiled by Numba.

A *stretch* is up to ``STRETCH`` consecutive voxels ``(n, z, start, stop)`` of logits
``(N, K, Z, V)``, which are contiguous: the values of one class lie side by side. Inner loops run
over the voxels of a stretch and outer loops over the classes, with selections instead of branches,
so that they become vector instructions; numbers of a stretch stay in buffers that fit the fastest
caches. A *block* is some consecutive stretches, which one thread sweeps.

A NaN in the logits reaches what is computed of them: selections are written so that values which do
not compare go through, and none of the options of :mod:`segcal.sweep.vector_math` lets LLVM assume
that there are no NaN. Buffers have the type of the logits, float32 or float64, and the loops
are compiled once for each; sums are float64.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from segcal.sweep.terms import NOTHING
from segcal.sweep.vector_math import ANY_ORDER, IN_VECTORS, exponential, logarithm

STRETCH = 512
"""Number of voxels of a stretch; with float32 and 5 classes, its buffers take 40 KiB."""
BLOCK_VOXELS = 16384
"""About the number of voxels of a block: many enough to start one, few enough to share out."""


@njit
def split(planes, size):
    """Return the number of stretches of a plane of that size, and of stretches in a block."""
    return planes * ((size + STRETCH - 1) // STRETCH), max(1, BLOCK_VOXELS // min(size, STRETCH))


@njit
def blocks_of(planes, size):
    """Return the number of blocks of so many planes of that size."""
    stretches, per_block = split(planes, size)
    return (stretches + per_block - 1) // per_block


@njit(forceinline=True)
def of_class(planes, k, at):
    """Stretch of class k; slices like this one keep their last axis contiguous for the compiler."""
    return planes[at[0], k, at[1], at[2] : at[3]]


@njit(**ANY_ORDER)
def sum_of(values):
    """Return the sum of a stretch's values, in float64."""
    total = 0.0
    for x in range(values.shape[0]):
        total += np.float64(values[x])
    return total


@njit(**IN_VECTORS)
def set_largest(logits, at, largest):
    """Set the largest logit of every voxel of a stretch."""
    plane = of_class(logits, 0, at)
    for x in range(largest.shape[0]):
        largest[x] = plane[x]
    for k in range(1, logits.shape[1]):
        plane = of_class(logits, k, at)
        for x in range(largest.shape[0]):
            largest[x] = plane[x] if plane[x] > largest[x] else largest[x]


@njit(**IN_VECTORS)
def set_largest_class(logits, at, largest, found):
    """Set the largest logit of every voxel of a stretch, and the first class that has it."""
    plane = of_class(logits, 0, at)
    for x in range(largest.shape[0]):
        largest[x] = plane[x]
        found[x] = 0
    for k in range(1, logits.shape[1]):
        plane, code = of_class(logits, k, at), np.uint8(k)
        for x in range(largest.shape[0]):
            larger = plane[x] > largest[x]
            largest[x] = plane[x] if larger else largest[x]
            found[x] = code if larger else found[x]


@njit(**IN_VECTORS)
def set_exponentials(logits, at, largest, exps, norm):
    """Set e^(l - max l) of every class of a stretch, and norm to their sum."""
    zero = norm.dtype.type(0)
    for x in range(norm.shape[0]):
        norm[x] = zero
    for k in range(logits.shape[1]):
        plane, e = of_class(logits, k, at), exps[k, : norm.shape[0]]
        for x in range(norm.shape[0]):
            e[x] = exponential(plane[x] - largest[x])
            norm[x] += e[x]


@njit(**IN_VECTORS)
def set_ce_weights(table, alike, label, weight):
    """Set w_y, 0 where the voxel does not count; usually all classes have the same weight."""
    T = weight.dtype.type
    every, zero = T(table[0]), T(0)
    for x in range(label.shape[0]):
        weight[x] = every if label[x] != NOTHING else zero
    if not alike:
        for x in range(label.shape[0]):
            if label[x] != NOTHING:
                weight[x] = T(table[label[x]])


@njit(**IN_VECTORS)
def cross_entropy(logits, at, label, largest, norm, weight, gap):
    """Return the sum of the cross-entropy, given max l, the sum of e^(l - max l), and w_y."""
    zero = norm.dtype.type(0)
    for x in range(norm.shape[0]):
        gap[x] = zero
    for k in range(logits.shape[1]):
        plane, code = of_class(logits, k, at), np.uint8(k)  # bytes are compared 32 at a time
        for x in range(norm.shape[0]):
            gap[x] = largest[x] - plane[x] if label[x] == code else gap[x]
    for x in range(norm.shape[0]):
        gap[x] += logarithm(norm[x])
    for x in range(norm.shape[0]):
        gap[x] = gap[x] * weight[x] if label[x] != NOTHING else zero
    return sum_of(gap)
