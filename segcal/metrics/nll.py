"""Negative log-likelihood."""

from __future__ import annotations

from typing import Any

import torch

from segcal.tensors import select_voxels

__all__ = ["nll"]


def nll(
    probs: Any,
    labels: Any,
    *,
    floor: float = 1e-12,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """Mean of ``-log p_y`` in nats.

    Args:
        probs: as in :func:`segcal.metrics.ece.ece`.
        labels: see there.
        floor: probabilities below count as this, since a stored 0 has no logarithm (nnU-Net
            writes exact zeros outside its crop).
        mask: see there.
        ignore_index: see there.

    Returns:
        nats; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    if not y.numel():
        return float("nan")
    of_label = torch.gather(p, 0, y.unsqueeze(0)).double()
    return float(-of_label.clamp_(min=floor).log_().mean())
