"""The sweep on CPUs, compiled: values and gradient in one pass over the logits.

Work goes by the *stretch*, up to 512 voxels along the last axis: what a stretch needs stays in the
fastest cache, so logits are read once from memory and the gradient is written once. Loops run over
the voxels of a stretch with the class outside, without branches, so that they become vector
instructions. Stretches go to threads in blocks whose bounds depend on the shape alone, and sums are
added in the order of the blocks: the bits of a result do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from segcal.sweep.terms import (
    ABS,
    EQUALITY,
    MAP,
    NOTHING,
    P2,
    P3,
    PATCH,
    PENALTY_CODES,
    PHR,
    RELU,
    SHAPE_CODES,
    UPPER,
    Z_LINEAR,
    Job,
    region_code,
)

STRETCH = 512
BLOCK_VOXELS = 16384
EXACT = {"contract", "nsz"}  # a * b + c in one rounding; -0 is 0
SUMS = {"reassoc", "nsz"}  # partial sums side by side, in an order fixed by the compiler


class _Plan(NamedTuple):
    """A :class:`segcal.sweep.terms.Job` as compiled code takes it."""

    ce_weight: NDArray[np.float64]
    penalty_weight: NDArray[np.float64]
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
    penalty: int
    regions: int
    from_largest: bool
    with_ce: bool
    with_gradient: bool
    with_statistics: bool


@njit
def _split(rows, width):
    """Return the number of stretches, and how many make a block."""
    return rows * ((width + STRETCH - 1) // STRETCH), max(1, BLOCK_VOXELS // min(width, STRETCH))


@njit(fastmath=EXACT, forceinline=True)
def _exp32(x):
    """e^x of a float32 <= 0 within 2 ulp: Cody-Waite reduction, the polynomial of Cephes' expf."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(fastmath=EXACT, forceinline=True)
def _log32(x):
    """Log x of a normal float32 > 0 within 1 ulp: exponent, and the polynomial of Cephes' logf."""
    bits = np.float32(x).view(np.int32)
    e = (bits >> np.int32(23)) - np.int32(126)
    m = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)).view(np.float32)
    low = m < np.float32(0.707106781186547524)
    e = np.float32(e) - (np.float32(1) if low else np.float32(0))
    m = (m + m if low else m) - np.float32(1)
    z = m * m
    p = np.float32(7.0376836292e-2)
    p = p * m - np.float32(1.1514610310e-1)
    p = p * m + np.float32(1.1676998740e-1)
    p = p * m - np.float32(1.2420140846e-1)
    p = p * m + np.float32(1.4249322787e-1)
    p = p * m - np.float32(1.6668057665e-1)
    p = p * m + np.float32(2.0000714765e-1)
    p = p * m - np.float32(2.4999993993e-1)
    p = p * m + np.float32(3.3333331174e-1)
    p = p * m * z
    p = p + np.float32(-2.12194440e-4) * e
    p = p - np.float32(0.5) * z
    return (m + p) + np.float32(0.693359375) * e


def _exps(plane: Any, largest: Any, out: Any) -> None:
    raise NotImplementedError  # in compiled code, the overload


@overload(_exps, fastmath=EXACT)
def _exps_for(plane, largest, out):
    if out.dtype == types.float32:

        def exps(plane, largest, out):
            for x in range(out.shape[0]):
                out[x] = _exp32(plane[x] - largest[x])
    else:

        def exps(plane, largest, out):
            for x in range(out.shape[0]):
                out[x] = math.exp(plane[x] - largest[x])

    return exps


def _add_logs(norm: Any, out: Any) -> None:
    raise NotImplementedError  # in compiled code, the overload


@overload(_add_logs, fastmath=EXACT)
def _add_logs_for(norm, out):
    if out.dtype == types.float32:

        def add_logs(norm, out):
            for x in range(out.shape[0]):
                out[x] += _log32(norm[x])
    else:

        def add_logs(norm, out):
            for x in range(out.shape[0]):
                out[x] += math.log(norm[x])

    return add_logs


