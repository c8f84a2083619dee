"""The kernel for the penalty on log-odds on NVIDIA GPUs, in Triton.

The formulas are in :mod:`segcal.sweep.confidence_loops`; names, layout and invariants are those of
:mod:`segcal.sweep.cuda`, which launches the kernel. The predictions and their regions come as
bytes, so that no neighbours of a voxel are needed and an image is one axis of V voxels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from segcal.sweep import terms

NOTHING = tl.constexpr(terms.NOTHING)


@triton.jit
def _odds(l_at, per_class, inside, label, predicted, largest, K: tl.constexpr):
    """Return o, the sum of e^(l - l_c) over the other classes, and l_c - l_y."""
    odds = largest - largest  # 0, or NaN of what is infinite
    gap = largest * 0.0
    for k in range(K):
        logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
        odds += tl.where(predicted == k, 0.0, tl.exp(logit - largest))
        gap += tl.where(label == k, largest - logit, 0.0)
    return odds, gap


@triton.jit
def _write_gradient(
    l_at, g_at, per_class, inside, label, predicted, largest, share, own, hit, K: tl.constexpr
):
    valid = label != NOTHING
    for k in range(K):
        logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
        g = tl.where(predicted == k, own, tl.exp(logit - largest) * share)
        g -= tl.where(label == k, hit, 0.0)
        tl.store(g_at + k * per_class, tl.where(valid, g, 0.0), mask=inside)


@triton.jit
def _observe(statistics, label, predicted, region, odds, K: tl.constexpr):
    """Add the sums of confidence and of hits, and the voxels, to a program's statistics."""
    confidence = (1.0 / (1.0 + odds)).to(tl.float64)
    for k in range(K):
        for r in range(2):
            here = (label != NOTHING) & (predicted == k) & (region == r)
            at = statistics + r * K + k
            tl.store(at, tl.load(at) + tl.sum(tl.where(here, confidence, 0.0), 0))
            at += 2 * K
            tl.store(at, tl.load(at) + tl.sum((here & (label == k)).to(tl.int32), 0))
            at += 2 * K
            tl.store(at, tl.load(at) + tl.sum(here.to(tl.int32), 0))
    tl.debug_barrier()  # the next block adds to what this one has written


@triton.jit
def _sweep_block(
    logits, labels, predicted, regions, lam, penalty_weight, ce_weight, clip, edge, ce_factor,
    penalty_factor, gradient, statistics, n, first, V,
    K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the weighted cross-entropy and penalty of every voxel of image n from `first` on."""
    per_class = tl.cast(V, tl.int64)
    v = first + tl.arange(0, BLOCK)
    inside = v < V
    label = tl.load(labels + n * per_class + v, mask=inside, other=NOTHING).to(tl.int32)
    chosen = tl.load(predicted + n * per_class + v, mask=inside, other=0).to(tl.int32)
    region = tl.load(regions + n * per_class + v, mask=inside, other=0).to(tl.int32)
    valid = label != NOTHING
    l_at = logits + n * K * per_class + v
    largest = tl.load(l_at + chosen * per_class, mask=inside, other=0.0)
    odds, gap = _odds(l_at, per_class, inside, label, chosen, largest, K)

    hit = tl.zeros((BLOCK,), largest.dtype)
    loss = tl.zeros((BLOCK,), largest.dtype)
    if ce_weight is not None:
        hit = tl.load(ce_weight + label, mask=valid, other=0.0)
        loss = tl.where(valid, (gap + tl.log(1.0 + odds)) * hit, 0.0)
        hit *= ce_factor
    weight = tl.load(penalty_weight)
    multiplier = tl.load(lam + region * K + chosen, mask=valid, other=0.0)
    value = -tl.log(tl.where(odds < edge, edge, odds))
    value = multiplier * tl.where(value > clip, clip, value)
    if gradient is not None:
        pull = multiplier * (weight * penalty_factor)
        pull = tl.where(odds < edge, 0.0, pull)
        p = hit / (1.0 + odds)
        share = p - pull / tl.where(odds < 1e-37, 1e-37, odds)
        _write_gradient(
            l_at, gradient + n * K * per_class + v, per_class, inside, label, chosen, largest,
            share, p + pull, hit, K,
        )  # fmt: skip
    if statistics is not None:
        _observe(statistics, label, chosen, region, odds, K)
    return loss, tl.where(valid, value * weight, 0.0)


@triton.jit(do_not_specialize=["blocks", "units"])
def sweep_confidence(
    logits, labels, predicted, regions, lam, penalty_weight, ce_weight,
    clip: tl.float64, edge: tl.float64, ce_factor: tl.float64, penalty_factor: tl.float64,
    gradient, sums, statistics, blocks, units,
    K: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sweep every ``num_programs``-th block; what is None among the pointers is left out."""
    T = logits.dtype.element_ty
    clip, edge = tl.full((), clip, T), tl.full((), edge, T)
    ce_factor, penalty_factor = tl.full((), ce_factor, T), tl.full((), penalty_factor, T)
    V = units * UNIT  # a multiple of 16 that the compiler knows to be one, or of 1
    per_image = tl.cdiv(V, BLOCK)
    program = tl.program_id(0)
    own = None if statistics is None else statistics + program * (3 * 2 * K)
    all_ce = tl.zeros((BLOCK,), tl.float64)
    all_penalties = tl.zeros((BLOCK,), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        ce, penalty = _sweep_block(
            logits, labels, predicted, regions, lam, penalty_weight, ce_weight, clip, edge,
            ce_factor, penalty_factor, gradient, own, tl.cast(block // per_image, tl.int64),
            (block % per_image) * BLOCK, V, K, BLOCK,
        )  # fmt: skip
        all_ce += ce.to(tl.float64)
        all_penalties += penalty.to(tl.float64)
    tl.store(sums + 2 * program, tl.sum(all_ce, 0))
    tl.store(sums + 2 * program + 1, tl.sum(all_penalties, 0))
