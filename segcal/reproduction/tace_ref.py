"""Row of the CRaC poster's TACE in the table of metrics, from tallies and so without torch."""

from __future__ import annotations

import numpy as np

from segcal.metrics.table import CalibrationMetric
from segcal.tally import Tally

__all__ = ["tace_ref_of"]


def tace_ref_of(tally: Tally) -> float:
    """:func:`segcal.reproduction.crac.tace_ref` from a tally, with its bins and threshold."""
    occurring = [k for k, c in enumerate(tally.classes) if c.hit_sum.sum() > 0]
    last = occurring[-1] + 1 if occurring else 0
    return mean_of_classes([c.expected_error() for c in tally.kept[:last]])


TACE_REF = CalibrationMetric(
    key="tace_ref",
    heading="TACE ref",
    shown=False,
    meaning="TACE of the CRaC poster: equal-width classwise ECE over p > {tace_threshold:g}, "
    "foreground-labelled voxels",
    function=lambda tally, groups: tace_ref_of(tally),
    where="cases",
    scope="fg",
    only_asked=True,
)
"""Row of the table of metrics, beside Nixon's TACE, for comparison with published numbers."""


def mean_of_classes(errors: list[float]) -> float:
    """Mean in which a class without a voxel counts as 0; NaN without classes."""
    return float(np.mean(np.nan_to_num(errors))) if errors else float("nan")
