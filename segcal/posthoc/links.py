"""Logits of probabilities that were saved without them."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["floor_of", "floored_share", "logits_of", "normalised"]


def logits_of(probabilities: Tensor, *, regions: bool) -> Tensor:
    """Logits ``(K, *S)`` whose softmax over K, or sigmoid for regions, are `probabilities`.

    A softmax leaves a constant of the logits open, which is so chosen that they are log p. It
    changes no calibration, nor anything that is linear in the logits, as resampling is.
    Probabilities below :func:`floor_of` are taken for it; of regions, 1 - p likewise for what the
    rounding of p leaves open.

    Args:
        probabilities: ``(K, *S)``, of the type that they were saved in, which the floor rests on.
        regions: whether every channel is a probability of its own.

    Returns:
        float32, or float64 of float64.
    """
    floor, rounding = floor_of(probabilities.dtype), torch.finfo(probabilities.dtype).eps / 4
    p = probabilities if probabilities.dtype == torch.float64 else probabilities.float()
    logits = p.clamp(min=floor).log()
    if regions:
        logits -= (1 - p).clamp(min=rounding).log()
    return logits


def normalised(logits: Tensor, *, regions: bool) -> Tensor:
    """Logits ``(K, *S)`` with the constant that :func:`logits_of` chooses: log-probabilities.

    A calibrator that was fitted to the logarithm of probabilities then fits logits too, also one to
    which the constant matters (a scale for each class).

    Args:
        logits: ``(K, *S)``, floating.
        regions: whether every channel is a sigmoid of its own, which has no such constant.

    Returns:
        float32, or float64 of float64.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()
    return x if regions else torch.log_softmax(x, 0)


def floor_of(dtype: torch.dtype) -> float:
    """The probability that 0 is taken for: the least that `dtype` can tell from it.

    6e-8 in float16, 1.2e-38 in float32 and bfloat16, 2.2e-308 in float64.
    """
    return 2.0**-24 if dtype == torch.float16 else float(torch.finfo(dtype).tiny)


def floored_share(probabilities: Tensor) -> float:
    """Share of the voxels of ``(K, *S)`` in which some probability is below the floor."""
    if not probabilities.numel():
        return 0.0
    return float((probabilities < floor_of(probabilities.dtype)).any(0).double().mean())
