"""Figures of a study, with colours that the colour-blind can distinguish, and different shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from segcal.binning import BinStatistics
from segcal.reporting.legends import add_legend, add_side_legend, label_epochs, shades
from segcal.reporting.progress import STYLES, region_names
from segcal.reporting.reliability import plot_class_reliability
from segcal.study.naming import better, is_relative, metric_name
from segcal.study.results import RAW, REPAIRS, Method
from segcal.study.statistics import Change, MeanRanks, MeanValue, cliques, pareto

__all__ = [
    "Point",
    "plot_critical_differences",
    "plot_curves",
    "plot_differences",
    "plot_front",
    "plot_logits",
    "plot_multipliers",
    "plot_repairs",
    "plot_sensitivity",
]

COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7A6F00",
    "#882255", "#332288", "#44AA99",
)  # fmt: skip
"""Colours of Okabe and Ito, with a darker yellow; then Tol's muted colours."""
MARKERS = "osD^vPX*<>"
BETTER, WORSE, SAME = "#0072B2", "#D55E00", "0.45"
FILLS = {RAW: "full", "temperature": "left", "class_region": "none", "class_region_case": "right"}
"""Markers by repair."""
WIDEST = 1.0
"""Largest relative change that a panel shows; an arrow at its side marks larger changes."""
NUMBERED = 7
"""Largest number of classes for which a heat map prints its values."""
SHARE = "{x:+.0%}"


@dataclass(frozen=True)
class Point:
    """A method in the plane of two metrics.

    Attributes:
        method: the method.
        x: mean of the metric that should be high.
        y: mean of the metric that should be low.
    """

    method: Method
    x: MeanValue
    y: MeanValue


def plot_differences(
    changes: Sequence[Change],
    rows: Sequence[tuple[str, str, str]],
    metrics: Sequence[str],
    *,
    title: str,
    margin: float,
    goals: Mapping[str, float],
) -> Figure:
    """Draw differences from the baseline with their intervals, one panel per metric.

    Args:
        changes: of one set and network.
        rows: name, method, and the same method with the Dice-optimal decision, whose DSC is a
            hollow mark. A DSC that equals the DSC of a simpler method has no mark.
        metrics: panels.
        title: of the figure.
        margin: DSC that may be lost, drawn as a broken line.
        goals: relative changes to reach, by metric, drawn as dotted lines.
    """
    found = {(c.method, c.metric): c for c in changes}
    size = (1.6 + 0.075 * max(len(r[0]) for r in rows) + 2.3 * len(metrics), 1.5 + 0.23 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for axis, metric in zip(axes, metrics, strict=True):
        relative = is_relative(metric)
        edge = _edge([found.get((m, metric)) for _, m, _ in rows], relative=relative)
        axis.axvline(0, color="0.6", linewidth=1)
        if metric == "dsc":
            axis.axvline(-margin, color="0.3", linestyle="--", linewidth=1)
        if metric in goals:
            axis.axvline(goals[metric], color="0.3", linestyle=":", linewidth=1.2)
        for y, (_, method, decided) in enumerate(rows):
            of_mask, of_dice = found.get((method, metric)), found.get((decided, metric))
            if of_mask is not None and not (metric == "dsc" and of_mask.same_as):
                _draw_change(axis, of_mask, y, relative=relative, edge=edge, fill="full")
            if metric == "dsc" and of_dice is not None and not of_dice.same_as:
                _draw_change(axis, of_dice, y + 0.28, relative=relative, edge=edge, fill="none")
        axis.set_title(f"{metric_name(metric)}\n(better to the {_side(metric)})", fontsize=9)
        if relative:
            axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:+.0f} %" if x else "0")
        axis.locator_params(axis="x", nbins=4)
        axis.tick_params(axis="x", labelsize=8)
        axis.grid(axis="y", color="0.93")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), [name for name, _, _ in rows], fontsize=8)
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    _legend_of_changes(figure, metrics, margin, goals)
    figure.suptitle(title, fontsize=11)
    return figure


def _edge(changes: Sequence[Change | None], *, relative: bool) -> float:
    """Upper limit of what is drawn."""
    if not relative:
        return float("inf")
    ends = [c.relative_ci95[1] for c in changes if c is not None and c.relative_ci95 is not None]
    return WIDEST if max(ends, default=0.0) > WIDEST else float("inf")


