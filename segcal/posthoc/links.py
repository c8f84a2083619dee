"""Logits of probabilities that were saved without logits."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["floor_of", "floored_share", "logits_of", "normalised"]


def logits_of(probabilities: Tensor, *, regions: bool) -> Tensor:
    """Logits ``(K, *S)`` whose softmax over K, or sigmoid for regions, are `probabilities`.

    A softmax does not determine a constant that is added to all logits; it is chosen so that the
    logits are log p. It does not matter to a softmax, nor to one after a resampling, which is
    linear in the logits. Probabilities below :func:`floor_of` count as this floor. For regions, 1 -
    p is bounded likewise by the rounding of p.

    Args:
        probabilities: ``(K, *S)``, of the type that they were saved in, which determines the floor.
        regions: whether every channel is a probability of its own.

    Returns:
        float32, or float64 for float64.
    """
    floor, rounding = floor_of(probabilities.dtype), torch.finfo(probabilities.dtype).eps / 4
    p = probabilities if probabilities.dtype == torch.float64 else probabilities.float()
    logits = p.clamp(min=floor).log()
    if regions:
        logits -= (1 - p).clamp(min=rounding).log()
    return logits


def normalised(logits: Tensor, *, regions: bool) -> Tensor:
    """Logits ``(K, *S)`` as log-probabilities, with the constant that :func:`logits_of` chooses.

    A calibrator that was fitted to the logarithms of probabilities can then be applied to logits,
    even if it depends on the constant (as with a scale for each class).

    Args:
        logits: ``(K, *S)``, floating.
        regions: whether every channel is a sigmoid of its own, which has no such constant.

    Returns:
        float32, or float64 for float64.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    return x if regions else torch.log_softmax(x, 0)


def floor_of(dtype: torch.dtype) -> float:
    """The probability that replaces 0, about the smallest that `dtype` distinguishes from 0.

    It is 6e-8 in float16, 1.2e-38 in float32 and bfloat16, and 2.2e-308 in float64.
    """
    return 2.0**-24 if dtype == torch.float16 else float(torch.finfo(dtype).tiny)


def floored_share(probabilities: Tensor) -> float:
    """Share of the voxels of ``(K, *S)`` in which some probability is below the floor."""
    if not probabilities.numel():
        return 0.0
    return float((probabilities < floor_of(probabilities.dtype)).any(0).double().mean())
