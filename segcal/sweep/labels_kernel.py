"""Small kernels around a sweep on NVIDIA GPUs, in Triton: its labels, its weights, its gradient.

Labels become codes of one byte; in the same pass they are counted and checked, because separate
passes would take more launches than the rest of a step. A wrong label becomes ``NOTHING``, so that
no loop fails, and is counted for :mod:`segcal.late_checks`. As in :mod:`segcal.sweep.cuda` every
program has a row of its own, and nothing is atomic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from segcal.sweep import terms

NOTHING = tl.constexpr(terms.NOTHING)
VALID, WEIGHT, WRONG, LOWEST, HIGHEST = (tl.constexpr(place) for place in range(5))
"""Places of the results in a row."""
FOUND = 5


@triton.jit(do_not_specialize=["ignore", "voxels", "blocks"])
def encode_labels(
    labels, codes, class_weight, found, ignore, voxels, blocks,
    K: tl.constexpr, IGNORES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write codes, and the counts of every ``num_programs``-th block of labels."""
    program = tl.program_id(0)
    valid_voxels = tl.zeros((BLOCK,), tl.int64)
    wrong_voxels = tl.zeros((BLOCK,), tl.int64)
    weights = tl.zeros((BLOCK,), tl.float64)
    lowest = tl.full((BLOCK,), float("inf"), tl.float64)
    highest = tl.full((BLOCK,), float("-inf"), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < voxels
        label = tl.load(labels + at, mask=inside, other=0).to(tl.int64)
        counts = inside
        if IGNORES:
            counts = inside & (label != ignore)
        right = (label >= 0) & (label < K)
        wrong = counts & ~right
        valid = counts & right
        tl.store(codes + at, tl.where(valid, label, NOTHING).to(tl.uint8), mask=inside)
        valid_voxels += valid.to(tl.int64)
        wrong_voxels += wrong.to(tl.int64)
        value = label.to(tl.float64)
        lowest = tl.minimum(lowest, tl.where(wrong, value, float("inf")))
        highest = tl.maximum(highest, tl.where(wrong, value, float("-inf")))
        if class_weight is not None:
            weights += tl.load(class_weight + label, mask=valid, other=0.0).to(tl.float64)
    row = found + program * 5
    tl.store(row + VALID, tl.sum(valid_voxels, 0).to(tl.float64))
    tl.store(row + WEIGHT, tl.sum(weights, 0))
    tl.store(row + WRONG, tl.sum(wrong_voxels, 0).to(tl.float64))
    tl.store(row + LOWEST, tl.min(lowest, 0))
    tl.store(row + HIGHEST, tl.max(highest, 0))


@triton.jit(do_not_specialize=["programs"])
def weigh_labels(
    found, class_weight, weights, seen, programs,
    K: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, TINY: tl.constexpr,
):  # fmt: skip
    """Write the factors on a voxel's penalty and cross-entropy; add to the wrong labels seen."""
    rows = tl.arange(0, ROWS)
    inside = rows < programs
    row = found + rows * 5
    valid = tl.sum(tl.load(row + VALID, mask=inside, other=0.0), 0)
    wrong = tl.sum(tl.load(row + WRONG, mask=inside, other=0.0), 0)
    lowest = tl.min(tl.load(row + LOWEST, mask=inside, other=float("inf")), 0)
    highest = tl.max(tl.load(row + HIGHEST, mask=inside, other=float("-inf")), 0)
    share = 1.0 / tl.maximum(valid, 1.0)
    tl.store(weights, tl.where(valid > 0, share, 0.0))
    k = tl.arange(0, LANES)
    own = tl.zeros((LANES,), tl.float64) + share
    if class_weight is not None:
        total = tl.sum(tl.load(row + WEIGHT, mask=inside, other=0.0), 0)
        own = tl.load(class_weight + k, mask=k < K, other=0.0).to(tl.float64)
        own /= tl.maximum(total, tl.full((), TINY, tl.float64))
    tl.store(weights + 1 + k, own, mask=k < K)
    tl.store(seen, tl.load(seen) + wrong)
    tl.store(seen + 1, tl.minimum(tl.load(seen + 1), lowest))
    tl.store(seen + 2, tl.maximum(tl.load(seen + 2), highest))


@triton.jit(do_not_specialize=["size"])
def scale_gradient(gradient, factor, size, BLOCK: tl.constexpr):
    """Multiply a gradient in place; by 1 it is not even read."""
    scale = tl.load(factor)
    if scale != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        tl.store(gradient + at, tl.load(gradient + at, mask=inside, other=0.0) * scale, mask=inside)
