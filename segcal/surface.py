"""Surfaces of binary masks and the distances between them, in millimetres.

A surface voxel is a voxel of the mask with a face neighbour outside it; outside the image counts
as outside the mask. Distances run between voxel centres.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import ndimage
from scipy.spatial import KDTree

from segcal.tensors import as_array

Distances = NDArray[np.float64]


@dataclass(frozen=True)
class SurfaceDistances:
    """Directed distances between two surfaces, in mm, one per surface voxel, in no order.

    Attributes:
        prediction_to_reference: from each surface voxel of the prediction to the nearest of the
            reference; empty if either mask is.
        reference_to_prediction: the other way.
        prediction_empty: whether the predicted mask has no voxel.
        reference_empty: whether the reference mask has no voxel.
    """

    prediction_to_reference: Distances
    reference_to_prediction: Distances
    prediction_empty: bool
    reference_empty: bool

    def undefined(self) -> float | None:
        """NaN if both masks are empty, inf if one is, None where distances exist."""
        if self.prediction_empty and self.reference_empty:
            return float("nan")
        if self.prediction_empty or self.reference_empty:
            return float("inf")
        return None


def surface_distances(
    prediction: ArrayLike, reference: ArrayLike, *, spacing_mm: Sequence[float] | ArrayLike
) -> SurfaceDistances:
    """Directed distances between the surfaces of two masks.

    Works on the box around both masks and on their surface voxels (a k-d tree), so cost and
    memory follow the surfaces, not the volume.

    Args:
        prediction: bool ``(*S)``, 1 to 3 axes.
        reference: bool, same shape.
        spacing_mm: voxel size along each axis of the arrays, in their order.

    Raises:
        ValueError: masks that are not bool or differ in shape; spacing of another length, not
            positive or not finite.
    """
    p, r = _mask("prediction", prediction), _mask("reference", reference)
    if p.shape != r.shape:
        raise ValueError(f"prediction {p.shape} and reference {r.shape}: expected one shape")
    spacing = np.asarray(spacing_mm, dtype=np.float64)
    if spacing.shape != (p.ndim,) or not np.all(np.isfinite(spacing)) or np.any(spacing <= 0):
        raise ValueError(
            f"spacing_mm: expected {p.ndim} positive numbers, one per array axis, "
            f"got {spacing.tolist()}"
        )
    empty = np.zeros(0)
    if not p.any() or not r.any():
        return SurfaceDistances(empty, empty, not p.any(), not r.any())
    box = bounding_box(p | r)  # cutting there loses nothing: outside is background
    p_surface, r_surface = surface_voxels(p[box]), surface_voxels(r[box])
    return SurfaceDistances(
        _directed(p_surface, r_surface, spacing),
        _directed(r_surface, p_surface, spacing),
        prediction_empty=False,
        reference_empty=False,
    )


def surface_voxels(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Voxels of `mask` that one erosion with face neighbours removes; outside is background."""
    return mask & ~ndimage.binary_erosion(mask, border_value=0)


def _mask(name: str, value: ArrayLike) -> NDArray[np.bool_]:
    array = as_array(value)
    if array.dtype != np.bool_:
        raise ValueError(
            f"{name}: expected a bool mask, got {array.dtype}; compare a label map with one label"
        )
    if not 1 <= array.ndim <= 3:
        raise ValueError(f"{name}: expected 1 to 3 axes, got shape {array.shape}")
    return array


def bounding_box(mask: NDArray[np.bool_]) -> tuple[slice, ...] | None:
    """Smallest box that holds every voxel of a mask; None if it has none."""
    box = []
    for axis in range(mask.ndim):
        (used,) = np.nonzero(mask.any(tuple(a for a in range(mask.ndim) if a != axis)))
        if not len(used):
            return None
        box.append(slice(int(used[0]), int(used[-1]) + 1))
    return tuple(box)


def _directed(a: NDArray[np.bool_], b: NDArray[np.bool_], spacing: Distances) -> Distances:
    """Distance from each surface voxel of a to the nearest of b; 0 for those that are in both."""
    apart = np.argwhere(a & ~b)
    shared = int(np.count_nonzero(a & b))
    distances = np.zeros(len(apart) + shared)
    if len(apart):
        tree = KDTree(np.argwhere(b) * spacing, balanced_tree=False, compact_nodes=False)
        distances[: len(apart)] = tree.query(apart * spacing)[0]
    return distances
