"""Draws the course of a training: terms of the loss, calibration, multipliers and constraints.

A penalty adds a constraint to the loss; its multiplier is the weight that is learned for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from segcal.reporting.legends import (
    COLOURS,
    MOST_CLASSES,
    add_class_bar,
    add_legend,
    class_colours,
    label_epochs,
    marker,
)

FIGURE_NAME = "segcal_progress.png"
ROWS = {
    1: ("all",),
    2: ("inner", "outer"),
    3: ("boundary", "near", "far"),
    4: ("in-inner", "in-outer", "out-inner", "out-outer"),
}
"""Names of the rows of multipliers by their number: one row for the whole image, or one per region.
Four rows are for channels whose multipliers also differ by the decision (in or out)."""
STYLES = ("-", "--", ":", "-.")
"""Line styles of the rows."""
PANELS = {"lam": "multiplier", "rho": "penalty parameter", "constraint": "constraint"}
"""Titles of the panels, by key of an update of multipliers; a method may lack some of them, and may
name its constraint itself (`quantity`)."""
WIDEST = 36
"""Most letters of a title that fit above a panel."""
Records = Sequence[Mapping[str, Any]]


def region_names(rows: int) -> Sequence[str]:
    """Names of the rows of multipliers, see :data:`ROWS`."""
    return ROWS.get(rows, tuple(f"region {r}" for r in range(rows)))


def plot_progress(records: Records, channels: Sequence[str]) -> Figure:
    """Draw the epochs of a training.

    Args:
        records: lines of ``segcal_log.jsonl``.
        channels: names of the classes, or of the regions, that the multipliers belong to.
    """
    learned = sorted(
        {k for r in records for k, v in r.items() if isinstance(v, dict) and "lam" in v}
    )
    steps = {n: [(r["epoch"], r[n]) for r in records if n in r] for n in learned}
    panels = {n: {key: f"{n} {key}" for key in PANELS if steps[n][0][1][key]} for n in learned}
    rows = [["terms", "terms", "ece"], *(_row(panels[n]) for n in learned)]
    if any("weights" in r for r in records):
        rows.append(["weights"] * 3)
    with plt.style.context("default"):  # nnU-Net sets the fonts of all figures
        figure = Figure(figsize=(12, 3.6 * len(rows)), layout="constrained")
        axes: dict[str, Axes] = figure.subplot_mosaic(rows)
        _terms(axes["terms"], records)
        _calibration(axes["ece"], records)
        if "weights" in axes:
            _weights(axes["weights"], records)
        for name in learned:
            for key, panel in panels[name].items():
                _learned(axes[panel], name, key, steps[name], channels)
        for ax in axes.values():
            label_epochs(ax)
        drawn = [axes[p] for name in learned for p in panels[name].values()]
        most = max(learned, key=lambda n: len(steps[n][0][1]["lam"]), default="")
        if learned and len(channels) <= MOST_CLASSES:
            lines = axes[panels[most]["lam"]].lines
            add_legend(figure, lines, loc="outside lower center", ncols=6, fontsize=7)
        elif learned:
            add_class_bar(figure, drawn, channels, class_colours(len(channels)))
            regions = region_names(len(steps[most][0][1]["lam"]))
            if len(regions) > 1:
                of_regions = [
                    Line2D([], [], color="0.3", linestyle=_style(row), label=region)
                    for row, region in enumerate(regions)
                ]
                add_legend(figure, of_regions, loc="outside lower center", ncols=4, fontsize=7)
    return figure


def _row(panels: Mapping[str, str]) -> list[str]:
    """Names of the panels at the three places of a row; a missing panel gives its place away."""
    row: list[str] = []
    for key in PANELS:
        row.append(panels.get(key) or row[-1])
    return row


def _style(row: int) -> str:
    return STYLES[row % len(STYLES)]


def _terms(ax: Axes, records: Records) -> None:
    epochs = [r["epoch"] for r in records]
    names = dict.fromkeys(name for r in records for phase in ("val", "train") for name in r[phase])
    for i, name in enumerate(names):
        for phase, style in (("val", "-"), ("train", "--")):
            if not any(name in r[phase] for r in records):
                continue  # a term that compares two views has no value in validation
            values = [r[phase].get(name, float("nan")) for r in records]
            ax.plot(
                epochs, values, style, marker=marker(len(epochs)), color=COLOURS[i % len(COLOURS)],
                label=f"{name}, {phase}",
            )  # fmt: skip
    ax.set_title("terms of the loss, unweighted")
    add_legend(ax, ax.lines, fontsize=7)


def _weights(ax: Axes, records: Records) -> None:
    """Draw the weights that a schedule changes."""
    known = [r for r in records if "weights" in r]
    epochs = [r["epoch"] for r in known]
    for i, name in enumerate(known[-1]["weights"]):
        values = [r["weights"].get(name, float("nan")) for r in known]
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(epochs, values, "-", marker=marker(len(epochs)), color=colour, label=name)
    ax.set(title="weights of terms with a schedule", ylim=(0, None))
    add_legend(ax, ax.lines, fontsize=7)


def _calibration(ax: Axes, records: Records) -> None:
    known = [(r["epoch"], r["ece"]) for r in records if r["ece"] is not None]
    ax.plot([e for e, _ in known], [ece for _, ece in known], marker(len(known)), color="C3")
    ax.set(title="ECE in validation", ylim=(0, None))


def _learned(
    ax: Axes,
    name: str,
    key: str,
    steps: Sequence[tuple[int, Mapping[str, Any]]],
    channels: Sequence[str],
) -> None:
    """Draw the values that the updates of a penalty report as `key`."""
    _multipliers(ax, [(epoch, step[key]) for epoch, step in steps], channels)
    quantity = steps[-1][1].get("quantity", "constraint")  # logs of old do not say
    title = f"{name}: {quantity if key == 'constraint' else PANELS[key]}"
    ax.set_title(title if len(title) <= WIDEST else title.replace(": ", ":\n", 1))
    if quantity != "constraint":  # of gaps, whose multipliers are no orders of magnitude
        if key == "constraint":
            ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    elif key != "constraint" and all((np.asarray(a.get_ydata()) > 0).all() for a in ax.lines):
        ax.set_yscale("log")  # not of both signs


def _multipliers(
    ax: Axes, steps: Sequence[tuple[int, list[list[float]]]], channels: Sequence[str]
) -> None:
    epochs = [epoch for epoch, _ in steps]
    rows = len(steps[0][1])
    colours = class_colours(len(channels))
    for row, region in enumerate(region_names(rows)):
        for k, channel in enumerate(channels):
            values = [value[row][k] for _, value in steps]
            ax.plot(
                epochs, values, _style(row), marker=marker(len(epochs)), color=colours[k],
                label=f"{channel}, {region}" if rows > 1 else channel,
            )  # fmt: skip
