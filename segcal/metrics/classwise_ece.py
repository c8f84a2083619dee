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
    (Kull et al. 2019, "classwise-ECE"). The bins are those of :func:`segcal.metrics.ece.ece`.

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
    errors = [equal_width_statistics(pk, y == k, bins).expected_error() for k, pk in enumerate(p)]
    return float(np.mean(errors))
