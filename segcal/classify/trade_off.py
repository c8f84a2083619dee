"""Figure of calibration against accuracy: one point per method, with the spread of its seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from segcal.classify.curves import panel_grid
from segcal.reporting.legends import COLOURS, add_side_legend

MARKERS = "osD^v<>Pp*X"
"""Markers of methods; no two of the first hundred methods share marker and colour."""


@dataclass(frozen=True)
class Panel:
    """Content of a data set's panel.

    Attributes:
        points: two metrics of every seed, by method; the first is better to the right, the second
            at the bottom; None where there is no value.
        right: name of the first metric.
        down: name of the second metric.
    """

    points: Mapping[str, Sequence[tuple[float | None, float | None]]]
    right: str
    down: str


def plot_trade_off(panels: Mapping[str, Panel], title: str) -> Figure:
    """Draw one panel per data set, with a large mark for a method's mean and small marks for seeds.

    Bars are one standard deviation over the seeds to each side. Seeds without a value are left out.

    Args:
        panels: by the name of the data set.
        title: of the figure.
    """
    figure, axes = panel_grid(len(panels), (4.2, 3.6))
    methods = list(dict.fromkeys(name for panel in panels.values() for name in panel.points))
    drawn: dict[str, Any] = {}
    for axis, (name, panel) in zip(axes, panels.items(), strict=True):
        for method, points in panel.points.items():
            place = methods.index(method)
            colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
            values = np.array(points, dtype=np.float64).reshape(-1, 2)
            values = values[np.isfinite(values).all(1)]
            if not len(values):
                continue
            spread = values.std(0, ddof=1) if len(values) > 1 else (None, None)
            axis.plot(*values.T, marker, color=colour, markersize=4, alpha=0.45, markeredgewidth=0)
            x, y = values.mean(0)
            drawn[method] = axis.errorbar(
                x, y, xerr=spread[0], yerr=spread[1], fmt=marker, color=colour, markersize=6,
                elinewidth=0.8, label=method,
            )  # fmt: skip
        axis.set_xlabel(f"{panel.right} (better to the right)")
        axis.set_ylabel(f"{panel.down} (better at the bottom)")
        axis.set_title(name, fontsize=10)
        axis.tick_params(labelsize=8)
        axis.locator_params(nbins=5)
        axis.ticklabel_format(useOffset=False, style="plain")
        axis.spines[["top", "right"]].set_visible(False)
    add_side_legend(figure, [drawn[method] for method in methods if method in drawn])
    figure.suptitle(title, fontsize=11)
    return figure
