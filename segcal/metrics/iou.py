"""Intersection over union, its mean over classes, and accuracy, from a confusion matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import as_array
from segcal.tensors import as_tensor, check_label_values

__all__ = ["accuracy", "confusion_matrix", "iou", "mean_dice", "mean_iou"]

Confusion = NDArray[np.int64]


def confusion_matrix(
    prediction: Any,
    reference: Any,
    num_classes: int,
    *,
    mask: Any = None,
    ignore_index: int | None = None,
) -> Confusion:
    """Count voxels by reference label (rows) and predicted label (columns); cases can be added.

    Args:
        prediction: integer label map, any shape (array or tensor).
        reference: integer label map, same shape.
        num_classes: K.
        mask: bool, same shape; False leaves a voxel out. None keeps all.
        ignore_index: reference label to leave out.

    Returns:
        int64 ``(K, K)``.

    Raises:
        ValueError: shapes differ, labels outside [0, K).
    """
    p, r = as_array(prediction), as_array(reference)
    if p.shape != r.shape:
        raise ValueError(f"prediction {p.shape} and reference {r.shape}: expected one shape")
    check_label_values(as_tensor(r), num_classes, ignore_index)
    check_label_values(as_tensor(p), num_classes, None)
    keep = np.ones(r.shape, dtype=bool) if mask is None else as_array(mask)
    if keep.shape != r.shape or keep.dtype != np.bool_:
        raise ValueError(f"mask: expected bool {r.shape}, got {keep.dtype} {keep.shape}")
    if ignore_index is not None:
        keep = keep & (r != ignore_index)
    pairs = r[keep].astype(np.int64) * num_classes + p[keep].astype(np.int64)
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def iou(confusion: Confusion) -> NDArray[np.float64]:
    """``TP / (TP + FP + FN)`` of every class (Jaccard index).

    Args:
        confusion: :func:`confusion_matrix` of one case, or summed over many (pooled).

    Returns:
        ``(K,)``; NaN for a class that is in neither map.
    """
    hits = np.diag(confusion).astype(np.float64)
    union = confusion.sum(0) + confusion.sum(1) - np.diag(confusion)
    return np.divide(hits, union, out=np.full(len(hits), np.nan), where=union > 0)


def mean_iou(confusion: Confusion, *, include_background: bool = False) -> float:
    """Mean of :func:`iou` over the classes that occur; NaN when none does.

    Args:
        confusion: :func:`confusion_matrix` of one case, or summed over many (pooled). The published
            model selection sums it over the validation set.
        include_background: whether class 0 takes part.
    """
    values = iou(confusion)[0 if include_background else 1 :]
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")


def mean_dice(confusion: Confusion, *, include_background: bool = False) -> float:
    """Mean Dice coefficient ``2 TP / (2 TP + FP + FN)`` over the classes that occur.

    Args:
        confusion: :func:`confusion_matrix` of one case, or summed over many (pooled).
        include_background: whether class 0 takes part.

    Returns:
        a fraction of 1; NaN when no class occurs.
    """
    values = iou(confusion)[0 if include_background else 1 :]
    values = values[~np.isnan(values)]
    return float((2 * values / (1 + values)).mean()) if values.size else float("nan")


def accuracy(confusion: Confusion) -> float:
    """Share of voxels whose label is right; NaN without voxels."""
    n = confusion.sum()
    return float(np.trace(confusion) / n) if n else float("nan")
