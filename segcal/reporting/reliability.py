"""Draws reliability diagrams: the accuracy of predictions against their confidence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator
from numpy.typing import NDArray

from segcal.binning import BinStatistics
from segcal.metrics.ece_floor import EceFloor
from segcal.reporting.layout import EDGE, lay_out
from segcal.reporting.picture import wrapped

TITLE_WIDTH = 34
"""Most letters of a line of a title above a panel."""
SMALL_TITLE_WIDTH = 30
"""Most letters of a line of a title above a small panel."""
TITLE_POINTS = 11
BAR, OVER, UNDER, LINE = "#3b6ea5", "#c0504d", "#d9a13b", "#555555"
NORMAL_95 = 1.96
"""Standard deviations to each side of the mean that hold 95 % of a normal distribution."""
STRIP, FLOOR = 0.3, 1e-5
"""Height of the strip of shares below a small diagram, and the share at its bottom."""
NARROWEST = 5.6
"""Width in inches that a legend in one line needs."""
ONE_BLOCK = 6
"""Most classes whose small diagrams stand in one block."""


def plot_reliability(
    diagrams: Mapping[str, BinStatistics],
    title: str = "",
    *,
    unit: str = "voxels",
    axes_names: tuple[str, str] = ("confidence", "accuracy"),
    floors: Mapping[str, EceFloor] | None = None,
) -> Figure:
    """Draw one reliability diagram per scope, with the share of voxels per bin below.

    A scope is a selection of voxels. The number in each panel is the ECE of exactly the statistics
    that are drawn (all cases pooled, that is, taken together), which differs from the mean of the
    values of cases. Empty bins have no bar.

    Args:
        diagrams: bin statistics of equal-width bins, by scope.
        title: title of the whole figure.
        unit: what is counted.
        axes_names: names of the horizontal and the vertical axis.
        floors: ECE that perfectly calibrated data would have by chance, by scope; lines show where
            the mean of a bin lies in 95 % of such data.
    """
    n = max(len(diagrams), 1)
    figure = Figure(figsize=(3.6 * n + 0.3, 5.2))
    axes = _two_rows(figure, n)
    for column, (scope, statistics) in enumerate(diagrams.items()):
        top, bottom = axes[:, column]
        m = len(statistics.count)
        left, width = np.arange(m) / m, 1 / m
        top.plot([0, 1], [0, 1], color=LINE, linestyle="--", linewidth=1, label="calibrated")
        _draw_bins(top, statistics, axes_names[1])
        error = statistics.expected_error()
        said = f"ECE {error:.4f}" if np.isfinite(error) else f"no {unit}"
        if np.isfinite(error) and floors:
            _draw_chance(top, statistics, floors[scope])
            said += f"\n{_of_chance(floors[scope])}"
        top.text(0.04, 0.95, said, fontsize=9,
                 transform=top.transAxes, va="top",
                 bbox={"facecolor": "white", "edgecolor": LINE, "boxstyle": "round"})  # fmt: skip
        top.set(xlim=(0, 1), ylim=(0, 1))
        top.set_title(fill(scope, TITLE_WIDTH), fontsize=10, y=1)
        bottom.set_xlim(0, 1)
        total = max(float(np.sum(statistics.count)), 1.0)
        _bars(bottom, left, width, np.asarray(statistics.count) / total, facecolor=BAR,
              edgecolor="white", linewidth=0.6)  # fmt: skip
        _log_shares(bottom, 1e-5, 1.5)
        bottom.set_xlabel(axes_names[0])
        if column == 0:
            top.set_ylabel(axes_names[1])
            bottom.set_ylabel(f"share of\n{unit}")
    _finish(figure, axes, title, left=1.1, between=0.75)
    return figure


def plot_class_reliability(
    diagrams: Mapping[str, Sequence[BinStatistics]],
    names: Sequence[str],
    title: str = "",
    *,
    unit: str = "voxels",
    axes_names: tuple[str, str] = ("probability", "frequency"),
    blocks: int | None = None,
) -> Figure:
    """Draw a small reliability diagram of ``p_k`` against ``y = k`` per class and scope.

    Classes are rows and scopes are columns; many classes stand in two blocks side by side. The
    strip below each diagram shows the share of voxels per bin on a log scale from 1e-5 to 1. The
    ECE is that of exactly the statistics that are drawn; n counts voxels.

    Args:
        diagrams: bin statistics of equal-width bins, one per class, by scope.
        names: names of the classes.
        title: title of the whole figure.
        unit: what is counted.
        axes_names: names of the horizontal and the vertical axis.
        blocks: number of blocks side by side; None chooses one or two.
    """
    blocks = min(blocks or (1 if len(names) <= ONE_BLOCK else 2), max(len(names), 1))
    rows = max(-(-len(names) // blocks), 1)
    columns = max(-(-len(names) // rows) * len(diagrams), 1)
    legend_columns, legend_height = (3, 1.0) if columns > 2 else (2, 1.2)
    width = max(2.1 * columns + 0.6 * blocks, NARROWEST)
    title = wrapped(title, width, TITLE_POINTS)
    head = 0.42 + 0.18 * (title.count("\n") + 1)
    height = 1.8 * rows - 0.15 + head + legend_height
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        rows, columns, left=0.65 / width, right=0.98, bottom=legend_height / height,
        top=1 - head / height, hspace=0.24, wspace=0.12,
    )  # fmt: skip
    for index, name in enumerate(names):
        block, row = divmod(index, rows)
        for column, (scope, classes) in enumerate(diagrams.items()):
            axis = figure.add_subplot(grid[row, block * len(diagrams) + column])
            last, first = row == rows - 1 or index == len(names) - 1, block == column == 0
            _draw_small(axis, classes[index], unit, axes_names[1])
            shown = f"{name}, {scope}" if scope else name
            axis.set_title(fill(shown, SMALL_TITLE_WIDTH), fontsize=8, pad=3, y=1)
            # shared axes would do the same, but each change of one goes through all of them
            axis.tick_params(labelsize=7, labelbottom=last, labelleft=first)
            if last:
                axis.set_xlabel(axes_names[0], fontsize=8)
            if first:
                axis.set_ylabel(axes_names[1], fontsize=8)
    figure.legend(
        *_entries(figure.axes), loc="lower center", ncols=legend_columns, frameon=False,
        fontsize="small",
    )  # fmt: skip
    if title:
        figure.suptitle(title, y=1 - 0.1 / height, va="top", fontsize=TITLE_POINTS)
    return figure


def plot_confidence(
    histograms: Mapping[str, BinStatistics], title: str = "", bins: int = 64
) -> Figure:
    """Draw how confident the right and the wrong voxels are, one panel per scope.

    Shares are of all voxels of the scope, on a log scale. If the mean confidence lies to the right
    of the accuracy, the predictions are overconfident.

    Args:
        histograms: statistics of equal-width bins of the top label's confidence, by scope; finer
            bins are merged into `bins`.
        title: title of the whole figure.
        bins: number of bins to draw, at most.
    """
    n = max(len(histograms), 1)
    figure = Figure(figsize=(3.6 * n + 0.3, 3.4))
    axes = figure.subplots(1, n, squeeze=False)
    for axis, (scope, fine) in zip(axes[0], histograms.items(), strict=False):
        m = len(fine.count)
        starts = np.unique(np.arange(bins) * m // bins)
        edges = np.append(starts, m) / m
        total = max(int(fine.count.sum()), 1)
        hits = np.add.reduceat(fine.hit_sum, starts) / total
        misses = np.add.reduceat(fine.count - fine.hit_sum, starts) / total
        for share, colour, name in ((hits, BAR, "right"), (misses, OVER, "wrong")):
            axis.stairs(share, edges, fill=True, color=colour, alpha=0.3)
            axis.stairs(share, edges, color=colour, linewidth=1.2, label=name)
        if fine.count.any():
            accuracy, promised = fine.hit_sum.sum() / total, fine.confidence_sum.sum() / total
            axis.axvline(accuracy, color="black", linewidth=1,
                         label="accuracy")  # fmt: skip
            axis.axvline(promised, color="black", linestyle=":", linewidth=1.4,
                         label="mean confidence")  # fmt: skip
            axis.text(
                0.04, 0.95, f"accuracy {accuracy:.4f}\nmean confidence {promised:.4f}",
                transform=axis.transAxes, va="top", fontsize=8,
                bbox={"facecolor": "white", "edgecolor": LINE, "boxstyle": "round"},
            )  # fmt: skip
        _log_shares(axis, 1e-6, 30)
        if axis is not axes[0, 0]:
            axis.yaxis.set_major_formatter(NullFormatter())
        axis.set(xlim=(0, 1), xlabel="confidence")
        axis.set_title(fill(scope, TITLE_WIDTH), fontsize=10, y=1)
    axes[0, 0].set_ylabel("share of voxels")
    _finish(figure, axes, title, left=0.85, between=0.3)
    return figure


def plot_case_reliability(
    cases: Mapping[str, Sequence[BinStatistics]], title: str = "", levels: int = 20
) -> Figure:
    """Draw how the accuracy of each bin is spread over the cases, one panel per scope.

    A column of cells is a bin of confidence. Among the cases with voxels in the bin, the shade of a
    cell is the share of cases whose accuracy lies at that height (dataset reliability histograms,
    Barfoot et al. 2024). A pooled diagram (all cases together) on the diagonal may hide cases above
    and below it. The bars below count the cases in which the bin is not empty.

    Args:
        cases: equal-width bins of every case, by scope.
        title: title of the whole figure.
        levels: number of cells in a column.
    """
    n = max(len(cases), 1)
    figure = Figure(figsize=(3.6 * n + 0.9, 5.2))
    axes = _two_rows(figure, n)
    for column, (scope, of_scope) in enumerate(cases.items()):
        top, bottom = axes[:, column]
        accuracy = np.stack([one.accuracy for one in of_scope])
        m, found = accuracy.shape[1], np.sum(~np.isnan(accuracy), axis=0)
        edges, heights = np.linspace(0, 1, m + 1), np.linspace(0, 1, levels + 1)
        counts = np.stack([np.histogram(of_bin, heights)[0] for of_bin in accuracy.T], axis=1)
        shares = np.where(counts > 0, counts / np.maximum(found, 1), np.nan)
        shades = top.pcolormesh(edges, heights, shares, cmap="Blues", vmin=0, vmax=1)
        top.plot([0, 1], [0, 1], color=LINE, linestyle="--", linewidth=1, label="calibrated")
        used = found > 0
        mean = np.nansum(accuracy, axis=0)[used] / found[used]
        top.plot(((edges[1:] + edges[:-1]) / 2)[used], mean, ".-", color=OVER, linewidth=1,
                 label="mean of the cases")  # fmt: skip
        top.set(xlim=(0, 1), ylim=(0, 1))
        top.set_title(fill(scope, TITLE_WIDTH), fontsize=10, y=1)
        _bars(bottom, edges[:-1], 1 / m, found, facecolor=BAR, edgecolor="white", linewidth=0.6)
        bottom.set(xlabel="confidence", xlim=(0, 1), ylim=(0, max(len(of_scope), 1)))
        bottom.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes[0, 0].set_ylabel("accuracy of a case")
    axes[1, 0].set_ylabel("cases with\nvoxels in bin")
    _finish(figure, axes, title, left=0.85, right=0.95)
    if cases:
        place = axes[0, -1].get_position()
        width = figure.get_figwidth()
        beside = figure.add_axes((place.x1 + 0.15 / width, place.y0, 0.14 / width, place.height))
        figure.colorbar(shades, cax=beside, label="share of the cases")
    return figure


def _draw_bins(axis: Axes, statistics: BinStatistics, true: str) -> None:
    """Bars of the accuracy, named `true`, the gap to the confidence, and the means of the bins."""
    used = np.asarray(statistics.count) > 0
    m = len(statistics.count)
    left, width = (np.arange(m) / m)[used], 1 / m
    confidence, accuracy = statistics.confidence[used], statistics.accuracy[used]
    _bars(axis, left, width, accuracy, facecolor=BAR, alpha=0.85, label=true, edgecolor="white",
          linewidth=0.6)  # fmt: skip
    over = confidence > accuracy
    for sign, colour, name in ((over, OVER, "overconfident"), (~over, UNDER, "underconfident")):
        if sign.any():
            low = np.minimum(accuracy, confidence)[sign]
            high = np.maximum(accuracy, confidence)[sign]
            _bars(axis, left[sign], width, high, low, facecolor="white")
            _bars(axis, left[sign], width, high, low, facecolor=colour, alpha=0.45,
                  edgecolor=colour, linewidth=0.6, label=name)  # fmt: skip
    axis.plot(confidence, accuracy, ".", color="black", markersize=4, label="bin mean",
              clip_on=False, zorder=5)  # fmt: skip


def _bars(
    axis: Axes, left: NDArray[Any], width: float, top: NDArray[Any], bottom: Any = 0.0, **style: Any
) -> None:
    """Draw bars as one artist, since one patch per bar would take a third of the time of a page.

    The limits of the axes must be set already, since the bars do not widen them.
    """
    x = np.stack([left, left, left + width, left + width], -1)
    low = np.broadcast_to(bottom, np.shape(top))
    y = np.stack([low, top, top, low], -1)
    axis.add_collection(PolyCollection(list(np.stack([x, y], -1)), **style), autolim=False)


def _draw_chance(axis: Axes, statistics: BinStatistics, floor: EceFloor) -> None:
    """Lines around the diagonal between which a bin's mean lies in 95 % of calibrated data."""
    used = np.asarray(statistics.count) > 0
    promised = statistics.confidence[used]
    for sign in (-1, 1):
        edge = np.clip(promised + sign * NORMAL_95 * floor.spread[used], 0, 1)
        axis.plot(promised, edge, color="black", linestyle=":", linewidth=1, zorder=4,
                  label="95 % if calibrated")  # fmt: skip


