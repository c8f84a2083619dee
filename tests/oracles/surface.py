"""Distances between surfaces from all pairs of surface voxels."""

from __future__ import annotations

import numpy as np


def surface_points(mask, spacing_mm):
    """Places in mm of the voxels that have a face neighbour outside the mask or the image.

    Only along axes with more than one voxel; of an image of a single voxel, that one.
    """
    padded = np.pad(mask, 1)
    axes = [step for step, n in zip(np.eye(mask.ndim, dtype=int), mask.shape, strict=True) if n > 1]
    axes = axes or [np.eye(mask.ndim, dtype=int)[0]]
    return np.array(
        [
            (i - 1) * spacing_mm
            for i in np.argwhere(padded)
            if not all(padded[tuple(i + step)] for step in (*axes, *(-a for a in axes)))
        ]
    )


def directed_distances(prediction, reference, spacing_mm):
    """From each surface voxel of one to the nearest of the other, and the other way."""
    a, b = (surface_points(m, np.asarray(spacing_mm)) for m in (prediction, reference))
    pairs = np.linalg.norm(a[:, None] - b[None], axis=-1)
    return pairs.min(1), pairs.min(0)
