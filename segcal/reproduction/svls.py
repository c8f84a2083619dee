"""TACE as the programs of SVLS and BWCR compute it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from segcal.tensors import select_voxels

__all__ = ["tace"]


def tace(
    probs: Any,
    labels: Any,
    *,
    threshold: float = 1e-3,
    bins: int = 10,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """What these programs call TACE, which is about `bins` times smaller than Nixon's.

    Only foreground classes take part, the last range gets the remainder of the division, and every
    range is weighted by its share before the mean over ranges is taken.

    Args:
        probs: probabilities as in :func:`segcal.metrics.ece.ece`.
        labels: integer label map of the same voxels.
        threshold: probabilities up to this value are left out; SVLS uses 1e-3, BWCR 1e-2.
        bins: R, the number of ranges per class.
        mask: bool, the voxels to count; None counts all.
        ignore_index: label to leave out, or None.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    errors = []
    for k in range(1, len(p)):
        kept = p[k] > threshold
        order = torch.sort(p[k][kept], stable=True)
        confidence = order.values.double().numpy(force=True)
        hits = (y[kept] == k)[order.indices].numpy(force=True)
        cuts = [*(r * (len(hits) // bins) for r in range(bins)), len(hits)]
        gaps = [
            abs(float(hits[a:b].sum()) - float(confidence[a:b].sum()))
            for a, b in itertools.pairwise(cuts)
        ]
        if len(hits):
            errors.append(sum(gaps) / len(hits) / bins)
    return float(np.mean(errors)) if errors else float("nan")
