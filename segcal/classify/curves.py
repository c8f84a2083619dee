"""Curves over the epochs of several trainings: a metric by method, multipliers by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator
from numpy.typing import NDArray

from segcal.reporting.legends import (
    COLOURS,
    MOST_CLASSES,
    add_class_bar,
    add_side_legend,
    label_epochs,
    marker,
    shades,
)
from segcal.reporting.reliability import TITLE_WIDTH

Records = Sequence[Mapping[str, Any]]
STYLES = ("-", "--", ":", "-.")
"""Line styles, each for ten lines."""
COLUMNS = 3
"""Largest number of panels side by side."""
DECADES = 10.0
"""Ratio of multipliers above which their axis is logarithmic."""


def plot_curves(
    trainings: Mapping[str, Sequence[Records]], metric: str, ylabel: str, *, log: bool = False
) -> Figure:
    """Draw a validation metric over the epochs, as the mean of each method's trainings.

    The band is one standard deviation over the trainings; curves end where the shortest training
    ends.

    Args:
        trainings: lines of the logs of a method's trainings, by method.
        metric: key of the lines.
        ylabel: of the axis.
        log: whether it is logarithmic.
    """
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axis = figure.subplots()
    if not _draw_curves(axis, trainings, metric, list(trainings), log=log):
        return _without_values(figure, axis, f"{ylabel}: no value")
    axis.set_ylabel(ylabel)
    add_side_legend(figure, axis.lines)
    return figure


def plot_curve_panels(
    sets: Mapping[str, Mapping[str, Sequence[Records]]],
    metric: str,
    ylabel: str,
    *,
    log: bool = False,
) -> Figure:
    """Draw :func:`plot_curves` in one panel per data set, with the same colours in all panels.

    Args:
        sets: lines of the logs of a method's trainings, by data set and method.
        metric: key of the lines.
        ylabel: of the axes.
        log: whether they are logarithmic.
    """
    figure, axes = panel_grid(len(sets), (4.2, 3.6))
    methods = list(dict.fromkeys(method for trainings in sets.values() for method in trainings))
    drawn: dict[str, Artist] = {}
    for axis, (name, trainings) in zip(axes, sets.items(), strict=True):
        if _draw_curves(axis, trainings, metric, methods, log=log):
            drawn = {**dict(zip(trainings, axis.lines, strict=True)), **drawn}
        else:
            _without_values(figure, axis, "no value")
        axis.set_title(fill(name, TITLE_WIDTH), fontsize=10)
        axis.set_ylabel(ylabel)
    add_side_legend(figure, [drawn[method] for method in methods if method in drawn])
    return figure


def panel_grid(
    count: int, size: tuple[float, float], columns: int = COLUMNS
) -> tuple[Figure, list[Axes]]:
    """A figure of panels in rows, and the axes of the panels.

    Args:
        count: number of panels.
        size: of a panel in inches, without legend and title.
        columns: largest number of panels side by side.
    """
    columns = min(columns, max(count, 1))
    rows = -(-max(count, 1) // columns)
    size = (size[0] * columns + 1.4, size[1] * rows + 0.4)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axis in axes[count:]:
        axis.set_axis_off()
    return figure, axes[:count]


def _draw_curves(
    axis: Axes,
    trainings: Mapping[str, Sequence[Records]],
    metric: str,
    order: Sequence[str],
    *,
    log: bool,
) -> bool:
    """Draw a line for every method, styled by its place in `order`; True if any has values."""
    for method, logs in trainings.items():
        values = over_epochs([[r.get(metric) for r in log] for log in logs])
        epochs = np.arange(values.shape[1])
        mean = values.mean(0)
        style, colour = _look(order.index(method))
        axis.plot(
            epochs, mean, style, marker=marker(len(mean)), color=colour, label=method, linewidth=1.3
        )
        if len(values) > 1:
            deviation = values.std(0, ddof=1)
            low = np.maximum(mean - deviation, values.min(0)) if log else mean - deviation
            axis.fill_between(epochs, low, mean + deviation, color=colour, alpha=0.12, linewidth=0)
    if not any(np.isfinite(line.get_ydata()).any() for line in axis.lines):
        return False
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5)))
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.margins(x=0.02)
    axis.spines[["top", "right"]].set_visible(False)
    label_epochs(axis)
    return True


def plot_retrieval(
    rows: Mapping[str, Sequence[Mapping[str, float | None]]],
    methods: Mapping[str, str],
    title: str,
) -> Figure:
    """Draw retrieval mAP against the number of conditions of a query, with bars of one deviation.

    Rows of a method share a colour; all rows except the last, its posterior, are dotted.

    Args:
        rows: for every training, retrieval mAP by number of conditions.
        methods: of the rows.
        title: of the figure.
    """
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axis = figure.subplots()
    order = list(dict.fromkeys(methods[row] for row in rows))
    last = {methods[row]: row for row in rows}
    figure.suptitle(title)
    met = False
    for i, (row, trainings) in enumerate(rows.items()):
        values = np.ma.masked_invalid(
            np.array([list(t.values()) for t in trainings], dtype=np.float64)
        )
        met |= values.count() > 0
        style, colour = _look(order.index(methods[row]))
        shift = 0.03 * (i - (len(rows) - 1) / 2)  # bars side by side
        axis.errorbar(
            np.array([int(n) for n in trainings[0]]) + shift,
            values.mean(0),
            yerr=values.std(0, ddof=1) if len(values) > 1 else None,
            fmt=f"o{style if last[methods[row]] == row else ':'}",
            color=colour, label=row, linewidth=1.3, markersize=3, elinewidth=0.5,
        )  # fmt: skip
    if not met:
        return _without_values(figure, axis, "no sample meets any query")
    axis.set(xlabel="conditions (labels wanted or unwanted)", ylabel="retrieval mAP")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    add_side_legend(figure, axis.containers)
    return figure


def _look(i: int) -> tuple[str, str]:
    """Style and colour of the line of the i-th method."""
    return STYLES[i // 10 % len(STYLES)], COLOURS[i % len(COLOURS)]


def _without_values(figure: Figure, axis: Axes, why: str) -> Figure:
    """The figure, with a sentence in place of missing values."""
    axis.clear()
    axis.set_axis_off()
    axis.text(0.5, 0.5, why, transform=axis.transAxes, ha="center", va="center")
    return figure


def plot_multipliers(
    trainings: Mapping[str, Sequence[Records]], names: Sequence[str], title: str
) -> Figure:
    """Draw the multipliers (learned penalty weights) of every class over epochs, by method.

    Thick lines are means over a method's trainings, thin lines single trainings. With many classes
    only the means are drawn, in the colours of a colour bar.

    Args:
        trainings: lines of the logs by method, see :func:`multipliers`.
        names: of the classes.
        title: of the figure.
    """
    figure, axes = panel_grid(len(trainings), (4.6, 3.5))
    colours = shades(len(names))
    few = len(names) <= MOST_CLASSES
    for axis, (method, logs) in zip(axes, trainings.items(), strict=True):
        values = over_epochs(
            [[lam for r in log if (lam := multipliers(r)) is not None] for log in logs]
        )
        means = []
        for k, name in enumerate(names):
            for one in values if few else ():
                axis.plot(one[:, k], color=colours[k], linewidth=0.5, alpha=0.5)
            means += axis.plot(
                values[:, :, k].mean(0), marker=marker(values.shape[1]), color=colours[k],
                linewidth=1.8 if few else 0.7, label=name,
            )  # fmt: skip
        if (values > 0).all() and values.max() > DECADES * values.min():
            axis.set_yscale("log")
        axis.set_title(fill(method, TITLE_WIDTH))
        axis.set_ylabel("multiplier")
        axis.spines[["top", "right"]].set_visible(False)
        label_epochs(axis)
    if few:
        add_side_legend(figure, means, title="class")
    else:
        add_class_bar(figure, axes, names, colours)
    figure.suptitle(title)
    return figure


def multipliers(record: Mapping[str, Any]) -> list[float] | None:
    """Multipliers of the classes in a line of a log, from the first penalty that has them."""
    parts = (v for v in record.values() if isinstance(v, Mapping) and "lam" in v)
    return next((part["lam"][0] for part in parts), None)


def over_epochs(courses: Sequence[Sequence[Any]]) -> NDArray[np.float64]:
    """Curves as an array ``(trainings, epochs, ...)``, cut to the shortest; None is NaN."""
    shortest = min(map(len, courses))
    return np.array([list(course)[:shortest] for course in courses], dtype=np.float64)