@njit(forceinline=True)
def _row(planes, k, at):
    """Row of class k; slices like this one keep their last axis contiguous for the compiler."""
    return planes[at[0], k, at[1], at[2], at[3] : at[4]]


@njit(forceinline=True)
def _count(codes, code, at, sizes, column, count):
    """count[x] = voxels of that code in the patch around x."""
    n, z, y, start, stop = at
    kz, ky, kx = sizes
    width = stop - start
    k = np.uint8(code)
    for x in range(width + kx - 1):
        column[x] = 0
    for dz in range(kz):
        for dy in range(ky):
            row = codes[n, z + dz, y + dy, start : stop + kx - 1]
            for x in range(width + kx - 1):
                column[x] += np.uint8(row[x] == k)
    for x in range(width):
        count[x] = column[x]
    for dx in range(1, kx):
        for x in range(width):
            count[x] += column[x + dx]


@njit(forceinline=True)
def _look_around(codes, at, sizes, column, counts, total, mixed):
    """Counts of the classes in the patches, of all that counts, and whether they are several."""
    width = at[4] - at[3]
    _count(codes, NOTHING, at, sizes, column, total)
    whole = np.uint8(sizes[0] * sizes[1] * sizes[2])
    for x in range(width):
        total[x] = max(whole - total[x], 1)
        mixed[x] = 0
    for k in range(counts.shape[0]):
        count = counts[k, :width]
        _count(codes, k, at, sizes, column, count)
        for x in range(width):
            mixed[x] += np.uint8(count[x] > 0)
    for x in range(width):
        mixed[x] = np.uint8(mixed[x] > 1)


@njit(forceinline=True)
def _by_region(region, table, out):
    """out[x] = table[region[x]]."""
    first = out.dtype.type(table[0])
    for x in range(out.shape[0]):
        out[x] = first
    for r in range(1, table.shape[0]):
        other, code = out.dtype.type(table[r]), np.uint8(r)
        for x in range(out.shape[0]):
            out[x] = other if region[x] == code else out[x]


@njit(forceinline=True, fastmath=SUMS)
def _sum(values):
    total = 0.0
    for x in range(values.shape[0]):
        total += np.float64(values[x])
    return total


@njit(forceinline=True, fastmath=SUMS)
def _sum_of_region(values, region, r):
    total, code = 0.0, np.uint8(r)
    for x in range(values.shape[0]):
        total += np.float64(values[x]) if region[x] == code else 0.0
    return total


@njit(forceinline=True, fastmath=EXACT)
def _largest(logits, at, largest):
    """Largest logit of every voxel."""
    plane = _row(logits, 0, at)
    for x in range(largest.shape[0]):
        largest[x] = plane[x]
    for k in range(1, logits.shape[1]):
        plane = _row(logits, k, at)
        for x in range(largest.shape[0]):
            largest[x] = plane[x] if plane[x] > largest[x] else largest[x]


@njit(forceinline=True, fastmath=EXACT)
def _cross_entropy(logits, at, label, largest, exps, norm, gap, weight):
    """Weighted cross-entropy of the stretch; leaves e^(l - max) and their sum for the gradient."""
    T = norm.dtype.type
    zero = T(0)
    for x in range(norm.shape[0]):
        norm[x] = zero
        gap[x] = zero
    for k in range(logits.shape[1]):
        plane, e = _row(logits, k, at), exps[k, : norm.shape[0]]
        _exps(plane, largest, e)
        code = np.uint8(k)  # compared as a byte, 32 voxels at a time
        for x in range(norm.shape[0]):
            norm[x] += e[x]
            gap[x] = largest[x] - plane[x] if label[x] == code else gap[x]
    _add_logs(norm, gap)
    for x in range(norm.shape[0]):
        gap[x] = gap[x] * weight[x] if label[x] != NOTHING else zero
    return _sum(gap)


