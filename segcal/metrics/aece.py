"""Adaptive expected calibration error: top-label ECE with bins of equal mass."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch

from segcal.binning import equal_mass_statistics, error_between_edges
from segcal.tensors import check_choice, select_voxels

Compat = Literal["crac"]


def aece(
    probs: Any,
    labels: Any,
    *,
    bins: int = 15,
    compat: Compat | None = None,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """``sum_m (n_m / n) |accuracy_m - confidence_m|`` over groups of equal size.

    Groups are as in :func:`segcal.binning.equal_mass_statistics`: exact, ties shared pro rata.

    Args:
        probs: as in :func:`segcal.metrics.ece.ece`.
        labels: see there.
        bins: M.
        compat: ``crac`` interpolates edges between sorted confidences as the published code does;
            it leaves the smallest confidence out, and where many are equal most bins are empty.
        mask: see there.
        ignore_index: see there.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`, or an unknown `compat`.
    """
    if compat is not None:
        check_choice("compat", compat, get_args(Compat))
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    hits = predicted == y
    if compat is None:
        return equal_mass_statistics(confidence, hits, bins).expected_error()
    n = len(confidence)
    if not n:
        return float("nan")
    ordered = np.sort(confidence.numpy(force=True))
    edges = np.interp(np.linspace(0, n, bins + 1), np.arange(n), ordered)
    return error_between_edges(confidence, hits, torch.as_tensor(edges))
