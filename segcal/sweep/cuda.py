"""The sweep on NVIDIA GPUs, in Triton: values and gradient in one pass over the logits.

The formulas are in :mod:`segcal.sweep.loops`; names are the same here.

**Layout.** A *block* is `BLOCK` voxels of one image, where Z Y X is one axis, with a lane for each
voxel. A program takes every ``num_programs``-th block and loops over the classes inside it. Logits
that it needs again, for the gradient or for ties, are still in the cache, so they are read from
memory once; nothing is kept per class.

**Patches.** Every lane looks at the codes of its patch, padded by half a patch on every side, and
counts all classes side by side in the bits of one integer: `BITS` for each of `GROUP` classes, 32
bits if that is enough, else 63. With more classes than `GROUP` it reads the patch again for the
next group. Two more counts say how many voxels do not count, and how many are of another class than
the centre (none in the inner region).

**Invariants.** Every program adds to sums and statistics of its own, which are added up afterwards:
there are no atomics, and which program takes which blocks depends on the shape alone, so results
have the same bits every time. A lane without a voxel, or whose voxel does not count, adds 0. NaN
goes through: `tl.where` on a comparison that a NaN fails keeps the NaN. In float32 only the
additions of sums are in float64. The host does not wait, and results stay on the device. Single
numbers are arguments, so that a CUDA graph replays the numbers it was captured with. Kernels are
not compiled for single image sizes, but separately for multiples of 16 voxels, which are loaded in
pairs.

None of this has ever run on a GPU: Triton's interpreter has run it, and it compiles for sm_80 and
sm_90. ``segcal doctor --gpu`` checks and times it where there is one.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from segcal.late_checks import label_watch
from segcal.sweep import terms
from segcal.sweep.confidence_kernel import sweep_confidence
from segcal.sweep.labels_kernel import FOUND, encode_labels, scale_gradient, weigh_labels
from segcal.sweep.terms import FUNCTION_CODES, SHAPE_CODES, ConfidencePlan, SweepPlan, Together

BLOCK = 512
PROGRAMS = 2048
"""Largest number of programs of a sweep, and so of rows of sums; enough to fill a large GPU."""
WARPS = 8
SCALE_BLOCK = 4096

NOTHING = tl.constexpr(terms.NOTHING)
NO_CLASS = tl.constexpr(terms.NO_CLASS)
Z_LINEAR = tl.constexpr(terms.Z_LINEAR)
PHR, P2 = tl.constexpr(terms.PHR), tl.constexpr(terms.P2)
RELU = tl.constexpr(terms.RELU)
ABS, LOWER = tl.constexpr(terms.ABS), tl.constexpr(terms.LOWER)


@triton.jit
def _look_around(
    corner,
    inside,
    label,
    row,
    plane,
    first,
    PATCH_Z: tl.constexpr,
    PATCH_Y: tl.constexpr,
    PATCH_X: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the classes in the patch whose first voxel is at `corner`.

    Returns the counts of the classes `first` to ``first + GROUP - 1``, `BITS` bits each, the number
    of voxels that do not count, and the number of voxels of another class than `label`.
    """
    nothing = tl.zeros((BLOCK,), tl.int32)
    others = tl.zeros((BLOCK,), tl.int32)
    if BITS * GROUP < 32:
        one = tl.full((BLOCK,), 1, tl.int32)
    else:
        one = tl.full((BLOCK,), 1, tl.int64)
    packed = one * 0
    for dz in range(PATCH_Z):
        for dy in range(PATCH_Y):
            for dx in range(PATCH_X):
                at = corner + (dz * plane + dy * row + dx)
                code = tl.load(at, mask=inside, other=NOTHING).to(tl.int32)
                nothing += (code == NOTHING).to(tl.int32)
                others += ((code != label) & (code < NO_CLASS)).to(tl.int32)
                slot = code - first
                counted = (slot >= 0) & (slot < GROUP)
                shift = tl.where(counted, slot * BITS, 0).to(one.dtype)
                packed += tl.where(counted, one << shift, 0)
    return packed, nothing, others


