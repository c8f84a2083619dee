"""Evaluates one case by the rules of the CRaC program, for comparison with published tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from segcal.metrics.brier import soft_brier
from segcal.metrics.dice import dice
from segcal.metrics.hausdorff import hausdorff
from segcal.metrics.nll import nll
from segcal.reproduction import crac
from segcal.tensors import as_tensor, select_voxels

__all__ = ["evaluate_case_marginloss"]

CONVENTIONS = {
    "dsc": "2|P&G|/(|P|+|G|), 4 decimals; 1 where the label is not in the reference, whatever the "
    "prediction",
    "hd95_pooled_voxels": "95th percentile of the distances in both directions together (medpy), "
    "in voxels of 1 x 1 x 1; 0 where the label is not in the reference or not in the prediction",
    "ece_fg": "top label, 15 bins (lo, hi] without tolerance, 4 decimals",
    "cece_fg": "classwise ECE, mean over 0 to the largest label of the case, 4 decimals",
    "aece_fg": "ECE with 15 bins between interpolated confidences, the smallest in no bin, "
    "4 decimals",
    "nll_fg": "mean -log p of the label, nats, 4 decimals",
    "tace_ref": "tcece: classwise ECE over p > 0.001 of each class, 4 decimals",
    "soft_brier_fg": "squared distance of p to the shares of the classes in the 3 x 3 patch of the "
    "slice",
    "scope fg": "voxels whose reference label is not background; undefined for fewer than 2 "
    "voxels, where the published program stops",
}
"""Meaning of every key."""

_CALIBRATION: dict[str, Callable[[Any, Any], float]] = {
    "ece_fg": crac.ece,
    "cece_fg": crac.classwise_ece,
    "aece_fg": crac.aece,
    "nll_fg": lambda p, y: nll(p, y, floor=torch.finfo(p.dtype).tiny),
    "tace_ref": crac.tcece,
}


def evaluate_case_marginloss(
    prediction: NDArray[Any],
    reference: NDArray[Any],
    *,
    labels: Mapping[int, str],
    probabilities: NDArray[Any] | None = None,
) -> dict[str, float]:
    """Row of a case by the rules of the CRaC test program (Bala93/CRac, evaluation/).

    The program grew out of the evaluator of MarginLoss. Its tables hold the plain mean over cases
    of these rows. :data:`CONVENTIONS` says what every key means. The program has some oddities,
    which are kept only here:

    - A label that the reference lacks scores DSC 1 and HD 0, even for false alarms. A label that
      the prediction misses scores DSC 0, but HD 0, the best value, since the program replaces
      medpy's error by 0.
    - Distances are in voxels, even along thick slices.
    - Calibration is computed over foreground-labelled voxels only, so false positives in the
      background do not count.
    - Each case is rounded to 4 decimals before the mean, but not HD95 and the soft Brier score.
    - Classes of the classwise errors run from 0, which none of these voxels has, to the largest
      label of the case.
    - No bin holds a probability of 0 or above 1; no label is ignored.

    Sums are float64 here and float32 in the program: before the rounding, values differ by about
    1e-7 on float32 probabilities, and by less than 1e-12 on float64 probabilities. The program
    takes logits. Where a stored probability is 0, its NLL cannot be recovered, and the smallest
    normal number is used instead.

    Args:
        prediction: integer ``(*S)``, with 2 axes, or with 3 and the slices along the first.
        reference: integer, same shape.
        labels: foreground labels to report, name by value; the published mean is over all of them.
        probabilities: ``(K, *S)``; None gives overlap and distances only.

    Returns:
        numbers by key; keys of single labels are ``metric/label``. NaN means undefined.

    Raises:
        ValueError: arrays do not fit each other.
    """
    if prediction.shape != reference.shape or reference.ndim not in (2, 3):
        raise ValueError(
            f"prediction {prediction.shape} and reference {reference.shape}: expected one shape of "
            "2 or 3 axes"
        )
    if not labels:
        raise ValueError("labels: expected at least one foreground label, got none")
    row: dict[str, float] = {}
    for value, name in labels.items():
        row[f"dsc/{name}"], row[f"hd95_pooled_voxels/{name}"] = _overlap(
            prediction == value, reference == value
        )
    for key in ("dsc", "hd95_pooled_voxels"):
        row[key] = float(np.mean([row[f"{key}/{name}"] for name in labels.values()]))
    if probabilities is not None:
        row.update(_calibration(probabilities, reference))
    return row


def _overlap(p: NDArray[np.bool_], r: NDArray[np.bool_]) -> tuple[float, float]:
    if not r.any():
        return 1.0, 0.0
    distance = hausdorff(p, r, spacing_mm=np.ones(r.ndim), percentile=95)
    return _rounded(dice(p, r, 1)), distance if np.isfinite(distance) else 0.0


def _calibration(probabilities: NDArray[Any], reference: NDArray[Any]) -> dict[str, float]:
    foreground = reference != 0
    p, y = select_voxels(probabilities[None], reference[None], foreground[None])
    if y.numel() < 2:
        return dict.fromkeys([*_CALIBRATION, "soft_brier_fg"], float("nan"))
    row = {key: _rounded(metric(p[None], y[None])) for key, metric in _CALIBRATION.items()}
    return row | {"soft_brier_fg": _soft_brier(probabilities, reference, foreground)}


def _soft_brier(
    probabilities: NDArray[Any], reference: NDArray[Any], foreground: NDArray[np.bool_]
) -> float:
    """Mean over foreground voxels, one slice in memory at a time."""
    if reference.ndim == 2:
        probabilities, reference, foreground = (
            probabilities[:, None], reference[None], foreground[None],
        )  # fmt: skip
    total = 0.0
    for z in np.flatnonzero(foreground.any((1, 2))):
        total += int(foreground[z].sum()) * soft_brier(
            as_tensor(probabilities[:, z])[None],
            as_tensor(reference[z])[None],
            padding="background",
            mask=foreground[z][None],
        )
    return total / int(foreground.sum())


def _rounded(value: float) -> float:
    return float(np.round(value, 4))
