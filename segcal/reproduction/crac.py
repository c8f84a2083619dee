"""Calibration errors as the CRaC paper and its program compute them (Bala93/CRac, evaluation/).

:func:`tace_ref` is the paper's formula with segcal's bins. The other functions equal the program's
bit for bit: the edges of bins are rounded to the precision of the probabilities and have no
tolerance, no bin holds a probability of 0 or above 1, and classwise errors run over the classes
from 0 to the largest label that occurs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from segcal.binning import above, equal_width_statistics
from segcal.reproduction.tace_ref import mean_of_classes, tace_ref_of
from segcal.tensors import as_tensor, select_voxels

__all__ = [
    "aece",
    "classwise_ece",
    "ece",
    "error_between_edges",
    "tace_ref",
    "tace_ref_of",
    "tcece",
]


def tace_ref(
    probs: Any,
    labels: Any,
    *,
    threshold: float = 1e-3,
    bins: int = 15,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """What the CRaC poster calls TACE: a thresholded classwise ECE of the foreground.

    ``(1/K') sum_k sum_m (n_mk / n_k) |frequency_mk - confidence_mk|`` over equal-WIDTH bins of
    the voxels with ``p_k > threshold``, for the K' classes from 0 to the largest label that occurs;
    a class without a voxel above the threshold counts as 0. It is not Nixon's TACE, and only meant
    for comparison with the published tables.

    Args:
        probs: probabilities as in :func:`segcal.metrics.ece.ece`.
        labels: integer label map of the same voxels.
        threshold: probabilities up to this value are left out.
        bins: M.
        mask: the voxels to count; None counts the foreground-LABELLED voxels, as the publication
            does, so that false positives in the background are never counted.
        ignore_index: label to leave out, or None.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    p, y = _foreground(probs, labels, mask, ignore_index)
    kept = [above(pk, threshold) for pk in p]
    return mean_of_classes(
        [
            equal_width_statistics(p[k][kept[k]], y[kept[k]] == k, bins).expected_error()
            for k in _classes(y)
        ]
    )


def tcece(
    probs: Any,
    labels: Any,
    *,
    threshold: float = 1e-3,
    bins: int = 15,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """:func:`tace_ref` as the program computes it, with the same arguments, result and errors."""
    p, y = _foreground(probs, labels, mask, ignore_index)
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype)
    kept = [pk > threshold for pk in p]
    return mean_of_classes(
        [error_between_edges(p[k][kept[k]], y[kept[k]] == k, edges) for k in _classes(y)]
    )


def ece(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> float:
    """Top-label ECE as the program computes it.

    Arguments, result and errors are those of :func:`segcal.metrics.ece.ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype)
    return error_between_edges(confidence, predicted == y, edges)


def classwise_ece(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> float:
    """Classwise ECE as the program computes it: the mean over classes 0 to the largest label.

    Arguments, result and errors are those of :func:`segcal.metrics.classwise_ece.classwise_ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype)
    errors = [error_between_edges(p[k], y == k, edges) for k in _classes(y)]
    return float(np.mean(errors)) if errors else float("nan")


def aece(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> float:
    """Adaptive ECE as the program computes it, with bins between interpolated confidences.

    The smallest confidence is in no bin, and if many confidences are equal, most bins are empty.
    Arguments, result and errors are those of :func:`segcal.metrics.aece.aece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    n = len(confidence)
    if not n:
        return float("nan")
    ordered = np.sort(confidence.numpy(force=True))
    edges = np.interp(np.linspace(0, n, bins + 1), np.arange(n), ordered)
    return error_between_edges(confidence, predicted == y, torch.as_tensor(edges))


def error_between_edges(confidence: Tensor, hits: Tensor, edges: Tensor) -> float:
    """Expected error over the bins (lo, hi] between `edges`, as the program computes it.

    Edges are rounded to the precision of `confidence`, without a tolerance, so float32 and float64
    input can give different results. A prediction in no bin (0, or above 1) still counts in n.

    Args:
        confidence: predicted probabilities ``(n,)``, floating.
        hits: whether each prediction was right, ``(n,)``, bool.
        edges: ``(M + 1,)``, ascending; a bin between two equal edges is empty.

    Returns:
        ``sum_m (n_m / n) |accuracy_m - confidence_m|``; NaN when there is no prediction.
    """
    bins = len(edges) - 1
    index = torch.bucketize(confidence.contiguous(), edges.to(confidence)) - 1
    inside = (index >= 0) & (index < bins)
    promised = torch.bincount(index[inside], confidence[inside].double(), minlength=bins)
    came_true = torch.bincount(index[inside & hits], minlength=bins)
    gaps = np.abs(promised.numpy(force=True) - came_true.numpy(force=True))
    return float(gaps.sum() / len(confidence)) if len(confidence) else float("nan")


def _foreground(
    probs: Any, labels: Any, mask: Any, ignore_index: int | None
) -> tuple[Tensor, Tensor]:
    """Voxels of the mask; without a mask, of the labelled foreground."""
    chosen = as_tensor(labels) != 0 if mask is None else mask
    return select_voxels(probs, labels, chosen, ignore_index)


def _classes(y: Tensor) -> range:
    """Classes from 0 to the largest label."""
    return range(int(y.max()) + 1 if y.numel() else 0)
