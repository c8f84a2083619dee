"""The sweep on NVIDIA GPUs, in Triton: values and gradient in one pass over the logits.

A program takes blocks of voxels, one lane each, and loops over the classes; logits that it needs
twice are still in the cache. Classes in the patch are counted side by side in the bits of one
integer. Every program adds to a row of its own, and the rows are summed afterwards: there are no
atomics, and which program takes which blocks depends on the shape alone, so results are the same
bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from segcal.sweep import terms
from segcal.sweep.terms import FUNCTION_CODES, SHAPE_CODES, SweepPlan

BLOCK = 512
PROGRAMS = 2048
"""Most programs of a sweep, and so rows of sums; enough to fill a large GPU."""
WARPS = 8

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
    """Look at the patch whose first voxel is at `corner`.

    Returns the counts of the classes `first` to ``first + GROUP - 1``, `BITS` bits each, the number
    of voxels that do not count, and of those of another class than `label`.
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
def _sweep(
    logits,
    codes,
    lam,
    rho,
    penalty_weight,
    ce_weight,
    numbers,
    gradient,
    sums,
    statistics,
    blocks,
    Z,
    Y,
    X,
    K: tl.constexpr,
    R: tl.constexpr,
    PATCH_Z: tl.constexpr,
    PATCH_Y: tl.constexpr,
    PATCH_X: tl.constexpr,
    FUNCTION: tl.constexpr,
    SHAPE: tl.constexpr,
    FROM_LARGEST: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sweep every ``num_programs``-th block; what is None among the pointers is left out."""
    T = logits.dtype.element_ty
    voxels = Z * Y * X
    row = X + (PATCH_X - 1)
    plane = row * (Y + (PATCH_Y - 1))
    per_element = tl.cdiv(voxels, BLOCK)
    per_class = tl.cast(voxels, tl.int64)
    program = tl.program_id(0)
    scale = tl.load(numbers)
    low = tl.load(numbers + 1)
    high = tl.load(numbers + 2)
    ce_factor = tl.load(numbers + 3)
    penalty_factor = tl.load(numbers + 4)
    weight = tl.load(penalty_weight)
    all_ce = tl.zeros((BLOCK,), tl.float64)
    all_penalties = tl.zeros((BLOCK,), tl.float64)

    for block in range(program, blocks, tl.num_programs(0)):
        n = tl.cast(block // per_element, tl.int64)
        v = (block % per_element) * BLOCK + tl.arange(0, BLOCK)
        inside = v < voxels
        z, y, x = v // (X * Y), v // X % Y, v % X
        corner = codes + n * plane * (Z + (PATCH_Z - 1)) + (z * plane + y * row + x)
        centre = (PATCH_Z // 2) * plane + (PATCH_Y // 2) * row + PATCH_X // 2
        label = tl.load(corner + centre, mask=inside, other=NOTHING).to(tl.int32)
        valid = label != NOTHING
        l_at = logits + n * K * per_class + v

        region = tl.zeros((BLOCK,), tl.int32)
        if not FROM_LARGEST:
            packed, nothing, others = _look_around(
                corner, inside, label, row, plane, 0,
                PATCH_Z, PATCH_Y, PATCH_X, BITS, GROUP, BLOCK,
            )  # fmt: skip
            total = tl.maximum(PATCH_Z * PATCH_Y * PATCH_X - nothing, 1)
        if R == 2:
            region = (others > 0).to(tl.int32)
        entry = tl.where(valid, region, 0)
        margin = tl.load(numbers + 5 + entry)
        entry *= K  # of class 0, in tables by region and class
        if not FROM_LARGEST:
            margin = margin / total.to(T)

        largest = tl.load(l_at, mask=inside, other=0.0)
        if FROM_LARGEST or ce_weight is not None:
            for k in range(1, K):
                logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
                largest = tl.where(logit > largest, logit, largest)
        if ce_weight is not None:
            norm = tl.zeros((BLOCK,), T)
            gap = tl.zeros((BLOCK,), T)
            for k in range(K):
                logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
                norm += tl.exp(logit - largest)
                gap += tl.where(label == k, largest - logit, 0.0)
            pull_ce = tl.load(ce_weight + label, mask=valid, other=0.0)
            all_ce += tl.where(valid, (gap + tl.log(norm)) * pull_ce, 0.0).to(tl.float64)
            pull_ce *= ce_factor
            norm = pull_ce / norm

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
            pull = tl.full((BLOCK,), 1.0, T)
            if SHAPE == ABS:
                pull = tl.where(u > 0, pull, tl.where(u < 0, -pull, 0.0))
                u = tl.abs(u)
            elif SHAPE == LOWER:
                pull = -pull
                u = -u
            value, slope = _penalise(
                u, tl.load(lam + entry + k), tl.load(rho + entry + k), FUNCTION
            )
            penalty += value
            if statistics is not None:
                size = u.to(tl.float64)
                clipped = tl.where(slope < low, low, slope)
                clipped = tl.where(clipped > high, high, clipped).to(tl.float64)
                for r in range(R):
                    here = valid & (region == r)
                    at = statistics + program * (3 * R * K) + r * K + k
                    tl.store(at, tl.load(at) + tl.sum(tl.where(here, clipped, 0.0), 0))
                    at += R * K
                    tl.store(at, tl.load(at) + tl.sum(tl.where(here, size, 0.0), 0))
            if gradient is not None:
                g = tl.where(valid, slope * pull * weight * penalty_factor, 0.0)
                if FROM_LARGEST:
                    g *= scale
                    onto_largest += g
                    g = -g
                if ce_weight is not None:
                    g += tl.exp(logit - largest) * norm - tl.where(label == k, pull_ce, 0.0)
                tl.store(gradient + n * K * per_class + v + k * per_class, g, mask=inside)
        all_penalties += tl.where(valid, penalty * weight, 0.0).to(tl.float64)

        if FROM_LARGEST and gradient is not None:
            ties = tl.zeros((BLOCK,), T)
            for k in range(K):
                logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
                ties += (logit == largest).to(T)
            tl.debug_barrier()  # the gradient that is read here has been written above
            for k in range(K):
                logit = tl.load(l_at + k * per_class, mask=inside, other=0.0)
                at = gradient + n * K * per_class + v + k * per_class
                tied = inside & (logit == largest)
                g = tl.load(at, mask=tied, other=0.0)
                tl.store(at, g + onto_largest / ties, mask=tied)
        if statistics is not None:
            for r in range(R):
                at = statistics + program * (3 * R * K) + (2 * R + r) * K
                found = tl.sum((valid & (region == r)).to(tl.int32), 0)
                tl.store(at, tl.load(at) + found)
            tl.debug_barrier()  # the next block adds to what this one has written

    tl.store(sums + 2 * program, tl.sum(all_ce, 0))
    tl.store(sums + 2 * program + 1, tl.sum(all_penalties, 0))


def run(logits: Tensor, codes: Tensor, plan: SweepPlan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sweep all voxels; arguments and results are those of :func:`segcal.sweep.cpu.run`."""
    n, k, z, y, x = logits.shape
    if z * y * x >= 2**31 - BLOCK or codes[0].numel() >= 2**31:
        raise ValueError(
            f"one image has {z * y * x} voxels, the sweep on GPUs takes fewer than 2^31"
        )
    residual = plan.residual
    r = len(residual.margins)
    blocks = n * triton.cdiv(z * y * x, BLOCK)
    programs = triton.cdiv(blocks, triton.cdiv(blocks, PROGRAMS))
    bits = (plan.sizes[0] * plan.sizes[1] * plan.sizes[2]).bit_length()
    sums = logits.new_empty((programs, 2), dtype=torch.float64)
    rows = programs if plan.statistics else 1
    statistics = logits.new_zeros((rows, 3, r, k), dtype=torch.float64)
    gradient = torch.empty_like(logits) if plan.gradient else None

    def alike(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(logits).contiguous()

    with torch.cuda.device_of(logits):
        _sweep[(programs,)](
            logits,
            codes.contiguous(),
            alike(residual.lam),
            alike(residual.rho),
            alike(plan.penalty_weight),
            alike(plan.cross_entropy_weight),
            _numbers(logits, plan),
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
            BLOCK=BLOCK,
            num_warps=WARPS,
            num_stages=1,
        )
    return sums.sum(0), statistics.sum(0), gradient


def _numbers(logits: Tensor, plan: SweepPlan) -> Tensor:
    """The single numbers, in the logits' precision, which arguments of a kernel do not have.

    They travel from pinned memory, for which the host does not wait.
    """
    residual = plan.residual
    values = torch.tensor(
        [residual.scale, *residual.clip, *plan.factors, *residual.margins],
        dtype=logits.dtype,
        pin_memory=logits.is_cuda,
    )
    return values.to(logits.device, non_blocking=True)
