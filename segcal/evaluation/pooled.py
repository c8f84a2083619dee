"""Calibration of many cases taken together, in memory that does not grow with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.binning import BinStatistics, MassHistogram, equal_width_statistics
from segcal.metrics.brier import brier
from segcal.metrics.nll import nll
from segcal.tensors import select_voxels


@dataclass(frozen=True)
class PooledCalibration:
    """Sums over voxels from which the pooled metrics follow; those of cases add up.

    Attributes:
        top: top-label bins.
        classes: bins of ``p_k`` against ``y = k``, one for every class.
        top_mass: top-label histogram for groups of equal mass.
        class_mass: histogram of every class's ``p_k`` above the threshold of TACE.
        threshold: of TACE.
        voxels: how many there are.
        nll_sum: nats.
        brier_sum: squared errors summed over the classes.
    """

    top: BinStatistics
    classes: tuple[BinStatistics, ...]
    top_mass: MassHistogram
    class_mass: tuple[MassHistogram, ...]
    threshold: float
    voxels: int
    nll_sum: float
    brier_sum: float

    @classmethod
    def of(
        cls,
        probs: Any,
        labels: Any,
        *,
        bins: int = 15,
        threshold: float = 1e-3,
        mask: Any = None,
        ignore_index: int | None = None,
    ) -> PooledCalibration:
        """Sums over one case (or batch); arguments and errors as in :func:`segcal.metrics.ece.ece`.

        Args:
            probs: see there.
            labels: see there.
            bins: M of the equal-width bins.
            threshold: probabilities up to this are left out of TACE.
            mask: see there.
            ignore_index: see there.
        """
        p, y = select_voxels(probs, labels, mask, ignore_index)
        confidence, predicted = p.max(dim=0)
        hits = predicted == y
        n = y.numel()
        kept = [pk > threshold for pk in p]
        return cls(
            top=equal_width_statistics(confidence, hits, bins),
            classes=tuple(equal_width_statistics(pk, y == k, bins) for k, pk in enumerate(p)),
            top_mass=MassHistogram.of(confidence, hits),
            class_mass=tuple(
                MassHistogram.of(pk[keep], y[keep] == k)
                for k, (pk, keep) in enumerate(zip(p, kept, strict=True))
            ),
            threshold=threshold,
            voxels=n,
            nll_sum=n * nll(p[None], y[None]) if n else 0.0,
            brier_sum=n * brier(p[None], y[None]) if n else 0.0,
        )

    def __add__(self, other: PooledCalibration) -> PooledCalibration:
        """Sums over both.

        Raises:
            ValueError: other classes, bins or threshold.
        """
        if len(self.classes) != len(other.classes) or self.threshold != other.threshold:
            raise ValueError(
                f"cannot add {len(self.classes)} classes, threshold {self.threshold:g}, and "
                f"{len(other.classes)} classes, threshold {other.threshold:g}"
            )
        return PooledCalibration(
            self.top + other.top,
            tuple(a + b for a, b in zip(self.classes, other.classes, strict=True)),
            self.top_mass + other.top_mass,
            tuple(a + b for a, b in zip(self.class_mass, other.class_mass, strict=True)),
            self.threshold,
            self.voxels + other.voxels,
            self.nll_sum + other.nll_sum,
            self.brier_sum + other.brier_sum,
        )

    def metrics(self, *, groups: int = 15) -> dict[str, float]:
        """Pooled metrics by name; fractions of 1, NLL in nats, NaN without voxels.

        ``aece`` and ``tace`` are those of probabilities moved by at most 2^-16, ``aece_bound`` says
        how far that can move ``aece``.

        Args:
            groups: R of the equal-mass groups.
        """
        gaps = np.concatenate([h.groups(groups).gap for h in self.class_mass])
        gaps = gaps[~np.isnan(gaps)]
        n = self.voxels
        return {
            "ece": self.top.expected_error(),
            "overconfidence": self.top.overconfidence(),
            "underconfidence": self.top.underconfidence(),
            "ace": self.top.average_error(),
            "mce": self.top.maximum_error(),
            "cece": float(np.mean([c.expected_error() for c in self.classes])),
            "aece": self.top_mass.groups(groups).expected_error(),
            "aece_bound": self.top_mass.error_bound(groups),
            "tace": float(gaps.mean()) if gaps.size else float("nan"),
            "nll": self.nll_sum / n if n else float("nan"),
            "brier": self.brier_sum / n if n else float("nan"),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; empty fine bins are left out."""
        return {
            "top": self.top.to_dict(),
            "classes": [c.to_dict() for c in self.classes],
            "top_mass": _sparse(self.top_mass),
            "class_mass": [_sparse(h) for h in self.class_mass],
            "threshold": self.threshold,
            "voxels": self.voxels,
            "nll_sum": self.nll_sum,
            "brier_sum": self.brier_sum,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PooledCalibration:
        """Read what :meth:`to_dict` wrote.

        Raises:
            ValueError: entries that are missing or do not fit.
        """
        try:
            return cls(
                top=BinStatistics.from_dict(data["top"]),
                classes=tuple(BinStatistics.from_dict(c) for c in data["classes"]),
                top_mass=_dense(data["top_mass"]),
                class_mass=tuple(_dense(h) for h in data["class_mass"]),
                threshold=float(data["threshold"]),
                voxels=int(data["voxels"]),
                nll_sum=float(data["nll_sum"]),
                brier_sum=float(data["brier_sum"]),
            )
        except KeyError as error:
            raise ValueError(f"pooled calibration: {error} is missing") from None


def _sparse(histogram: MassHistogram) -> dict[str, Any]:
    s = histogram.statistics
    (index,) = np.nonzero(s.count)
    part = BinStatistics(s.count[index], s.confidence_sum[index], s.hit_sum[index])
    return {"index": index.tolist(), **part.to_dict()}


def _dense(data: Mapping[str, Any]) -> MassHistogram:
    part = BinStatistics.from_dict(data)
    index = np.asarray(data["index"], dtype=np.int64)
    if index.shape != part.count.shape or (index.size and index.max() >= MassHistogram.FINE):
        raise ValueError("pooled calibration: index does not fit its bins")

    def spread(values: NDArray[Any]) -> NDArray[Any]:
        full = np.zeros(MassHistogram.FINE, dtype=values.dtype)
        full[index] = values
        return full

    return MassHistogram(
        BinStatistics(spread(part.count), spread(part.confidence_sum), spread(part.hit_sum))
    )
