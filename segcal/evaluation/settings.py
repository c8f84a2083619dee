"""Settings of an evaluation, and what its numbers mean.

A scope is a selection of voxels that calibration errors are computed over, such as the labelled
foreground.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from segcal.arrays import check_choice
from segcal.evaluation.agreement import DEFINITIONS
from segcal.evaluation.intervals import Kind, stated
from segcal.evaluation.reported import definitions, scope_metrics
from segcal.metrics import table

__all__ = ["EvaluationSettings"]

Compat = Literal["marginloss", "curvas"]
SCOPES = {
    "fg": "labelled foreground",
    "union": "labelled or predicted foreground",
    "dilated": "within {dilation} voxels of the labelled foreground",
    "crop": "where a foreground probability is not 0",
    "roi": "region of interest",
    "all": "all voxels",
}
"""Scopes, and the voxels that each selects."""
_SCOPE_CONVENTIONS = {
    "fg": "voxels whose reference label is not background",
    "union": "voxels whose reference label or most likely label is not background",
    "dilated": "voxels labelled as foreground, and all voxels within {dilation} voxels of them "
    "(box)",
    "crop": "smallest box around the voxels with a foreground probability above 0 or a foreground "
    "label: nnU-Net writes exact zeros outside its crop",
    "roi": "voxels of the mask that was given with the case",
    "all": "every voxel of the volume",
}


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """Settings that the numbers depend on; they are written beside the numbers.

    Attributes:
        bins: number of bins of ECE, classwise ECE, TACE and tace_ref.
        tace_threshold: probabilities up to this value are left out of TACE and tace_ref.
        dilation: voxels by which the dilated scope reaches beyond the labelled foreground.
        nsd_tolerance_mm: distance up to which surfaces agree in the normalised surface distance.
        tolerance: how far, in voxels, the geometry of a prediction may deviate from its reference.
        chosen: scopes (selections of voxels) that calibration is reported for; keys of
            :data:`SCOPES`.
        compat: ``marginloss`` adds columns of that name, computed by the rules of
            :mod:`segcal.reproduction.marginloss`; ``curvas`` does so by the rules of
            :mod:`segcal.reproduction.curvas`, for cases with several raters.
        level: level of the intervals of volumes, such as 0.95.
        interval: how the intervals are made from the fit to validation cases.
        threshold: a mask is where the probability of foreground, or of a region, is above this
            value; None uses the label map beside the probabilities, or the most likely classes.

    Raises:
        ValueError: values are out of range.
    """

    bins: int = 15
    tace_threshold: float = 1e-3
    dilation: int = 5
    nsd_tolerance_mm: float = 2.0
    tolerance: float = 1e-2
    chosen: tuple[str, ...] = ("fg", "union", "dilated", "all")
    compat: Compat | None = None
    threshold: float | None = None
    level: float = 0.95
    interval: Kind = "conformal"

    def __post_init__(self) -> None:
        if self.bins < 1 or self.dilation < 1:
            raise ValueError(
                f"bins, dilation: expected at least 1, got {self.bins}, {self.dilation}"
            )
        if not 0 <= self.tace_threshold <= 1 or not 0 <= self.tolerance < np.inf:
            raise ValueError(
                f"tace_threshold, tolerance: expected a probability and a finite number of voxels, "
                f"got {self.tace_threshold}, {self.tolerance}"
            )
        if not 0 <= self.nsd_tolerance_mm < np.inf:
            raise ValueError(f"nsd_tolerance_mm: expected mm >= 0, got {self.nsd_tolerance_mm}")
        if self.threshold is not None and not 0 <= self.threshold < 1:
            raise ValueError(
                f"threshold: expected a probability from 0 to below 1, got {self.threshold}"
            )
        if not 0 < self.level < 1:
            raise ValueError(f"level: expected a number between 0 and 1, got {self.level}")
        check_choice("interval", self.interval, get_args(Kind))
        if self.compat is not None:
            check_choice("compat", self.compat, get_args(Compat))
        for scope in self.chosen:
            check_choice("chosen", scope, tuple(SCOPES))
        if not self.chosen or len(set(self.chosen)) < len(self.chosen):
            raise ValueError(f"chosen: expected different scopes, got {', '.join(self.chosen)}")

    @property
    def scopes(self) -> tuple[str, ...]:
        """Names of the voxel selections, as they appear in the keys of results."""
        return tuple(f"dilated{self.dilation}" if s == "dilated" else s for s in self.chosen)

    @property
    def scope_titles(self) -> dict[str, str]:
        """A title per scope, for figures."""
        return {
            key: f"{key}: {SCOPES[scope].format(dilation=self.dilation)}"
            for key, scope in zip(self.scopes, self.chosen, strict=True)
        }

    def conventions(self, unit: str = "mm", *, fitted: bool = False) -> dict[str, str]:
        """Meaning of every key, in words.

        Args:
            unit: unit of the lengths, ``mm`` or ``px``.
            fitted: whether intervals of volumes were fitted to validation cases.
        """
        asked: dict[str, float | str] = {
            "unit": unit,
            "bins": self.bins,
            "tace_threshold": self.tace_threshold,
            "nsd_tolerance_mm": self.nsd_tolerance_mm,
        }
        return {
            **({} if unit == "mm" else {"_mm, _ml": f"{unit}, 1000 {unit}: images state no size"}),
            **definitions(table.STRUCTURE, **asked),
            "surface": "voxels with a face neighbour outside of the structure; distances are "
            "between voxel centres",
            **definitions(table.PENALISED, **asked),
            **definitions(table.CONFIDENCE, **asked),
            **DEFINITIONS,
            "penalised_mean": "mean in which a miss or false alarm costs the image diagonal",
            "intervals": stated(self.level, self.interval if fitted else None),
            "bins": f"{self.bins} equal-width bins (lo, hi], 0 in the first",
            **definitions(scope_metrics(), **asked),
            **{
                f"scope {key}": _SCOPE_CONVENTIONS[scope].format(dilation=self.dilation)
                for key, scope in zip(self.scopes, self.chosen, strict=True)
            },
            **definitions((*table.RATERS, table.ENERGY, table.BRIER_SOFT), **asked),
            "several raters": "overlap and surfaces are against the label that most raters give "
            "(the smallest label in a tie); fg holds what any rater labels as foreground; "
            "calibration is against all raters, which equals calibration against their shares "
            "(soft labels), with equal-mass groups from 2^16 cells; ece_SCOPE/raterN is against "
            "one rater",
            "regions": "where labels overlap, every region is a question of its own (inside or "
            "not): calibration is the mean over regions, and cece is the error of the probability "
            "of a region",
            "ignore label": "its voxels are in no metric; a structure that it cuts has a surface "
            "along the cut",
            **_of_published(self.compat),
            **(
                {}
                if self.threshold is None
                else {"masks": f"where the probability is above {self.threshold:g}"}
            ),
            "pooled": "all voxels of all cases together; equal-mass groups from 2^16 cells",
            "mean over cases": "plain mean of the values of the cases; undefined cases are left "
            "out and counted",
        }


def _of_published(compat: Compat | None) -> dict[str, str]:
    """Meaning of every key of a published evaluation."""
    if compat is None:
        return {}
    from segcal.reproduction import curvas, marginloss  # here, since they need torch

    meanings = {"marginloss": marginloss.CONVENTIONS, "curvas": curvas.CONVENTIONS}[compat]
    return {f"{compat} {key}": text for key, text in meanings.items()}