@triton.jit
def _penalise(z, lam, rho, FUNCTION: tl.constexpr):
    """P(z; lam, rho) and P'(z), of :mod:`segcal.alm.functions`; a NaN passes through."""
    inside = tl.where(z > Z_LINEAR, Z_LINEAR, z)
    if FUNCTION == PHR:
        s = lam + rho * inside
        d = tl.where(rho < 1e-37, 1e-37, rho)
        v = tl.where(s < 0, -0.5 * lam * lam / d, lam * inside + 0.5 * rho * inside * inside)
        s = tl.where(s < 0, 0.0, s)
    elif FUNCTION == RELU:
        v = tl.where(inside < 0, 0.0, lam * inside)
        s = tl.where(inside < 0, 0.0, lam)
    else:
        cubic = rho * 0.0
        if FUNCTION == P2:
            cubic = rho * rho
        p = tl.where(inside < 0, 0.0, inside)
        m = tl.where(inside < 0, inside, 0.0)
        d = 1.0 - rho * m
        v = tl.where(inside < 0, lam * m / d, p * (lam + p * (lam * rho + p * cubic / 6.0)))
        s = tl.where(inside < 0, lam / (d * d), lam + p * (2.0 * lam * rho + 0.5 * cubic * p))
    return v + s * (z - inside), s


@triton.jit
def _constraint(u, SHAPE: tl.constexpr):
    """Return z and dz/du."""
    side = tl.full(u.shape, 1.0, u.dtype)
    z = u
    if SHAPE == ABS:
        side = tl.where(u > 0, side, tl.where(u < 0, -side, 0.0))
        z = tl.abs(u)
    elif SHAPE == LOWER:
        side = -side
        z = -u
    return z, side


@triton.jit
def _largest(l_at, per_class, inside, K: tl.constexpr):
    largest = tl.load(l_at, mask=inside, other=0.0)
    for k in range(1, K):
        logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
        largest = tl.where(logit > largest, logit, largest)
    return largest


@triton.jit
def _cross_entropy(l_at, per_class, inside, label, largest, K: tl.constexpr):
    """Return -log p_y, and the sum of e^(l - max l)."""
    norm = largest * 0.0
    gap = largest * 0.0
    for k in range(K):
        logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
        norm += tl.exp(logit - largest)
        gap += tl.where(label == k, largest - logit, 0.0)
    return gap + tl.log(norm), norm


@triton.jit
def _observe(statistics, k, slope, z, valid, region, low, high, R: tl.constexpr, K: tl.constexpr):
    """Add P', between its bounds, and z of class k to a program's statistics."""
    z = z.to(tl.float64)
    clipped = tl.where(slope < low, low, slope)
    clipped = tl.where(clipped > high, high, clipped).to(tl.float64)
    for r in range(R):
        here = valid & (region == r)
        at = statistics + r * K + k
        tl.store(at, tl.load(at) + tl.sum(tl.where(here, clipped, 0.0), 0))
        at += R * K
        tl.store(at, tl.load(at) + tl.sum(tl.where(here, z, 0.0), 0))


@triton.jit
def _count_voxels(statistics, valid, region, R: tl.constexpr, K: tl.constexpr):
    for r in range(R):
        at = statistics + (2 * R + r) * K
        tl.store(at, tl.load(at) + tl.sum((valid & (region == r)).to(tl.int32), 0))
    tl.debug_barrier()  # the next block adds to what this one has written


@triton.jit
def _share_among_largest(l_at, g_at, per_class, inside, largest, onto_largest, K: tl.constexpr):
    """Add to the gradient of the largest logits what flows through them, in equal shares."""
    ties = largest * 0.0
    for k in range(K):
        logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
        ties += (logit == largest).to(largest.dtype)
    tl.debug_barrier()  # the gradient that is read here has been written above
    for k in range(K):
        logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
        tied = inside & (logit == largest)
        g = tl.load(g_at + k * per_class, mask=tied, other=0.0)
        tl.store(g_at + k * per_class, g + onto_largest / ties, mask=tied)


