"""The sweep's loops over voxels for CPUs, compiled by Numba: :func:`sweep_blocks`.

**What is computed.** For a voxel with label y, region r and logits l, and every class k,

    u_k = l_k - m_r c_k / n              with a patch, in which c_k of the n voxels that count
                                         are of class k
    u_k = s (max_j l_j - l_k - m_r)      without one
    z_k = |u_k|, u_k or -u_k             by ``SHAPE_CODES``
    CE  = w_y (log sum_j e^(l_j - max l) + max l - l_y)
    R   = v sum_k P(z_k; lam_rk, rho_rk)     P of :mod:`segcal.alm.functions`, v = 1 / (N divisor)

and, with a and b the factors of the two and p the softmax,

    d(a CE + b R)/dl_k = a w_y (p_k - [k = y]) + b v d_k        with a patch
                       = a w_y (p_k - [k = y]) - b v s d_k      without one
    d_k = P'(z_k) dz_k/du_k

Without a patch each of the T largest logits also gets its share ``b v s sum_j d_j / T`` of the
gradient that flows through ``max l``. In validation the sums of P' and of z per region and class,
and the number of voxels per region, are found as well.

**Why one pass.** The work is bound by memory: logits are read and the gradient is written once, and
everything else stays in buffers that fit the fastest caches. ``e^(l - max l)`` serves the
cross-entropy and its gradient; counts of labels serve the proportions and the regions.

**Losses of sums.** Where a loss of sums such as soft Dice takes part, a pass before this one has
found the cross-entropy and left the softmax in the memory of the gradient
(:mod:`segcal.sweep.sums_loops`). With its slopes g the gradient is then

    d/dl_k = b v d_k + p_k (a w_y + g_k - sum_j p_j g_j) - a w_y [k = y]

**Layout.** Logits are ``(N, K, Z, Y X)``, contiguous; a stretch is of one plane Y X. Stretches,
blocks and what is computed with all losses are in :mod:`segcal.sweep.stretches`. :class:`Buffers`
holds the numbers of a stretch: one per voxel, or per class and voxel.

**Patches.** Codes are labels as bytes ``(N, Z + kz - 1, Y + ky - 1, X + kx - 1)``, padded by half a
patch, ``NOTHING`` where a voxel does not count, ``NO_CLASS`` where it counts without a class. A
class is counted along a piece of a row: first down every column (kz ky bytes), then over kx
columns. Counts are bytes, so a patch has fewer voxels than 254, which ``supports`` ensures.

**Invariants.** Which stretches make a block depends on the shape alone, and every block adds to
sums of its own, so results have the same bits on any number of threads. A voxel with label
``NOTHING`` gives exactly 0 to values, statistics and gradient, whatever its logits.

**Inlining.** ``inline="always"`` is done by Numba, which then does not count references of the
arrays handed on; this saves a few percent in functions that run once per class. Such functions use
the floating-point optimisations of :func:`sweep_blocks`. ``forceinline`` is done by LLVM, and keeps
a function's own optimisations.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from segcal.compiling import compiled
from segcal.sweep.bins_loops import bin_buffers
from segcal.sweep.sharing import take
from segcal.sweep.stretches import (
    STRETCH,
    blocks_of,
    cross_entropy,
    of_class,
    set_ce_weights,
    set_exponentials,
    set_largest,
    split,
    sum_of,
)
from segcal.sweep.sums_loops import SumSlopes, set_slopes
from segcal.sweep.terms import ABS, NOTHING, P2, P3, PHR, RELU, UPPER, Z_LINEAR
from segcal.sweep.vector_math import ANY_ORDER, EXACT, IN_VECTORS

CROSS_ENTROPY, PENALTY = 0, 1
"""Places in a block's sums."""
SLOPE_SUM, Z_SUM, VOXELS = 0, 1, 2
"""Tables ``(R, K)`` in a block's statistics; of the last, class 0 alone is used."""


