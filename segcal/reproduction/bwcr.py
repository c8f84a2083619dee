"""BWCR as its published program computes it, faults included."""

from __future__ import annotations

import numpy as np
import torch
from scipy import ndimage
from torch import Tensor

from segcal.arrays import as_array
from segcal.penalties.bwcr import BWCR
from segcal.tensors import valid_mask

__all__ = ["PublishedBWCR"]


class PublishedBWCR(BWCR):
    """BWCR with the published program's distances and its divisor.

    ``L = sum_i lambda(i) M(i) sum_k (z1_k - z2_k)^2 / (K n)``, where n is the number of all voxels
    instead of those in M, so that wide warps lower the loss. The distance to a boundary is rounded
    up outside an object and down inside; an object that is at most two voxels thick counts as
    absent. The arguments are those of :class:`segcal.penalties.bwcr.BWCR`.
    """

    def forward(
        self, first: Tensor, second: Tensor, labels: Tensor, inside: Tensor | None = None
    ) -> Tensor:
        """Return the weighted consistency of two views' logits in the original frame."""
        counts = valid_mask(labels, self.ignore_index)
        counts = counts if inside is None else counts & inside
        share = counts.sum() / max(counts.numel(), 1)
        return super().forward(first, second, labels, inside) * share

    def weight(self, labels: Tensor) -> Tensor:
        """Return lambda ``(N, *S)`` float32 of `labels`, on their device."""
        smallest = self.weight_max / 100 if self.weight_min is None else self.weight_min
        sampling = np.ones(labels.ndim - 1) if self.spacing is None else np.array(self.spacing)
        array = as_array(labels)
        weight = np.full(array.shape, smallest, dtype=np.float32)
        for n, one in enumerate(array):
            for k in set(range(1, self.num_classes)) - {self.ignore_index}:
                mask = one == k
                if not mask.any() or mask.all():
                    continue
                within = ndimage.distance_transform_edt(mask, sampling) - sampling.min()
                beyond = ndimage.distance_transform_edt(~mask, sampling)
                within, beyond = np.floor(within), np.ceil(beyond)
                if within.max() < 1:
                    continue
                distance = np.where(mask, np.maximum(within, 0), beyond)
                near = np.maximum(self.radius - distance, 0) / self.radius
                part = self.weight_max * near**self.power + smallest
                weight[n] = np.maximum(weight[n], part)
        return torch.from_numpy(weight).to(labels.device)
