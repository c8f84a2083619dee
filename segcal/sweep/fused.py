"""The sweep as a differentiable function.

Cross-entropy, the penalties on residuals and the penalty on log-odds have gradients in closed form,
so one pass over the logits gives the values and writes the gradient, and nothing but the gradient
is kept. Regions of the predicted map need a pass before, for the prediction. Losses of sums over
the voxels, such as soft Dice and mL1-ACE, need one for the sums; it leaves the softmax where the
gradient will be. The readable versions, made of ordinary torch operations, are still there
(``fused=False`` builds them), and the tests compare with them.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.neighbourhood import KernelSize, Padding, kernel_sizes, outer_region, pad_labels
from segcal.sweep.terms import (
    NO_CLASS,
    NOTHING,
    BinTerm,
    ConfidencePlan,
    ConfidenceTerm,
    CrossEntropyTerm,
    OverlapTerm,
    Residual,
    Shape,
    SharedPlan,
    SumsPlan,
    SweepPlan,
    Swept,
    Together,
)
from segcal.tensors import HALF, check_shapes

Found = tuple[Tensor, Tensor, Tensor | None]
OUTSIDE = {"replicate": None, "background": 0, "renormalize": NOTHING, "zeros": NO_CLASS}
DEVICES = ("cpu", "cuda")
ROOM = 2**13
"""Number of voxels beyond the last that must be countable, because the last block ends there."""
TRIES = 3
"""Number of failures after which compiling is given up."""


class Weights(NamedTuple):
    """Weights of what one sweep computes, in the order of :class:`Together`."""

    penalty: float = 1.0
    cross_entropy: float = 1.0
    overlap: float = 1.0
    bins: float = 1.0


class Statistics(NamedTuple):
    """Sums of P' and of z over each region's voxels, float64 ``(R, K)``; voxel counts ``(R,)``."""

    derivative: Tensor
    constraint: Tensor
    voxels: Tensor


class ConfidenceStatistics(NamedTuple):
    """Sums per region and predicted class ``(2, K)``: of confidence, float64; of hits; voxels."""

    confidence: Tensor
    hits: Tensor
    voxels: Tensor


def supports(
    logits: Tensor, term: Swept, *, beside: Swept | None = None, statistics: bool = False
) -> bool:
    """Whether :func:`sweep` takes these logits ``(N, K, *S)``; if not, use the readable version.

    It takes 1 to 3 spatial axes, 2 to 253 classes, patches of up to 253 voxels (of any size for the
    regions of a predicted map), on a CPU (compiled by Numba) or an NVIDIA GPU (by Triton). On a GPU
    images must have fewer than 2^31 voxels, and there are no losses of sums.

    Args:
        logits: the logits.
        term: what to compute, perhaps beside others. What a cross-entropy shares a sweep with is to
            be asked for, too, because it has no loops of its own.
        beside: the penalty that shares the sweep. Its loops also make the second pass for a loss of
            sums; without it those of a residual do.
        statistics: ask for :func:`statistics` or :func:`confidence_statistics` instead.
    """
    axes = logits.ndim - 2
    patch = term.patch if isinstance(term, Residual) else None
    on_cpu = logits.device.type == "cpu"
    return (
        not torch.compiler.is_compiling()  # which makes something of the readable version itself
        and 1 <= axes <= 3
        and 2 <= logits.shape[1] < NO_CLASS
        and logits.numel() > 0
        and (patch is None or math.prod(kernel_sizes(axes, patch[0])) < NO_CLASS)
        and logits.device.type in DEVICES
        and (on_cpu or not isinstance(term, OverlapTerm | BinTerm))
        and (on_cpu or _can_be_counted(logits.shape[2:], patch))
        and (
            isinstance(term, CrossEntropyTerm)
            or _compiles(_Variant.of(logits, term, beside, statistics))
        )
    )


def _can_be_counted(space: Sequence[int], patch: tuple[KernelSize, Padding] | None) -> bool:
    """Whether a kernel's 32 bits can count the voxels of an image, and of its padding."""
    sizes = (1,) * len(space) if patch is None else kernel_sizes(len(space), patch[0])
    padded = math.prod(s + size - 1 for s, size in zip(space, sizes, strict=True))
    return padded < 2**31 - ROOM


