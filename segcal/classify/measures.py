"""Metrics of classified samples: accuracy and calibration of classes, rankings of labels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from segcal.binning import BinStatistics, equal_width_statistics
from segcal.classify.prediction import log_odds_by_kind, probabilities
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.metrics.aece import aece
from segcal.metrics.brier import brier
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.ece import ece, reliability
from segcal.metrics.ece_floor import EceFloor, ece_floor, floor_of_cells
from segcal.metrics.mean_ap import average_precisions, mean_average_precision
from segcal.metrics.multilabel_calibration import (
    multilabel_calibration_error,
    multilabel_reliability,
)
from segcal.metrics.nll import nll
from segcal.metrics.retrieval import retrieval_curve
from segcal.tensors import label_masks

CLASS_METRICS = {
    "accuracy": "share of samples whose most probable class is theirs",
    "ece": "expected calibration error of the top class, bins of equal width",
    "ece_floor": "ECE that calibrated probabilities as confident as these would have by chance",
    "aece": "ECE with bins of equal mass",
    "cece": "expected calibration error of every class against the others, mean over classes",
    "nll": "mean negative log-likelihood, in nats",
    "brier": "mean over samples of the squared error summed over classes",
}
"""Metrics of classes, and their meaning."""
LABEL_METRICS = {
    "map_class": "mean over labels of the average precision of ranking the samples (mAP@class)",
    "map_sample": "mean over samples of the average precision of ranking the labels (mAP@sample)",
    "ace": "mean gap over the bins that are not empty, all pairs of sample and label pooled",
    "mce": "largest of these gaps",
    "ece": "mean of these gaps, weighted by the pairs in a bin",
    "ece_floor": "ECE that calibrated probabilities like these would have by chance",
    "nll": "mean negative log-likelihood of a label, in nats",
    "brier": "mean squared error of a label's probability",
}
"""Metrics of labels, and their meaning."""
HIGHER_IS_BETTER = ("accuracy", "map_class", "map_sample")
NO_MERIT = ("ece_floor",)
"""Numbers that describe the samples rather than the loss."""
TEST = "test_"
"""Prefix of test metrics in lines of a training's log."""
CLASS_BINS, LABEL_BINS = 15, 10
"""Default number of bins of calibration errors and diagrams."""
FINE = 64
"""Number of cells of a bin, in which the simulation of the floor treats probabilities as equal."""
MOST_CONDITIONS = 5
"""Largest number of labels of a retrieval query."""
FLOOR = 1e-12
"""Smaller probabilities count as this value in logarithms."""


@dataclass(frozen=True)
class Measured:
    """Results of one kind of probabilities.

    Attributes:
        metrics: numbers by name.
        top: bins of the top class; for labels, of all pairs of sample and label.
        classes: bins of every class or label.
        table: a row for each class or label.
        retrieval: for labels, retrieval mAP by the number of conditions of a query.
        floor: of the ECE, if asked for.
    """

    metrics: dict[str, float]
    top: BinStatistics
    classes: list[BinStatistics]
    table: pd.DataFrame
    retrieval: dict[int, float] = field(default_factory=dict)
    floor: EceFloor | None = None


def measure_classes(
    probs: Tensor,
    classes: Tensor,
    names: tuple[str, ...],
    *,
    full: bool = False,
    bins: int | None = None,
) -> Measured:
    """Results for classes, which exclude each other.

    Args:
        probs: ``(N, K)``.
        classes: ``(N,)``.
        names: of the classes.
        full: whether to simulate the floor of ECE, too.
        bins: of calibration errors and diagrams; None takes :data:`CLASS_BINS`.
    """
    bins = CLASS_BINS if bins is None else bins
    metrics = {
        "accuracy": float((probs.argmax(1) == classes).double().mean()),
        "ece": ece(probs, classes, bins=bins),
        "aece": aece(probs, classes, bins=bins),
        "cece": classwise_ece(probs, classes, bins=bins),
        "nll": nll(probs, classes),
        "brier": brier(probs, classes),
    }
    each = [equal_width_statistics(probs[:, k], classes == k, bins) for k in range(len(names))]
    predicted = probs.argmax(1)
    table = pd.DataFrame(
        {
            "n": [int((classes == k).sum()) for k in range(len(names))],
            "recall": [_share(predicted[classes == k] == k) for k in range(len(names))],
            "precision": [_share(classes[predicted == k] == k) for k in range(len(names))],
            "ece": [b.expected_error() for b in each],
        },
        index=pd.Index(names, name="class"),
    )
    floor = None
    if full:
        floor = ece_floor(probs, classes, bins=bins)
        metrics["ece_floor"] = floor.expected
    top = reliability(probs, classes, bins=bins)
    return Measured(metrics, top, each, table, floor=floor)


