"""Labels from stored floats: rounded where they are near whole numbers, never two of them to one.

Scaled headers and resampling leave 2.0235 or 0.9999999 for a label, which may be rounded. Labels
that were divided, by 255 say, lie near 0 all together, and rounding would empty the map.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LABEL_ROUNDING = 0.05
"""Label values this near an integer are rounded to it (scaled headers give 2.0235 for 2)."""
NOISE = 1e-6
"""Values that differ by this share of themselves (or of 1) are one number, written twice."""
MOST_LABELS = 256
"""More distinct values from 0 to 1 than this are no divided labels."""


def round_labels(array: NDArray[Any], name: str) -> NDArray[np.int32]:
    """Labels ``(*S)`` of floating values.

    Args:
        array: floating ``(*S)``.
        name: what messages begin with.

    Raises:
        ValueError: values that are not near a whole number, or of which several distinct ones are
            near the same.
    """
    rounded = np.rint(array)
    with np.errstate(invalid="ignore"):
        distance = np.abs(array - rounded)
    off = ~(distance <= LABEL_ROUNDING)  # NaN is off, too
    if off.any():
        hint = _divided(_distinct(array)) or "resample label maps with nearest neighbours"
        raise ValueError(
            f"{name}: {np.count_nonzero(off)} voxels are no labels, e.g. "
            f"{array[off][:3].tolist()}; {hint}"
        )
    if array.size and np.abs(rounded).max() > np.iinfo(np.int32).max:
        raise ValueError(f"{name}: values up to {np.abs(rounded).max():.3g} are no labels")
    if found := merged(array, distance):
        raise ValueError(f"{name}: {found}")
    return rounded.astype(np.int32)


def merged(array: NDArray[Any], distance: NDArray[Any]) -> str:
    """Say which distinct values would become one label if they were rounded; empty if none would.

    Zero counts as a value that is there: that a map holds nothing but 0.0039 is no background.

    Args:
        array: finite floating values.
        distance: of each from its whole number.
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
    """Finite values that differ by more than noise, and 0, ascending."""
    values = np.unique(array[np.isfinite(array)]).astype(np.float64)
    values = np.union1d(values, [0.0])
    apart = np.diff(values) > NOISE * np.maximum(1, np.abs(values[1:]))
    return values[np.concatenate([[True], apart])]


def _divided(values: NDArray[np.float64]) -> str:
    """Say by what labels were divided, if distinct ascending values look like it."""
    if not 2 <= len(values) <= MOST_LABELS or values[0] < 0 or values[-1] > 1:
        return ""
    divisor = np.rint(1 / np.diff(values).min())
    whole = values * divisor
    if divisor < 3 or (np.abs(whole - np.rint(whole)) > LABEL_ROUNDING).any():
        return ""
    return (
        f"they look like labels divided by {divisor:.0f}: multiply by it, and store whole numbers"
    )