class Numbers(NamedTuple):
    """A :class:`segcal.sweep.terms.SweepPlan` in the form for compiled code.

    Attributes:
        ce_weight: ``(K,)``, weight of a voxel's cross-entropy by its label.
        penalty_weight: v.
        lam: multipliers ``(R, K)``.
        rho: penalty parameters ``(R, K)``.
        margins: ``(R,)``, m; with R = 2 the regions are those of the patch.
        sizes: sizes of the patch along Z, Y, X.
        scale: s.
        clip_low: lower bound of every P' in the statistics.
        clip_high: upper bound of every P' in the statistics.
        ce_factor: a.
        penalty_factor: b.
        shape: one of ``SHAPE_CODES``.
        function: one of ``FUNCTION_CODES``.
        from_largest: whether there is no patch.
        gaps: whether some codes are ``NOTHING``.
        one_ce_weight: whether all classes have the same weight.
        with_ce: whether to compute the cross-entropy.
        with_penalty: whether to compute the penalty.
        with_gradient: whether to compute the gradient.
        with_statistics: whether to compute the statistics.
        with_softmax: whether the softmax is in the memory of the gradient, for `slopes`; the
            cross-entropy's value is then not computed.
        slopes: of losses of sums.
    """

    ce_weight: NDArray[np.float64]
    penalty_weight: float
    lam: NDArray[np.float64]
    rho: NDArray[np.float64]
    margins: NDArray[np.float64]
    sizes: tuple[int, int, int]
    scale: float
    clip_low: float
    clip_high: float
    ce_factor: float
    penalty_factor: float
    shape: int
    function: int
    from_largest: bool
    gaps: bool
    one_ce_weight: bool
    with_ce: bool
    with_penalty: bool
    with_gradient: bool
    with_statistics: bool
    with_softmax: bool
    slopes: SumSlopes


class Buffers(NamedTuple):
    """Buffers of a stretch, by slot or by class, with one number per voxel.

    Rows are cut to the stretch where they are used, so that the last axis stays contiguous for the
    compiler. There are few arrays, because references of every array in a tuple are counted
    whenever the tuple is handed on.

    Attributes:
        bytes: uint8 ``(BYTE_SLOTS, length)``.
        floats: ``(FLOAT_SLOTS, length)`` of the logits' type.
        counts: uint8 ``(K, length)``, voxels in the patch of each class.
        exps: ``(K, length)`` of the logits' type, e^(l - max l); with a softmax, slopes g.
        bins: for :func:`set_slopes`.
        column: uint8 ``(length + kx - 1,)``, counts of columns in :func:`_count`.
    """

    bytes: Any
    floats: Any
    counts: Any
    exps: Any
    bins: Any
    column: Any


BYTE_SLOTS = 3
LABEL = 0  # code of the class; NOTHING where the voxel does not count
REGION = 1  # 0, or 1 where the patch holds several classes; NOTHING as above
TOTAL = 2  # voxels in the patch that count, at least 1

FLOAT_SLOTS = 11
LARGEST = 0  # max l
TIES = 1  # how many logits are the largest
NORM = 2  # the sum of e^(l - max l); then what turns these, or p, into their part of the gradient
CE_WEIGHT = 3  # w_y; then a w_y
GAP = 4  # max l - l_y; then the cross-entropy; with a softmax, the sum of p g
MARGIN = 5  # m, over the voxels in the patch that count
VALUE = 6  # the sum of P over the classes
ONTO_LARGEST = 7  # the sum of d over the classes; then the share of each largest logit
U = 8  # of the class in turn: the residual; then z
SLOPE, PULL = 9, 10  # of the class in turn: P', and d


@njit
def _buffers(classes, length, patch_width, dtype):
    """Buffers for stretches of up to `length` voxels."""
    return Buffers(
        np.empty((BYTE_SLOTS, length), np.uint8),
        np.empty((FLOAT_SLOTS, length), dtype),
        np.empty((classes, length), np.uint8),
        np.empty((classes, length), dtype),
        bin_buffers(length),
        np.empty(length + patch_width - 1, np.uint8),
    )


