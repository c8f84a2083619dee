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
        probs: probabilities ``(N, K, *S)`` (array or tensor), or ``(K, *S)`` with labels ``(*S)``.
        labels: integer ``(N, *S)``.
        floor: smaller probabilities count as this value, because a stored 0 has no logarithm
            (nnU-Net writes exact zeros outside its crop).
        mask: bool like `labels`, the voxels to count; None counts all.
        ignore_index: label to leave out.

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
