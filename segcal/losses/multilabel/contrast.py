"""Soft contrasts of the positive with the negative labels of a sample, a class, or a batch."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["check_temperatures", "contrast", "masked_logsumexp"]

Along = Literal["both", "sample", "class"]


def check_temperatures(positive: float, negative: float) -> None:
    """Raise ValueError unless both are finite and above 0."""
    if not (0 < positive < math.inf and 0 < negative < math.inf):
        raise ValueError(
            f"temperature_pos, temperature_neg: expected numbers above 0, got {positive} and "
            f"{negative}"
        )


def masked_logsumexp(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log of the sum of exponentials over the last axis, where `mask` is True.

    Returns:
        the logarithm, 0 with zero gradient where nothing is selected; and where anything is.
    """
    some = mask.any(-1)
    kept = torch.where(some.unsqueeze(-1), x.masked_fill(~mask, -math.inf), 0.0)
    return torch.where(some, torch.logsumexp(kept, dim=-1), 0.0), some


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

    0 with zero gradient where there is no positive or no negative label.
    """
    low, has_negative = masked_logsumexp(x / temperature_neg, negative)
    high, has_positive = masked_logsumexp(-x / temperature_pos, positive)
    value = F.softplus(temperature_neg * low + temperature_pos * high + bias)
    return torch.where(has_negative & has_positive, value, 0.0)
