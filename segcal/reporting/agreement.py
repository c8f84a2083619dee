"""Figures of predicted against true DSC, of risk and coverage, and of volumes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from segcal.evaluation.agreement import MEAN, Predicted, curve, dsc_agreement
from segcal.metrics.aurc import risk_coverage
from segcal.metrics.limits_of_agreement import limits_of_agreement
from segcal.metrics.table import top_risk
from segcal.reporting.layout import half_a_number, lay_out, room_for_numbers
from segcal.tally import Tally

Numbers = NDArray[Any]
LINE = "#555555"
RANDOM, IDEAL = "#b0b0b0", "#5a9e6f"
SIDE = 3.6
"""Size of a panel in inches."""
COLUMNS = 4
TITLE_WIDTH = 30
"""Most letters of a line of a title above a panel."""
POINTS = 400
"""Most points of a curve that are drawn."""


def plot_predicted_dsc(found: Mapping[str, Predicted], title: str = "") -> Figure:
    """Draw the DSC that was predicted without the reference against the true DSC, by label.

    A point is a case; the line joins the means of groups of cases with similar predicted DSC.

    Args:
        found: predicted and true DSC, by label.
        title: title of the figure.
    """
    figure, axes = _panels(len(found))
    ends = [x for of in found.values() for x in (of.predicted, of.true)]
    low = max(0.0, min((float(x.min()) for x in ends if x.size), default=0.0) - 0.03)
    for axis, (name, of) in zip(axes, found.items(), strict=False):
        axis.plot([0, 1], [0, 1], color=LINE, linestyle="--", linewidth=1)
        axis.plot(of.predicted, of.true, "o", color="C0", markersize=4, alpha=0.6)
        groups = curve(of)
        if len(groups) > 1:
            axis.plot([g["predicted"] for g in groups], [g["true"] for g in groups], "-s",
                      color="black", markersize=4, linewidth=1.2)  # fmt: skip
        numbers = dsc_agreement(of)
        rank = "-" if numbers["spearman"] is None else f"{numbers['spearman']:.2f}"
        error = "-" if numbers["mae"] is None else f"{numbers['mae']:.3f}"
        axis.text(0.04, 0.96, f"Spearman {rank}\nMAE {error}\nn {numbers['n']}",
                  transform=axis.transAxes, va="top", fontsize=8,
                  bbox={"facecolor": "white", "edgecolor": LINE, "boxstyle": "round"})  # fmt: skip
        axis.set(xlim=(low, 1.01), ylim=(low, 1.01), xlabel="predicted DSC", ylabel="true DSC")
        axis.set_title(fill(name, TITLE_WIDTH), fontsize=10, y=1)
        axis.set_aspect("equal")
    _finish(figure, axes, title)
    return figure


def plot_risk_coverage(
    found: Mapping[str, Predicted], tallies: Mapping[str, Tally], title: str = ""
) -> Figure:
    """Draw the risk (1 - DSC of cases, wrong voxels of a scope) among the most confident part.

    Args:
        found: predicted and true DSC by label; the mean over labels is drawn, or the only label.
        tallies: sums over voxels by scope (selection of voxels); the last and widest are drawn.
        title: title of the figure.
    """
    tallies = dict(list(tallies.items())[1 - COLUMNS :])
    figure, axes = _panels(1 + len(tallies))
    of = found.get(MEAN) or next(iter(found.values()))
    loss, n = 1 - of.true, len(of.true)
    _draw_risk(axes[0], of.predicted, loss, np.ones(n))
    axes[0].set(ylabel="mean 1 - DSC of cases kept")
    axes[0].set_title(f"cases (DSC, {n})", fontsize=10, y=1)
    for axis, (scope, tally) in zip(axes[1:], tallies.items(), strict=False):
        _draw_risk(axis, *top_risk(tally))
        axis.set(ylabel="share of kept voxels that are wrong")
        axis.set_title(f"voxels, {scope}", fontsize=10, y=1)
    styles = {"by confidence": ("C0", "-"), "random": (RANDOM, "--"), "ideal": (IDEAL, "-")}
    handles = [Line2D([], [], color=c, linestyle=s, label=k) for k, (c, s) in styles.items()]
    figure.legend(handles=handles, loc="lower center", ncols=3, frameon=False, fontsize="small")
    _finish(figure, axes, title, legend_lines=1)
    return figure


def plot_volumes(found: Mapping[str, pd.DataFrame], unit: str, title: str = "") -> Figure:
    """Draw (expected - true) volume against the mean of both (Bland-Altman), by label.

    Bars are the intervals, red where they do not contain the true volume. Lines are the bias and
    the limits of agreement.

    Args:
        found: result of :func:`segcal.evaluation.agreement.volumes`.
        unit: unit of the volumes.
        title: title of the figure.
    """
    figure, axes = _panels(len(found))
    for axis, (name, of) in zip(axes, found.items(), strict=False):
        off, middle = of["expected"] - of["true"], (of["expected"] + of["true"]) / 2
        covered = (of["low"] <= of["true"]) & (of["true"] <= of["high"])
        drawn = np.isfinite(of["high"])
        for held, colour in ((covered, "C0"), (~covered, "#d1495b")):
            there = held & drawn
            axis.vlines(middle[there], (of["low"] - of["true"])[there],
                        (of["high"] - of["true"])[there], color=colour, alpha=0.35)  # fmt: skip
            axis.plot(middle[held], off[held], "o", color=colour, markersize=4)
        limits = limits_of_agreement(off, np.zeros(len(off)))
        axis.axhline(0, color=LINE, linewidth=0.8, linestyle=":")
        for value, style in zip(limits, ("-", "--", "--"), strict=True):
            if np.isfinite(value):
                axis.axhline(value, color="black", linewidth=1, linestyle=style)
        share = f"{covered.mean():.0%}" if len(of) else "-"
        axis.text(0.04, 0.96, f"bias {limits.bias:.2f}\nwithin interval {share}",
                  transform=axis.transAxes, va="top", fontsize=8,
                  bbox={"facecolor": "white", "edgecolor": LINE, "boxstyle": "round"})  # fmt: skip
        axis.set(xlabel=f"mean of expected and true ({unit})", ylabel=f"expected - true ({unit})")
        axis.locator_params(axis="x", nbins=4)  # else volumes with many digits overlap
        axis.set_title(fill(name, TITLE_WIDTH), fontsize=10, y=1)
    _finish(figure, axes, title)
    return figure


def _draw_risk(axis: Axes, confidence: Numbers, loss: Numbers, counts: Numbers) -> None:
    for order, colour in ((confidence, "C0"), (-loss, IDEAL)):
        coverage, risk = risk_coverage(order, loss, counts=counts)
        few = np.unique(np.linspace(0, max(len(risk) - 1, 0), POINTS).astype(int))[: len(risk)]
        axis.plot(coverage[few], risk[few], color=colour, marker="o" if len(risk) == 1 else "")
    if counts.sum():
        axis.axhline(np.average(loss, weights=counts), color=RANDOM, linestyle="--", linewidth=1)
    axis.set(xlim=(0, 1.01), xlabel="share kept")
    axis.set_ylim(bottom=0)


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    """A figure with so many panels in rows, and the panels."""
    columns = min(COLUMNS, max(count, 1))
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(SIDE * columns + 0.2, (SIDE - 0.2) * rows + 0.5))
    grid = figure.add_gridspec(rows, columns)
    return figure, [figure.add_subplot(grid[divmod(i, columns)]) for i in range(max(count, 1))]


def _finish(figure: Figure, axes: Sequence[Axes], title: str, legend_lines: int = 0) -> None:
    """Add the title, and lay out the figure around the panels that :func:`_panels` made."""
    room, columns = room_for_numbers(axes), min(COLUMNS, len(axes))
    rows = [axes[i : i + columns] for i in range(0, len(axes), columns)]
    lay_out(
        figure, rows, title, left=room, between=room + 0.05, right=half_a_number(axes), apart=0.6,
        legend_lines=legend_lines,
    )  # fmt: skip