class _Variant(NamedTuple):
    """What is compiled separately: on a GPU nearly everything but sizes, on a CPU the loops."""

    device: torch.device
    of_log_odds: bool
    of_sums: bool = False
    statistics: bool = False
    dtype: torch.dtype = torch.float32
    space: tuple[int, ...] = (1,)
    num_classes: int = 2
    residual: tuple[str, Shape, int, tuple[KernelSize, Padding] | None] = (
        "phr",
        "abs",
        1,
        (1, "replicate"),
    )

    @classmethod
    def of(cls, logits: Tensor, term: Swept, beside: Swept | None, statistics: bool) -> _Variant:
        of_sums = isinstance(term, OverlapTerm | BinTerm)
        of_log_odds = isinstance(beside if of_sums else term, ConfidenceTerm)
        if logits.device.type == "cpu":
            return cls(logits.device, of_log_odds, of_sums)
        space = logits.shape[2:]
        last = 16 if math.prod(space) % 16 == 0 else 1
        found = cls(
            logits.device,
            of_log_odds,
            False,
            statistics,
            torch.float32 if logits.dtype in HALF else logits.dtype,
            (*(1,) * (len(space) - 1), last),
            logits.shape[1],
        )
        if not isinstance(term, Residual):
            return found
        patch = term.patch and (_hashable(term.patch[0]), term.patch[1])
        return found._replace(residual=(term.function, term.shape, len(term.margins), patch))

    def run(self) -> None:
        """Compile it and run it on a few voxels."""
        k = self.num_classes
        lam = torch.ones(2, k, dtype=torch.float64, device=self.device)
        penalty: ConfidenceTerm | Residual = ConfidenceTerm(lam, 1.0)
        if not self.of_log_odds:
            function, shape, regions, patch = self.residual
            lam = lam[:regions]
            penalty = Residual(lam, lam, function, shape, (1.0,) * regions, patch=patch)
        logits = torch.zeros(1, k, *self.space, dtype=self.dtype, device=self.device)
        labels = torch.zeros(1, *self.space, dtype=torch.uint8, device=self.device)
        cross_entropy = None if self.statistics else CrossEntropyTerm(k)
        overlap = OverlapTerm(k, lambda p, o, t: (p.sum(), p, o)) if self.of_sums else None
        _run(
            logits, labels, Together(penalty, cross_entropy, overlap), Weights(),
            gradient=not self.statistics, statistics=self.statistics,
        )  # fmt: skip
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # what goes wrong in a kernel shows only then


_WORK: set[_Variant] = set()
_FAILED: Counter[_Variant] = Counter()
"""Variants that have been tried, and how often in vain."""


def _compiles(variant: _Variant) -> bool:
    """Whether a variant can be compiled and run here, tried with a few voxels; warns if not.

    A failure may be temporary, such as a full disk; a variant is given up after a few failures.
    """
    if variant in _WORK:
        return True
    if _FAILED[variant] >= TRIES:
        return False
    if variant.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        warnings.warn(
            "segcal's fast path has not been compiled for what a CUDA graph captures; its slower "
            "readable version is captured. Call the loss once before the capture",
            stacklevel=3,
        )
        return False
    try:
        variant.run()
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a compiler may lack
        _FAILED[variant] += 1
        if _FAILED[variant] == 1:
            warnings.warn(
                f"segcal's fast path cannot be compiled for {variant.device} "
                f"({type(error).__name__}: {error}); its slower readable version is used",
                stacklevel=3,
            )
        return False
    _WORK.add(variant)
    return True


def _hashable(kernel_size: KernelSize) -> KernelSize:
    return kernel_size if isinstance(kernel_size, int) else tuple(kernel_size)


