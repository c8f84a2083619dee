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

    Groups are as in :func:`segcal.binning.equal_mass_statistics`: exact, ties shared pro rata.

    Args:
        probs: as in :func:`segcal.metrics.ece.ece`.
        labels: see there.
        bins: M.
        mask: see there.
        ignore_index: see there.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    return equal_mass_statistics(confidence, predicted == y, bins).expected_error()
