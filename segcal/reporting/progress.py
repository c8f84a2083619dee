"""The figure of a training: terms, calibration, multipliers and constraints over the epochs."""

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
REGIONS = {1: ("all",), 2: ("inner", "outer"), 3: ("boundary", "near", "far")}
"""Names of the rows of multipliers, by their number."""
STYLES = ("-", "--", ":", "-.")
"""Of the regions."""
PANELS = {"lam": "multiplier", "rho": "penalty parameter", "constraint": "constraint"}
"""Titles by what an update of multipliers reports; a method may not have them all."""
Records = Sequence[Mapping[str, Any]]


def region_names(rows: int) -> Sequence[str]:
    """Names of the rows of multipliers: regions, or one row for the whole image."""
    return REGIONS.get(rows) or [f"region {r}" for r in range(rows)]


def _style(row: int) -> str:
    return STYLES[row % len(STYLES)]


def plot_progress(records: Records, channels: Sequence[str]) -> Figure:
    """Draw the epochs of a training.

    Args:
        records: lines of ``segcal_log.jsonl``.
        channels: names of the classes, or regions, that multipliers belong to.
    """
    learned = sorted(
        {k for r in records for k, v in r.items() if isinstance(v, dict) and "lam" in v}
    )
    rows = [["terms", "terms", "ece"], *([f"{n} {key}" for key in PANELS] for n in learned)]
    with plt.style.context("default"):  # nnU-Net sets the fonts of all figures
        figure = Figure(figsize=(12, 3.6 * len(rows)), layout="constrained")
        axes: dict[str, Axes] = figure.subplot_mosaic(rows)
        _terms(axes["terms"], records)
        _calibration(axes["ece"], records)
        for name in learned:
            for key, title in PANELS.items():
                ax = axes[f"{name} {key}"]
                _multipliers(
                    ax, [(r["epoch"], r[name][key]) for r in records if name in r], channels
                )
                ax.set_title(f"{name}: {title}")
                positive = all((np.asarray(line.get_ydata()) > 0).all() for line in ax.lines)
                if key != "constraint" and positive:  # of both signs, no logarithm
                    ax.set_yscale("log")
        for ax in axes.values():
            label_epochs(ax)
        drawn = [axes[f"{name} {key}"] for name in learned for key in PANELS]
        if learned and len(channels) <= MOST_CLASSES:
            add_legend(figure, drawn[0].lines, loc="outside lower center", ncols=6, fontsize=7)
        elif learned:
            add_class_bar(figure, drawn, channels, class_colours(len(channels)))
            if len(drawn[0].lines) > len(channels):
                rows = len(drawn[0].lines) // len(channels)
                of_regions = [
                    Line2D([], [], color="0.3", linestyle=_style(row), label=region)
                    for row, region in enumerate(region_names(rows))
                ]
                add_legend(figure, of_regions, loc="outside lower center", ncols=6, fontsize=7)
    return figure


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


def _calibration(ax: Axes, records: Records) -> None:
    known = [(r["epoch"], r["ece"]) for r in records if r["ece"] is not None]
    ax.plot([e for e, _ in known], [ece for _, ece in known], marker(len(known)), color="C3")
    ax.set(title="ECE in validation", ylim=(0, None))


def _multipliers(
    ax: Axes, steps: Sequence[tuple[int, list[list[float]]]], channels: Sequence[str]
) -> None:
    epochs = [epoch for epoch, _ in steps]
    rows = len(steps[0][1])  # none where a method has no such values
    colours = class_colours(len(channels))
    for row, region in zip(range(rows), region_names(rows), strict=False):
        for k, channel in enumerate(channels):
            values = [value[row][k] for _, value in steps]
            ax.plot(
                epochs, values, _style(row), marker=marker(len(epochs)), color=colours[k],
                label=f"{channel}, {region}" if rows > 1 else channel,
            )  # fmt: skip
