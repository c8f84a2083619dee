"""The sweep as a differentiable function.

Cross-entropy, the penalties on residuals and the one on log-odds have gradients in closed form, so
one pass over the logits gives the values and writes the gradient, and nothing but the gradient is
kept. (Regions of the predicted map take a pass before, for the prediction, and so do the sums of a
loss of overlaps such as soft Dice, whose gradient joins the others'.) The readable
versions, made of ordinary torch operations, stay where they are (``fused=False`` builds them) and
are what the tests compare with.
"""

from __future__ import annotations

import importlib
import math
import warnings
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from segcal.neighbourhood import kernel_sizes, outer_region, pad_labels
from segcal.sweep.terms import (
    NO_CLASS,
    NOTHING,
    ConfidencePlan,
    ConfidenceTerm,
    CrossEntropyTerm,
    OverlapTerm,
    Penalty,
    Plan,
    Residual,
    SweepPlan,
    Together,
)
from segcal.tensors import HALF, check_logits_labels, valid_mask

Found = tuple[Tensor, Tensor, Tensor | None]
OUTSIDE = {"replicate": None, "background": 0, "renormalize": NOTHING, "zeros": NO_CLASS}
DEVICES = ("cpu", "cuda")
Factors = tuple[float, float, float]
"""Weights of cross-entropy, penalty and loss of overlaps."""
NO_FACTORS = (0.0, 0.0, 0.0)


class Statistics(NamedTuple):
    """Sums over the voxels of each region: of P' and of z ``(R, K)`` float64; voxels ``(R,)``."""

    derivative: Tensor
    constraint: Tensor
    voxels: Tensor


class ConfidenceStatistics(NamedTuple):
    """Sums per region and predicted class ``(2, K)``: of confidence, float64; of hits; voxels."""

    confidence: Tensor
    hits: Tensor
    voxels: Tensor


def supports(logits: Tensor, penalty: Penalty | None) -> bool:
    """Whether :func:`sweep` takes these logits ``(N, K, *S)``; if not, use the readable version.

    It takes 1 to 3 spatial axes, 2 to 253 classes, patches of up to 253 voxels (of any size for the
    regions of a predicted map), on a CPU (compiled by Numba) or an NVIDIA GPU (by Triton).
    """
    axes = logits.ndim - 2
    patch = penalty.patch if isinstance(penalty, Residual) else None
    return (
        not torch.compiler.is_compiling()  # which makes something of the readable version itself
        and 1 <= axes <= 3
        and 2 <= logits.shape[1] < NO_CLASS
        and logits.numel() > 0
        and (patch is None or math.prod(kernel_sizes(axes, patch[0])) < NO_CLASS)
        and logits.device.type in DEVICES
        and _compiles(logits.device, isinstance(penalty, ConfidenceTerm))
    )


def supports_overlap(logits: Tensor) -> bool:
    """Whether :func:`sweep` takes these logits with a loss of overlaps: on a CPU."""
    return logits.device.type == "cpu" and supports(logits, None)


@cache
def _compiles(device: torch.device, of_log_odds: bool) -> bool:
    """Whether the device's loops can be compiled here, found out by a voxel; warns if not."""
    ones = torch.ones(2, 2, dtype=torch.float64, device=device)
    penalty: Penalty = ConfidenceTerm(ones, 1.0)
    if not of_log_odds:
        penalty = Residual(ones[:1], ones[:1], "phr", "abs", (1.0,), patch=(1, "replicate"))
    logits = torch.zeros(1, 2, 1, device=device)
    labels = torch.zeros(1, 1, dtype=torch.uint8, device=device)
    try:
        _run(logits, labels, Together(penalty, CrossEntropyTerm(2)), (1.0, 1.0, 1.0), gradient=True)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler may lack
        warnings.warn(
            f"segcal's fast path cannot be compiled for {device} "
            f"({type(error).__name__}: {error}); its slower readable version is used",
            stacklevel=2,
        )
        return False
    return True


