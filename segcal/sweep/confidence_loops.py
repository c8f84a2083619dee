"""The sweep's loops for the penalty on log-odds, compiled by Numba: :func:`confidence_blocks`.

**What is computed.** For a voxel with label y and logits l, with c the first class of the largest
logit, and with r the region of the predicted map,

    o_i = sum_{j != c} e^(l_j - l_c)             the odds against the prediction
    p_k = e^(l_k - l_c) / (1 + o_i)
    CE  = w_y (log(1 + o_i) + l_c - l_y)
    R   = v lam_rc min(-log o_i, clip)           v = 1 / N

and, with a and b the factors of the two and d = b v lam_rc, or 0 beyond the clip,

    d(a CE + b R)/dl_c = a w_y (p_c - [c = y]) + d
    d(a CE + b R)/dl_k = a w_y (p_k - [k = y]) - d e^(l_k - l_c) / o_i

In validation the sums of p_c and of [c = y], and the voxels, are found per r and c.

**Why two passes.** r depends on the predictions of the neighbours, so :func:`largest_blocks` first
finds c of all voxels, as bytes; regions are found between the two passes. The second pass, like the
pass of :mod:`segcal.sweep.loops`, reads the logits once and writes the gradient once, and the
exponentials serve cross-entropy, log-odds and both gradients.

**Losses of sums.** Where a loss of sums such as soft Dice takes part, its pass
(:mod:`segcal.sweep.sums_loops`) also finds c and the cross-entropy, and the second pass reads the
softmax that it left in place of the gradient, and no logits: ``o_i = sum_{j != c} p_j / p_c``.

**Layout.** Logits are ``(N, K, V)``, contiguous; the loops need no neighbours of a voxel.
Stretches and blocks are those of :mod:`segcal.sweep.stretches`.

**Invariants.** Results have the same bits on any number of threads, because every block adds to
sums of its own. Sums of odds start from the other classes, never from ``1 - p_c``, so that they are
exact where the network is confident. A voxel with label ``NOTHING`` gives exactly 0 to values,
statistics and gradient. A NaN in the logits of any other voxel reaches the values and the sum of
confidence, because selections are written so that values which do not compare go through.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from segcal.compiling import compiled
from segcal.sweep.bins_loops import bin_buffers
from segcal.sweep.loops import CROSS_ENTROPY, PENALTY
from segcal.sweep.sharing import take
from segcal.sweep.stretches import (
    STRETCH,
    blocks_of,
    cross_entropy,
    of_class,
    set_ce_weights,
    set_largest,
    set_largest_class,
    split,
    sum_of,
)
from segcal.sweep.sums_loops import SumSlopes, set_slopes
from segcal.sweep.terms import NOTHING
from segcal.sweep.vector_math import EXACT, IN_VECTORS, exponential, logarithm

CONFIDENCE_SUM, HITS, VOXELS = 0, 1, 2
"""Tables ``(2, K)`` in a block's statistics."""


class ConfidenceNumbers(NamedTuple):
    """A :class:`segcal.sweep.terms.ConfidencePlan` in the form for compiled code.

    Attributes:
        ce_weight: ``(K,)``, weight of a voxel's cross-entropy by its label.
        penalty_weight: v.
        lam: multipliers ``(2, K)``.
        clip: upper bound of the log-odds.
        edge: odds below which log-odds are beyond the clip: a little less than e^-clip, so that
            log-odds equal to the clip are not beyond it by rounding.
        ce_factor: a.
        penalty_factor: b.
        one_ce_weight: whether all classes have the same weight.
        with_ce: whether to compute the cross-entropy.
        with_gradient: whether to compute the gradient.
        with_statistics: whether to compute the statistics.
        with_softmax: whether the softmax is in the memory of the gradient, for `slopes`; the
            cross-entropy's value is then not computed.
        slopes: of losses of sums.
    """

    ce_weight: NDArray[np.float64]
    penalty_weight: float
    lam: NDArray[np.float64]
    clip: float
    edge: float
    ce_factor: float
    penalty_factor: float
    one_ce_weight: bool
    with_ce: bool
    with_gradient: bool
    with_statistics: bool
    with_softmax: bool
    slopes: SumSlopes


class OddsBuffers(NamedTuple):
    """Buffers of a stretch, with one number of the logits' type per voxel.

    Attributes:
        floats: ``(FLOAT_SLOTS, length)``.
        exps: ``(K, length)``, e^(l - l_c), 0 for class c itself; with a softmax, slopes g.
        bins: for :func:`set_slopes`.
    """

    floats: Any
    exps: Any
    bins: Any


FLOAT_SLOTS = 8
LARGEST = 0  # l_c; with a softmax, p_c
ODDS = 1  # o
CE_WEIGHT = 2  # w_y; then a w_y
GAP = 3  # l_c - l_y; then the cross-entropy; with a softmax, the sum of p g
PULL = 4  # lam_rc; then d
VALUE = 5  # lam_rc min(-log o, clip)
SHARE = 6  # what turns exps, or p, into the gradient of their class
NORM = 7  # 1 + o; with a softmax, what turns p_c into its part of the gradient


