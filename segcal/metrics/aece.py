"""Adaptive expected calibration error: top-label ECE with bins of equal mass."""

from __future__ import annotations

from typing import Any

from segcal.binning import equal_mass_statistics
from segcal.tensors import select_voxels

__all__ = ["aece"]


def aece(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> float:
    """``sum_m (n_m / n) |accuracy_m - confidence_m|`` over groups of equal size.

    The groups are exact, and voxels of equal confidence are shared between groups in proportion
    (:func:`segcal.binning.equal_mass_statistics`).

    Args:
        probs: probabilities ``(N, K, *S)`` (array or tensor), or ``(K, *S)`` with labels ``(*S)``.
        labels: integer ``(N, *S)``.
        bins: M.
        mask: bool like `labels`, the voxels to count; None counts all.
        ignore_index: label to leave out.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    return equal_mass_statistics(confidence, predicted == y, bins).expected_error()
