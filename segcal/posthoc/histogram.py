"""Histogram binning: p becomes the observed share of hits among voxels of about the same p."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segcal.binning import edge_tolerance
from segcal.posthoc.one_vs_rest import OneVsRest

__all__ = ["HistogramBinning"]

TIED = 1e-13
"""An edge lies this share above the value it is made from, so that ties stay together."""


class HistogramBinning(OneVsRest):
    """Replace p by the share of hits in its bin, for every class against the rest.

    Source: Zadrozny and Elkan 2001, "Obtaining calibrated probability estimates from decision trees
    and naive Bayesian classifiers". A bin is (lower, upper], as in :mod:`segcal.binning`. In a bin
    without voxels p stays. With more than two classes the p' are divided by their sum; with two
    classes there is one map, for class 1. A class that is nowhere or everywhere in the cases keeps
    its p, and where all maps give 0 the probabilities stay.

    A probability of exactly 0 is possible, so the NLL of other cases may be infinite.

    Args:
        per_channel: whether every channel is a sigmoid of its own, with labels that may overlap.
        bins: number of bins.
        equal_mass: whether bins hold about equally many voxels (tied values stay in one bin, so
            that there may be fewer bins) instead of being equally wide.

    Attributes:
        maps: upper edges of the bins, the last of which is 1, and p', float64 ``(2, m)``, of each
            class, or of class 1 of two; NaN for a bin without voxels, and None for a class that
            keeps its p.

    Raises:
        ValueError: fewer than 1 bin.
    """

    def __init__(
        self, *, per_channel: bool = False, bins: int = 15, equal_mass: bool = False
    ) -> None:
        super().__init__(per_channel=per_channel)
        if bins < 1:
            raise ValueError(f"bins: expected 1 or more, got {bins}")
        self.bins, self.equal_mass = bins, equal_mass

    def _map_of(
        self, log_p: Tensor, log_q: Tensor, hits: Tensor, weights: Tensor, num_classes: int
    ) -> NDArray[np.float64]:
        p, w = log_p.exp().clip(max=1).numpy(), weights.numpy()
        edges = np.arange(1, self.bins) + edge_tolerance(self.bins)
        upper = np.append(edges, self.bins) / self.bins
        if self.equal_mass:
            order = p.argsort(kind="stable")
            mass = w[order].cumsum() / w.sum()
            last = np.searchsorted(mass, np.arange(1, self.bins) / self.bins - 1e-12)
            upper = np.unique([*(p[order][last] * (1 + TIED)).clip(max=1), 1.0])
        index = np.searchsorted(upper, p)
        mass = np.bincount(index, w, len(upper))
        hit_mass = np.bincount(index, w * hits.numpy(), len(upper))
        share = np.full(len(upper), np.nan)
        np.divide(hit_mass, mass, out=share, where=mass > 0)
        return np.stack([upper, share])

    def _mapped(
        self, found: NDArray[np.float64], log_p: Tensor, log_q: Tensor
    ) -> tuple[Tensor, Tensor]:
        upper, share = found
        value = torch.from_numpy(share[np.searchsorted(upper, log_p.exp().clip(max=1).numpy())])
        empty = value.isnan()
        return torch.where(empty, log_p, value.log()), torch.where(
            empty, log_q, torch.log1p(-value)
        )

    def _is_map(self, found: NDArray[np.float64]) -> bool:
        if found.ndim != 2 or found.shape[0] != 2 or not found.shape[1]:
            return False
        upper, share = found
        edges = bool((np.diff(upper) > 0).all() and upper[-1] == 1)
        return edges and bool((np.isnan(share) | ((share >= 0) & (share <= 1))).all())

    def _learned(self) -> dict[str, Any]:
        found = super()._learned()
        for one in found["maps"]:
            if one is not None:  # JSON has no NaN
                one[1] = [None if np.isnan(value) else value for value in one[1]]
        return found

    def _arguments(self) -> dict[str, Any]:
        return {"bins": self.bins, "equal_mass": self.equal_mass}
