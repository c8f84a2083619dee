"""The sweep on CPUs: hands a plan to the compiled loops, and shares the work among threads.

What is computed, and how, is described in :mod:`segcal.sweep.loops`; for the penalty on log-odds in
:mod:`segcal.sweep.confidence_loops`, and for sums by bin in :mod:`segcal.sweep.bins_loops`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.sweep.bins_loops import (
    EXTRA_CELLS,
    HIT_SLOTS,
    SLOTS,
    Bins,
    pull_block,
    sum_block,
)
from segcal.sweep.confidence_loops import ConfidenceNumbers, confidence_block, largest_block
from segcal.sweep.labels_loops import BLOCK, PLACES, VALID, WRONG, encode_block
from segcal.sweep.loops import BLOCK_VOXELS, STRETCH, Numbers, split, sweep_block
from segcal.sweep.overlap_loops import overlap_block
from segcal.sweep.terms import (
    FUNCTION_CODES,
    SHAPE_CODES,
    ConfidencePlan,
    Residual,
    SweepPlan,
    Together,
)
from segcal.tensors import check_label_values

TABLE_BYTES = 2**25
"""Limit on the memory of the sums by bin of all blocks, unless one block per image needs more."""


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
    _in_parallel(lambda block: encode_block(*arguments, block), blocks)
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
    stretches, per_block = split(n * z, y * x)
    blocks = -(-stretches // per_block)
    sums = np.zeros((blocks, 2))
    numbers = _numbers(plan, k)
    statistics = np.zeros((blocks if plan.statistics else 1, 3, *numbers.lam.shape))
    planes, codes = logits.view(n, k, z, y * x), codes.contiguous()
    gradient = torch.empty_like(planes) if plan.gradient else logits.new_empty((0,) * 4)
    arguments = (
        planes.numpy(),
        codes.numpy(),
        numbers,
        gradient.numpy(),
        sums,
        statistics,
    )
    _in_parallel(lambda block: sweep_block(*arguments, block), blocks)
    return (
        torch.from_numpy(sums.sum(0)),
        torch.from_numpy(statistics.sum(0)),
        gradient.view_as(logits) if plan.gradient else None,
    )


def largest_class(logits: Tensor) -> Tensor:
    """First class of the largest logit, uint8 ``(N, V)``, of contiguous logits ``(N, K, V)``."""
    n, _, voxels = logits.shape
    stretches, per_block = split(n, voxels)
    predicted = logits.new_empty((n, voxels), dtype=torch.uint8)
    arguments = logits.unsqueeze(2).numpy(), predicted.numpy()
    _in_parallel(lambda block: largest_block(*arguments, block), -(-stretches // per_block))
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
    stretches, per_block = split(n, voxels)
    blocks = -(-stretches // per_block)
    sums = np.zeros((blocks, 2))
    statistics = np.zeros((blocks if plan.statistics else 1, 3, 2, k))
    gradient = torch.empty_like(logits) if plan.gradient else logits.new_empty((0, 0, 0))
    arguments = (
        logits.unsqueeze(2).numpy(),
        tuple(x.contiguous().numpy() for x in maps),
        _confidence_numbers(plan, torch.finfo(logits.dtype).eps),
        gradient.unsqueeze(2).numpy(),
        sums,
        statistics,
    )
    _in_parallel(lambda block: confidence_block(*arguments, block), blocks)
    return (
        torch.from_numpy(sums.sum(0)),
        torch.from_numpy(statistics.sum(0)),
        gradient if plan.gradient else None,
    )


def sum_bins(logits: Tensor, codes: Tensor, bins: Bins) -> tuple[Tensor, Tensor]:
    """Sum probabilities and hits by cell.

    Args:
        logits: float32 or float64 ``(N, K, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.
        bins: the bins.

    Returns:
        sums of :mod:`segcal.sweep.bins_loops`, float64 ``(N, K, M + 2, SLOTS)``, and sums of the
        hits ``(N, K, M + 2, HIT_SLOTS)``.
    """
    n, k, _ = logits.shape
    per_image, per_block = _bin_blocks(logits, bins)
    sums, hits = (
        np.empty((n, per_image, k, bins.number + EXTRA_CELLS, slots))
        for slots in (SLOTS, HIT_SLOTS)
    )
    arguments = logits.unsqueeze(2).numpy(), codes.numpy(), bins, per_block, sums, hits
    _in_parallel(lambda block: sum_block(*arguments, block), n * per_image)
    return torch.from_numpy(sums.sum(1)), torch.from_numpy(hits.sum(1))


def pull_bins(logits: Tensor, codes: Tensor, bins: Bins, lines: Tensor) -> Tensor:
    """Gradient like `logits` ``(N, K, V)`` of a loss of the sums that :func:`sum_bins` found.

    Args:
        logits: float32 or float64 ``(N, K, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.
        bins: the bins.
        lines: ``(N, K, 2, M + 2, LINE)`` of the logits' type, as for :func:`pull_block`.
    """
    per_image, per_block = _bin_blocks(logits, bins)
    gradient = torch.empty_like(logits)
    arguments = (
        logits.unsqueeze(2).numpy(),
        codes.numpy(),
        bins,
        per_block,
        per_image,
        lines.contiguous().flatten(2).numpy(),
        gradient.unsqueeze(2).numpy(),
    )
    _in_parallel(lambda block: pull_block(*arguments, block), len(logits) * per_image)
    return gradient


def _bin_blocks(logits: Tensor, bins: Bins) -> tuple[int, int]:
    """Number of blocks of an image and of stretches of a block, as tables have room for."""
    n, k, voxels = logits.shape
    stretches = -(-voxels // STRETCH)
    table = 8 * k * (bins.number + EXTRA_CELLS) * (SLOTS + HIT_SLOTS)
    most = max(1, min(-(-voxels // BLOCK_VOXELS), TABLE_BYTES // (n * table)))
    per_block = -(-stretches // most)
    return -(-stretches // per_block), per_block


def sum_overlaps(logits: Tensor, codes: Tensor) -> Tensor:
    """Sum probabilities, probabilities of the labels, and labels, by image and class.

    Args:
        logits: float32 or float64 ``(N, K, V)``, contiguous.
        codes: labels uint8 ``(N, V)``, ``NOTHING`` where a voxel does not count.

    Returns:
        P, O and T of :mod:`segcal.sweep.overlap_loops`, float64 ``(3, N, K)``.
    """
    n, k, voxels = logits.shape
    stretches = -(-voxels // STRETCH)
    per_block = -(-BLOCK_VOXELS // STRETCH)
    per_image = -(-stretches // per_block)
    sums = np.zeros((n, per_image, 3, k))
    arguments = logits.unsqueeze(2).numpy(), codes.contiguous().numpy(), per_block, sums
    _in_parallel(lambda block: overlap_block(*arguments, block), n * per_image)
    return torch.from_numpy(sums.sum(1)).transpose(0, 1).contiguous()


def _in_parallel(work: Callable[[int], None], blocks: int) -> None:
    """Call `work` for every block, on as many threads as torch uses.

    The threads are those of torch's own OpenMP where its ``GOMP_parallel`` can be reached (Linux).
    These threads spin for some milliseconds after every operation of torch, so that other threads
    would have to share the cores with them. Elsewhere new threads are started.
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


def _numbers(plan: SweepPlan, classes: int) -> Numbers:
    nothing = torch.zeros(1, classes, dtype=torch.float64)
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
        slopes=_slopes(plan, classes),
    )


def _confidence_numbers(plan: ConfidencePlan, epsilon: float) -> ConfidenceNumbers:
    ce_weight = _ce_weight(plan)
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
        slopes=_slopes(plan, plan.term.lam.shape[1]),
    )


def _slopes(plan: SweepPlan | ConfidencePlan, classes: int) -> NDArray[np.float64]:
    return np.zeros((0, 2, classes)) if plan.slopes is None else _float64(plan.slopes)


def _ce_weight(plan: SweepPlan | ConfidencePlan) -> NDArray[np.float64]:
    weight = plan.cross_entropy_weight
    return np.zeros(0) if weight is None else _float64(weight)


def _float64(x: Tensor) -> NDArray[np.float64]:
    return x.detach().double().cpu().contiguous().numpy()
