"""Settings of a triage, which says which cases to check first, and what its numbers mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import numpy as np

from segcal.arrays import check_choice
from segcal.evaluation.intervals import Kind, stated
from segcal.evaluation.reported import definitions
from segcal.metrics import table

__all__ = ["TrustSettings"]


@dataclass(frozen=True, kw_only=True)
class TrustSettings:
    """Settings that the numbers depend on; they are written beside the numbers.

    Attributes:
        level: level of the intervals of the volume, such as 0.95.
        interval: kind of the fitted intervals.
        swing: a volume is flagged if it would change by more than this share if the undecided
            voxels were decided the other way.
        tolerance: how far, in voxels, the geometry of a prediction may deviate from its label map
            or image.

    Raises:
        ValueError: values are out of range.
    """

    level: float = 0.95
    interval: Kind = "conformal"
    swing: float = 0.1
    tolerance: float = 1e-2

    def __post_init__(self) -> None:
        if not 0 < self.level < 1:
            raise ValueError(f"level: expected a number between 0 and 1, got {self.level}")
        if not 0 <= self.swing < np.inf or not 0 <= self.tolerance < np.inf:
            raise ValueError(
                f"swing, tolerance: expected finite numbers of 0 or more, got {self.swing}, "
                f"{self.tolerance}"
            )
        check_choice("interval", self.interval, get_args(Kind))

    def conventions(self, unit: str = "mm", *, fitted: bool = False) -> dict[str, str]:
        """Meaning of every key, in words.

        Args:
            unit: unit of the lengths, ``mm`` or ``px``.
            fitted: whether intervals were fitted to validation cases.
        """
        return {
            **({} if unit == "mm" else {"_ml": f"1000 {unit}: images state no size"}),
            **definitions(table.CONFIDENCE),
            "intervals": stated(self.level, self.interval if fitted else None),
            "flag": f"volume: its volume swing is above {self.swing:g}",
            "order": "lowest soft Dice confidence first; an empty mask counts as 1 - its largest "
            "p. Cases are sorted by their least sure structure",
        }
