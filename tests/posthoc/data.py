"""Made-up logits and labels, of which the logits are wrong in a way that is known."""

from __future__ import annotations

import torch
from torch import Tensor


def wrong_logits(n: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits ``(n, k)``, too large and with one class too likely, and labels of the true ones."""
    generator = torch.Generator().manual_seed(seed)
    x = 1.5 * torch.randn((n, k), generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(x, 1), 1, generator=generator)[:, 0]
    return 2 * x + torch.eye(k, dtype=torch.float64)[0], labels
