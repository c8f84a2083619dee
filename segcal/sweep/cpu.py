"""The sweep on CPUs, compiled: values and gradient in one pass over the logits.

Work goes by the *stretch*, up to 512 voxels of a plane (the last two axes, flattened): what a
stretch needs stays in the fastest cache, so logits are read once from memory and the gradient is
written once. Loops run over the voxels of a stretch with the class outside, without branches, so
that they become vector instructions. Stretches go to threads in blocks whose bounds depend on the
shape alone, and sums are added in the order of the blocks: the bits of a result do not depend on
the number of threads.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload
from numpy.typing import NDArray
from torch import Tensor

from segcal.compiling import compiled
from segcal.sweep.terms import (
    ABS,
    FUNCTION_CODES,
    NOTHING,
    P2,
    P3,
    PHR,
    RELU,
    SHAPE_CODES,
    UPPER,
    Z_LINEAR,
    SweepPlan,
)

STRETCH = 512
BLOCK_VOXELS = 16384
EXACT = {"contract", "nsz"}  # a * b + c in one rounding; -0 is 0
SUMS = {"reassoc", "nsz"}  # partial sums side by side, in an order fixed by the compiler


class _Numbers(NamedTuple):
    """A :class:`segcal.sweep.terms.SweepPlan` as compiled code takes it."""

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
    with_gradient: bool
    with_statistics: bool


@njit
def _split(planes, size):
    """Return the number of stretches, and how many make a block."""
    return planes * ((size + STRETCH - 1) // STRETCH), max(1, BLOCK_VOXELS // min(size, STRETCH))


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
    return ((m + p) + np.float32(0.693359375) * e) + (x - x)  # NaN stays NaN


def _exps(plane: Any, largest: Any, out: Any, norm: Any) -> None:
    raise NotImplementedError  # in compiled code, the overload


@overload(_exps, fastmath=EXACT)
def _exps_for(plane, largest, out, norm):
    if out.dtype == types.float32:

        def exps(plane, largest, out, norm):
            for x in range(out.shape[0]):
                out[x] = _exp32(plane[x] - largest[x])
                norm[x] += out[x]
    else:

        def exps(plane, largest, out, norm):
            for x in range(out.shape[0]):
                out[x] = math.exp(plane[x] - largest[x])
                norm[x] += out[x]

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
    """Stretch of class k; slices like this one keep their last axis contiguous for the compiler."""
    return planes[at[0], k, at[1], at[2] : at[3]]


@njit(forceinline=True)
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


@njit(forceinline=True)
def _look_around(
    codes, at, row_length, sizes, gaps, count_all, column, label, counts, total, mixed
):
    """Labels of a stretch, counts of classes in their patches, of all that counts, and whether
    the classes are several. A stretch is pieces of rows.
    """  # noqa: D205
    n, z, start, stop = at
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
    if count_all:
        for x in range(stop - start):
            mixed[x] = 0
        for k in range(counts.shape[0]):
            count = counts[k, : stop - start]
            for x in range(stop - start):
                mixed[x] += np.uint8(count[x] > 0)
        for x in range(stop - start):
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
        _exps(plane, largest, e, norm)
        code = np.uint8(k)  # compared as a byte, 32 voxels at a time
        for x in range(norm.shape[0]):
            gap[x] = largest[x] - plane[x] if label[x] == code else gap[x]
    _add_logs(norm, gap)
    for x in range(norm.shape[0]):
        gap[x] = gap[x] * weight[x] if label[x] != NOTHING else zero
    return _sum(gap)


@njit(forceinline=True, fastmath=EXACT)
def _penalise(function, absolute, signed, u, lam, rho, weight, value, slope, pull):
    """Put z = absolute |u| + signed u in place of u, add P(z) to value; slope = P'(z).

    pull = weight P'(z) dz/du. P is of :mod:`segcal.alm.functions`; comparisons with < let NaN
    through.
    """
    T = u.dtype.type
    zero, one, half, top = T(0), T(1), T(0.5), T(Z_LINEAR)
    for x in range(u.shape[0]):
        side = one if u[x] > zero else (-one if u[x] < zero else zero)
        z = absolute * abs(u[x]) + signed * u[x]
        inside = top if z > top else z
        beyond = z - inside
        la, rh = lam[x], rho[x]
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
        pull[x] = s * (absolute * side + signed) * weight[x]


@partial(compiled, fastmath=EXACT)
def _block(logits, codes, plan, gradient, all_sums, all_statistics, block):
    """Sweep the stretches of one block, adding to its row of the sums and statistics."""
    T = logits.dtype.type
    N, K, Z, plane_size = logits.shape
    row_length = codes.shape[3] - plan.sizes[2] + 1
    R = plan.lam.shape[0]
    per_plane = (plane_size + STRETCH - 1) // STRETCH
    longest = min(plane_size, STRETCH)
    zero, scale = T(0), T(plan.scale)
    absolute = T(1) if plan.shape == ABS else zero
    signed = zero if plan.shape == ABS else (T(1) if plan.shape == UPPER else T(-1))
    ce_factor, penalty_factor = T(plan.ce_factor), T(plan.penalty_factor)
    low, high = T(plan.clip_low), T(plan.clip_high)
    every_weight, every_ce_weight = T(plan.penalty_weight), T(plan.ce_weight[0])
    whole = plan.sizes[0] * plan.sizes[1] * plan.sizes[2]
    per_voxel = T(1) / T(whole)
    floats, bytes_ = np.empty((15, longest), logits.dtype), np.empty((4, longest), np.uint8)
    exps, counts = np.empty((K, longest), logits.dtype), np.empty((K, longest), np.uint8)
    column = np.empty(longest + plan.sizes[2] - 1, np.uint8)
    neighbours = not plan.from_largest

    sums, statistics = all_sums[block], all_statistics[block if plan.with_statistics else 0]
    stretches, per_block = _split(N * Z, plane_size)
    for index in range(block * per_block, min((block + 1) * per_block, stretches)):
        plane_index = index // per_plane
        n, z = plane_index // Z, plane_index % Z
        start = (index % per_plane) * STRETCH
        stop = min(start + STRETCH, plane_size)
        width = stop - start
        at = (n, z, start, stop)
        label, region = bytes_[0, :width], bytes_[1, :width]
        total, mixed = bytes_[2, :width], bytes_[3, :width]
        largest, ties, norm = floats[0, :width], floats[1, :width], floats[2, :width]
        ce_weight, gap = floats[3, :width], floats[4, :width]
        weight, margin, lam = floats[5, :width], floats[6, :width], floats[7, :width]
        rho, u, value = floats[8, :width], floats[9, :width], floats[10, :width]
        slope, pull, onto_largest = floats[11, :width], floats[12, :width], floats[13, :width]
        clipped = floats[14, :width]

        _look_around(
            codes, at, row_length, plan.sizes, plan.gaps, neighbours, column, label, counts, total,
            mixed,
        )  # fmt: skip
        for x in range(width):
            region[x] = mixed[x] if R == 2 else 0
        for x in range(width):
            region[x] = region[x] if label[x] != NOTHING else np.uint8(NOTHING)
            weight[x] = every_weight if region[x] != NOTHING else zero
            value[x] = zero
            onto_largest[x] = zero
        _by_region(region, plan.margins, margin)
        if not plan.from_largest:
            for x in range(width):
                margin[x] *= per_voxel
            if plan.gaps:
                for x in range(width):
                    margin[x] *= T(whole) / T(total[x])
        if plan.with_ce or plan.from_largest:
            _largest(logits, at, largest)
        if plan.with_ce:
            for x in range(width):
                ce_weight[x] = every_ce_weight if label[x] != NOTHING else zero
            if not plan.one_ce_weight:
                for x in range(width):
                    if label[x] != NOTHING:
                        ce_weight[x] = T(plan.ce_weight[label[x]])
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
            a, b = absolute, signed
            if plan.function == PHR:  # one loop for each, without a branch inside
                _penalise(PHR, a, b, u, lam, rho, weight, value, slope, pull)
            elif plan.function == P2:
                _penalise(P2, a, b, u, lam, rho, weight, value, slope, pull)
            elif plan.function == P3:
                _penalise(P3, a, b, u, lam, rho, weight, value, slope, pull)
            else:
                _penalise(RELU, a, b, u, lam, rho, weight, value, slope, pull)
            if plan.with_statistics:
                for x in range(width):
                    clipped[x] = min(max(slope[x], low), high)
                for r in range(R):
                    statistics[0, r, k] += _sum_of_region(clipped, region, r)
                    statistics[1, r, k] += _sum_of_region(u, region, r)
            if plan.with_gradient:
                g = _row(gradient, k, at)
                factor = penalty_factor
                if plan.from_largest:
                    for x in range(width):
                        onto_largest[x] += scale * pull[x]
                    factor = -scale * penalty_factor
                if plan.with_ce:
                    e, code = exps[k, :width], np.uint8(k)
                    for x in range(width):
                        p = factor * pull[x] if region[x] != NOTHING else zero
                        hit = ce_weight[x] if label[x] == code else zero
                        g[x] = p + e[x] * norm[x] - hit
                else:
                    for x in range(width):
                        g[x] = factor * pull[x] if region[x] != NOTHING else zero

        if plan.with_gradient and plan.from_largest:
            for x in range(width):
                ties[x] = zero
            for k in range(K):
                plane = _row(logits, k, at)
                for x in range(width):
                    ties[x] += T(1) if plane[x] == largest[x] else zero
            for x in range(width):
                share = penalty_factor * onto_largest[x] / ties[x]
                onto_largest[x] = share if region[x] != NOTHING else zero
            for k in range(K):
                plane, g = _row(logits, k, at), _row(gradient, k, at)
                for x in range(width):
                    g[x] += onto_largest[x] if plane[x] == largest[x] else zero
        for x in range(width):
            value[x] = value[x] * weight[x] if region[x] != NOTHING else zero
        sums[1] += _sum(value)
        if plan.with_statistics:
            for r in range(R):
                for x in range(width):
                    statistics[2, r, 0] += region[x] == r


def run(logits: Tensor, codes: Tensor, plan: SweepPlan) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sweep all voxels.

    Args:
        logits: float32 or float64 ``(N, K, Z, Y, X)``, contiguous.
        codes: uint8 labels, padded by half a patch.
        plan: what to compute.

    Returns:
        values ``(2,)`` of cross-entropy and penalty; statistics ``(3, R, K)``: sums of P' and of z,
        and in ``[2, :, 0]`` the voxels of each region; the gradient like `logits`, or None. The
        first two are float64.
    """
    n, k, z, y, x = logits.shape
    stretches, per_block = _split(n * z, y * x)
    blocks = -(-stretches // per_block)
    sums = np.zeros((blocks, 2))
    statistics = np.zeros((blocks if plan.statistics else 1, 3, *plan.residual.lam.shape))
    planes, codes = logits.view(n, k, z, y * x), codes.contiguous()
    gradient = torch.empty_like(planes) if plan.gradient else logits.new_empty((0,) * 4)
    arguments = (
        planes.numpy(),
        codes.numpy(),
        _numbers(plan),
        gradient.numpy(),
        sums,
        statistics,
    )
    _in_parallel(lambda block: _block(*arguments, block), blocks)
    return (
        torch.from_numpy(sums.sum(0)),
        torch.from_numpy(statistics.sum(0)),
        gradient.view_as(logits) if plan.gradient else None,
    )


def _in_parallel(work: Callable[[int], None], blocks: int) -> None:
    """Call `work` for every block, on as many threads as torch uses.

    The threads are those of torch's own OpenMP where its ``GOMP_parallel`` can be reached (Linux):
    they spin for some milliseconds after every operation of torch, and others would have to share
    the cores with them. Elsewhere they are new ones.
    """
    queue = itertools.count()
    errors: list[BaseException] = []
    finished: list[int] = []

    def worker(_: Any = None) -> None:
        try:
            while (block := next(queue)) < blocks and not errors:
                work(block)
            finished.append(threading.get_ident())
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
    if parallel is not None and threading.get_ident() not in finished:
        raise KeyboardInterrupt  # it came between OpenMP and our first line, which no one sees


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


def _numbers(plan: SweepPlan) -> _Numbers:
    residual = plan.residual
    with_ce = plan.cross_entropy_weight is not None
    ce_weight = (
        np.zeros(1) if plan.cross_entropy_weight is None else _float64(plan.cross_entropy_weight)
    )
    return _Numbers(
        ce_weight=ce_weight,
        penalty_weight=float(plan.penalty_weight),
        lam=_float64(residual.lam),
        rho=_float64(residual.rho),
        margins=np.array(residual.margins, dtype=np.float64),
        sizes=plan.sizes,
        scale=float(residual.scale),
        clip_low=float(residual.clip[0]),
        clip_high=float(residual.clip[1]),
        ce_factor=float(plan.factors[0]),
        penalty_factor=float(plan.factors[1]),
        shape=SHAPE_CODES[residual.shape],
        function=FUNCTION_CODES[residual.function],
        from_largest=residual.patch is None,
        gaps=plan.gaps,
        one_ce_weight=bool((ce_weight == ce_weight[0]).all()),
        with_ce=with_ce,
        with_gradient=plan.gradient,
        with_statistics=plan.statistics,
    )


def _float64(x: Tensor) -> NDArray[np.float64]:
    return x.detach().double().cpu().contiguous().numpy()