@njit(**IN_VECTORS)
def _count(codes, code, at, sizes, column, count):
    """count[x] = voxels of that code in the patch around x, for a piece of one row."""
    n, z, y, start, width = at
    kz, ky, kx = sizes
    k = np.uint8(code)
    for x in range(width + kx - 1):
        column[x] = 0
    for dz in range(kz):
        for dy in range(ky):
            row = codes[n, z + dz, y + dy, start : start + width + kx - 1]
            for x in range(width + kx - 1):
                column[x] += np.uint8(row[x] == k)
    for x in range(width):
        count[x] = column[x]
    for dx in range(1, kx):
        for x in range(width):
            count[x] += column[x + dx]


@njit(**IN_VECTORS)
def _look_around(codes, at, sizes, gaps, count_all, column, label, counts, total):
    """Set label, and if wanted counts and total; a stretch is pieces of rows of the plane."""
    n, z, start, stop = at
    row_length = codes.shape[3] - sizes[2] + 1
    whole = np.uint8(sizes[0] * sizes[1] * sizes[2])
    done = start
    while done < stop:
        y = done // row_length
        x0 = done - y * row_length
        width = min(row_length - x0, stop - done)
        here, piece = done - start, (n, z, y, x0, width)
        x1 = x0 + sizes[2] // 2
        label[here : here + width] = codes[n, z + sizes[0] // 2, y + sizes[1] // 2, x1 : x1 + width]
        if count_all:
            some = total[here : here + width]
            if gaps:
                _count(codes, NOTHING, piece, sizes, column, some)
                for x in range(width):
                    some[x] = max(whole - some[x], 1)
            else:
                for x in range(width):
                    some[x] = whole
            for k in range(counts.shape[0]):
                _count(codes, k, piece, sizes, column, counts[k, here : here + width])
        done += width


@njit(**IN_VECTORS)
def _set_regions(two, label, counts, region):
    """region[x] = whether the patch holds several classes, if there are two regions."""
    for x in range(region.shape[0]):
        region[x] = 0
    if two:
        for k in range(counts.shape[0]):
            count = counts[k, : region.shape[0]]
            for x in range(region.shape[0]):
                region[x] += np.uint8(count[x] > 0)
    for x in range(region.shape[0]):
        several = np.uint8(region[x] > 1)
        region[x] = several if label[x] != NOTHING else np.uint8(NOTHING)


@njit(**IN_VECTORS)
def _by_region(region, table, out):
    """out[x] = table[region[x]]; the table's first entry where the voxel does not count."""
    first = out.dtype.type(table[0])
    for x in range(out.shape[0]):
        out[x] = first
    for r in range(1, table.shape[0]):
        other, code = out.dtype.type(table[r]), np.uint8(r)
        for x in range(out.shape[0]):
            out[x] = other if region[x] == code else out[x]


@njit(**IN_VECTORS)
def _divide_by_neighbours(sizes, gaps, total, margin):
    """Divide margins by the voxels in the patch that count."""
    T = margin.dtype.type
    whole = T(sizes[0] * sizes[1] * sizes[2])
    per_voxel = T(1) / whole
    for x in range(margin.shape[0]):
        margin[x] *= per_voxel
    if gaps:  # else there is nothing to divide by that differs
        for x in range(margin.shape[0]):
            margin[x] *= whole / T(total[x])


@njit(**ANY_ORDER)
def _sum_of_region(values, region, r):
    total, code = 0.0, np.uint8(r)
    for x in range(values.shape[0]):
        total += np.float64(values[x]) if region[x] == code else 0.0
    return total


@njit(**IN_VECTORS)
def _prepare_gradient(factor, norm, weight):
    """Turn w_y into a w_y, and norm into the factor from exps to a w_y p."""
    for x in range(norm.shape[0]):
        weight[x] *= factor
        norm[x] = weight[x] / norm[x]


@njit(inline="always")
def _set_residuals(plane, count, from_largest, scale, largest, margin, u):
    """Set u of the class whose logits are `plane`."""
    T = u.dtype.type
    if from_largest:
        for x in range(u.shape[0]):
            u[x] = (largest[x] - plane[x] - margin[x]) * scale
    else:
        for x in range(u.shape[0]):
            u[x] = plane[x] - T(count[x]) * margin[x]


@njit(**IN_VECTORS)
def _penalise(function, shape, u, region, lam, rho, value, slope, pull):
    """Put z in place of u, add P(z) to value, set slope = P'(z) and pull = P'(z) dz/du.

    Above ``Z_LINEAR`` P continues along its tangent. `lam` and `rho` are those of the first region
    and of the last, which may be the same.
    """
    T = u.dtype.type
    zero, one, half, top = T(0), T(1), T(0.5), T(Z_LINEAR)
    fixed = one if shape == UPPER else -one
    for x in range(u.shape[0]):
        side = one if u[x] > zero else (-one if u[x] < zero else zero)
        side = side if shape == ABS else fixed
        z = side * u[x]
        inside = top if z > top else z
        beyond = z - inside
        la, rh = (lam[1], rho[1]) if region[x] == 1 else (lam[0], rho[0])
        if function == PHR:
            s = la + rh * inside
            d = rh if rh > T(1e-37) else T(1e-37)
            v = -half * la * la / d if s < zero else la * inside + half * rh * inside * inside
            s = zero if s < zero else s
        elif function == RELU:
            v = zero if inside < zero else la * inside
            s = zero if inside < zero else la
        else:
            cubic = rh * rh if function == P2 else zero
            p = zero if inside < zero else inside
            m = inside if inside < zero else zero
            d = one - rh * m
            v = la * m / d if inside < zero else p * (la + p * (la * rh + p * cubic * T(1 / 6)))
            s = la / (d * d) if inside < zero else la + p * (T(2) * la * rh + half * cubic * p)
        value[x] += v + s * beyond
        slope[x] = s
        u[x] = z
        pull[x] = s * side


@njit(inline="always")
def _penalise_by(function, shape, u, region, lam, rho, value, slope, pull):
    """One loop for each function, without a branch inside, as :func:`_penalise` describes."""
    if function == PHR:
        _penalise(PHR, shape, u, region, lam, rho, value, slope, pull)
    elif function == P2:
        _penalise(P2, shape, u, region, lam, rho, value, slope, pull)
    elif function == P3:
        _penalise(P3, shape, u, region, lam, rho, value, slope, pull)
    else:
        _penalise(RELU, shape, u, region, lam, rho, value, slope, pull)


@njit(inline="always")
def _observe(k, low, high, region, slope, z, statistics):
    """Add P' and z of class k to the statistics; P' is overwritten."""
    for x in range(slope.shape[0]):
        inside = low if slope[x] < low else slope[x]
        slope[x] = high if inside > high else inside
    for r in range(statistics.shape[1]):
        statistics[SLOPE_SUM, r, k] += _sum_of_region(slope, region, r)
        statistics[Z_SUM, r, k] += _sum_of_region(z, region, r)


@njit(**IN_VECTORS)
def _count_voxels(region, statistics):
    for r in range(statistics.shape[1]):
        voxels, code = 0, np.uint8(r)
        for x in range(region.shape[0]):
            voxels += region[x] == code
        statistics[VOXELS, r, 0] += voxels


@njit(inline="always")
def _write_gradient(g, k, factor, with_ce, label, pull, e, norm, weight):
    """Write the gradient of class k, without what flows through the largest logit."""
    zero, code = g.dtype.type(0), np.uint8(k)
    if with_ce:
        for x in range(g.shape[0]):
            hit = weight[x] if label[x] == code else zero
            slope = factor * pull[x] + e[x] * norm[x] - hit
            g[x] = slope if label[x] != NOTHING else zero
    else:
        for x in range(g.shape[0]):
            g[x] = factor * pull[x] if label[x] != NOTHING else zero


@njit(inline="always")
def _turn_softmax(g, k, factor, label, pull, slope, norm, weight):
    """Turn p of class k in g into the gradient, without what flows through the largest logit."""
    zero, code = g.dtype.type(0), np.uint8(k)
    for x in range(g.shape[0]):
        hit = weight[x] if label[x] == code else zero
        found = factor * pull[x] + g[x] * (norm[x] + slope[x]) - hit
        g[x] = found if label[x] != NOTHING else zero


@njit(**IN_VECTORS)
def _share_among_largest(logits, gradient, at, factor, label, largest, ties, share):
    """Add to the gradient of the largest logits what flows through them, in equal shares."""
    zero, one = ties.dtype.type(0), ties.dtype.type(1)
    for x in range(ties.shape[0]):
        ties[x] = zero
    for k in range(logits.shape[1]):
        plane = of_class(logits, k, at)
        for x in range(ties.shape[0]):
            ties[x] += one if plane[x] == largest[x] else zero
    for x in range(ties.shape[0]):
        each = factor * share[x] / (ties[x] if ties[x] > zero else one)  # a NaN equals nothing
        share[x] = each if label[x] != NOTHING else zero
    for k in range(logits.shape[1]):
        plane, g = of_class(logits, k, at), of_class(gradient, k, at)
        for x in range(ties.shape[0]):
            g[x] += share[x] if plane[x] == largest[x] else zero


@njit(inline="always")
def _sweep_classes(logits, plan, gradient, statistics, at, buffers):
    """Set the sum of P over the classes, and write the gradient."""
    width, floats = at[3] - at[2], buffers.floats
    label, region = buffers.bytes[LABEL, :width], buffers.bytes[REGION, :width]
    largest, margin, u = floats[LARGEST, :width], floats[MARGIN, :width], floats[U, :width]
    norm, weight, value = floats[NORM, :width], floats[CE_WEIGHT, :width], floats[VALUE, :width]
    slope, pull, onto_largest, ties = (
        floats[SLOPE, :width],
        floats[PULL, :width],
        floats[ONTO_LARGEST, :width],
        floats[TIES, :width],
    )
    T = u.dtype.type
    from_largest, scale = plan.from_largest, T(plan.scale)
    low, high = T(plan.clip_low), T(plan.clip_high)
    onto_each = T(plan.penalty_factor * plan.penalty_weight) * scale
    factor = -onto_each if from_largest else T(plan.penalty_factor * plan.penalty_weight)
    for x in range(width):
        value[x] = T(0)
        onto_largest[x] = T(0)
        pull[x] = T(0)
    for k in range(logits.shape[1]):
        if plan.with_penalty:
            lam = T(plan.lam[0, k]), T(plan.lam[-1, k])
            rho = T(plan.rho[0, k]), T(plan.rho[-1, k])
            plane, count = of_class(logits, k, at), buffers.counts[k, :width]
            _set_residuals(plane, count, from_largest, scale, largest, margin, u)
            _penalise_by(plan.function, plan.shape, u, region, lam, rho, value, slope, pull)
        if plan.with_statistics:
            _observe(k, low, high, region, slope, u, statistics)
        if plan.with_gradient:
            g, e = of_class(gradient, k, at), buffers.exps[k, :width]
            if plan.with_softmax:
                _turn_softmax(g, k, factor, label, pull, e, norm, weight)
            else:
                _write_gradient(g, k, factor, plan.with_ce, label, pull, e, norm, weight)
            if plan.with_penalty and from_largest:
                for x in range(width):
                    onto_largest[x] += pull[x]
    if plan.with_gradient and plan.with_penalty and from_largest:
        _share_among_largest(logits, gradient, at, onto_each, label, largest, ties, onto_largest)


@njit(inline="always")
def _sweep_stretch(logits, codes, plan, gradient, sums, statistics, at, buffers):
    """Sweep the voxels at ``(n, z, start, stop)``."""
    width, floats, exps, counts = at[3] - at[2], buffers.floats, buffers.exps, buffers.counts
    label, region = buffers.bytes[LABEL, :width], buffers.bytes[REGION, :width]
    total, margin = buffers.bytes[TOTAL, :width], floats[MARGIN, :width]
    largest, norm, gap = floats[LARGEST, :width], floats[NORM, :width], floats[GAP, :width]
    weight, value = floats[CE_WEIGHT, :width], floats[VALUE, :width]
    T = value.dtype.type
    patch = not plan.from_largest
    _look_around(codes, at, plan.sizes, plan.gaps, patch, buffers.column, label, counts, total)
    _set_regions(plan.lam.shape[0] == 2, label, counts, region)
    _by_region(region, plan.margins, margin)
    if patch:
        _divide_by_neighbours(plan.sizes, plan.gaps, total, margin)
    if (plan.with_penalty and plan.from_largest) or (plan.with_ce and not plan.with_softmax):
        set_largest(logits, at, largest)
    for x in range(width):
        weight[x] = T(0)
    if plan.with_ce:
        set_ce_weights(plan.ce_weight, plan.one_ce_weight, label, weight)
    if plan.with_softmax:
        set_slopes(gradient, at, plan.slopes, label, exps, gap, buffers.bins)
        for x in range(width):
            weight[x] *= T(plan.ce_factor)
            norm[x] = weight[x] - gap[x]
    elif plan.with_ce:
        set_exponentials(logits, at, largest, exps, norm)
        sums[CROSS_ENTROPY] += cross_entropy(logits, at, label, largest, norm, weight, gap)
        _prepare_gradient(T(plan.ce_factor), norm, weight)
    _sweep_classes(logits, plan, gradient, statistics, at, buffers)
    for x in range(width):
        value[x] = value[x] if label[x] != NOTHING else T(0)
    sums[PENALTY] += plan.penalty_weight * sum_of(value)
    if plan.with_statistics:
        _count_voxels(region, statistics)


@partial(compiled, fastmath=EXACT)
def sweep_blocks(logits, codes, plan, gradient, all_sums, all_statistics, counter):
    """Sweep the stretches of the blocks that `counter` gives, adding to their sums and statistics.

    Args:
        logits: ``(N, K, Z, Y X)``, contiguous.
        codes: uint8 labels, padded by half a patch.
        plan: what to compute.
        gradient: like `logits`, set; the softmax before, where the plan says so; empty where it is
            not wanted.
        all_sums: float64 ``(blocks, 2)``, zeros: weighted sums of cross-entropy and penalty.
        all_statistics: float64 ``(blocks, 3, R, K)``, zeros; one row where it is not wanted.
        counter: see :func:`segcal.sweep.sharing.take`.
    """
    images, classes, depth, size = logits.shape
    per_plane = (size + STRETCH - 1) // STRETCH
    buffers = _buffers(classes, min(size, STRETCH), plan.sizes[2], logits.dtype)
    stretches, per_block = split(images * depth, size)
    block = take(counter)
    while block < blocks_of(images * depth, size):
        sums = all_sums[block]
        statistics = all_statistics[block if plan.with_statistics else 0]
        for index in range(block * per_block, min((block + 1) * per_block, stretches)):
            plane = index // per_plane
            start = (index % per_plane) * STRETCH
            stop = min(start + STRETCH, size)
            at = (plane // depth, plane % depth, start, stop)
            _sweep_stretch(logits, codes, plan, gradient, sums, statistics, at, buffers)
        block = take(counter)