def _draw_change(
    axis: Axes, change: Change, y: float, *, relative: bool, edge: float, fill: Any
) -> None:
    """A mark and its interval."""
    value = change.relative if relative else change.difference
    interval = change.relative_ci95 if relative else change.ci95
    sign = {"higher": 1, "lower": -1}[better(change.metric)] * change.direction
    colour = {1: BETTER, -1: WORSE, 0: SAME}[sign]
    marker = {1: "o", -1: "s", 0: "D"}[sign]
    if not np.isfinite(value):
        return
    if value > edge:
        axis.plot(edge, y, ">", color=colour, markersize=5, clip_on=False)
        return
    if interval is not None:
        low, high = interval
        axis.plot(
            (low, min(high, edge)), (y, y), color=colour, linewidth=1.5, solid_capstyle="butt"
        )
    axis.plot(value, y, marker, color=colour, markersize=4.5, fillstyle=fill,
              markerfacecoloralt="white")  # fmt: skip


def _legend_of_changes(
    figure: Figure, metrics: Sequence[str], margin: float, goals: Mapping[str, float]
) -> None:
    entries = [
        Line2D([], [], color=BETTER, marker="o", label="better"),
        Line2D([], [], color=SAME, marker="D", label="undecided"),
        Line2D([], [], color=WORSE, marker="s", label="worse"),
    ]
    if "dsc" in metrics:
        entries += [
            Line2D([], [], color="0.2", marker="o", fillstyle="none", linewidth=0,
                   label="Dice-optimal decision"),
            Line2D([], [], color="0.3", linestyle="--", label=f"loss of {margin:g}"),
        ]  # fmt: skip
    if any(metric in goals for metric in metrics):
        entries.append(Line2D([], [], color="0.3", linestyle=":", label="goal"))
    figure.legend(
        handles=entries, loc="outside lower center", ncols=6, frameon=False, fontsize="small"
    )


def _side(metric: str) -> str:
    return "right" if better(metric) == "higher" else "left"