@njit(forceinline=True, fastmath=EXACT)
def _shape(shape, u, sign):
    """Turn u into the constraint z in place; sign = dz / du."""
    T = u.dtype.type
    zero, one = T(0), T(1)
    if shape == ABS:
        for x in range(u.shape[0]):
            sign[x] = one if u[x] > zero else (-one if u[x] < zero else zero)
            u[x] = abs(u[x])
    else:
        s = one if shape == UPPER else -one
        for x in range(u.shape[0]):
            sign[x] = s
            u[x] *= s


@njit(forceinline=True, fastmath=EXACT)
def _penalise(penalty, z, lam, rho, value, slope):
    """Value = P(z; lam, rho) and slope = P'(z), the functions of :mod:`segcal.alm`."""
    T = z.dtype.type
    zero, one, half, top = T(0), T(1), T(0.5), T(Z_LINEAR)
    for x in range(z.shape[0]):
        inside = top if z[x] > top else z[x]
        beyond = z[x] - inside
        la, rh = lam[x], rho[x]
        if penalty == PHR:  # comparisons with < let NaN through
            s = la + rh * inside
            d = rh if rh > T(1e-37) else T(1e-37)
            v = -half * la * la / d if s < zero else la * inside + half * rh * inside * inside
            s = zero if s < zero else s
        elif penalty == RELU:
            v = zero if inside < zero else la * inside
            s = zero if inside < zero else la
        elif penalty == EQUALITY:
            v = la * inside + half * rh * inside * inside
            s = la + rh * inside
        else:
            cubic = rh * rh if penalty == P2 else zero
            p = zero if inside < zero else inside
            m = inside if inside < zero else zero
            d = one - rh * m
            v = la * m / d if inside < zero else p * (la + p * (la * rh + p * cubic * T(1 / 6)))
            s = la / (d * d) if inside < zero else la + p * (T(2) * la * rh + half * cubic * p)
        value[x] = v + s * beyond
        slope[x] = s


