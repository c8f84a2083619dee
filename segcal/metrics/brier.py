"""Brier score."""

from __future__ import annotations

from typing import Any

import torch

from segcal.tensors import select_voxels


def brier(probs: Any, labels: Any, *, mask: Any = None, ignore_index: int | None = None) -> float:
    """Mean over voxels of ``sum_k (p_k - 1[y = k])^2``, between 0 and 2 (Brier 1950).

    Arguments and errors as in :func:`segcal.metrics.ece.ece`.

    Returns:
        the score; NaN when no voxel counts.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    if not y.numel():
        return float("nan")
    # (p_k - t)^2 = p_k^2 - 2 t p_k + t^2, one class at a time
    of_label = torch.gather(p, 0, y.unsqueeze(0)).double()
    squares = sum(float(pk.double().square().sum()) for pk in p)
    return (squares - 2 * float(of_label.sum())) / y.numel() + 1.0