@njit(**IN_VECTORS)
def _set_odds(logits, at, predicted, largest, exps, odds):
    """Set exps, and odds to their sum."""
    zero = odds.dtype.type(0)
    for x in range(odds.shape[0]):
        odds[x] = largest[x] - largest[x]  # 0, or NaN of what is infinite
    for k in range(logits.shape[1]):
        plane, e, code = of_class(logits, k, at), exps[k, : odds.shape[0]], np.uint8(k)
        for x in range(odds.shape[0]):
            other = exponential(plane[x] - largest[x])
            e[x] = zero if predicted[x] == code else other
            odds[x] += e[x]


@njit(**IN_VECTORS)
def _set_odds_of_softmax(softmax, at, predicted, own, odds):
    """Set own to p of the predicted class, and odds to the others' sum over it."""
    zero = odds.dtype.type(0)
    for x in range(odds.shape[0]):
        own[x] = zero
        odds[x] = zero
    for k in range(softmax.shape[1]):
        p, code = of_class(softmax, k, at), np.uint8(k)
        for x in range(odds.shape[0]):
            here, other = p[x], own[x]  # loaded in any case, which vectors can
            own[x] = here if predicted[x] == code else other
            odds[x] += zero if predicted[x] == code else here
    for x in range(odds.shape[0]):
        odds[x] /= own[x]


@njit(**IN_VECTORS)
def _set_multipliers(table, label, predicted, outer, lam):
    """Set lam_rc, 0 where the voxel does not count."""
    T = lam.dtype.type
    zero = T(0)
    for x in range(lam.shape[0]):
        lam[x] = zero
    for k in range(table.shape[1]):
        code, inner_lam, outer_lam = np.uint8(k), T(table[0, k]), T(table[1, k])
        for x in range(lam.shape[0]):
            here = outer_lam if outer[x] != 0 else inner_lam
            lam[x] = here if predicted[x] == code else lam[x]
    for x in range(lam.shape[0]):
        lam[x] = lam[x] if label[x] != NOTHING else zero


@njit(**IN_VECTORS)
def _penalise(clip, edge, factor, label, odds, pull, value):
    """Return the sum of the penalty without v; turn lam_rc into d = factor lam_rc."""
    T = odds.dtype.type
    zero, top, least = T(0), T(clip), T(edge)
    for x in range(odds.shape[0]):
        value[x] = -logarithm(least if odds[x] < least else odds[x])
    for x in range(odds.shape[0]):
        v = pull[x] * (top if value[x] > top else value[x])
        value[x] = v if label[x] != NOTHING else zero
        pull[x] = zero if odds[x] < least else factor * pull[x]
    return sum_of(value)


@njit(**IN_VECTORS)
def _set_shares(odds, weight, pull, share):
    """Set the factors from exps to gradients; turn d into the gradient of class c, but for hits."""
    T = odds.dtype.type
    one, tiny = T(1), T(1e-37)
    for x in range(odds.shape[0]):
        p = weight[x] / (one + odds[x])
        o = tiny if odds[x] < tiny else odds[x]
        share[x] = p - pull[x] / o
        pull[x] = p + pull[x]


@njit(**IN_VECTORS)
def _write_gradient(g, k, label, predicted, e, share, own, weight):
    """Write the gradient of class k."""
    zero, code = g.dtype.type(0), np.uint8(k)
    for x in range(g.shape[0]):
        slope = own[x] if predicted[x] == code else e[x] * share[x]
        hit = weight[x] if label[x] == code else zero
        g[x] = slope - hit if label[x] != NOTHING else zero


@njit(**IN_VECTORS)
def _set_shares_of_softmax(odds, own, weight, pull, total, norm, share):
    """Set the factors from p of class c, and of the others, to their parts of the gradient."""
    tiny = odds.dtype.type(1e-37)
    for x in range(odds.shape[0]):
        o = tiny if odds[x] < tiny else odds[x]
        norm[x] = weight[x] - total[x]
        share[x] = norm[x] - pull[x] / (o * own[x])


@njit(**IN_VECTORS)
def _turn_softmax(g, k, label, predicted, slope, norm, share, pull, weight):
    """Turn p of class k in g into the gradient."""
    zero, code = g.dtype.type(0), np.uint8(k)
    for x in range(g.shape[0]):
        here = predicted[x] == code
        hit = weight[x] if label[x] == code else zero
        found = g[x] * ((norm[x] if here else share[x]) + slope[x])
        found += (pull[x] if here else zero) - hit
        g[x] = found if label[x] != NOTHING else zero


@njit(**IN_VECTORS)
def _observe(label, predicted, outer, odds, statistics):
    """Add the stretch to the sums of confidence and hits, and to the voxels."""
    for x in range(odds.shape[0]):
        if label[x] != NOTHING:
            r, c = outer[x], predicted[x]
            statistics[CONFIDENCE_SUM, r, c] += 1.0 / (1.0 + np.float64(odds[x]))
            statistics[HITS, r, c] += np.float64(label[x] == c)
            statistics[VOXELS, r, c] += 1.0


