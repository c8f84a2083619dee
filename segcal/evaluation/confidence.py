"""Predicted quality and volumes of a case, from its probabilities alone, without a reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.case import Structure
from segcal.metrics import table
from segcal.metrics.structure_sums import structure_sums


def confidence_row(
    probabilities: NDArray[Any],
    prediction: NDArray[Any],
    *,
    structures: Sequence[Structure],
    spacing_mm: Sequence[float],
    regions: bool = False,
    valid: NDArray[np.bool_] | None = None,
    level: float = 0.95,
) -> dict[str, float]:
    """Numbers of :data:`segcal.metrics.table.CONFIDENCE` for every structure, ``metric/label``.

    Args:
        probabilities: floating ``(K, *S)``.
        prediction: label map ``(*S)`` that belongs to the probabilities.
        structures: structures to report.
        spacing_mm: voxel size along S.
        regions: whether the channels are regions.
        valid: bool ``(*S)``; False leaves a voxel out. None keeps all.
        level: level of the intervals of the volume, such as 0.95.

    Raises:
        ValueError: the arrays do not fit each other.
    """
    sums = structure_sums(
        probabilities,
        prediction,
        channels=[one.channel for one in structures],
        labels=[one.labels for one in structures],
        spacing_mm=spacing_mm,
        regions=regions,
        valid=valid,
        level=level,
        tie=table.TIE,
    )
    return {
        f"{metric.key}/{one.name}": metric.function(of)
        for one, of in zip(structures, sums, strict=True)
        for metric in table.CONFIDENCE
    }