@njit(nogil=True, fastmath=EXACT, cache=True)
def _block(logits, codes, region_map, plan, gradient, all_sums, all_statistics, block):
    """Sweep the stretches of one block, adding to its row of the sums and statistics."""
    T = logits.dtype.type
    N, K, Z, Y, X = logits.shape
    kz, ky, kx = plan.sizes
    R = plan.lam.shape[0]
    per_row = (X + STRETCH - 1) // STRETCH
    longest = min(X, STRETCH)
    zero, scale = T(0), T(plan.scale)
    ce_factor, penalty_factor = T(plan.ce_factor), T(plan.penalty_factor)
    low, high = T(plan.clip_low), T(plan.clip_high)
    floats, bytes_ = np.empty((15, longest), logits.dtype), np.empty((3, longest), np.uint8)
    exps, counts = np.empty((K, longest), logits.dtype), np.empty((K, longest), np.uint8)
    column = np.empty(longest + kx - 1, np.uint8)

    sums, statistics = all_sums[block], all_statistics[block if plan.with_statistics else 0]
    stretches, per_block = _split(N * Z * Y, X)
    for index in range(block * per_block, min((block + 1) * per_block, stretches)):
        row = index // per_row
        n, z, y = row // (Z * Y), row // Y % Z, row % Y
        start = (index % per_row) * STRETCH
        width = min(STRETCH, X - start)
        stop = start + width
        at = (n, z, y, start, stop)
        label = codes[n, z + kz // 2, y + ky // 2, start + kx // 2 : stop + kx // 2]
        region, total, mixed = bytes_[0, :width], bytes_[1, :width], bytes_[2, :width]
        largest, ties, norm = floats[0, :width], floats[1, :width], floats[2, :width]
        ce_weight, gap = floats[3, :width], floats[4, :width]
        weight, margin, lam = floats[5, :width], floats[6, :width], floats[7, :width]
        rho, u, value = floats[8, :width], floats[9, :width], floats[10, :width]
        slope, penalty, pull = floats[11, :width], floats[12, :width], floats[13, :width]
        onto_largest = floats[14, :width]

        if plan.regions == PATCH or not plan.from_largest:
            _look_around(codes, at, plan.sizes, column, counts, total, mixed)
        for x in range(width):
            region[x] = mixed[x] if plan.regions == PATCH else 0
        if plan.regions == MAP:
            region[:] = region_map[n, z, y, start:stop]
        for x in range(width):
            region[x] = region[x] if label[x] != NOTHING else np.uint8(NOTHING)
            counts_here = region[x] != NOTHING
            weight[x] = T(plan.penalty_weight[region[x], label[x]]) if counts_here else zero
            penalty[x] = zero
            onto_largest[x] = zero
        _by_region(region, plan.margins, margin)
        if not plan.from_largest:
            for x in range(width):
                margin[x] /= T(total[x])
        if plan.with_ce or plan.from_largest:
            _largest(logits, at, largest)
        if plan.with_ce:
            for x in range(width):
                ce_weight[x] = T(plan.ce_weight[label[x]]) if label[x] != NOTHING else zero
            sums[0] += _cross_entropy(logits, at, label, largest, exps, norm, gap, ce_weight)
            for x in range(width):
                ce_weight[x] *= ce_factor
                norm[x] = ce_weight[x] / norm[x]

        for k in range(K):
            plane = _row(logits, k, at)
            _by_region(region, plan.lam[:, k], lam)
            _by_region(region, plan.rho[:, k], rho)
            if plan.from_largest:
                for x in range(width):
                    u[x] = (largest[x] - plane[x] - margin[x]) * scale
            else:
                count = counts[k, :width]
                for x in range(width):
                    u[x] = plane[x] - T(count[x]) * margin[x]
            _shape(plan.shape, u, pull)
            if plan.penalty == PHR:  # one loop for each, without a branch inside
                _penalise(PHR, u, lam, rho, value, slope)
            elif plan.penalty == P2:
                _penalise(P2, u, lam, rho, value, slope)
            elif plan.penalty == P3:
                _penalise(P3, u, lam, rho, value, slope)
            elif plan.penalty == RELU:
                _penalise(RELU, u, lam, rho, value, slope)
            else:
                _penalise(EQUALITY, u, lam, rho, value, slope)
            for x in range(width):
                penalty[x] += value[x]
            if plan.with_statistics:
                for x in range(width):
                    value[x] = min(max(slope[x], low), high)
                    u[x] = abs(u[x]) if plan.penalty == EQUALITY else u[x]
                for r in range(R):
                    statistics[0, r, k] += _sum_of_region(value, region, r)
                    statistics[1, r, k] += _sum_of_region(u, region, r)
            if plan.with_gradient:
                g, e = _row(gradient, k, at), exps[k, :width]
                for x in range(width):
                    p = slope[x] * pull[x] * weight[x] * penalty_factor
                    pull[x] = p if region[x] != NOTHING else zero
                if plan.from_largest:
                    for x in range(width):
                        onto_largest[x] += scale * pull[x]
                        pull[x] *= -scale
                if plan.with_ce:
                    code = np.uint8(k)
                    for x in range(width):
                        hit = ce_weight[x] if label[x] == code else zero
                        pull[x] += e[x] * norm[x] - hit
                for x in range(width):
                    g[x] = pull[x]

        if plan.with_gradient and plan.from_largest:
            for x in range(width):
                ties[x] = zero
            for k in range(K):
                plane = _row(logits, k, at)
                for x in range(width):
                    ties[x] += T(1) if plane[x] == largest[x] else zero
            for x in range(width):
                onto_largest[x] /= ties[x]
            for k in range(K):
                plane, g = _row(logits, k, at), _row(gradient, k, at)
                for x in range(width):
                    g[x] += onto_largest[x] if plane[x] == largest[x] else zero
        for x in range(width):
            penalty[x] = penalty[x] * weight[x] if region[x] != NOTHING else zero
        sums[1] += _sum(penalty)
        if plan.with_statistics:
            for r in range(R):
                for x in range(width):
                    statistics[2, r, 0] += region[x] == r


def run(
    logits: Tensor, codes: Tensor, region: Tensor | None, job: Job
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sweep all voxels.

    Args:
        logits: float32 or float64 ``(N, K, Z, Y, X)``, contiguous.
        codes: uint8 labels, padded by half a patch.
        region: uint8 ``(N, Z, Y, X)``; None where the job says which.
        job: what to compute.

    Returns:
        values ``(2,)`` of cross-entropy and penalty; statistics ``(3, R, K)``: sums of P' and of z,
        and in ``[2, :, 0]`` the voxels of each region; the gradient like `logits`, or None. The
        first two are float64.
    """
    n, _, z, y, x = logits.shape
    stretches, per_block = _split(n * z * y, x)
    blocks = -(-stretches // per_block)
    sums = np.zeros((blocks, 2))
    statistics = np.zeros((blocks if job.statistics else 1, 3, *job.residual.lam.shape))
    gradient = torch.empty_like(logits) if job.gradient else logits.new_empty((0,) * 5)
    arguments = (
        logits.numpy(),
        codes.numpy(),
        (codes.new_empty((0,) * 4) if region is None else region).numpy(),
        _plan(job, region is not None),
        gradient.numpy(),
        sums,
        statistics,
    )
    _in_parallel(lambda block: _block(*arguments, block), blocks)
    return (
        torch.from_numpy(sums.sum(0)),
        torch.from_numpy(statistics.sum(0)),
        gradient if job.gradient else None,
    )


def _in_parallel(work: Callable[[int], None], blocks: int) -> None:
    """Call `work` for every block, on as many threads as torch uses.

    The threads are those of torch's own OpenMP where its ``GOMP_parallel`` can be reached (Linux):
    they spin for some milliseconds after every operation of torch, and others would have to share
    the cores with them. Elsewhere they are new ones.
    """
    queue = itertools.count()
    errors: list[BaseException] = []

    def worker(_: Any = None) -> None:
        try:
            while (block := next(queue)) < blocks and not errors:
                work(block)
        except BaseException as error:  # noqa: BLE001 - nothing may leave a thread of OpenMP
            errors.append(error)

    workers = max(1, min(torch.get_num_threads(), blocks))
    parallel = _openmp()
    if workers == 1:
        worker()
    elif parallel is not None:
        parallel(_ON_THREAD(worker), None, workers, 0)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(worker, range(workers)))
    if errors:
        raise errors[0]


_ON_THREAD = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def _openmp() -> Callable[..., None] | None:
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel  # of the libraries that are loaded
    except (AttributeError, OSError, TypeError):
        return None
    parallel.argtypes = [_ON_THREAD, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return cast(Callable[..., None], parallel)


def _plan(job: Job, with_map: bool) -> _Plan:
    residual = job.residual
    ce_weight = job.cross_entropy_weight
    return _Plan(
        ce_weight=_float64(job.penalty_weight[0] if ce_weight is None else ce_weight),
        penalty_weight=_float64(job.penalty_weight),
        lam=_float64(residual.lam),
        rho=_float64(residual.rho),
        margins=np.array(residual.margins, dtype=np.float64),
        sizes=job.sizes,
        scale=float(residual.scale),
        clip_low=float(residual.clip[0]),
        clip_high=float(residual.clip[1]),
        ce_factor=float(job.factors[0]),
        penalty_factor=float(job.factors[1]),
        shape=SHAPE_CODES[residual.shape],
        penalty=PENALTY_CODES[residual.penalty],
        regions=region_code(residual, with_map),
        from_largest=residual.patch is None,
        with_ce=ce_weight is not None,
        with_gradient=job.gradient,
        with_statistics=job.statistics,
    )


def _float64(x: Tensor) -> NDArray[np.float64]:
    return x.detach().double().contiguous().numpy()
