"""Evaluates one case by the rules of the CURVAS challenge, for comparison with its tables.

CURVAS is a challenge on calibration and uncertainty for multi-rater volume assessment in
multi-organ segmentation, MICCAI 2024 (Riera-Marin et al. 2025, arXiv 2505.08685). The rules are
those of its program (SYCAI-Technologies/curvas-challenge, ``CURVAS_2024/evaluation_metrics``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

__all__ = ["crps_of_volumes", "ece_of_rater", "evaluate_case_curvas"]

CONVENTIONS = {
    "dsc": "consensus DSC as programmed: predictions where raters disagree are left out; mean over "
    "the lines of voxels along the last axis (but the first line of each slice) in which all "
    "raters see the label, then over the slices; for a case, mean over the labels",
    "confidence": "half the sum of mean p where all raters see the label, and mean 1 - p where "
    "no rater does; for a case, mean over the labels",
    "crps_mm3": "integral of (F(y) - [y >= v])^2 over the raters' mean volume -+ 3 SD; v is the "
    "sum of p; F is the normal distribution of the raters' volumes through 100 points from its 1st "
    "to its 99th percentile, 0 and 1 beyond; SD of the population; for a case, mean over labels",
    "ece": "top label, 50 bins [lo, hi), with a bin of its own for a confidence of 1; mean over "
    "the raters",
}
"""Meaning of every key."""
BINS = 50
POINTS = 100
"""Points of the distribution function of the volumes."""
Masks = NDArray[np.bool_]


def evaluate_case_curvas(
    prediction: NDArray[Any],
    raters: Sequence[NDArray[Any]],
    probabilities: NDArray[Any],
    *,
    labels: Mapping[int, str],
    voxel_mm3: float,
    roi: Masks | None = None,
) -> dict[str, float]:
    """Row of a case by the rules of the challenge's program.

    :data:`CONVENTIONS` says what every key means. The program has some oddities, which are kept
    only here. Volumes that differ by more than 3 SD of the raters cost no more than those at 3 SD,
    and CRPS is undefined if all raters have the same volume. DSC is a mean over lines of voxels,
    since MONAI's DiceMetric reads the program's arrays of three axes that way; a line without the
    label does not count, even if it has false positives. The program crops slices to the voxels of
    the CT above 0 HU before it computes ECE; pass that box as `roi` to get its number. The program
    sums in float32, this function in float64.

    Args:
        prediction: integer ``(z, y, x)``.
        raters: integer, same shape, two or more.
        probabilities: ``(K, z, y, x)``.
        labels: foreground labels to report, name by value.
        voxel_mm3: size of a voxel.
        roi: voxels over which ECE is computed; None uses all.

    Returns:
        numbers by key; keys of single labels are ``metric/label``. NaN means undefined.

    Raises:
        ValueError: there are fewer than two raters, or arrays do not fit each other.
    """
    if len(raters) < 2 or prediction.ndim != 3:
        raise ValueError(
            "raters: expected two or more label maps with three axes, got "
            f"{len(raters)} with {prediction.ndim}"
        )
    if any(x.shape != prediction.shape for x in (*raters, probabilities[0])):
        raise ValueError(
            f"prediction {prediction.shape}, raters {[x.shape for x in raters]}, probabilities "
            f"{probabilities.shape}: expected one shape"
        )
    row: dict[str, float] = {}
    for value, name in labels.items():
        masks = np.stack([one == value for one in raters])
        inside: Masks = np.all(masks, axis=0)
        outside: Masks = ~np.any(masks, axis=0)
        p = probabilities[value]
        row[f"dsc/{name}"] = _mean_of_lines((prediction == value) & (inside | outside), inside)
        row[f"confidence/{name}"] = (1 - _mean(p[outside]) + _mean(p[inside])) / 2
        row[f"crps_mm3/{name}"] = voxel_mm3 * crps_of_volumes(
            masks.sum((1, 2, 3)), float(p.sum(dtype=np.float64))
        )
    for key in ("dsc", "confidence", "crps_mm3"):
        row[key] = float(np.mean([row[f"{key}/{name}"] for name in labels.values()]))
    eces = [ece_of_rater(probabilities, one, roi) for one in raters]
    row.update({f"ece/rater{r}": value for r, value in enumerate(eces, 1)})
    row["ece"] = float(np.mean(eces))
    return row


def crps_of_volumes(volumes: Any, value: float) -> float:
    """CRPS between limits, see :data:`CONVENTIONS`; exact, while the program integrates in steps.

    The distribution function is linear between its points, so Simpson's rule gives the exact
    integral of its square on every piece.

    Args:
        volumes: volumes by the raters ``(R,)``.
        value: predicted volume.

    Returns:
        the score in the unit of the volumes; NaN if all volumes are the same.
    """
    mean, sd = float(np.mean(volumes)), float(np.std(volumes))
    if sd == 0:
        return float("nan")
    low, high = (float(stats.norm.ppf(q)) for q in (0.01, 0.99))
    x = mean + sd * np.linspace(low, high, POINTS)
    cdf = stats.norm.cdf(x, mean, sd)
    low, high = mean - 3 * sd, mean + 3 * sd
    total = 0.0
    cuts = np.unique(np.clip([low, *x, value, high], low, high))
    for a, b in pairwise(cuts):
        middle = (a + b) / 2
        if not x[0] < middle < x[-1]:
            total += (b - a) * (float(middle >= x[-1]) - (middle >= value)) ** 2
            continue
        gaps = np.interp([a, middle, b], x, cdf) - float(middle >= value)
        total += (b - a) * float(np.dot([1, 4, 1], gaps**2)) / 6
    return total


def ece_of_rater(
    probabilities: NDArray[Any], labels: NDArray[Any], mask: Masks | None = None
) -> float:
    """Top-label ECE with 50 bins ``[lo, hi)`` (torchmetrics' MulticlassCalibrationError).

    Args:
        probabilities: ``(K, *S)``.
        labels: integer ``(*S)``.
        mask: bool ``(*S)``; None counts all.

    Returns:
        a fraction of 1; NaN when no voxel counts.
    """
    keep = np.ones(labels.shape, bool) if mask is None else mask
    p = probabilities[:, keep].astype(np.float32, copy=False)
    confidence, hit = p.max(0), p.argmax(0) == labels[keep]
    edges = torch.linspace(0, 1, BINS + 1).numpy()
    index = np.searchsorted(edges, confidence, side="right") - 1
    promised = np.bincount(index, confidence.astype(np.float64), BINS + 1)
    true = np.bincount(index, hit, BINS + 1)
    return float(np.abs(promised - true).sum() / len(hit)) if len(hit) else float("nan")


def _mean_of_lines(p: Masks, r: Masks) -> float:
    """Mean over the slices of the mean over lines in which the reference has a voxel."""
    p, r = p[:, 1:], r[:, 1:]
    size, both = r.sum(2), (p & r).sum(2)
    with np.errstate(invalid="ignore", divide="ignore"):
        dice = np.where(size > 0, 2 * both / (size + p.sum(2)), np.nan)
    slices = [_mean(line[~np.isnan(line)]) for line in dice if not np.isnan(line).all()]
    return _mean(np.array(slices))


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else float("nan")
