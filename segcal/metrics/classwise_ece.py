"""Classwise expected calibration error."""

from __future__ import annotations

from typing import Any

import numpy as np

from segcal.binning import equal_width_statistics
from segcal.tensors import select_voxels

__all__ = ["classwise_ece"]


def classwise_ece(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> float:
    """Mean over classes of the binary ECE of ``p_k`` against ``y = k``.

    ``(1/K) sum_k sum_m (n_mk / n) |frequency_mk - confidence_mk|`` over all K classes of the model
    (Kull et al. 2019, "classwise-ECE"). Bins as in :func:`segcal.metrics.ece.ece`.

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
    errors = [equal_width_statistics(pk, y == k, bins).expected_error() for k, pk in enumerate(p)]
    return float(np.mean(errors))
