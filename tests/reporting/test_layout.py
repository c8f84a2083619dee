"""Figures that are laid out by known sizes: nothing is cut off, and no panel covers another."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from segcal.binning import BinStatistics
from segcal.evaluation.agreement import Predicted
from segcal.metrics.ece_floor import EceFloor
from segcal.reporting.agreement import plot_predicted_dsc, plot_volumes
from segcal.reporting.picture import draw
from segcal.reporting.reliability import (
    plot_case_reliability,
    plot_class_reliability,
    plot_confidence,
    plot_reliability,
)

LONG = ["dilated5: within 5 voxels of the labelled foreground", "all", "n" * 60, "m n " * 20]
TITLE = "How the reliability of the top label varies over 1000 cases " * 2


def statistics(seed=0):
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 10**7, 15)
    return BinStatistics(count, count * np.arange(0.5, 15) / 15, rng.binomial(count, 0.5))


def floor():
    return EceFloor(0.1, 0.0123, 0.0456, 0.5, 0.01, np.full(15, 0.1))


def volumes(scale):
    true = np.array([1.0, 1.003, 1.4, 2.0]) * scale
    off = np.array([1.0, -2, 3, -0.5]) * scale
    return pd.DataFrame(
        {"expected": true + off, "true": true, "low": true - scale, "high": true + 4 * scale}
    )


def dsc():
    predicted = np.array([0.001, 0.5, 0.7, 0.99])
    return Predicted(["a", "b", "c", "d"], predicted, predicted[::-1].copy())


FIGURES = {
    "reliability": lambda names: plot_reliability(
        dict.fromkeys(names, statistics()), TITLE, floors=dict.fromkeys(names, floor())
    ),
    "cases": lambda names: plot_case_reliability(
        {name: [statistics(i) for i in range(150)] for name in names}, TITLE
    ),
    "confidence": lambda names: plot_confidence(dict.fromkeys(names, statistics()), TITLE),
    "classes": lambda names: plot_class_reliability(
        {"all": [statistics()] * len(names)}, [name[:24] for name in names]
    ),
    "dsc": lambda names: plot_predicted_dsc(dict.fromkeys(names, dsc()), TITLE),
    "small volumes": lambda names: plot_volumes(dict.fromkeys(names, volumes(1e-4)), "ml", TITLE),
    "large volumes": lambda names: plot_volumes(dict.fromkeys(names, volumes(1e5)), "ml", TITLE),
}


@pytest.mark.parametrize("count", [1, 2, 4, 17])
@pytest.mark.parametrize("kind", FIGURES)
def test_everything_lies_inside_and_apart(kind, count):
    names = [f"{LONG[i % len(LONG)]}{i}" for i in range(count)]
    figure = FIGURES[kind](names)
    draw(figure, "")
    renderer = FigureCanvasAgg(figure).get_renderer()
    others = [*figure.legends, *(text for text in figure.texts if text.get_text())]
    boxes = [axis.get_tightbbox(renderer) for axis in figure.axes]
    boxes += [artist.get_window_extent(renderer) for artist in others]
    page = figure.bbox
    for box in boxes:
        assert box.x0 >= -1, box
        assert box.y0 >= -1, box
        assert box.x1 <= page.x1 + 1, box
        assert box.y1 <= page.y1 + 1, box
    for one, other in itertools.combinations(boxes, 2):
        wide = min(one.x1, other.x1) - max(one.x0, other.x0)
        high = min(one.y1, other.y1) - max(one.y0, other.y0)
        assert wide <= 2 or high <= 2, (one, other)
