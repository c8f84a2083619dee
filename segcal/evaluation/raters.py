"""Numbers of a case that several raters labelled: agreement, disagreement and volumes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.case import Structure
from segcal.metrics import table
from segcal.metrics.generalised_energy_distance import generalised_energy_distance
from segcal.metrics.rater_agreement import RaterSums, rater_sums

Labels = NDArray[np.integer[Any]]


def rater_row(
    prediction: Labels,
    raters: Sequence[Labels],
    *,
    structures: Sequence[Structure],
    spacing_mm: Sequence[float],
    probabilities: NDArray[Any] | None = None,
    samples: Sequence[Labels] = (),
    valid: NDArray[np.bool_] | None = None,
) -> dict[str, float]:
    """Numbers of :data:`segcal.metrics.table.RATERS` for every structure, ``metric/label``.

    Args:
        prediction: label map ``(*S)``.
        raters: label maps, same shape, two or more.
        structures: structures to report.
        spacing_mm: voxel size along S.
        probabilities: ``(K, *S)``; if None, the prediction counts as certain for the volume, and
            metrics of probabilities are undefined.
        samples: label maps that were drawn from the model.
        valid: bool ``(*S)``; False leaves a voxel out. None keeps all.
    """
    voxel_ml = float(np.prod(spacing_mm)) / 1000
    row: dict[str, float] = {"raters": float(len(raters))}
    for one in structures:
        mask, *masks = (_inside(x, one, valid) for x in (prediction, *raters))
        p = mask if probabilities is None else probabilities[one.channel]
        if valid is not None and probabilities is not None:
            p = np.where(valid, p, 0)
        sums = rater_sums(p, mask, masks, voxel_ml=voxel_ml)
        row.update({f"{key}/{one.name}": x for key, x in _numbers(sums, probabilities).items()})
        if samples:
            drawn = [_inside(x, one, valid) for x in samples]
            row[f"{table.ENERGY.key}/{one.name}"] = generalised_energy_distance(drawn, masks)
    return row


def _numbers(sums: RaterSums, probabilities: NDArray[Any] | None) -> dict[str, float]:
    return {
        metric.key: metric.function(sums)
        if probabilities is not None or not metric.of_probabilities
        else float("nan")
        for metric in table.RATERS
    }


def _inside(labels: Labels, one: Structure, valid: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    mask = labels == one.labels[0] if len(one.labels) == 1 else np.isin(labels, one.labels)
    return mask if valid is None else mask & valid
