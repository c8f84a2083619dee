"""Rounds stored floats to labels if they are near whole numbers and stay distinct.

Scaled headers and resampling turn a label into 2.0235 or 0.9999999, which may be rounded. Labels
that were divided, for example by 255, all lie near 0, and rounding would empty the map.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LABEL_ROUNDING = 0.05
"""Label values this near an integer are rounded to it (scaled headers give 2.0235 for 2)."""
NOISE = 1e-6
"""Values that differ by less than this share of themselves (or of 1) count as equal."""
MOST_LABELS = 256
"""More distinct values from 0 to 1 than this cannot be divided labels."""


def round_labels(array: NDArray[Any], name: str) -> NDArray[np.int32]:
    """Labels ``(*S)`` from floating values.

    Args:
        array: floating ``(*S)``.
        name: first words of messages.

    Raises:
        ValueError: a value is not near a whole number, or several distinct values are near the
            same whole number.
    """
    rounded = np.rint(array)
    with np.errstate(invalid="ignore"):
        distance = np.abs(array - rounded)
    off = ~(distance <= LABEL_ROUNDING)  # NaN is off, too
    if off.any():
        hint = _divided(_distinct(array)) or "resample label maps with nearest neighbours"
        raise ValueError(
            f"{name}: {np.count_nonzero(off)} voxels do not hold labels, e.g. "
            f"{array[off][:3].tolist()}; {hint}"
        )
    if array.size and np.abs(rounded).max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: values up to {np.abs(rounded).max():.3g} are not labels")
    if found := merged(array, distance):
        raise ValueError(f"{name}: {found}")
    return rounded.astype(np.int32)


def merged(array: NDArray[Any], distance: NDArray[Any]) -> str:
    """Say which distinct values would become one label if they were rounded; empty if none would.

    Zero always counts as one of the values, so a map of nothing but 0.0039 is not background.

    Args:
        array: finite floating values.
        distance: distance of each value from the nearest whole number.
    """
    if not array.size or distance.max() <= NOISE:
        return ""
    values = _distinct(array)
    labels = np.rint(values)
    several, counts = np.unique(labels, return_counts=True)
    if counts.max() == 1:
        return ""
    label = several[counts.argmax()]
    here = values[labels == label]
    hint = _divided(values) or "store labels as whole numbers"
    if len(values) > MOST_LABELS and values[0] >= 0 and values[-1] <= 1:
        hint = "is it a map of probabilities?"
    return (
        f"{len(here)} stored values, {here[0]:.4g} to {here[-1]:.4g}, would all become label "
        f"{label:.0f}; {hint}"
    )


def _distinct(array: NDArray[Any]) -> NDArray[np.float64]:
    """Finite values that differ by more than :data:`NOISE`, and 0, in ascending order."""
    values = np.unique(array[np.isfinite(array)]).astype(np.float64)
    values = np.union1d(values, [0.0])
    apart = np.diff(values) > NOISE * np.maximum(1, np.abs(values[1:]))
    return values[np.concatenate([[True], apart])]


def _divided(values: NDArray[np.float64]) -> str:
    """Say by which number labels were divided, if distinct ascending values look like it."""
    if not 2 <= len(values) <= MOST_LABELS or values[0] < 0 or values[-1] > 1:
        return ""
    divisor = np.rint(1 / np.diff(values).min())
    whole = values * divisor
    if divisor < 3 or (np.abs(whole - np.rint(whole)) > LABEL_ROUNDING).any():
        return ""
    return (
        f"they look like labels divided by {divisor:.0f}: multiply them by it, and store whole "
        "numbers"
    )