def measure_labels(
    log_odds: Tensor,
    targets: Tensor,
    names: tuple[str, ...],
    *,
    full: bool = False,
    bins: int | None = None,
) -> Measured:
    """Results for labels, of which a sample may have several.

    Args:
        log_odds: of the probabilities ``(N, T)``; log-odds rank without ties from rounding.
        targets: ``(N, T)`` of 0, 1 and -1.
        names: of the labels.
        full: whether to answer queries and to simulate the floor of ECE, too.
        bins: of calibration errors and diagrams; None takes :data:`LABEL_BINS`.
    """
    bins = LABEL_BINS if bins is None else bins
    probs = torch.sigmoid(log_odds)
    positive, negative = label_masks(probs, targets)
    known = positive | negative
    truth = positive[known].double()
    p = probs[known].double()
    log_p = torch.where(truth > 0, p, 1 - p).clamp(min=FLOOR).log()
    metrics = {
        "map_class": mean_average_precision(log_odds, targets, average="class"),
        "map_sample": mean_average_precision(log_odds, targets, average="sample"),
        "ace": multilabel_calibration_error(probs, targets, bins=bins),
        "mce": multilabel_calibration_error(probs, targets, bins=bins, reduction="maximum"),
        "ece": multilabel_calibration_error(probs, targets, bins=bins, reduction="expected"),
        "nll": float(-log_p.mean()),
        "brier": float(((p - truth) ** 2).mean()),
    }
    each = [
        equal_width_statistics(probs[known[:, t], t], positive[known[:, t], t], bins)
        for t in range(len(names))
    ]
    table = pd.DataFrame(
        {
            "n": known.sum(0).tolist(),
            "positive": positive.sum(0).tolist(),
            "average_precision": average_precisions(log_odds, targets, average="class"),
            "ace": [b.average_error() for b in each],
            "mce": [b.maximum_error() for b in each],
        },
        index=pd.Index(names, name="label"),
    )
    curve, floor = {}, None
    if full:
        conditions = range(1, min(MOST_CONDITIONS, len(names)) + 1)
        curve = retrieval_curve(log_odds, targets, conditions=conditions)
        floor = floor_of_cells(equal_width_statistics(p, truth > 0, bins * FINE), bins)
        metrics["ece_floor"] = floor.expected
    pooled = multilabel_reliability(probs, targets, bins=bins)
    return Measured(metrics, pooled, each, table, curve, floor)


def measure(
    logits: Tensor,
    targets: Tensor,
    names: tuple[str, ...],
    loss: MultiLabelLoss | None,
    *,
    full: bool = False,
    bins: int | None = None,
) -> dict[str, Measured]:
    """Results of logits, for every kind of :func:`probabilities`.

    Args:
        logits: ``(N, K)``.
        targets: classes ``(N,)`` or labels ``(N, T)``.
        names: of the classes or labels.
        loss: multi-label loss; None for classes.
        full: whether to answer queries of labels and to simulate floors of ECE too.
        bins: number of bins of calibration errors and diagrams; None takes :data:`CLASS_BINS` for
            classes, :data:`LABEL_BINS` for labels.
    """
    options: dict[str, Any] = {"full": full, "bins": bins}
    if loss is None:
        found = probabilities(logits, loss)
        return {kind: measure_classes(p, targets, names, **options) for kind, p in found.items()}
    return {
        kind: measure_labels(z, targets, names, **options)
        for kind, z in log_odds_by_kind(logits, loss).items()
    }


def conventions(multilabel: bool, bins: Iterable[int]) -> dict[str, str]:
    """Meaning of the numbers of :func:`measure`.

    Args:
        multilabel: whether to explain metrics of labels.
        bins: numbers of bins in use.
    """
    chosen: Mapping[str, str] = LABEL_METRICS if multilabel else CLASS_METRICS
    said = " or ".join(map(str, sorted(set(bins))))
    return {**chosen, "bins": f"{said} of (lo, hi], 0 in the first"}


def record(outcome: Measured) -> dict[str, Any]:
    """An outcome as it is stored in JSON."""
    return {
        "metrics": {k: _finite(v) for k, v in outcome.metrics.items()},
        "reliability": outcome.top.to_dict(),
        "retrieval": {str(n): _finite(v) for n, v in outcome.retrieval.items()},
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share(hits: Tensor) -> float:
    return float(hits.double().mean()) if len(hits) else float("nan")