def _of_chance(floor: EceFloor) -> str:
    text = f"floor {floor.expected:.4f}, 95 % {floor.q95:.4f}"
    return text if np.isnan(floor.p) else f"{text}\np if calibrated {floor.p:.2g}"


def _draw_small(axis: Axes, statistics: BinStatistics, unit: str, true: str) -> None:
    """One diagram and its strip of shares in the same axes, since many axes are slow to lay out."""
    n, m = int(statistics.count.sum()), len(statistics.count)
    axis.plot([0, 1], [0, 1], color=LINE, linestyle="--", linewidth=0.8, label="calibrated")
    _draw_bins(axis, statistics, true)
    share = np.maximum(statistics.count / max(n, 1), FLOOR)
    height = STRIP * (1 - np.log10(share) / np.log10(FLOOR))
    low = -STRIP - 0.03
    _bars(axis, np.arange(m) / m, 1 / m, low + height, low, facecolor="0.6",
          label=f"share of {unit}, log, 1e-5 to 1")  # fmt: skip
    error = statistics.expected_error()
    axis.text(0.03, 0.97, f"ECE {error:.4f}\nn {n:,}" if n else f"no {unit}",
              transform=axis.transAxes, va="top", fontsize=7,
              bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1})  # fmt: skip
    axis.set(xlim=(0, 1), ylim=(-STRIP - 0.03, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))


