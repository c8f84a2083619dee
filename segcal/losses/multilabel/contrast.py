"""Soft contrasts of the positive with the negative labels of a sample, a class, or a batch."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["check_temperatures", "contrast", "masked_logsumexp", "soft_maximum"]

Along = Literal["both", "sample", "class"]


def check_temperatures(positive: float, negative: float) -> None:
    """Raise ValueError unless both are finite and at least 0."""
    if not (0 <= positive < math.inf and 0 <= negative < math.inf):
        raise ValueError(
            f"temperature_pos, temperature_neg: expected numbers of at least 0, got {positive} and "
            f"{negative}"
        )


def masked_logsumexp(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials over the last axis, where `mask` is True.

    Returns:
        the logarithm, 0 with zero gradient where nothing is selected; and whether anything is.
    """
    kept, some = _masked(x, mask)
    return torch.where(some, torch.logsumexp(kept, dim=-1), 0.0), some


def soft_maximum(x: Tensor, mask: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """``T log sum exp(x / T)`` over the last axis, where `mask` is True.

    Temperature 0 gives its limit, the maximum; equal largest values share the gradient.

    Returns:
        this value, 0 with zero gradient where nothing is selected; and whether anything is.
    """
    if temperature > 0:
        value, some = masked_logsumexp(x / temperature, mask)
        return temperature * value, some
    kept, some = _masked(x, mask)
    if not x.shape[-1]:  # amax has no value of nothing
        return x.sum(-1), some
    return torch.where(some, kept.amax(-1), 0.0), some


def _masked(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`x` with -inf outside of `mask`, 0 where nothing is selected; and whether anything is."""
    some = mask.any(-1)
    return torch.where(some.unsqueeze(-1), x.masked_fill(~mask, -math.inf), 0.0), some


def contrast(
    x: Tensor,
    positive: Tensor,
    negative: Tensor,
    *,
    temperature_pos: float,
    temperature_neg: float,
    bias: float,
) -> Tensor:
    """``softplus(T_N LSE_n(x_n / T_N) + T_P LSE_p(-x_p / T_P) + bias)`` over the last axis.

    A temperature of 0 takes the maximum. The value is 0 with zero gradient where there is no
    positive or no negative label.
    """
    low, has_negative = soft_maximum(x, negative, temperature_neg)
    high, has_positive = soft_maximum(-x, positive, temperature_pos)
    value = F.softplus(low + high + bias)
    return torch.where(has_negative & has_positive, value, 0.0)
