"""Difference of volumes, in millilitres and relative to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from segcal.arrays import as_array

__all__ = ["volume_difference"]


def volume_difference(
    prediction: Any,
    reference: Any,
    *,
    spacing_mm: Sequence[float],
    relative: bool = False,
) -> float:
    """Predicted minus reference volume of two masks.

    Args:
        prediction: bool ``(*S)``.
        reference: bool, same shape.
        spacing_mm: voxel size along each axis.
        relative: return a fraction of the reference's volume instead of ml.

    Returns:
        the difference in ml, positive where too much is predicted; with `relative` a fraction, NaN
        where the reference is empty.

    Raises:
        ValueError: masks that are not bool or differ in shape; spacing that does not fit.
    """
    p, r = as_array(prediction), as_array(reference)
    if p.shape != r.shape or p.dtype != np.bool_ or r.dtype != np.bool_:
        raise ValueError(
            f"prediction, reference: expected bool masks of one shape, got {p.dtype} {p.shape} and "
            f"{r.dtype} {r.shape}"
        )
    spacing = np.asarray(spacing_mm, dtype=np.float64)
    if spacing.shape != (p.ndim,) or not np.all(np.isfinite(spacing)) or np.any(spacing <= 0):
        raise ValueError(f"spacing_mm: expected {p.ndim} positive numbers, got {spacing.tolist()}")
    predicted, labelled = int(np.count_nonzero(p)), int(np.count_nonzero(r))
    if relative:
        return (predicted - labelled) / labelled if labelled else float("nan")
    return float((predicted - labelled) * np.prod(spacing) / 1000)