def sweep(
    logits: Tensor, labels: Tensor, terms: Together, weights: Weights | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted sum of what one sweep computes, and each part without weight.

    Args:
        logits: ``(N, K, *S)`` that :func:`supports` takes; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        terms: what to compute. On a GPU a cross-entropy needs a penalty beside it.
        weights: weights of the parts; all are 1 by default.

    Returns:
        the weighted sum, differentiable once (not by ``torch.func``); the values ``(4,)`` of
        penalty, cross-entropy, loss of overlaps and loss of bins without gradient, 0 where they are
        left out.

    Raises:
        ValueError: shapes or label values that do not fit.
        RuntimeError: in a backward pass that is to be differentiated.
    """
    check_shapes(logits, labels, terms.num_classes)
    with torch.autocast(logits.device.type, enabled=False):
        x = logits.float() if logits.dtype in HALF else logits
        wanted = torch.is_grad_enabled() and x.requires_grad
        total, values = _Sweep.apply(x, labels, terms, weights or Weights(), wanted)
        return total, values


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
    check_shapes(logits, labels, residual.num_classes)
    x = logits.float() if logits.dtype in HALF else logits
    _, found, _ = _run(x, labels, Together(residual), Weights(), gradient=False, statistics=True)
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
    check_shapes(logits, labels, term.num_classes)
    x = logits.float() if logits.dtype in HALF else logits
    _, found, _ = _run(x, labels, Together(term), Weights(), gradient=False, statistics=True)
    return ConfidenceStatistics(found[0], *found[1:].round().long())


class _Sweep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, terms: Together, weights: Weights, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        values, _, gradient = _run(logits, labels, terms, weights, gradient=wanted)
        ctx.save_for_backward(*(() if gradient is None else (gradient,)))
        values = values.to(logits.dtype)
        ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)
        ctx.scale = None
        present = [i for i, part in enumerate(terms.parts) if part is not None]
        total = values[present[0]] * weights[present[0]]
        for i in present[1:]:
            total += values[i] * weights[i]
        return total, values

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused sweep has no second derivative; build penalties, soft Dice and mL1-ACE "
                "with fused=False, which are the readable versions"
            )
        (gradient,) = ctx.saved_tensors
        if grad is None:
            return (None,) * 5
        if ctx.scale is None:
            gradient, ctx.scale = _backend(grad.device.type).scale(gradient, grad)
        else:  # a graph that was retained: the gradient may be another's by now
            gradient = gradient * (grad / ctx.scale)
        return gradient, None, None, None, None


def _run(
    logits: Tensor,
    labels: Tensor,
    terms: Together,
    weights: Weights,
    *,
    gradient: bool,
    statistics: bool = False,
) -> Found:
    """Values ``(4,)``, statistics if wanted, and gradient, by the device's loops for such terms."""
    x = logits.detach().contiguous()
    codes, penalty_weight, cross_entropy_weight = _backend(x.device.type).encode(
        labels, x.shape[1], terms
    )
    plan = SharedPlan(
        penalty_weight=penalty_weight,
        cross_entropy_weight=cross_entropy_weight,
        factors=(weights.cross_entropy, weights.penalty),
        gradient=gradient,
        statistics=statistics,
    )
    of_sums, predicted = None, None
    if terms.overlap is not None or terms.bins is not None:
        of_sums, predicted, plan = _run_sums(x, codes, terms, weights, plan)
        if terms.penalty is None and not gradient:
            return F.pad(of_sums, (1, 0)), of_sums.new_empty(0), None
    if isinstance(terms.penalty, ConfidenceTerm):
        values, found, grad = _run_confidence(x, codes, terms.penalty, plan, predicted)
    else:
        values, found, grad = _run_residual(x, codes, terms.penalty, plan, terms.ignore_index)
    values = F.pad(values.flip(0), (0, 2))
    if of_sums is not None:
        values[1:] += of_sums
    return values, found, None if grad is None else grad.view(logits.shape)


def _run_sums(
    x: Tensor, codes: Tensor, terms: Together, weights: Weights, plan: SharedPlan
) -> tuple[Tensor, Tensor | None, SharedPlan]:
    """Make the pass for losses of sums.

    Returns:
        values ``(3,)`` of cross-entropy, loss of overlaps and loss of bins; the predicted classes
        where the penalty needs them; the plan for the second pass.
    """
    sums = _backend(x.device.type).sum_up(
        x.flatten(2),
        codes.flatten(1),
        SumsPlan(
            cross_entropy_weight=plan.cross_entropy_weight,
            overlaps=terms.overlap is not None,
            bins=terms.bins,
            gaps=terms.ignore_index is not None,
            predicted=isinstance(terms.penalty, ConfidenceTerm),
            softmax=plan.gradient,
        ),
    )
    overlap_value = bins_value = torch.zeros((), dtype=torch.float64)
    overlap_slopes = bin_slopes = None
    if terms.overlap is not None:
        overlap_value, *slopes = terms.overlap.loss(*sums.overlaps)
        overlap_slopes = weights.overlap * torch.stack(slopes, 1)
    if terms.bins is not None:
        bins_value, *slopes = terms.bins.loss(*sums.bins)
        bin_slopes = weights.bins * torch.stack(slopes)
    known = replace(
        plan,
        softmax=sums.softmax,
        cross_entropy_weight=plan.cross_entropy_weight if plan.gradient else None,
        overlap_slopes=overlap_slopes,
        bin_slopes=bin_slopes,
        bins=terms.bins,
    )
    return torch.stack([sums.cross_entropy, overlap_value, bins_value]), sums.predicted, known


def _run_confidence(
    x: Tensor, codes: Tensor, term: ConfidenceTerm, plan: SharedPlan, predicted: Tensor | None
) -> Found:
    """Find where the patches of the predictions are mixed; then call the device's loops.

    These loops need no neighbours of a voxel, so the layout is ``(N, K, V)``. The predictions are
    found unless they are known.
    """
    backend = _backend(x.device.type)
    n, _, *space = x.shape
    x = x.flatten(2)
    if predicted is None:
        predicted = backend.largest_class(x)
    around, nothing = predicted.view(n, *space), None
    if term.ignore_index is not None:
        around, nothing = around.masked_fill(codes == NOTHING, NOTHING), NOTHING
    outer = outer_region(around, kernel_size=term.kernel_size, ignore_index=nothing)
    maps = (codes.reshape(n, -1), predicted, outer.view(torch.uint8).view(n, -1))
    found: Found = backend.run_confidence(x, maps, ConfidencePlan(**vars(plan), term=term))
    return found


def _run_residual(
    x: Tensor, codes: Tensor, residual: Residual | None, plan: SharedPlan, ignore_index: int | None
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
