"""The sweep as a differentiable function.

Cross-entropy and the penalties on residuals have gradients in closed form, so one pass over the
logits gives the values and writes the gradient, and nothing but the gradient is kept. The readable
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

from segcal.neighbourhood import kernel_sizes, pad_labels
from segcal.sweep.terms import NO_CLASS, NOTHING, CrossEntropyTerm, Residual, SweepPlan
from segcal.tensors import HALF, check_logits_labels, check_num_classes, valid_mask

Found = tuple[Tensor, Tensor, Tensor | None]
Backend = Callable[[Tensor, Tensor, SweepPlan], Found]
OUTSIDE = {"replicate": None, "background": 0, "renormalize": NOTHING, "zeros": NO_CLASS}
DEVICES = ("cpu", "cuda")


class Statistics(NamedTuple):
    """Sums over the voxels of each region: of P' and of z ``(R, K)`` float64; voxels ``(R,)``."""

    derivative: Tensor
    constraint: Tensor
    voxels: Tensor


def supports(logits: Tensor, residual: Residual) -> bool:
    """Whether :func:`sweep` takes these logits ``(N, K, *S)``; if not, use the readable version.

    It takes 1 to 3 spatial axes, 2 to 253 classes, patches of up to 253 voxels, on a CPU (compiled
    by Numba) or an NVIDIA GPU (by Triton).
    """
    axes = logits.ndim - 2
    return (
        not torch.compiler.is_compiling()  # which makes something of the readable version itself
        and 1 <= axes <= 3
        and 2 <= logits.shape[1] < NO_CLASS
        and logits.numel() > 0
        and (residual.patch is None or math.prod(kernel_sizes(axes, residual.patch[0])) < NO_CLASS)
        and logits.device.type in DEVICES
        and _compiles(logits.device)
    )


@cache
def _compiles(device: torch.device) -> bool:
    """Whether the device's loops can be compiled here, found out by a voxel; warns if not."""
    one = torch.ones(1, 2, dtype=torch.float64, device=device)
    residual = Residual(one, one, "phr", "abs", (1.0,), patch=(1, "replicate"))
    plan = SweepPlan(residual, one[0, 0], one[0], (1.0, 1.0), (1, 1, 1), gaps=False, gradient=True,
                     statistics=False)  # fmt: skip
    logits = torch.zeros(1, 2, 1, 1, 1, device=device)
    codes = torch.zeros(1, 1, 1, 1, dtype=torch.uint8, device=device)
    try:
        _backend(device.type)(logits, codes, plan)
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
    residual: Residual,
    *,
    weight: float = 1.0,
    cross_entropy: CrossEntropyTerm | None = None,
    cross_entropy_weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted sum of a cross-entropy and a penalty, and both without weights.

    Args:
        logits: ``(N, K, *S)`` that :func:`supports` takes; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        residual: the penalty.
        weight: of the penalty.
        cross_entropy: the cross-entropy; None leaves it out. It has the residual's ignore label.
        cross_entropy_weight: its weight.

    Returns:
        the weighted sum, differentiable once (not by ``torch.func``); cross-entropy and penalty
        without gradient.

    Raises:
        ValueError: shapes or label values that do not fit.
        RuntimeError: in a backward pass that is to be differentiated.
    """
    check_logits_labels(logits, labels, residual.lam.shape[1], residual.ignore_index)
    if cross_entropy is not None:
        check_num_classes(logits, cross_entropy.num_classes)
    with torch.autocast(logits.device.type, enabled=False):
        x = logits.float() if logits.dtype in HALF else logits
        factors = (cross_entropy_weight, weight)
        wanted = torch.is_grad_enabled() and x.requires_grad
        total, values = _Sweep.apply(x, labels, residual, cross_entropy, factors, wanted)
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


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        residual: Residual,
        cross_entropy: CrossEntropyTerm | None,
        factors: tuple[float, float],
        wanted: bool,
    ) -> tuple[Tensor, Tensor]:
        values, _, gradient = _run(
            logits, labels, residual, cross_entropy, factors, gradient=wanted
        )
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
    residual: Residual,
    cross_entropy: CrossEntropyTerm | None,
    factors: tuple[float, float],
    *,
    gradient: bool,
    statistics: bool = False,
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
        penalty_weight=_penalty_weight(valid, residual),
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
    values, found, grad = _backend(logits.device.type)(
        logits.detach().contiguous().view(n, k, *layout),
        codes.reshape(n, *padded),
        plan,
    )
    return values, found, None if grad is None else grad.view(logits.shape)


def _backend(device: str) -> Backend:
    return importlib.import_module(f"segcal.sweep.{device}").run


def _penalty_weight(valid: Tensor, residual: Residual) -> Tensor:
    n = valid.count_nonzero().double()
    return torch.where(n > 0, 1 / n.clamp(min=1), 0.0) / residual.divisor


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
