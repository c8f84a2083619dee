"""Courses over the epochs of several trainings: a metric by method, multipliers by class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Records = Sequence[Mapping[str, Any]]
STYLES = ("-", "--", ":", "-.")
"""Of lines, when colours run out."""
COLOURS = 10
DECADES = 10.0
"""Ratio of multipliers from which on their axis is logarithmic."""


def plot_curves(
    trainings: Mapping[str, Sequence[Records]], metric: str, ylabel: str, *, log: bool = False
) -> Figure:
    """Draw a metric of the validation set over the epochs, the mean of a method's trainings.

    The band is one standard deviation over the trainings, up to the epoch that all of them reach.

    Args:
        trainings: lines of the logs of a method's trainings, by method.
        metric: key of the lines.
        ylabel: of the axis.
        log: whether it is logarithmic.
    """
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axis = figure.subplots()
    for i, (method, logs) in enumerate(trainings.items()):
        values = over_epochs([[r.get(metric) for r in log] for log in logs])
        epochs = np.arange(values.shape[1])
        mean = values.mean(0)
        style, colour = _look(i)
        axis.plot(epochs, mean, style, color=colour, label=method, linewidth=1.3)
        if len(values) > 1:
            deviation = values.std(0, ddof=1)
            low = np.maximum(mean - deviation, values.min(0)) if log else mean - deviation
            axis.fill_between(epochs, low, mean + deviation, color=colour, alpha=0.12, linewidth=0)
    if log:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
    axis.set(xlabel="epoch", ylabel=ylabel, xlim=(0, None))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    return figure


def plot_retrieval(
    rows: Mapping[str, Sequence[Mapping[str, float | None]]],
    methods: Mapping[str, str],
    title: str,
) -> Figure:
    """Draw retrieval mAP against the number of conditions of a query, bars of one deviation.

    Rows of a method share a colour; all but the last of them, its posterior, are dotted.

    Args:
        rows: for every training, retrieval mAP by number of conditions.
        methods: of the rows.
        title: of the figure.
    """
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    axis = figure.subplots()
    order = list(dict.fromkeys(methods[row] for row in rows))
    last = {methods[row]: row for row in rows}
    for i, (row, trainings) in enumerate(rows.items()):
        values = np.ma.masked_invalid(
            np.array([list(t.values()) for t in trainings], dtype=np.float64)
        )
        style, colour = _look(order.index(methods[row]))
        shift = 0.03 * (i - (len(rows) - 1) / 2)  # bars side by side
        axis.errorbar(
            np.array([int(n) for n in trainings[0]]) + shift,
            values.mean(0),
            yerr=values.std(0, ddof=1) if len(values) > 1 else None,
            fmt=f"o{style if last[methods[row]] == row else ':'}",
            color=colour, label=row, linewidth=1.3, markersize=3, elinewidth=0.5,
        )  # fmt: skip
    axis.set(xlabel="conditions (labels wanted or unwanted)", ylabel="retrieval mAP")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize="small")
    figure.suptitle(title)
    return figure


def _look(i: int) -> tuple[str, str]:
    """Style and colour of the line of the i-th method."""
    return STYLES[i // COLOURS % len(STYLES)], f"C{i % COLOURS}"


def plot_multipliers(
    trainings: Mapping[str, Sequence[Records]], names: Sequence[str], title: str
) -> Figure:
    """Draw the multipliers of every class over the epochs, a panel a method.

    Thick lines are means over a method's trainings, thin ones the trainings.

    Args:
        trainings: lines of the logs by method, see :func:`multipliers`.
        names: of the classes.
        title: of the figure.
    """
    n = len(trainings)
    figure = Figure(figsize=(4.6 * n + 1.2, 3.9), layout="constrained")
    axes = figure.subplots(1, n, squeeze=False)[0]
    colours = mpl.colormaps["viridis"](np.linspace(0, 0.92, len(names)))
    for axis, (method, logs) in zip(axes, trainings.items(), strict=True):
        values = over_epochs(
            [[lam for r in log if (lam := multipliers(r)) is not None] for log in logs]
        )
        for k, name in enumerate(names):
            for one in values:
                axis.plot(one[:, k], color=colours[k], linewidth=0.5, alpha=0.5)
            axis.plot(values[:, :, k].mean(0), color=colours[k], linewidth=1.8, label=name)
        if (values > 0).all() and values.max() > DECADES * values.min():
            axis.set_yscale("log")
        axis.set(xlabel="epoch", ylabel="multiplier", title=method)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.spines[["top", "right"]].set_visible(False)
    lines, labels = axes[0].get_legend_handles_labels()
    figure.legend(
        lines, labels, loc="outside right center", frameon=False, fontsize="small", title="class"
    )
    figure.suptitle(title)
    return figure


def multipliers(record: Mapping[str, Any]) -> list[float] | None:
    """Multipliers of the classes in a line of a log, of the first penalty that learns them."""
    parts = (v for v in record.values() if isinstance(v, Mapping) and "lam" in v)
    return next((part["lam"][0] for part in parts), None)


def over_epochs(courses: Sequence[Sequence[Any]]) -> NDArray[np.float64]:
    """Courses as an array ``(trainings, epochs, ...)``, cut to the shortest; None is NaN."""
    shortest = min(map(len, courses))
    return np.array([list(course)[:shortest] for course in courses], dtype=np.float64)
