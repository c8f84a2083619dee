"""Calibration error without bins: distance of confidence to its isotonic recalibration."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.binning import BinStatistics
from segcal.compiling import compiled

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
    curve = _increasing()(cells.accuracy[used], count)
    return float((count * np.abs(curve - cells.confidence[used])).sum() / count.sum())


@cache
def _increasing() -> Any:
    """The loop, compiled when it is first needed.

    ``scipy.optimize.isotonic_regression`` finds the same curve, but its import takes longer than
    the evaluation of a small case.
    """
    return compiled(_pooled)


def _pooled(values: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Increasing curve ``(n,)`` with the smallest weighted squared distance to some values.

    Pool adjacent violators (Busing 2022): a value that is not above the pool before it is joined
    with it, then with the values after and the pools before, until the means of pools increase.

    Args:
        values: ``(n,)``.
        weights: ``(n,)``, positive.
    """
    n = len(values)
    mean, weight = np.empty(n), np.empty(n)
    end = np.empty(n, np.int64)
    last = -1
    i = 0
    while i < n:
        here, heavy = values[i], weights[i]
        if last >= 0 and mean[last] >= here:
            total = weight[last] * mean[last] + heavy * here
            heavy += weight[last]
            here = total / heavy
            last -= 1
            while i < n - 1 and here >= values[i + 1]:
                i += 1
                total += weights[i] * values[i]
                heavy += weights[i]
                here = total / heavy
            while last >= 0 and mean[last] >= here:
                total += weight[last] * mean[last]
                heavy += weight[last]
                here = total / heavy
                last -= 1
        i += 1
        last += 1
        mean[last], weight[last], end[last] = here, heavy, i
    start = 0
    curve = np.empty(n)
    for pool in range(last + 1):
        curve[start : end[pool]] = mean[pool]
        start = end[pool]
    return curve
