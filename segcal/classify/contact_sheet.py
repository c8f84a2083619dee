"""Contact sheet of the images found by queries for several labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from segcal.metrics.retrieval import Queries, draw_queries, query_log_scores, query_relevance
from segcal.ranking import average_precision
from segcal.tensors import UNKNOWN

__all__ = ["Answer", "answer", "draw_answers", "plot_contact_sheet"]

SHOWN = 8
"""Number of images per query, the best first."""
FRAMES = {1: "C2", 0: "C3", UNKNOWN: "0.6"}
MEANING = (
    "Green: meets all conditions. Red: breaks one. Grey: unknown. p: probability of meeting all."
)


@dataclass(frozen=True)
class Answer:
    """Result of a query.

    Attributes:
        query: in words.
        samples: numbers of the samples found, the best first.
        probability: that each sample meets all conditions.
        relevance: 1 where it does, 0 where not, -1 where unknown.
        relevant: number of samples that meet all conditions.
        known: number of samples for which this is known.
        average_precision: of the ranking of all samples; NaN if none meets all conditions.
    """

    query: str
    samples: Sequence[int]
    probability: Sequence[float]
    relevance: Sequence[int]
    relevant: int
    known: int
    average_precision: float


def draw_answers(
    log_odds: Tensor, targets: Tensor, names: Sequence[str], *, most: int, seed: int = 0
) -> list[Answer]:
    """Answers to one query for each number of conditions, as far as some sample meets them.

    Args:
        log_odds: of the labels' probabilities ``(N, T)``.
        targets: ``(N, T)`` of 0, 1 and -1.
        names: of the labels.
        most: largest number of conditions of a query.
        seed: of the draws.
    """
    found = []
    for conditions in range(1, min(most, len(names)) + 1):
        queries = draw_queries(targets, conditions, 1, seed=seed + conditions)
        if len(queries.wanted):
            found.append(answer(log_odds, targets, names, queries))
    return found


def answer(log_odds: Tensor, targets: Tensor, names: Sequence[str], query: Queries) -> Answer:
    """Return the answer to one query.

    Args:
        log_odds: of the labels' probabilities ``(N, T)``.
        targets: ``(N, T)`` of 0, 1 and -1.
        names: of the labels.
        query: ``(1, T)``, wanted and unwanted labels.
    """
    scores = query_log_scores(log_odds, *query)[0]
    relevance = query_relevance(targets, *query)[0]
    first = torch.argsort(scores, descending=True, stable=True)[:SHOWN]
    known = (relevance != UNKNOWN).numpy()
    relevant = (relevance == 1).numpy()
    wanted, unwanted = (mask[0].nonzero().flatten().tolist() for mask in query)
    return Answer(
        ", ".join([*(names[t] for t in wanted), *(f"not {names[t]}" for t in unwanted)]),
        first.tolist(),
        scores[first].exp().tolist(),
        relevance[first].tolist(),
        int(relevant.sum()),
        int(known.sum()),
        average_precision(scores.numpy()[known], relevant[known])
        if relevant.any()
        else float("nan"),
    )


def plot_contact_sheet(answers: Sequence[Answer], images: Sequence[Tensor], title: str) -> Figure:
    """Draw a row of images for every query, with frames that show whether they meet it.

    Args:
        answers: to draw.
        images: of each answer, ``(at most 8, C, H, W)``.
        title: of the figure.
    """
    figure = Figure(figsize=(10.4, 1.75 * len(answers) + 0.7), layout="constrained")
    rows = figure.subfigures(len(answers), 1, squeeze=False)[:, 0]
    for row, one, found in zip(rows, answers, images, strict=True):
        row.suptitle(
            f"{one.query}: {one.relevant} of {one.known} meet it, AP {one.average_precision:.2f}",
            fontsize=9, ha="left", x=0.01,
        )  # fmt: skip
        axes = row.subplots(1, SHOWN, squeeze=False)[0]
        for axis in axes[len(found) :]:
            axis.set_axis_off()
        each = zip(axes, _shown(found), one.probability, one.relevance, strict=False)
        for axis, image, probability, relevance in each:
            axis.imshow(image, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(f"p = {probability:.2g}", fontsize=7, labelpad=2)
            for spine in axis.spines.values():
                spine.set(edgecolor=FRAMES[relevance], linewidth=3)
    figure.suptitle(f"{title}. {MEANING}", fontsize=10)
    return figure


def _shown(images: Tensor) -> NDArray[np.float64]:
    """Images ``(N, H, W, 3)`` or ``(N, H, W)`` from 0 to 1; with other channels, the first."""
    values = images.double()
    if images.dtype == torch.uint8:
        values = values / 255
    else:
        low, high = values.amin(), values.amax()
        values = (values - low) / (high - low).clamp(min=1e-12)
    array: NDArray[np.float64] = values.movedim(1, 3).numpy()
    return array if array.shape[3] == 3 else array[..., 0]
