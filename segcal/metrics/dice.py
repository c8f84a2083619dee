"""Dice similarity coefficient of label maps."""

from __future__ import annotations

from typing import Any

import numpy as np

from segcal.arrays import as_array

__all__ = ["dice"]


def dice(prediction: Any, reference: Any, label: int, *, mask: Any = None) -> float:
    """``DSC = 2 |P and G| / (|P| + |G|)`` of one label (Dice 1945).

    Args:
        prediction: integer label map, any shape (array or tensor).
        reference: integer label map, same shape.
        label: the label that is compared.
        mask: bool, same shape; False leaves a voxel out. None keeps all.

    Returns:
        a fraction of 1. NaN when the label is in neither map (the published evaluation counts this
        as 1), 0 when it is in one map only.

    Raises:
        ValueError: shapes differ.
    """
    p, r = as_array(prediction), as_array(reference)
    if p.shape != r.shape:
        raise ValueError(f"prediction {p.shape} and reference {r.shape}: expected one shape")
    p, r = p == label, r == label
    if mask is not None:
        m = as_array(mask)
        if m.shape != p.shape or m.dtype != np.bool_:
            raise ValueError(f"mask: expected bool {p.shape}, got {m.dtype} {m.shape}")
        p, r = p & m, r & m
    total = int(np.count_nonzero(p)) + int(np.count_nonzero(r))
    return 2 * int(np.count_nonzero(p & r)) / total if total else float("nan")