@njit(inline="always")
def _sweep_stretch(logits, maps, plan, gradient, sums, statistics, at, buffers):
    """Sweep the voxels at ``(n, 0, start, stop)``."""
    width, floats, exps = at[3] - at[2], buffers.floats, buffers.exps
    label, predicted = maps[0][at[0], at[2] : at[3]], maps[1][at[0], at[2] : at[3]]
    outer = maps[2][at[0], at[2] : at[3]]
    largest, odds, weight = floats[LARGEST, :width], floats[ODDS, :width], floats[CE_WEIGHT, :width]
    gap, pull, value = floats[GAP, :width], floats[PULL, :width], floats[VALUE, :width]
    share, norm = floats[SHARE, :width], floats[NORM, :width]
    T = odds.dtype.type
    for x in range(width):
        weight[x] = T(0)
    if plan.with_ce:
        set_ce_weights(plan.ce_weight, plan.one_ce_weight, label, weight)
    if plan.with_softmax:
        _set_odds_of_softmax(gradient, at, predicted, largest, odds)
    else:
        set_largest(logits, at, largest)
        _set_odds(logits, at, predicted, largest, exps, odds)
        if plan.with_ce:
            for x in range(width):
                norm[x] = T(1) + odds[x]
            sums[CROSS_ENTROPY] += cross_entropy(logits, at, label, largest, norm, weight, gap)
    _set_multipliers(plan.lam, label, predicted, outer, pull)
    factor = T(plan.penalty_factor * plan.penalty_weight)
    sums[PENALTY] += plan.penalty_weight * _penalise(
        plan.clip, plan.edge, factor, label, odds, pull, value
    )
    if plan.with_statistics:
        _observe(label, predicted, outer, odds, statistics)
    if plan.with_gradient:
        for x in range(width):
            weight[x] *= T(plan.ce_factor)
        if plan.with_softmax:
            set_slopes(gradient, at, plan.slopes, label, exps, gap, buffers.bins)
            _set_shares_of_softmax(odds, largest, weight, pull, gap, norm, share)
        else:
            _set_shares(odds, weight, pull, share)
        for k in range(logits.shape[1]):
            g, e = of_class(gradient, k, at), exps[k, :width]
            if plan.with_softmax:
                _turn_softmax(g, k, label, predicted, e, norm, share, pull, weight)
            else:
                _write_gradient(g, k, label, predicted, e, share, pull, weight)


@partial(compiled, fastmath=EXACT)
def confidence_blocks(logits, maps, plan, gradient, all_sums, all_statistics, counter):
    """Sweep the stretches of the blocks that `counter` gives, adding to their sums and statistics.

    Args:
        logits: ``(N, K, 1, V)``, contiguous.
        maps: uint8 ``(N, V)`` each: labels, predicted classes, and regions.
        plan: what to compute.
        gradient: like `logits`, set; the softmax before, where the plan says so; empty where it is
            not wanted.
        all_sums: float64 ``(blocks, 2)``, zeros: weighted sums of cross-entropy and penalty.
        all_statistics: float64 ``(blocks, 3, 2, K)``, zeros; one row where it is not wanted.
        counter: see :func:`segcal.sweep.sharing.take`.
    """
    images, classes, _, size = logits.shape
    per_image = (size + STRETCH - 1) // STRETCH
    length = min(size, STRETCH)
    buffers = OddsBuffers(
        np.empty((FLOAT_SLOTS, length), logits.dtype),
        np.empty((classes, length), logits.dtype),
        bin_buffers(length),
    )
    stretches, per_block = split(images, size)
    block = take(counter)
    while block < blocks_of(images, size):
        sums = all_sums[block]
        statistics = all_statistics[block if plan.with_statistics else 0]
        for index in range(block * per_block, min((block + 1) * per_block, stretches)):
            start = (index % per_image) * STRETCH
            at = (index // per_image, 0, start, min(start + STRETCH, size))
            _sweep_stretch(logits, maps, plan, gradient, sums, statistics, at, buffers)
        block = take(counter)


@partial(compiled, fastmath=EXACT)
def largest_blocks(logits, predicted, counter):
    """Set the first class of the largest logit in the blocks that `counter` gives.

    Args:
        logits: ``(N, K, 1, V)``, contiguous.
        predicted: uint8 ``(N, V)``.
        counter: see :func:`segcal.sweep.sharing.take`.
    """
    images, _, _, size = logits.shape
    per_image = (size + STRETCH - 1) // STRETCH
    buffer = np.empty(min(size, STRETCH), logits.dtype)
    stretches, per_block = split(images, size)
    block = take(counter)
    while block < blocks_of(images, size):
        for index in range(block * per_block, min((block + 1) * per_block, stretches)):
            start = (index % per_image) * STRETCH
            at = (index // per_image, 0, start, min(start + STRETCH, size))
            found, largest = predicted[at[0], at[2] : at[3]], buffer[: at[3] - at[2]]
            set_largest_class(logits, at, largest, found)
        block = take(counter)