def plot_critical_differences(found: Sequence[MeanRanks], *, title: str) -> Figure:
    """Draw mean ranks; a bar joins methods that differ by less than Nemenyi's distance.

    Args:
        found: one panel each; rankings without a rank are left out.
        title: of the figure.
    """
    panels = [r for r in found if len(r.mean) > 1]
    most = max((len(r.mean) for r in panels), default=2)
    bars = max((len(_bars(r)) for r in panels), default=0)
    high = 1.15 + 0.19 * -(-most // 2) + 0.09 * bars
    figure = Figure(figsize=(9.6, high * max(len(panels), 1) + 0.4), layout="constrained")
    axes = figure.subplots(max(len(panels), 1), 1, squeeze=False)[:, 0]
    for axis in axes:
        axis.set_axis_off()
    for axis, one in zip(axes, panels, strict=False):
        _draw_ranks(axis, one)
    figure.suptitle(title, fontsize=11)
    return figure


def _bars(ranks: MeanRanks) -> list[tuple[str, ...]]:
    return [] if ranks.distance is None else cliques(ranks.mean, ranks.distance)


def _draw_ranks(axis: Axes, ranks: MeanRanks) -> None:
    """One axis of ranks with names at both sides."""
    names, k = list(ranks.mean), len(ranks.mean)
    left, bars = -(-k // 2), _bars(ranks)
    pad, first = 0.30 * (k - 1), 1.1 + 0.45 * len(bars)
    axis.plot((1, k), (0, 0), color="black", linewidth=1)
    for tick in range(1, k + 1):
        axis.plot((tick, tick), (0, -0.25), color="black", linewidth=1)
        axis.text(tick, -0.4, str(tick), ha="center", va="bottom", fontsize=8)
    for place, name in enumerate(names):
        rank, at_left = ranks.mean[name], place < left
        depth = first + (place if at_left else k - 1 - place)
        end = 1 - 0.15 * pad if at_left else k + 0.15 * pad
        axis.plot((rank, rank, end), (0, depth, depth), color="0.35", linewidth=0.8)
        side = "right" if at_left else "left"
        text = f"{name}  {rank:.1f}" if at_left else f"{rank:.1f}  {name}"
        space = -0.03 * pad if at_left else 0.03 * pad
        axis.text(end + space, depth, text, ha=side, va="center", fontsize=8)
    for place, clique in enumerate(bars):
        y = 0.5 + 0.45 * place
        ends = (ranks.mean[clique[0]], ranks.mean[clique[-1]])
        axis.plot(ends, (y, y), color=BETTER, linewidth=3.5, solid_capstyle="round")
    if ranks.distance is not None:
        far = min(ranks.distance, k - 1)
        axis.plot((1, 1 + far), (-1.9, -1.9), color="black", linewidth=1.5, marker="|")
        said = f"critical difference {ranks.distance:.2f}"
        axis.text(1 + far + 0.02 * k, -1.9, said, ha="left", va="center", fontsize=8)
    p = "" if ranks.p is None else f", Friedman p {ranks.p:.2g}"
    axis.set_title(f"{metric_name(ranks.metric)}: {ranks.blocks} patients{p}", fontsize=9)
    axis.set(xlim=(1 - pad, k + pad), ylim=(first + left - 0.3, -2.4))


def plot_front(
    panels: Mapping[str, Sequence[Point]],
    *,
    title: str,
    floors: Mapping[str, float],
    recipes: Sequence[str],
) -> Figure:
    """Draw DSC against a calibration error with the Pareto front, one panel per group.

    A line joins the repairs of a recipe.

    Args:
        panels: points by title.
        title: of the figure.
        floors: error of the true posterior where it is known, by title.
        recipes: all of them, in the order of their colours.
    """
    columns = min(2, max(1, len(panels)))
    rows = -(-max(1, len(panels)) // columns)
    figure = Figure(figsize=(4.3 * columns + 2.4, 3.8 * rows + 0.4), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    styles = {r: (_colour(i), MARKERS[i % len(MARKERS)]) for i, r in enumerate(recipes)}
    used: dict[str, None] = {}
    for axis, (name, points) in zip(axes, panels.items(), strict=False):
        if name in floors:
            axis.axhline(floors[name], color="0.3", linestyle=":", linewidth=1.2)
        _draw_points(axis, points, styles)
        used |= dict.fromkeys(p.method.recipe for p in points)
        axis.set_title(name, fontsize=10)
        if points:
            axis.set_xlabel(f"{metric_name(points[0].x.metric)}, better to the right", fontsize=9)
            axis.set_ylabel(f"{metric_name(points[0].y.metric)}, better below", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.locator_params(nbins=6)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    entries = [_entry(r, *styles[r]) for r in recipes if r in used]
    repairs = {p.method.repair for points in panels.values() for p in points}
    entries += [
        Line2D([], [], color="0.2", marker="o", linewidth=0, label=repair,
               fillstyle=FILLS.get(repair, "full"), markerfacecoloralt="white")
        for repair in FILLS if repair in repairs
    ]  # fmt: skip
    entries.append(
        Line2D([], [], color="0.2", linewidth=1, linestyle="--", label="front of Pareto")
    )
    if floors:
        entries.append(Line2D([], [], color="0.3", linestyle=":", label="true posterior"))
    add_side_legend(figure, entries)
    figure.suptitle(title, fontsize=11)
    return figure


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _entry(name: str, colour: str, marker: str) -> Line2D:
    return Line2D([], [], color=colour, marker=marker, linewidth=0, label=name)


def _draw_points(
    axis: Axes, points: Sequence[Point], styles: Mapping[str, tuple[str, str]]
) -> None:
    """Points with their intervals, and the front through the best."""
    for recipe in dict.fromkeys(p.method.recipe for p in points):
        own = sorted((p for p in points if p.method.recipe == recipe), key=_order)
        colour, marker = styles[recipe]
        axis.plot([p.x.mean for p in own], [p.y.mean for p in own], color=colour, linewidth=0.8,
                  alpha=0.6)  # fmt: skip
        for p in own:
            if p.x.ci95 is not None:
                axis.plot(p.x.ci95, (p.y.mean, p.y.mean), color=colour, linewidth=0.7, alpha=0.35)
            if p.y.ci95 is not None:
                axis.plot((p.x.mean, p.x.mean), p.y.ci95, color=colour, linewidth=0.7, alpha=0.35)
            axis.plot(p.x.mean, p.y.mean, marker, color=colour, markersize=6.5, zorder=3,
                      fillstyle=FILLS.get(p.method.repair, "full"), markerfacecoloralt="white",
                      )  # fmt: skip
    plane = np.array([[p.x.mean, p.y.mean] for p in points], dtype=np.float64).reshape(-1, 2)
    front = plane[pareto(plane, higher=(True, False))]
    front = front[np.lexsort((front[:, 1], front[:, 0]))]
    axis.plot(front[:, 0], front[:, 1], "--", color="0.2", linewidth=1, zorder=2)


def _order(point: Point) -> int:
    repair = point.method.repair
    return REPAIRS.index(repair) if repair in REPAIRS else len(REPAIRS)


def plot_repairs(bins: Mapping[str, Mapping[str, BinStatistics]], *, title: str) -> Figure:
    """Draw reliability before and after every repair, one row per recipe.

    Args:
        bins: summed over the voxels of all cases and seeds, by recipe and repair.
        title: of the figure.
    """
    repairs = [r for r in REPAIRS if any(r in of for of in bins.values())]
    repairs += [r for of in bins.values() for r in of if r not in repairs]
    size = max((len(b.count) for of in bins.values() for b in of.values()), default=1)
    none = BinStatistics(np.zeros(size, np.int64), np.zeros(size), np.zeros(size))
    columns = {r: [of.get(r, none) for of in bins.values()] for r in dict.fromkeys(repairs)}
    axes = ("confidence", "accuracy")
    return plot_class_reliability(columns, list(bins), title, axes_names=axes)


def plot_multipliers(
    logs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    channels: Sequence[str],
    *,
    title: str,
) -> Figure:
    """Draw learned penalty weights (multipliers) and constraint gaps over epochs, with seed range.

    Args:
        logs: lines of the trainings' logs, by recipe; recipes without multipliers are left out.
        channels: names of the classes or regions.
        title: of the figure.
    """
    found = {
        f"{recipe}: {term}" if term != recipe else recipe: (runs, term)
        for recipe, runs in logs.items()
        for term in learned_terms(runs)
    }
    rows = max(1, len(found))
    figure = Figure(figsize=(10, 2.7 * rows + 0.7), layout="constrained")
    axes = figure.subplots(rows, 2, squeeze=False, sharex="row")
    most = 0
    for row, (name, (runs, term)) in zip(axes, found.items(), strict=False):
        said = ("multiplier", _quantity(runs, term))
        for axis, key, what in zip(row, ("lam", "constraint"), said, strict=True):
            steps = _steps(runs, term, key)
            most = max(most, steps.shape[2] if steps.size else 0)
            _draw_groups(axis, steps, len(channels))
            axis.set_title(f"{name}: {what}", fontsize=9)
            label_epochs(axis)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
        row[1].axhline(0, color="0.6", linewidth=0.8)
    colours = group_colours(len(channels))
    entries = [
        Line2D([], [], color=c, label=name) for c, name in zip(colours, channels, strict=False)
    ]
    if most > 1:
        entries += [
            Line2D([], [], color="0.3", linestyle=s, label=r)
            for s, r in zip(STYLES, region_names(most), strict=False)
        ]
    add_legend(figure, entries[:24], loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure


def group_colours(channels: int) -> Sequence[Any]:
    """Colours of classes: distinct for few classes, shades for many."""
    return COLOURS[:channels] if channels <= len(COLOURS) else shades(channels)


def learned_terms(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """Terms of the trainings that have multipliers."""
    return list(
        dict.fromkeys(
            name
            for records in runs
            for record in records
            for name, value in record.items()
            if isinstance(value, Mapping) and "lam" in value
        )
    )


def _quantity(runs: Sequence[Sequence[Mapping[str, Any]]], term: str) -> str:
    """Name of a term's constraint, if the log has it."""
    last = next(r[term] for records in runs for r in reversed(records) if term in r)
    return str(last.get("quantity", "constraint"))


def _steps(runs: Sequence[Sequence[Mapping[str, Any]]], term: str, key: str) -> NDArray[np.float64]:
    """Values ``(runs, epochs, regions, channels)``; NaN where a run has none."""
    shaped = [
        {int(r["epoch"]): np.atleast_2d(np.asarray(r[term][key], dtype=np.float64))
         for r in records if isinstance(r.get(term), Mapping) and r[term].get(key)}
        for records in runs
    ]  # fmt: skip
    shapes = {v.shape for of in shaped for v in of.values()}
    if not shapes:
        return np.zeros((0, 0, 0, 0))
    high, wide = max(s[0] for s in shapes), max(s[1] for s in shapes)
    epochs = 1 + max(e for of in shaped for e in of)
    values = np.full((len(runs), epochs, high, wide), np.nan)
    for run, of in enumerate(shaped):
        for epoch, value in of.items():
            values[run, epoch, : value.shape[0], : value.shape[1]] = value
    return values


def _draw_groups(axis: Axes, steps: NDArray[np.float64], channels: int) -> None:
    if not steps.size:
        axis.text(0.5, 0.5, "not logged", ha="center", transform=axis.transAxes, color="0.4")
        return
    colours = group_colours(max(channels, steps.shape[3]))
    for region, _ in enumerate(region_names(steps.shape[2])):
        style = STYLES[region % len(STYLES)]
        for k in range(steps.shape[3]):
            values = steps[:, :, region, k]
            epochs = np.flatnonzero(np.isfinite(values).any(axis=0))
            if not len(epochs):
                continue
            own = values[:, epochs]
            marker = "o" if len(epochs) == 1 else ""
            axis.plot(epochs, np.nanmean(own, axis=0), style, color=colours[k], linewidth=1.3,
                      marker=marker)  # fmt: skip
            axis.fill_between(epochs, np.nanmin(own, axis=0), np.nanmax(own, axis=0),
                              color=colours[k], alpha=0.12, linewidth=0)  # fmt: skip


def plot_curves(
    curves: Mapping[str, NDArray[np.float64]], *, label: str, title: str, recipes: Sequence[str]
) -> Figure:
    """Draw a validation metric over the epochs, as the mean over seeds.

    Args:
        curves: ``(seeds, epochs)`` by recipe; NaN where a training has no value.
        label: of the metric.
        title: of the figure.
        recipes: all of them, in the order of their colours.
    """
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    entries = []
    for index, recipe in enumerate(recipes):
        if recipe not in curves:
            continue
        epochs = np.flatnonzero(np.isfinite(curves[recipe]).any(axis=0))
        if not len(epochs):
            continue
        mean = np.nanmean(curves[recipe][:, epochs], axis=0)
        marker, every = MARKERS[index % len(MARKERS)], max(1, len(epochs) // 8)
        entries += axis.plot(
            epochs, mean, color=_colour(index), marker=marker, markevery=(index % every, every),
            markersize=5, linewidth=1.2, label=recipe,
        )  # fmt: skip
    label_epochs(axis)
    axis.set_ylabel(label)
    axis.grid(color="0.93")
    axis.spines[["top", "right"]].set_visible(False)
    add_side_legend(figure, entries)
    figure.suptitle(title, fontsize=11)
    return figure


def plot_sensitivity(
    curves: Mapping[str, Sequence[tuple[float, Mapping[str, MeanValue]]]],
    metrics: Sequence[str],
    *,
    argument: str,
    baseline: Mapping[str, Mapping[str, float]],
    title: str,
) -> Figure:
    """Draw metrics against the value of one argument, one line per group.

    Args:
        curves: value of the argument and means by metric, by group, in order of the values.
        metrics: panels.
        argument: its name.
        baseline: means of the baseline by group and metric, drawn as dotted lines.
        title: of the figure.
    """
    columns = min(4, len(metrics))
    figure = Figure(figsize=(2.75 * columns, 3.6), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False)[0]
    values = sorted({value for of in curves.values() for value, _ in of})
    logarithmic = values[0] > 0 and values[-1] >= 10 * values[0]
    for axis, metric in zip(axes, metrics, strict=False):
        for index, (name, of) in enumerate(curves.items()):
            shown = [(v, m[metric]) for v, m in of if metric in m]
            x = [v for v, _ in shown]
            colour, marker = _colour(index), MARKERS[index % len(MARKERS)]
            axis.plot(x, [m.mean for _, m in shown], marker + "-", color=colour, markersize=5,
                      linewidth=1.2, label=name)  # fmt: skip
            for v, m in shown:
                if m.ci95 is not None:
                    axis.plot((v, v), m.ci95, color=colour, linewidth=0.9, alpha=0.6)
            if metric in baseline.get(name, {}):
                axis.axhline(baseline[name][metric], color=colour, linestyle=":", linewidth=1.2)
        if logarithmic:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter("{x:g}")
            axis.xaxis.set_minor_formatter("")
        direction = "above" if better(metric) == "higher" else "below"
        axis.set_title(f"{metric_name(metric)}\n(better {direction})", fontsize=9)
        axis.set_xlabel(argument, fontsize=9)
        axis.locator_params(axis="y", nbins=5)
        axis.tick_params(labelsize=8)
        axis.grid(color="0.93")
        axis.spines[["top", "right"]].set_visible(False)
    entries = [line for line in axes[0].lines if not str(line.get_label()).startswith("_")]
    if baseline:
        entries.append(Line2D([], [], color="0.3", linestyle=":", label="baseline"))
    add_legend(figure, entries, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.suptitle(title, fontsize=11)
    return figure


def plot_logits(tables: Mapping[str, pd.DataFrame], names: Sequence[str], *, title: str) -> Figure:
    """Draw mean logits by true class and channel, one row of panels per region.

    Args:
        tables: mean logits with the columns ``region, label, channel, mean_logit``, by recipe.
        names: of the classes, by their number.
        title: of the figure.
    """
    regions = list(dict.fromkeys(r for t in tables.values() for r in t["region"]))
    regions.sort()  # inner before outer
    columns = min(4, max(1, len(tables)))
    blocks = -(-max(1, len(tables)) // columns)
    rows = blocks * max(1, len(regions))
    figure = Figure(figsize=(2.5 * columns + 1.6, 2.1 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_axis_off()
    scale = max((float(t["mean_logit"].abs().max()) for t in tables.values()), default=1.0)
    scale = scale if np.isfinite(scale) and scale > 0 else 1.0
    shown = None
    for index, (recipe, table) in enumerate(tables.items()):
        block, column = divmod(index, columns)
        for place, region in enumerate(regions):
            axis = axes[block * len(regions) + place, column]
            axis.set_axis_on()
            own = table[table["region"] == region]
            grid = own.pivot_table(index="label", columns="channel", values="mean_logit")
            shown = axis.imshow(grid.to_numpy(), cmap="PuOr_r", vmin=-scale, vmax=scale)
            _label_grid(axis, grid, names, scale, first=column == 0)
            axis.set_title(f"{recipe}, {region}", fontsize=8.5)
    if shown is not None:
        figure.colorbar(shown, ax=axes, label="mean logit", shrink=0.6)
    figure.supxlabel("channel", fontsize=9)
    figure.supylabel("true class", fontsize=9)
    figure.suptitle(title, fontsize=11)
    return figure


def _label_grid(
    axis: Axes, grid: pd.DataFrame, names: Sequence[str], scale: float, *, first: bool
) -> None:
    """Names at the sides of a heat map, and its values if they are few."""
    numbers = grid.to_numpy()
    few = max(numbers.shape) <= NUMBERED
    axis.set_xticks(range(numbers.shape[1]), [str(c) for c in grid.columns], fontsize=7)
    rows = [_class_name(names, str(c)) if first else "" for c in grid.index]
    axis.set_yticks(range(numbers.shape[0]), rows, fontsize=7)
    axis.tick_params(length=0)
    for (i, j), value in np.ndenumerate(numbers):
        if few and np.isfinite(value):
            ink = "white" if abs(value) > 0.6 * scale else "black"
            axis.text(
                j,
                i,
                f"{round(float(value), 1) + 0.0:.1f}",
                ha="center",
                va="center",
                fontsize=6.5,
                color=ink,
            )


def _class_name(names: Sequence[str], number: str) -> str:
    known = number.isdigit() and int(number) < len(names)
    return f"{names[int(number)]} {number}" if known and names[int(number)] != number else number
