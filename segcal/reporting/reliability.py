"""Reliability diagrams: what was promised against what came true."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure

from segcal.binning import BinStatistics
from segcal.io.files import whole_file

BAR, OVER, UNDER, LINE = "#3b6ea5", "#c0504d", "#d9a13b", "#555555"


def plot_reliability(diagrams: Mapping[str, BinStatistics], title: str = "") -> Figure:
    """Draw one reliability diagram per scope, with the share of voxels per bin below.

    The number in each panel is the ECE of exactly the statistics that are drawn (all cases
    pooled), which differs from the mean of per-case values. Empty bins have no bar.

    Args:
        diagrams: bin statistics of equal-width bins, by scope.
        title: of the whole figure.
    """
    n = max(len(diagrams), 1)
    figure = Figure(figsize=(3.6 * n + 0.3, 5.2), layout="constrained")
    axes = figure.subplots(
        2, n, squeeze=False, sharex=True, gridspec_kw={"height_ratios": [3.2, 1]}
    )
    for column, (scope, statistics) in enumerate(diagrams.items()):
        top, bottom = axes[:, column]
        m = len(statistics.count)
        left, width = np.arange(m) / m, 1 / m
        used = np.asarray(statistics.count) > 0
        confidence, accuracy = statistics.confidence[used], statistics.accuracy[used]
        top.plot([0, 1], [0, 1], color=LINE, linestyle="--", linewidth=1, label="calibrated")
        top.bar(left[used], accuracy, width, align="edge", color=BAR, alpha=0.85, label="accuracy",
                edgecolor="white", linewidth=0.6)  # fmt: skip
        over = confidence > accuracy
        for sign, colour, name in ((over, OVER, "overconfident"), (~over, UNDER, "underconfident")):
            if sign.any():
                low = np.minimum(accuracy, confidence)[sign]
                gap = np.abs(accuracy - confidence)[sign]
                top.bar(left[used][sign], gap, width, low, align="edge", color=colour, alpha=0.45,
                        edgecolor=colour, linewidth=0.6, label=name)  # fmt: skip
        top.plot(confidence, accuracy, ".", color="black", markersize=4, label="bin mean",
                 clip_on=False, zorder=5)  # fmt: skip
        error = statistics.expected_error()
        top.text(0.04, 0.95, f"ECE {error:.4f}" if np.isfinite(error) else "no voxels",
                 transform=top.transAxes, va="top",
                 bbox={"facecolor": "white", "edgecolor": LINE, "boxstyle": "round"})  # fmt: skip
        top.set(xlim=(0, 1), ylim=(0, 1), title=scope)
        total = max(float(np.sum(statistics.count)), 1.0)
        bottom.bar(left, np.asarray(statistics.count) / total, width, align="edge", color=BAR,
                   edgecolor="white", linewidth=0.6)  # fmt: skip
        bottom.set(xlabel="confidence", yscale="log", ylim=(1e-5, 1.5))
        if column == 0:
            top.set_ylabel("accuracy")
            bottom.set_ylabel("share of voxels")
    if diagrams:
        handles: dict[str, Artist] = {}
        for axis in axes[0]:
            for handle, name in zip(*axis.get_legend_handles_labels(), strict=True):
                handles.setdefault(name, handle)
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=5,
            frameon=False, fontsize="small",
        )  # fmt: skip
    if title:
        figure.suptitle(title)
    return figure


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, whole or not at all."""
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
