"""Sums of predicted probabilities by bin as a differentiable function.

The loss is computed from the sums by ordinary torch operations in the caller, because the sums are
few. Compiled loops find the sums, and take the loss's derivatives with respect to the sums back to
the logits, in one pass each (:mod:`segcal.sweep.bins_loops`).
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from segcal.binning import edge_tolerance
from segcal.sweep.terms import NO_CLASS, NOTHING
from segcal.tensors import valid_mask

Sums = tuple[Tensor, Tensor, Tensor]
"""W, C and A."""


def supports_bins(logits: Tensor) -> bool:
    """Whether :func:`bin_sums` takes these logits ``(N, K, *S)``: on a CPU, 1 to 3 spatial axes."""
    return (
        not torch.compiler.is_compiling()  # which makes something of the readable version itself
        and logits.device.type == "cpu"
        and 1 <= logits.ndim - 2 <= 3
        and 2 <= logits.shape[1] < NO_CLASS
        and logits.numel() > 0
        and logits.dtype in (torch.float32, torch.float64)
        and _compiles()
    )


@cache
def _compiles() -> bool:
    """Whether the loops can be compiled here, tried with one voxel; warns if not."""
    logits = torch.zeros(1, 2, 1, requires_grad=True)
    labels = torch.zeros(1, 1, dtype=torch.uint8)
    try:
        with torch.enable_grad():
            confidence = bin_sums(logits, labels, bins=1, soft=False)[1]
            torch.autograd.grad(confidence.sum(), logits)
    except Exception as error:  # noqa: BLE001 - whatever a compiler may lack
        warnings.warn(
            f"segcal's fast path for bins cannot be compiled for the CPU "
            f"({type(error).__name__}: {error}); its slower readable version is used",
            stacklevel=2,
        )
        return False
    return True


def bin_sums(
    logits: Tensor, labels: Tensor, *, bins: int, soft: bool, ignore_index: int | None = None
) -> Sums:
    """Sums by bin of the weights, of weighted probabilities and of weighted hits.

    Args:
        logits: ``(N, K, *S)`` that :func:`supports_bins` takes.
        labels: integer ``(N, *S)``.
        bins: M.
        soft: whether a probability is shared, in proportion, by the two bins whose centres are
            nearest, instead of belonging to the bin that it falls into.
        ignore_index: label to leave out.

    Returns:
        float64 ``(N, K, M)`` each, differentiable once (not by ``torch.func``).

    Raises:
        RuntimeError: in a backward pass that should itself be differentiated.
    """
    codes = labels.to(torch.uint8)
    if ignore_index is not None:
        codes = codes.masked_fill(~valid_mask(labels, ignore_index), NOTHING)
    found: Sums = _BinSums.apply(logits, codes.flatten(1).contiguous(), bins, soft)
    return found


class _BinSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, codes: Tensor, bins: int, soft: bool) -> Sums:
        ctx.save_for_backward(logits, codes)
        ctx.bins, ctx.soft = bins, soft
        cells, hits = _cpu().sum_bins(_flat(logits), codes, _bins(bins, soft))
        weight, confidence = (
            _fold(cells[..., i], cells[..., i + 1] if soft else None) for i in (0, 2)
        )
        return weight, confidence, _fold(hits[..., 0], hits[..., 1] if soft else None)

    @staticmethod
    def backward(
        ctx: Any, by_weight: Tensor, by_confidence: Tensor, by_accuracy: Tensor
    ) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the sweep over bins has no second derivative; build the loss with fused=False, "
                "which is the readable version"
            )
        logits, codes = ctx.saved_tensors
        lines = _lines(by_weight, by_confidence, by_accuracy, ctx.soft).to(logits.dtype)
        gradient = _cpu().pull_bins(_flat(logits), codes, _bins(ctx.bins, ctx.soft), lines)
        return gradient.view(logits.shape), None, None, None


def _cpu() -> Any:
    return importlib.import_module("segcal.sweep.cpu")  # with Numba, when it is first needed


def _bins(count: int, soft: bool) -> Any:
    return _cpu().Bins(count, edge_tolerance(count), soft)


def _flat(logits: Tensor) -> Tensor:
    return logits.detach().contiguous().flatten(2)


def _fold(left: Tensor, right: Tensor | None) -> Tensor:
    """Sums of bins ``(N, K, M)`` from sums of cells ``(N, K, M + 2)``, for a cell's two bins."""
    found = left[..., :-2].clone()
    found[..., 0] += left[..., -2]
    if right is not None:
        found[..., 1:] += right[..., :-3]
        found[..., -1] += right[..., -3]
    return found


def _lines(by_weight: Tensor, by_confidence: Tensor, by_accuracy: Tensor, soft: bool) -> Tensor:
    """Intercept and slope of g over p by cell, float64 ``(N, K, 2, M + 2, 2)``, hits second.

    With ``f = M p - 1/2 - a`` and D for the difference between bins a + 1 and a,
    ``g = dC_a + f D dC + M (D dW + p D dC + [k = y] D dA)``.
    """
    n, k, bins = by_weight.shape
    lines = by_weight.new_zeros(n, k, 2, bins + 2, 2)
    lines[..., :bins, 0] = by_confidence[:, :, None]
    lines[..., bins, 0] = by_confidence[:, :, None, 0]
    if soft:
        rise_w, rise_c, rise_a = (x.diff(dim=-1) for x in (by_weight, by_confidence, by_accuracy))
        centre = torch.arange(bins - 1, dtype=torch.float64) + 0.5
        lines[..., : bins - 1, 0] += (bins * rise_w - centre * rise_c)[:, :, None]
        lines[:, :, 1, : bins - 1, 0] += bins * rise_a
        lines[..., : bins - 1, 1] = 2 * bins * rise_c[:, :, None]
    return lines
