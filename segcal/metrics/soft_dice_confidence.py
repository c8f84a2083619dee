"""Soft Dice confidence: the Dice coefficient that is expected of a mask, without a reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from segcal.arrays import as_array

__all__ = ["soft_dice_confidence", "soft_dice_of"]


def soft_dice_confidence(p: Any, mask: Any = None) -> float:
    """Approximate expected DSC of a mask, ``2 sum_{mask} p / (sum p + |mask|)``.

    Borges, Pacheco, Silva, "Soft Dice Confidence: A Near-Optimal Confidence Estimator for Selective
    Prediction in Semantic Segmentation" (arXiv 2402.10665). It is the ratio of the expectations of
    numerator and denominator of the DSC, which is near the expectation of the ratio where the
    labels of voxels are independent given the image. There is nothing to tune. It can be trusted as
    far as the probabilities are calibrated.

    Args:
        p: floating ``(*S)``, probability of one structure (array or tensor).
        mask: bool, same shape: the voxels predicted as the structure; None takes ``p > 0.5``.

    Returns:
        a fraction of 1. NaN where the mask is empty and every probability is 0 (like the DSC of a
        label that is in neither map), 0 where only the mask is empty.

    Raises:
        ValueError: a mask that is not bool or of another shape.
    """
    values = as_array(p)
    inside = values > 0.5 if mask is None else as_array(mask)
    if inside.shape != values.shape or inside.dtype != np.bool_:
        raise ValueError(f"mask: expected bool {values.shape}, got {inside.dtype} {inside.shape}")
    in_mask = float(np.sum(values, where=inside, dtype=np.float64))
    total = float(np.sum(values, dtype=np.float64))
    return soft_dice_of(in_mask, total, int(np.count_nonzero(inside)))


def soft_dice_of(in_mask: float, total: float, mask_voxels: int) -> float:
    """Soft Dice confidence from its sums.

    Args:
        in_mask: sum of the probabilities in the mask.
        total: sum of all probabilities.
        mask_voxels: size of the mask.

    Returns:
        a fraction of 1, as :func:`soft_dice_confidence`.
    """
    both = total + mask_voxels
    return 2 * in_mask / both if both > 0 else float("nan")