def _log_shares(axis: Axes, low: float, high: float) -> None:
    """Make the vertical axis logarithmic, with few plain numbers, which are quick to set."""
    axis.set_ylim(low, high)  # first, so that nothing is measured where there is no voxel
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(FixedLocator([t for t in (1, 1e-2, 1e-4, 1e-6) if t >= low]))
    axis.yaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter("{x:g}")


def _two_rows(figure: Figure, columns: int) -> NDArray[Any]:
    """Axes of tall diagrams above flat ones; only the lower have numbers below them."""
    axes = figure.subplots(
        2, columns, squeeze=False, gridspec_kw={"height_ratios": [3.2, 1], "hspace": 0.1}
    )
    for axis in axes[0]:
        axis.xaxis.set_major_formatter(NullFormatter())  # tick_params would make ticks
    return axes


def _finish(
    figure: Figure,
    axes: NDArray[Any],
    title: str,
    *,
    left: float,
    between: float = 0.6,
    right: float = EDGE,
) -> None:
    """Add title and legend, and lay out the figure around them; sizes are in inches."""
    handles, names = _entries(axes[0])
    columns = 5 if figure.get_figwidth() > NARROWEST else 2
    figure.legend(
        handles, names, loc="lower center", ncols=columns, frameon=False, fontsize="small"
    )
    lay_out(
        figure, axes.tolist(), title, left=left, between=between, right=right,
        legend_lines=-(-len(names) // columns),
    )  # fmt: skip


def _entries(axes: Iterable[Axes]) -> tuple[list[Artist], list[str]]:
    """Handles and names of a legend that names everything once."""
    handles: dict[str, Artist] = {}
    for axis in axes:
        for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    return list(handles.values()), list(handles)
