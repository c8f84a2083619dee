"""Expected calibration error of the top label."""

from __future__ import annotations

from typing import Any

from segcal.binning import BinStatistics, equal_width_statistics
from segcal.tensors import select_voxels

__all__ = ["ece", "reliability"]


def ece(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> float:
    """Top-label ECE: ``sum_m (n_m / n) |accuracy_m - confidence_m|``.

    The confidence of a voxel is its largest probability; the accuracy of a bin is the share of its
    voxels whose class of largest probability is the label (ties go to the lowest class). Bins are
    (lo, hi] of equal width, and 0 is in the first bin; a value within 1e-6 bin widths above an edge
    counts as on the edge (Guo et al. 2017; 15 bins as in CALS and CRaC).

    Args:
        probs: probabilities ``(N, K, *S)`` (array or tensor), or ``(K, *S)`` with labels ``(*S)``.
        labels: integer ``(N, *S)``.
        bins: M.
        mask: bool like `labels`, the voxels to count; None counts all.
        ignore_index: label to leave out.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: shapes, labels or probabilities that do not fit.
    """
    found = reliability(probs, labels, bins=bins, mask=mask, ignore_index=ignore_index)
    return found.expected_error()


def reliability(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> BinStatistics:
    """Bin statistics behind :func:`ece` and the reliability diagram, which cases can add up.

    Arguments and errors are as in :func:`ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    return equal_width_statistics(confidence, predicted == y, bins)
