"""The sweep on CPUs: hands a plan to the compiled loops, and shares the work among threads.

What is computed, and how, is described in :mod:`segcal.sweep.loops`; for the penalty on log-odds in
:mod:`segcal.sweep.confidence_loops`, and for losses of sums in :mod:`segcal.sweep.sums_loops`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.binning import edge_tolerance
from segcal.sweep.bins_loops import EXTRA_CELLS, LINE, SLOTS, Bins
from segcal.sweep.confidence_loops import ConfidenceNumbers, confidence_blocks, largest_blocks
from segcal.sweep.labels_loops import BLOCK, PLACES, VALID, WRONG, encode_blocks
from segcal.sweep.loops import Numbers, sweep_blocks
from segcal.sweep.stretches import BLOCK_VOXELS, STRETCH, blocks_of
from segcal.sweep.sums_loops import SumNumbers, SumSlopes, sum_blocks
from segcal.sweep.terms import (
    FUNCTION_CODES,
    SHAPE_CODES,
    BinTerm,
    ConfidencePlan,
    Residual,
    SharedPlan,
    SumsPlan,
    SweepPlan,
    Together,
)
from segcal.tensors import check_label_values

TABLE_BYTES = 2**25
"""Limit on the memory of the sums of all blocks, unless one block per image needs more."""


class Sums(NamedTuple):
    """What :func:`sum_up` finds.

    Attributes:
        cross_entropy: float64 scalar, 0 where it is left out.
        overlaps: P, O and T of :mod:`segcal.sweep.sums_loops`, float64 ``(3, N, K)``; zeros without
            a loss of overlaps.
        bins: W, C and A of :mod:`segcal.sweep.bins_loops`, float64 ``(3, N, K, M)``; None without a
            loss of bins.
        predicted: first class of the largest logit, uint8 ``(N, V)``, or None.
        softmax: like the logits, or None.
    """

    cross_entropy: Tensor
    overlaps: Tensor
    bins: Tensor | None
    predicted: Tensor | None
    softmax: Tensor | None


def encode(
    labels: Tensor, num_classes: int, terms: Together
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check labels, and encode what every loop needs of them.

    Args:
        labels: integer ``(N, *S)``.
        num_classes: K.
        terms: what is to be computed.

    Returns:
        codes uint8 ``(N, *S)``, ``NOTHING`` where a voxel does not count; and the weights of
        :class:`segcal.sweep.terms.SharedPlan`: a scalar for the penalty, ``(K,)`` for the
        cross-entropy.

    Raises:
        ValueError: label values that do not fit.
    """
    ignore, ce = terms.ignore_index, terms.cross_entropy
    class_weight = None if ce is None else ce.class_weight
    codes = torch.empty(labels.shape, dtype=torch.uint8)
    blocks = -(-labels.numel() // BLOCK)
    found = np.zeros((blocks, PLACES + num_classes), np.int64)
    arguments = (
        labels.contiguous().view(-1).numpy(),
        num_classes,
        ignore is not None,
        ignore or 0,
        class_weight is not None,
        codes.view(-1).numpy(),
        found,
    )
    _in_parallel(lambda counter: encode_blocks(*arguments, counter), blocks)
    counts = found.sum(0)
    if counts[WRONG]:
        check_label_values(labels, num_classes, ignore)
    n = int(counts[VALID])
    penalty_weight = torch.tensor(1 / n if n else 0.0, dtype=torch.float64)
    if ce is None:
        return codes, penalty_weight, None
    if class_weight is None:
        return codes, penalty_weight, penalty_weight.expand(num_classes)
    weight = class_weight.double()
    total = (weight * torch.from_numpy(counts[PLACES:])).sum()
    return codes, penalty_weight, weight / total.clamp(min=torch.finfo(torch.float64).tiny)


def scale(gradient: Tensor, factor: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradient times a factor, and the factor if it was multiplied in place.

    Args:
        gradient: tensor of any shape.
        factor: scalar.

    Returns:
        the product; the factor where `gradient` was multiplied in place, None where it is
        unchanged.
    """
    return (gradient if factor.item() == 1 else gradient * factor), None


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
    blocks = blocks_of(n * z, y * x)
    sums = np.zeros((blocks, 2))
    numbers = _numbers(plan, logits)
    statistics = np.zeros((blocks if plan.statistics else 1, 3, *numbers.lam.shape))
    planes, codes = logits.view(n, k, z, y * x), codes.contiguous()
    gradient = _gradient(plan, planes)
    arguments = (
        planes.numpy(),
        codes.numpy(),
        numbers,
        gradient.numpy(),
        sums,
        statistics,
    )
    _in_parallel(lambda counter: sweep_blocks(*arguments, counter), blocks)
    return (
        torch.from_numpy(sums.sum(0)),
        torch.from_numpy(statistics.sum(0)),
        gradient.view_as(logits) if plan.gradient else None,
    )


def largest_class(logits: Tensor) -> Tensor:
    """First class of the largest logit, uint8 ``(N, V)``, of contiguous logits ``(N, K, V)``."""
    n, _, voxels = logits.shape
    predicted = logits.new_empty((n, voxels), dtype=torch.uint8)
    arguments = logits.unsqueeze(2).numpy(), predicted.numpy()
    _in_parallel(lambda counter: largest_blocks(*arguments, counter), blocks_of(n, voxels))
    return predicted


def run_confidence(
    logits: Tensor, maps: tuple[Tensor, Tensor, Tensor], plan: ConfidencePlan
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sweep all voxels for the penalty on log-odds.

    Args:
        logits: float32 or float64 ``(N, K, V)``, contiguous.
        maps: uint8 ``(N, V)`` each: labels, ``NOTHING`` where a voxel does not count; predicted
            classes; regions of the predicted map.
        plan: what to compute.

    Returns:
        values ``(2,)`` of cross-entropy and penalty; statistics ``(3, 2, K)``: sums of confidence
        and of hits, and voxels; the gradient like `logits`, or None. The first two are float64.
    """
    n, k, voxels = logits.shape
    blocks = blocks_of(n, voxels)
    sums = np.zeros((blocks, 2))
    statistics = np.zeros((blocks if plan.statistics else 1, 3, 2, k))
    planes = logits.unsqueeze(2)
    gradient = _gradient(plan, planes)
    arguments = (
        planes.numpy(),
        tuple(x.contiguous().numpy() for x in maps),
        _confidence_numbers(plan, logits),
        gradient.numpy(),
        sums,
        statistics,
    )
    _in_parallel(lambda counter: confidence_blocks(*arguments, counter), blocks)
    return (
        torch.from_numpy(sums.sum(0)),
        torch.from_numpy(statistics.sum(0)),
        gradient.view_as(logits) if plan.gradient else None,
    )


def sum_up(logits: Tensor, codes: Tensor, plan: SumsPlan) -> Sums:
    """Find the sums that losses of sums need, and what else is found on the way.

    Args:
        logits: float32 or float64 ``(N, K, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.
        plan: what to compute.
    """
    n, k, voxels = logits.shape
    bins, ce_weight = _bins(plan.bins), _ce_weight(plan)
    with_bins = plan.bins is not None
    per_image, per_block = _sum_blocks(logits, bins, with_bins)
    softmax = logits.new_empty(logits.shape if plan.softmax else (0, 0, 0))
    predicted = torch.empty((n, voxels) if plan.predicted else (0, 0), dtype=torch.uint8)
    values, overlaps = np.zeros((n, per_image, 1)), np.zeros((n, per_image, 3, k))
    cells = np.zeros((n, per_image if with_bins else 0, k, bins.number + EXTRA_CELLS, SLOTS))
    arguments = (
        logits.unsqueeze(2).numpy(),
        codes.contiguous().numpy(),
        SumNumbers(
            ce_weight=ce_weight,
            one_ce_weight=bool((ce_weight == ce_weight[:1]).all()),
            bins=bins,
            gaps=plan.gaps,
            with_ce=plan.cross_entropy_weight is not None,
            with_overlaps=plan.overlaps,
            with_bins=with_bins,
            with_predicted=plan.predicted,
            with_softmax=plan.softmax,
        ),
        per_block,
        softmax.unsqueeze(2).numpy(),
        predicted.numpy(),
        values,
        overlaps,
        cells,
    )
    _in_parallel(lambda counter: sum_blocks(*arguments, counter), n * per_image)
    return Sums(
        torch.tensor(values.sum()),
        torch.from_numpy(overlaps.sum(1)).transpose(0, 1).contiguous(),
        _of_cells(cells.sum(1), bins.soft) if with_bins else None,
        predicted if plan.predicted else None,
        softmax if plan.softmax else None,
    )


def _bins(term: BinTerm | None) -> Bins:
    return Bins(1, 0.0, False) if term is None else Bins(
        term.bins, edge_tolerance(term.bins), term.soft
    )  # fmt: skip


def _sum_blocks(logits: Tensor, bins: Bins, with_bins: bool) -> tuple[int, int]:
    """Number of blocks of an image and of stretches of a block, as tables have room for."""
    n, k, voxels = logits.shape
    stretches = -(-voxels // STRETCH)
    cells = (bins.number + EXTRA_CELLS) * SLOTS if with_bins else 0
    most = max(1, min(-(-voxels // BLOCK_VOXELS), TABLE_BYTES // (8 * n * k * (3 + cells))))
    per_block = -(-stretches // most)
    return -(-stretches // per_block), per_block


def _of_cells(cells: NDArray[np.float64], soft: bool) -> Tensor:
    """W, C and A ``(3, N, K, M)`` from sums of cells ``(N, K, M + 1, SLOTS)``."""
    left, right = np.moveaxis(cells, -1, 0).reshape(3, 2, *cells.shape[:-1]).swapaxes(0, 1)
    found = left[..., :-1].copy()
    found[..., 0] += left[..., -1]
    if soft:
        found[..., 1:] += right[..., :-2]
        found[..., -1] += right[..., -2]
    return torch.from_numpy(found)


def _lines(slopes: NDArray[np.float64], soft: bool) -> NDArray[np.float64]:
    """Intercept and slope of g over p by cell, ``(N, K, 2 * (M + 1) * LINE)``, hits second.

    With dW, dC and dA for the derivatives of the loss by the sums ``(3, N, K, M)``, with D for the
    difference between bins a + 1 and a, and with ``f = M p - 1/2 - a``,
    ``g = dC_a + f D dC + M (D dW + p D dC + [k = y] D dA)``.
    """
    _, n, k, bins = slopes.shape
    by_confidence = slopes[1][:, :, None]
    lines = np.zeros((n, k, 2, bins + EXTRA_CELLS, LINE))
    lines[..., :bins, 0] = by_confidence
    lines[..., bins, 0] = by_confidence[..., 0]
    if soft:
        rise_w, rise_c, rise_a = np.diff(slopes)
        centre = np.arange(bins - 1) + 0.5
        lines[..., : bins - 1, 0] += (bins * rise_w - centre * rise_c)[:, :, None]
        lines[:, :, 1, : bins - 1, 0] += bins * rise_a
        lines[..., : bins - 1, 1] = 2 * bins * rise_c[:, :, None]
    return lines.reshape(n, k, -1)


def _in_parallel(loop: Callable[[NDArray[np.int64]], None], blocks: int) -> None:
    """Call `loop` on as many threads as torch uses, but no more than there are blocks.

    It is given the counter that :func:`segcal.sweep.sharing.take` raises, and ends at its last
    block by itself.

    The threads are those of torch's own OpenMP where its ``GOMP_parallel`` can be reached (Linux).
    These threads spin for some milliseconds after every operation of torch, so that other threads
    would have to share the cores with them. Elsewhere new threads are started.
    """
    counter = np.zeros(1, np.int64)
    errors: list[BaseException] = []
    finished: list[int] = []

    def worker(_: Any = None) -> None:
        try:
            loop(counter)
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


def _gradient(plan: SharedPlan, planes: Tensor) -> Tensor:
    """Memory of the gradient ``(N, K, Z, V)``, in which the softmax may be; empty if not wanted."""
    if plan.softmax is not None:
        return plan.softmax.view_as(planes)
    return torch.empty_like(planes) if plan.gradient else planes.new_empty((0, 0, 0, 0))


def _numbers(plan: SweepPlan, logits: Tensor) -> Numbers:
    nothing = torch.zeros(1, logits.shape[1], dtype=torch.float64)
    residual = plan.residual or Residual(nothing, nothing, "relu", "upper", (0.0,))
    ce_weight = _ce_weight(plan)
    return Numbers(
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
        one_ce_weight=bool((ce_weight == ce_weight[:1]).all()),
        with_ce=plan.cross_entropy_weight is not None,
        with_penalty=plan.residual is not None,
        with_gradient=plan.gradient,
        with_statistics=plan.statistics,
        with_softmax=plan.softmax is not None,
        slopes=_slopes(plan, logits),
    )


def _confidence_numbers(plan: ConfidencePlan, logits: Tensor) -> ConfidenceNumbers:
    ce_weight, epsilon = _ce_weight(plan), torch.finfo(logits.dtype).eps
    return ConfidenceNumbers(
        ce_weight=ce_weight,
        penalty_weight=float(plan.penalty_weight),
        lam=_float64(plan.term.lam),
        clip=float(plan.term.clip),
        edge=math.exp(-plan.term.clip) * (1 - 16 * epsilon),
        ce_factor=float(plan.factors[0]),
        penalty_factor=float(plan.factors[1]),
        one_ce_weight=bool((ce_weight == ce_weight[:1]).all()),
        with_ce=plan.cross_entropy_weight is not None,
        with_gradient=plan.gradient,
        with_statistics=plan.statistics,
        with_softmax=plan.softmax is not None,
        slopes=_slopes(plan, logits),
    )


def _slopes(plan: SharedPlan, logits: Tensor) -> SumSlopes:
    overlaps, lines = np.zeros((0, 2, 1)), np.zeros((0, 1, 1))
    if plan.overlap_slopes is not None:
        overlaps = _float64(plan.overlap_slopes)
    if plan.bins is not None and plan.bin_slopes is not None:
        lines = _lines(_float64(plan.bin_slopes), plan.bins.soft)
    of_type = lines.astype(np.float32 if logits.dtype == torch.float32 else np.float64)
    return SumSlopes(overlaps, of_type, _bins(plan.bins))


def _ce_weight(plan: SharedPlan | SumsPlan) -> NDArray[np.float64]:
    weight = plan.cross_entropy_weight
    return np.zeros(0) if weight is None else _float64(weight)


def _float64(x: Tensor) -> NDArray[np.float64]:
    return np.asarray(x.detach().cpu().numpy(), np.float64, order="C")
