"""Regions of a predicted map: how far a voxel lies from where the prediction changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from segcal.arrays import distinct_labels
from segcal.neighbourhood import outer_region

__all__ = ["Regions"]


@dataclass(frozen=True)
class Regions:
    """How a predicted map is divided into regions, which are known without a reference.

    Attributes:
        bands: upper ends, ascending, of the distance to the nearest voxel that is predicted as
            another class: in mm where the voxel size is known, else in voxels. The last region
            holds the voxels beyond. None (default) gives two regions: inside (0), where the 3^d
            patch around a voxel is predicted as one class, and boundary (1), where it is mixed.

    Raises:
        ValueError: bands that are not positive and ascending.
    """

    bands: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.bands is None:
            return
        ends = [0.0, *self.bands, np.inf]
        if len(ends) < 3 or any(not a < b for a, b in pairwise(ends)):
            raise ValueError(
                f"bands: expected positive, ascending distances, got {list(self.bands)}"
            )

    @property
    def count(self) -> int:
        """Number of regions."""
        return 2 if self.bands is None else len(self.bands) + 1

    @property
    def inside(self) -> int:
        """The region that is farthest from another predicted class."""
        return 0 if self.bands is None else len(self.bands)

    def of(self, predicted: Tensor, spacing_mm: Sequence[float] | None = None) -> Tensor:
        """Return the region of every voxel, int64 like `predicted`.

        Args:
            predicted: integer ``(N, *S)``. Without spatial axes everything is region 0.
            spacing_mm: voxel size along S, for `bands`; None measures distances in voxels.

        Raises:
            ValueError: a voxel size for another number of axes.
        """
        axes = predicted.ndim - 1
        if spacing_mm is not None and len(spacing_mm) != axes:
            raise ValueError(
                f"spacing_mm: expected a voxel size for {axes} axes, got {list(spacing_mm)}"
            )
        if not axes:
            return torch.zeros_like(predicted, dtype=torch.long)
        if self.bands is None:
            few = int(predicted.max()) < 256 if predicted.numel() else True
            return outer_region(predicted.byte() if few else predicted).long()
        distances = [_to_another_class(one.cpu().numpy(), spacing_mm) for one in predicted]
        ends = torch.tensor(self.bands, dtype=torch.float64)
        return torch.bucketize(torch.from_numpy(np.stack(distances)), ends).to(predicted.device)


def _to_another_class(
    label_map: NDArray[Any], spacing_mm: Sequence[float] | None
) -> NDArray[np.float64]:
    """Distance ``(*S)`` of every voxel to the nearest voxel of another class, or infinity."""
    distance = np.full(label_map.shape, np.inf)
    found = distinct_labels(label_map)
    for k in found if len(found) > 1 else ():
        mask = label_map == k
        distance[mask] = ndimage.distance_transform_edt(mask, sampling=spacing_mm)[mask]
    return distance