def sweep(
    logits: Tensor,
    labels: Tensor,
    penalty: Penalty | None,
    *,
    weight: float = 1.0,
    cross_entropy: CrossEntropyTerm | None = None,
    cross_entropy_weight: float = 1.0,
    overlap: OverlapTerm | None = None,
    overlap_weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weighted sum of a cross-entropy, a penalty and a loss of overlaps, and each without weight.

    Args:
        logits: ``(N, K, *S)`` that :func:`supports` takes; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        penalty: what it is; None leaves it out.
        weight: of the penalty.
        cross_entropy: the cross-entropy; None leaves it out. All have the same ignore label.
        cross_entropy_weight: its weight.
        overlap: the loss of overlaps, beside a cross-entropy; None leaves it out.
        overlap_weight: its weight.

    Returns:
        the weighted sum, differentiable once (not by ``torch.func``); cross-entropy, penalty and
        loss of overlaps without gradient, 0 where they are left out.

    Raises:
        ValueError: shapes or label values that do not fit.
        RuntimeError: in a backward pass that is to be differentiated.
    """
    terms = Together(penalty, cross_entropy, overlap)
    check_logits_labels(logits, labels, terms.num_classes, terms.ignore_index)
    with torch.autocast(logits.device.type, enabled=False):
        x = logits.float() if logits.dtype in HALF else logits
        factors = (cross_entropy_weight, weight, overlap_weight)
        wanted = torch.is_grad_enabled() and x.requires_grad
        total, values = _Sweep.apply(x, labels, terms, factors, wanted)
        return total, values[0], values[1], values[2]


@torch.no_grad()
def statistics(logits: Tensor, labels: Tensor, residual: Residual) -> Statistics:
    """Sums of P' and z per region and class, from which multipliers are learned.

    Args:
        logits: ``(N, K, *S)`` that :func:`supports` takes.
        labels: integer ``(N, *S)``.
        residual: the penalty; its `clip` applies to every P'.

    Raises:
        ValueError: shapes or label values that do not fit.
    """
    check_logits_labels(logits, labels, residual.lam.shape[1], residual.ignore_index)
    x = logits.float() if logits.dtype in HALF else logits
    _, found, _ = _run(x, labels, Together(residual), NO_FACTORS, gradient=False, statistics=True)
    return Statistics(found[0], found[1], found[2, :, 0].round().long())


@torch.no_grad()
def confidence_statistics(
    logits: Tensor, labels: Tensor, term: ConfidenceTerm
) -> ConfidenceStatistics:
    """Sums over the voxels of each region and predicted class, from which multipliers are learned.

    Args:
        logits: ``(N, K, *S)`` that :func:`supports` takes.
        labels: integer ``(N, *S)``.
        term: the penalty.

    Raises:
        ValueError: shapes or label values that do not fit.
    """
    check_logits_labels(logits, labels, term.lam.shape[1], term.ignore_index)
    x = logits.float() if logits.dtype in HALF else logits
    _, found, _ = _run(x, labels, Together(term), NO_FACTORS, gradient=False, statistics=True)
    return ConfidenceStatistics(found[0], *found[1:].round().long())


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: Together, factors: Factors, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        values, _, gradient = _run(logits, labels, terms, factors, gradient=wanted)
        ctx.save_for_backward(*(() if gradient is None else (gradient,)))
        values = values.to(logits.dtype)
        ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)
        total = values[0] * factors[0] + values[1] * factors[1]
        if terms.overlap is not None:
            total += values[2] * factors[2]
        return total, values

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused sweep has no second derivative; build penalties and soft Dice with "
                "fused=False, which are the readable versions"
            )
        (gradient,) = ctx.saved_tensors
        if grad is None:
            return (None,) * 5
        if grad.device.type != "cpu" or grad.item() != 1:
            gradient = gradient * grad
        return gradient, None, None, None, None


def _run(
    logits: Tensor,
    labels: Tensor,
    terms: Together,
    factors: Factors,
    *,
    gradient: bool,
    statistics: bool = False,
) -> Found:
    """Values ``(3,)``, statistics and gradient, by the device's loops for such a penalty."""
    x = logits.detach().contiguous()
    valid = valid_mask(labels, terms.ignore_index)
    codes = labels.to(torch.uint8)
    if terms.ignore_index is not None:
        codes = codes.masked_fill(~valid, NOTHING)
    overlap, slopes = _overlap(x, codes, terms.overlap, factors[2])
    plan = Plan(
        penalty_weight=_penalty_weight(valid),
        cross_entropy_weight=_cross_entropy_weight(labels, valid, terms.cross_entropy, x.shape[1]),
        factors=factors[:2],
        slopes=slopes,
        gradient=gradient,
        statistics=statistics,
    )
    if isinstance(terms.penalty, ConfidenceTerm):
        values, found, grad = _run_confidence(x, codes, terms.penalty, plan)
    else:
        values, found, grad = _run_residual(x, codes, terms.penalty, plan, terms.ignore_index)
    return torch.cat([values, overlap]), found, None if grad is None else grad.view(logits.shape)


def _overlap(
    x: Tensor, codes: Tensor, term: OverlapTerm | None, factor: float
) -> tuple[Tensor, Tensor | None]:
    """Value ``(1,)`` of a loss of overlaps, and its weighted slopes ``(N, 2, K)``."""
    if term is None:
        return torch.zeros(1, dtype=torch.float64, device=x.device), None
    sums = _backend(x.device.type).sum_overlaps(x.flatten(2), codes.flatten(1))
    with torch.enable_grad():
        probability, overlap = (s.requires_grad_() for s in sums[:2])
        value = term.value(probability, overlap, sums[2])
        slopes = torch.autograd.grad(value, (probability, overlap))
    return value.detach().view(1), factor * torch.stack(slopes, 1)


def _run_confidence(x: Tensor, codes: Tensor, term: ConfidenceTerm, plan: Plan) -> Found:
    """Find what is predicted, and where its patches are mixed; then call the device's loops.

    Voxels are on their own in these, so that their layout is ``(N, K, V)``.
    """
    backend = _backend(x.device.type)
    n, _, *space = x.shape
    x = x.flatten(2)
    predicted = backend.largest_class(x)
    around, nothing = predicted.view(n, *space), None
    if term.ignore_index is not None:
        around, nothing = around.masked_fill(codes == NOTHING, NOTHING), NOTHING
    outer = outer_region(around, kernel_size=term.kernel_size, ignore_index=nothing)
    maps = (codes.reshape(n, -1), predicted, outer.view(torch.uint8).view(n, -1))
    found: Found = backend.run_confidence(x, maps, ConfidencePlan(**vars(plan), term=term))
    return found


def _run_residual(
    x: Tensor, codes: Tensor, residual: Residual | None, plan: Plan, ignore_index: int | None
) -> Found:
    """Bring everything into one layout, ``(N, K, Z, Y, X)``, and call the device's loops."""
    n, k, *space = x.shape
    sizes, padding, divisor = (1,) * len(space), "replicate", 1.0
    patch = None if residual is None else residual.patch
    if patch is not None:
        sizes, padding = kernel_sizes(len(space), patch[0]), patch[1]
    if residual is not None:
        divisor = residual.divisor
    codes = pad_labels(codes, sizes, OUTSIDE[padding])
    depth, height, width = (1, 1, *sizes)[-3:]
    whole = SweepPlan(
        **{**vars(plan), "penalty_weight": plan.penalty_weight / divisor},
        residual=residual,
        sizes=(depth, height, width),
        gaps=ignore_index is not None or OUTSIDE[padding] == NOTHING,
    )
    if patch is None:  # voxels are on their own, and long rows are faster
        space = [math.prod(space)]
    layout = (1, 1, *space)[-3:]
    padded = (s + size - 1 for s, size in zip(layout, whole.sizes, strict=True))
    found: Found = _backend(x.device.type).run(
        x.view(n, k, *layout), codes.reshape(n, *padded), whole
    )
    return found


def _backend(device: str) -> Any:
    return importlib.import_module(f"segcal.sweep.{device}")


def _penalty_weight(valid: Tensor) -> Tensor:
    n = valid.count_nonzero().double()
    return torch.where(n > 0, 1 / n.clamp(min=1), 0.0)


def _cross_entropy_weight(
    labels: Tensor, valid: Tensor, term: CrossEntropyTerm | None, num_classes: int
) -> Tensor | None:
    if term is None:
        return None
    if term.class_weight is None:
        weight = torch.ones(num_classes, dtype=torch.float64, device=labels.device)
        return weight / valid.count_nonzero().clamp(min=1)
    weight = term.class_weight.double()
    found = torch.where(valid, weight[torch.where(valid, labels, 0).long()], 0.0).sum()
    return weight / found.clamp(min=torch.finfo(torch.float64).tiny)
