"""Calibration error without bins: distance of confidence to its isotonic recalibration."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from segcal.binning import BinStatistics

__all__ = ["isotonic_ece", "isotonic_error"]


def isotonic_ece(
    probs: Any, labels: Any, *, mask: Any = None, ignore_index: int | None = None
) -> float:
    """Top-label ECE without bins, by :func:`isotonic_error`.

    Arguments and errors are as in :func:`segcal.metrics.ece.ece`.
    """
    from segcal.tensors import select_voxels

    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    value, index, count = np.unique(
        confidence.double().numpy(force=True), return_inverse=True, return_counts=True
    )
    hits = np.bincount(index, (predicted == y).numpy(force=True), len(value))
    return isotonic_error(BinStatistics(count, value * count, hits))


def isotonic_error(cells: BinStatistics) -> float:
    """``sum_i n_i |c(p_i) - p_i| / n``, c the increasing curve nearest to the observed hits.

    The curve is constant on stretches (the pools of the pool-adjacent-violators algorithm), which
    take the place of bins; their number and width follow from the data (CORP, Dimitriadis, Gneiting
    and Jordan 2021). Compared with ECE it shows how much the choice of bins matters. The curve is
    fitted to the same data, so that like ECE this is above 0 for calibrated probabilities; where
    accuracy falls with confidence, the curve is constant.

    Args:
        cells: predictions sorted by confidence, which is nearly equal within a cell.

    Returns:
        a fraction of 1; NaN without predictions.
    """
    used = cells.count > 0
    if not used.any():
        return float("nan")
    count = cells.count[used].astype(np.float64)
    curve = isotonic_regression(cells.accuracy[used], weights=count).x
    return float((count * np.abs(curve - cells.confidence[used])).sum() / count.sum())