@triton.jit
def _sweep_classes(
    l_at, g_at, statistics, lam, rho, scale, low, high, corner, row, plane, per_class, inside,
    label, region, margin, packed, largest, norm, hit, factor,
    K: tl.constexpr, R: tl.constexpr, PATCH_Z: tl.constexpr, PATCH_Y: tl.constexpr,
    PATCH_X: tl.constexpr, FUNCTION: tl.constexpr, SHAPE: tl.constexpr, FROM_LARGEST: tl.constexpr,
    WITH_CE: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the sum of P over the classes; write the gradient, and add to the statistics.

    `norm` turns e^(l - max l) into a w_y p, `hit` is a w_y, `factor` is b v. `packed` has the
    counts of the first group of classes.
    """
    T = margin.dtype
    valid = label != NOTHING
    entry = tl.where(valid, region, 0) * K  # of class 0, in tables by region and class
    penalty = tl.zeros((BLOCK,), T)
    onto_largest = tl.zeros((BLOCK,), T)
    for k in range(K):
        logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
        if FROM_LARGEST:
            u = (largest - logit - margin) * scale
        else:
            if GROUP < K:  # noqa: SIM102 - decided when compiling, the other when running
                if k % GROUP == 0:
                    packed = _look_around(
                        corner, inside, label, row, plane, k,
                        PATCH_Z, PATCH_Y, PATCH_X, BITS, GROUP, BLOCK,
                    )[0]  # fmt: skip
            count = (packed >> (k % GROUP * BITS)) & ((1 << BITS) - 1)
            u = logit - count.to(T) * margin
        z, side = _constraint(u, SHAPE)
        value, slope = _penalise(z, tl.load(lam + entry + k), tl.load(rho + entry + k), FUNCTION)
        penalty += value
        if statistics is not None:
            _observe(statistics, k, slope, z, valid, region, low, high, R, K)
        if g_at is not None:
            g = tl.where(valid, slope * side * factor, 0.0)
            if FROM_LARGEST:
                g *= scale
                onto_largest += g
                g = -g
            if WITH_CE:
                g += tl.exp(logit - largest) * norm - tl.where(label == k, hit, 0.0)
            tl.store(g_at + k * per_class, g, mask=inside)
    if FROM_LARGEST and g_at is not None:
        _share_among_largest(l_at, g_at, per_class, inside, largest, onto_largest, K)
    return penalty


@triton.jit
def _sweep_block(
    logits, codes, lam, rho, penalty_weight, ce_weight, scale, low, high, ce_factor,
    penalty_factor, inner, outer, gradient, statistics, n, first, Z, Y, X,
    K: tl.constexpr, R: tl.constexpr, PATCH_Z: tl.constexpr, PATCH_Y: tl.constexpr,
    PATCH_X: tl.constexpr, FUNCTION: tl.constexpr, SHAPE: tl.constexpr, FROM_LARGEST: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the weighted cross-entropy and penalty of every voxel of image n from `first` on."""
    voxels = Z * Y * X
    if WHOLE:
        voxels = tl.multiple_of(voxels, 16)
    per_class = tl.cast(voxels, tl.int64)
    row = X + (PATCH_X - 1)
    plane = row * (Y + (PATCH_Y - 1))
    v = first + tl.arange(0, BLOCK)
    inside = v < voxels
    z, y, x = v // (X * Y), v // X % Y, v % X
    corner = codes + n * plane * (Z + (PATCH_Z - 1)) + (z * plane + y * row + x)
    centre = (PATCH_Z // 2) * plane + (PATCH_Y // 2) * row + PATCH_X // 2
    label = tl.load(corner + centre, mask=inside, other=NOTHING).to(tl.int32)
    valid = label != NOTHING
    l_at = logits + n * K * per_class + v
    g_at = None if gradient is None else gradient + n * K * per_class + v

    region = tl.zeros((BLOCK,), tl.int32)
    packed = region
    margin = tl.zeros((BLOCK,), inner.dtype) + inner
    if not FROM_LARGEST:
        packed, nothing, others = _look_around(
            corner, inside, label, row, plane, 0, PATCH_Z, PATCH_Y, PATCH_X, BITS, GROUP, BLOCK
        )
        if R == 2:
            region = (others > 0).to(tl.int32)
            margin = tl.where(others > 0, outer, inner)
        margin /= tl.maximum(PATCH_Z * PATCH_Y * PATCH_X - nothing, 1).to(margin.dtype)

    largest = margin
    norm = margin
    hit = margin
    loss = tl.zeros((BLOCK,), margin.dtype)
    if FROM_LARGEST or ce_weight is not None:
        largest = _largest(l_at, per_class, inside, K)
    if ce_weight is not None:
        loss, norm = _cross_entropy(l_at, per_class, inside, label, largest, K)
        hit = tl.load(ce_weight + label, mask=valid, other=0.0)
        loss = tl.where(valid, loss * hit, 0.0)
        hit *= ce_factor
        norm = hit / norm
    weight = tl.load(penalty_weight)
    penalty = _sweep_classes(
        l_at, g_at, statistics, lam, rho, scale, low, high, corner, row, plane, per_class, inside,
        label, region, margin, packed, largest, norm, hit, weight * penalty_factor,
        K, R, PATCH_Z, PATCH_Y, PATCH_X, FUNCTION, SHAPE, FROM_LARGEST, ce_weight is not None,
        BITS, GROUP, BLOCK,
    )  # fmt: skip
    if statistics is not None:
        _count_voxels(statistics, valid, region, R, K)
    return loss, tl.where(valid, penalty * weight, 0.0)


@triton.jit(do_not_specialize=["blocks", "Z", "Y", "X"])
def _sweep(
    logits, codes, lam, rho, penalty_weight, ce_weight,
    scale: tl.float64, low: tl.float64, high: tl.float64, ce_factor: tl.float64,
    penalty_factor: tl.float64, inner: tl.float64, outer: tl.float64,
    gradient, sums, statistics, blocks, Z, Y, X,
    K: tl.constexpr, R: tl.constexpr, PATCH_Z: tl.constexpr, PATCH_Y: tl.constexpr,
    PATCH_X: tl.constexpr, FUNCTION: tl.constexpr, SHAPE: tl.constexpr, FROM_LARGEST: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sweep every ``num_programs``-th block; pointers that are None are left out."""
    T = logits.dtype.element_ty
    scale, low, high = tl.full((), scale, T), tl.full((), low, T), tl.full((), high, T)
    ce_factor, penalty_factor = tl.full((), ce_factor, T), tl.full((), penalty_factor, T)
    inner, outer = tl.full((), inner, T), tl.full((), outer, T)
    per_image = tl.cdiv(Z * Y * X, BLOCK)
    program = tl.program_id(0)
    own = None if statistics is None else statistics + program * (3 * R * K)
    all_ce = tl.zeros((BLOCK,), tl.float64)
    all_penalties = tl.zeros((BLOCK,), tl.float64)
    for block in range(program, blocks, tl.num_programs(0)):
        ce, penalty = _sweep_block(
            logits, codes, lam, rho, penalty_weight, ce_weight, scale, low, high, ce_factor,
            penalty_factor, inner, outer, gradient, own,
            tl.cast(block // per_image, tl.int64), (block % per_image) * BLOCK, Z, Y, X,
            K, R, PATCH_Z, PATCH_Y, PATCH_X, FUNCTION, SHAPE, FROM_LARGEST, BITS, GROUP, WHOLE,
            BLOCK,
        )  # fmt: skip
        all_ce += ce.to(tl.float64)
        all_penalties += penalty.to(tl.float64)
    tl.store(sums + 2 * program, tl.sum(all_ce, 0))
    tl.store(sums + 2 * program + 1, tl.sum(all_penalties, 0))


def encode(
    labels: Tensor, num_classes: int, terms: Together
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Encode what every kernel needs of labels, as :func:`segcal.sweep.cpu.encode` does.

    Voxels with wrong labels are left out, and counted so that a later call raises an error.
    """
    watch = label_watch(labels.device, num_classes, terms.ignore_index)
    watch.look()
    labels = labels.contiguous()
    codes = torch.empty_like(labels, dtype=torch.uint8)
    ce = terms.cross_entropy
    class_weight = None if ce is None or ce.class_weight is None else ce.class_weight.contiguous()
    blocks = triton.cdiv(labels.numel(), BLOCK)
    programs = _programs(blocks)
    found, weights = (
        torch.empty(size, dtype=torch.float64, device=labels.device)
        for size in (programs * FOUND, 1 + num_classes)
    )
    ignore = terms.ignore_index
    with torch.cuda.device_of(labels):
        encode_labels[(programs,)](
            labels,
            codes,
            class_weight,
            found,
            0 if ignore is None else ignore,
            labels.numel(),
            blocks,
            K=num_classes,
            IGNORES=ignore is not None,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        weigh_labels[(1,)](
            found,
            class_weight,
            weights,
            watch.seen,
            programs,
            K=num_classes,
            LANES=triton.next_power_of_2(num_classes),
            ROWS=PROGRAMS,
            TINY=torch.finfo(torch.float64).tiny,
            num_warps=WARPS,
        )
    watch.ask()
    return codes, weights[0], None if ce is None else weights[1:]


def scale(gradient: Tensor, factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Multiply a gradient in place, as :func:`segcal.sweep.cpu.scale`; the host does not wait."""
    size = gradient.numel()
    with torch.cuda.device_of(gradient):
        scale_gradient[(triton.cdiv(size, SCALE_BLOCK),)](
            gradient, factor, size, BLOCK=SCALE_BLOCK, num_warps=WARPS
        )
    return gradient, factor.clone()


def run(logits: Tensor, codes: Tensor, plan: SweepPlan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sweep all voxels; arguments and results are those of :func:`segcal.sweep.cpu.run`."""
    n, k, z, y, x = logits.shape
    residual = plan.residual
    if residual is None:
        raise ValueError("penalty: expected one, got None")
    r = len(residual.margins)
    blocks = n * triton.cdiv(z * y * x, BLOCK)
    programs = _programs(blocks)
    bits = (plan.sizes[0] * plan.sizes[1] * plan.sizes[2]).bit_length()
    sums = logits.new_empty((programs, 2), dtype=torch.float64)
    rows = programs if plan.statistics else 1
    statistics = logits.new_zeros((rows, 3, r, k), dtype=torch.float64)
    gradient = torch.empty_like(logits) if plan.gradient else None
    with torch.cuda.device_of(logits):
        _sweep[(programs,)](
            logits,
            codes.contiguous(),
            _alike(logits, residual.lam),
            _alike(logits, residual.rho),
            _alike(logits, plan.penalty_weight),
            _alike(logits, plan.cross_entropy_weight),
            *(float(x) for x in (residual.scale, *residual.clip, *plan.factors)),
            float(residual.margins[0]),
            float(residual.margins[-1]),
            gradient,
            sums,
            statistics if plan.statistics else None,
            blocks,
            z,
            y,
            x,
            K=k,
            R=r,
            PATCH_Z=plan.sizes[0],
            PATCH_Y=plan.sizes[1],
            PATCH_X=plan.sizes[2],
            FUNCTION=FUNCTION_CODES[residual.function],
            SHAPE=SHAPE_CODES[residual.shape],
            FROM_LARGEST=residual.patch is None,
            BITS=bits,
            GROUP=min(k, 63 // bits),
            WHOLE=z * y * x % 16 == 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
            num_stages=1,
        )
    return sums.sum(0), statistics.sum(0), gradient


def largest_class(logits: Tensor) -> Tensor:
    """First class of the largest logit, uint8 ``(N, V)``, of logits ``(N, K, V)``."""
    return logits.argmax(1).byte()


def run_confidence(
    logits: Tensor, maps: tuple[Tensor, Tensor, Tensor], plan: ConfidencePlan
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sweep all voxels, as :func:`segcal.sweep.cpu.run_confidence` does."""
    n, k, voxels = logits.shape
    blocks = n * triton.cdiv(voxels, BLOCK)
    programs = _programs(blocks)
    sums = logits.new_empty((programs, 2), dtype=torch.float64)
    rows = programs if plan.statistics else 1
    statistics = logits.new_zeros((rows, 3, 2, k), dtype=torch.float64)
    gradient = torch.empty_like(logits) if plan.gradient else None
    # a little below e^-clip: what is equal to the clip, but for rounding, is not beyond it
    edge = math.exp(-plan.term.clip) * (1 - 100 * torch.finfo(logits.dtype).eps)
    unit = 16 if voxels % 16 == 0 else 1
    with torch.cuda.device_of(logits):
        sweep_confidence[(programs,)](
            logits,
            *(x.contiguous() for x in maps),
            _alike(logits, plan.term.lam),
            _alike(logits, plan.penalty_weight),
            _alike(logits, plan.cross_entropy_weight),
            *(float(x) for x in (plan.term.clip, edge, *plan.factors)),
            gradient,
            sums,
            statistics if plan.statistics else None,
            blocks,
            voxels // unit,
            K=k,
            UNIT=unit,
            BLOCK=BLOCK,
            num_warps=WARPS,
            num_stages=1,
        )
    return sums.sum(0), statistics.sum(0), gradient


def _programs(blocks: int) -> int:
    """Number of programs: one per block, or fewer with equally many blocks each."""
    return triton.cdiv(blocks, triton.cdiv(blocks, PROGRAMS))


def _alike(logits: Tensor, x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().to(logits).contiguous()
