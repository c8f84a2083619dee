"""Calibration error of every single class: expected (ECE), average (ACE) or maximum (MCE)."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import check_choice
from segcal.binning import Reduction, equal_width_statistics
from segcal.tensors import select_voxels

__all__ = ["calibration_error"]


def calibration_error(
    probs: Any,
    labels: Any,
    *,
    reduction: Reduction = "expected",
    bins: int = 20,
    include_background: bool = True,
    mask: Any = None,
    ignore_index: int | None = None,
) -> NDArray[np.float64]:
    """Gap between ``p_k`` and the frequency of ``y = k``, for every class of a case.

    ``expected`` weighs bins by their voxels, ``average`` (ACE) takes the mean gap of the non-empty
    bins, and ``maximum`` (MCE) the largest gap (Barfoot et al. 2024; MONAI's CalibrationError with
    20 bins, whose counters are float32).

    Args:
        probs: probabilities of one case, ``(N, K, *S)`` (array or tensor), or ``(K, *S)`` with
            labels ``(*S)``.
        labels: integer ``(N, *S)``.
        reduction: how the gaps of the bins become one number.
        bins: M.
        include_background: whether class 0 takes part.
        mask: bool like `labels`, the voxels to count; None counts all.
        ignore_index: label to leave out.

    Returns:
        ``(K,)``, or ``(K - 1,)`` without the background; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`, or an unknown reduction.
    """
    check_choice("reduction", reduction, get_args(Reduction))
    p, y = select_voxels(probs, labels, mask, ignore_index)
    first = 0 if include_background else 1
    return np.array(
        [equal_width_statistics(p[k], y == k, bins).error(reduction) for k in range(first, len(p))]
    )
