"""The sweep as a differentiable function.

Cross-entropy, the penalties on residuals and the one on log-odds have gradients in closed form, so
one pass over the logits gives the values and writes the gradient, and nothing but the gradient is
kept. (Regions of the predicted map take a pass before, for the prediction.) The readable
versions, made of ordinary torch operations, stay where they are (``fused=False`` builds them) and
are what the tests compare with.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
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
    Penalty,
    Residual,
    SweepPlan,
)
from segcal.tensors import HALF, check_logits_labels, check_num_classes, valid_mask

Found = tuple[Tensor, Tensor, Tensor | None]
OUTSIDE = {"replicate": None, "background": 0, "renormalize": NOTHING, "zeros": NO_CLASS}
DEVICES = ("cpu", "cuda")


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


def supports(logits: Tensor, penalty: Penalty) -> bool:
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
        _run(logits, labels, penalty, CrossEntropyTerm(2), (1.0, 1.0), gradient=True)
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
    penalty: Penalty,
    *,
    weight: float = 1.0,
    cross_entropy: CrossEntropyTerm | None = None,
    cross_entropy_weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of a cross-entropy and a penalty, and both without weights.

    Args:
        logits: ``(N, K, *S)`` that :func:`supports` takes; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        penalty: what it is.
        weight: of the penalty.
        cross_entropy: the cross-entropy; None leaves it out. It has the penalty's ignore label.
        cross_entropy_weight: its weight.

    Returns:
        the weighted sum, differentiable once (not by ``torch.func``); cross-entropy and penalty
        without gradient.

    Raises:
        ValueError: shapes or label values that do not fit.
        RuntimeError: in a backward pass that is to be differentiated.
    """
    check_logits_labels(logits, labels, penalty.lam.shape[1], penalty.ignore_index)
    if cross_entropy is not None:
        check_num_classes(logits, cross_entropy.num_classes)
    with torch.autocast(logits.device.type, enabled=False):
        x = logits.float() if logits.dtype in HALF else logits
        factors = (cross_entropy_weight, weight)
        wanted = torch.is_grad_enabled() and x.requires_grad
        total, values = _Sweep.apply(x, labels, penalty, cross_entropy, factors, wanted)
        return total, values[0], values[1]


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
    _, found, _ = _run(x, labels, residual, None, (0.0, 0.0), gradient=False, statistics=True)
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
    _, found, _ = _run(x, labels, term, None, (0.0, 0.0), gradient=False, statistics=True)
    return ConfidenceStatistics(found[0], *found[1:].round().long())


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        penalty: Penalty,
        cross_entropy: CrossEntropyTerm | None,
        factors: tuple[float, float],
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        values, _, gradient = _run(logits, labels, penalty, cross_entropy, factors, gradient=wanted)
        ctx.save_for_backward(*(() if gradient is None else (gradient,)))
        values = values.to(logits.dtype)
        ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)
        return values[0] * factors[0] + values[1] * factors[1], values

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused sweep has no second derivative; build the penalty with fused=False, "
                "which is the readable version"
            )
        (gradient,) = ctx.saved_tensors
        if grad is None:
            return (None,) * 6
        if grad.device.type != "cpu" or grad.item() != 1:
            gradient = gradient * grad
        return gradient, None, None, None, None, None


def _run(
    logits: Tensor,
    labels: Tensor,
    penalty: Penalty,
    cross_entropy: CrossEntropyTerm | None,
    factors: tuple[float, float],
    *,
    gradient: bool,
    statistics: bool = False,
) -> Found:
    """Sweep by the device's loops for a penalty of this kind."""
    run: Callable[..., Found] = _run_residual
    if isinstance(penalty, ConfidenceTerm):
        run = _run_confidence
    return run(logits, labels, penalty, cross_entropy, factors, gradient, statistics)


def _run_confidence(
    logits: Tensor,
    labels: Tensor,
    term: ConfidenceTerm,
    cross_entropy: CrossEntropyTerm | None,
    factors: tuple[float, float],
    gradient: bool,
    statistics: bool,
) -> Found:
    """Find what is predicted, and where its patches are mixed; then call the device's loops.

    Voxels are on their own in these, so that their layout is ``(N, K, V)``.
    """
    backend = _backend(logits.device.type)
    n, k, *space = logits.shape
    x = logits.detach().contiguous().view(n, k, -1)
    valid = valid_mask(labels, term.ignore_index)
    codes = labels.to(torch.uint8)
    predicted = backend.largest_class(x)
    around = predicted.view(n, *space)
    nothing = None
    if term.ignore_index is not None:
        codes = codes.masked_fill(~valid, NOTHING)
        around, nothing = around.masked_fill(~valid, NOTHING), NOTHING
    outer = outer_region(around, kernel_size=term.kernel_size, ignore_index=nothing)
    plan = ConfidencePlan(
        term=term,
        penalty_weight=_penalty_weight(valid),
        cross_entropy_weight=_cross_entropy_weight(labels, valid, cross_entropy, k),
        factors=factors,
        gradient=gradient,
        statistics=statistics,
    )
    maps = (codes.reshape(n, -1), predicted, outer.view(torch.uint8).view(n, -1))
    values, found, grad = backend.run_confidence(x, maps, plan)
    return values, found, None if grad is None else grad.view(logits.shape)


def _run_residual(
    logits: Tensor,
    labels: Tensor,
    residual: Residual,
    cross_entropy: CrossEntropyTerm | None,
    factors: tuple[float, float],
    gradient: bool,
    statistics: bool,
) -> Found:
    """Bring everything into one layout, ``(N, K, Z, Y, X)``, and call the device's loops."""
    n, k, *space = logits.shape
    sizes, padding = (1,) * len(space), "replicate"
    if residual.patch is not None:
        sizes, padding = kernel_sizes(len(space), residual.patch[0]), residual.patch[1]
    valid = valid_mask(labels, residual.ignore_index)
    codes = labels.to(torch.uint8)
    if residual.ignore_index is not None:
        codes = codes.masked_fill(~valid, NOTHING)
    codes = pad_labels(codes, sizes, OUTSIDE[padding])
    depth, height, width = (1, 1, *sizes)[-3:]
    plan = SweepPlan(
        residual=residual,
        penalty_weight=_penalty_weight(valid) / residual.divisor,
        cross_entropy_weight=_cross_entropy_weight(labels, valid, cross_entropy, k),
        factors=factors,
        sizes=(depth, height, width),
        gaps=residual.ignore_index is not None or OUTSIDE[padding] == NOTHING,
        gradient=gradient,
        statistics=statistics,
    )
    if residual.patch is None:  # voxels are on their own, and long rows are faster
        space = [math.prod(space)]
    layout = (1, 1, *space)[-3:]
    padded = (s + size - 1 for s, size in zip(layout, plan.sizes, strict=True))
    values, found, grad = _backend(logits.device.type).run(
        logits.detach().contiguous().view(n, k, *layout),
        codes.reshape(n, *padded),
        plan,
    )
    return values, found, None if grad is None else grad.view(logits.shape)


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
