"""Thresholded adaptive calibration error."""

from __future__ import annotations

from typing import Any

from segcal.binning import above, equal_mass_statistics, mean_gap
from segcal.tensors import select_voxels

__all__ = ["tace"]


def tace(
    probs: Any,
    labels: Any,
    *,
    threshold: float = 1e-3,
    bins: int = 15,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """TACE: mean gap over classes and ranges of equal mass, without tiny probabilities.

    For each class k, the voxels with ``p_k > threshold`` are sorted by ``p_k`` and cut into `bins`
    ranges of equal size; the result is the mean over all non-empty (class, range) pairs of
    ``|frequency of y = k - mean p_k|`` (Nixon et al., "Measuring calibration in deep learning").
    Tied values are shared in proportion by the ranges that they span. A class without a voxel above
    the threshold contributes nothing.

    Args:
        probs: probabilities ``(N, K, *S)`` (array or tensor), or ``(K, *S)`` with labels ``(*S)``.
        labels: integer ``(N, *S)``.
        threshold: probabilities up to this are left out.
        bins: number of ranges per class.
        mask: bool like `labels`, the voxels to count; None counts all.
        ignore_index: label to leave out.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    kept = [above(pk, threshold) for pk in p]
    return mean_gap(
        [
            equal_mass_statistics(pk[keep], y[keep] == k, bins)
            for k, (pk, keep) in enumerate(zip(p, kept, strict=True))
        ]
    )
