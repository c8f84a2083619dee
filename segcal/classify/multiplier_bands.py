"""Range of multipliers over the epochs: largest, mean and smallest of the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from segcal.classify.curves import DECADES, Records, multipliers, over_epochs, panel_grid
from segcal.reporting.legends import add_side_legend, label_epochs, marker
from segcal.reporting.reliability import TITLE_WIDTH

COLUMNS = 4
"""Largest number of panels side by side."""
EXTENT = {"largest": "C3", "mean": "C0", "smallest": "C2"}
"""Lines and their colours."""


def plot_multiplier_bands(trainings: Mapping[str, Sequence[Records]], title: str) -> Figure:
    """Draw the largest, mean and smallest multiplier of the classes, in one panel per method.

    With several trainings, each line is a mean over them, cut to the shortest training.

    Args:
        trainings: lines of the logs by method, see :func:`segcal.classify.curves.multipliers`.
        title: of the figure.
    """
    figure, axes = panel_grid(len(trainings), (3.0, 2.6), COLUMNS)
    lines: list[Any] = []
    for axis, (method, logs) in zip(axes, trainings.items(), strict=True):
        values = over_epochs(
            [[lam for record in log if (lam := multipliers(record)) is not None] for log in logs]
        )
        extent = [values.max(2).mean(0), values.mean((0, 2)), values.min(2).mean(0)]
        lines = [
            axis.plot(course, marker=marker(len(course)), color=colour, label=name)[0]
            for course, (name, colour) in zip(extent, EXTENT.items(), strict=True)
        ]
        axis.fill_between(range(len(extent[0])), extent[2], extent[0], color="C0", alpha=0.12)
        if (values > 0).all() and values.max() > DECADES * values.min():
            axis.set_yscale("log")
            axis.yaxis.set_minor_formatter(NullFormatter())
        axis.set_title(fill(method, TITLE_WIDTH), fontsize=10)
        axis.set_ylabel("multiplier")
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        label_epochs(axis)
    add_side_legend(figure, lines, title="of the classes")
    figure.suptitle(title, fontsize=11)
    return figure
