"""Draws differences between methods with their intervals, one panel per metric."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from segcal.evaluation.compare import Difference
from segcal.evaluation.reported import metric_of, readable

SHORT, LETTER = 12, 0.09
"""Letters of a method's name that fit beside a panel, and inches for each further letter."""


def plot_comparison(differences: Sequence[Difference], *, unit: str = "mm") -> Figure:
    """Plot mean paired differences to the baseline as points, intervals as bars.

    Args:
        differences: differences to show, with a mean.
        unit: unit of the lengths, ``mm`` or ``px``.
    """
    metrics = list(dict.fromkeys(d.metric for d in differences))
    methods = list(dict.fromkeys(d.method for d in differences))
    columns = min(4, max(1, len(metrics)))
    rows = -(-max(1, len(metrics)) // columns)
    longer = max((len(method) for method in methods), default=0) - SHORT
    width = 3.2 * columns + LETTER * max(longer, 0)
    figure = Figure(figsize=(width, (1.1 + 0.35 * len(methods)) * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis in axes[len(metrics) :]:
        axis.set_axis_off()
    for index, (axis, metric) in enumerate(zip(axes, metrics, strict=False)):
        axis.axvline(0, color="0.6", linewidth=1)
        for y, method in enumerate(reversed(methods)):
            for d in differences:
                if (d.metric, d.method) == (metric, method) and d.mean is not None:
                    if d.ci95 is not None:
                        axis.plot(d.ci95, (y, y), color="C0", linewidth=2, solid_capstyle="butt")
                    axis.plot(d.mean, y, "o", color="C0", markersize=5)
        labels = list(reversed(methods)) if index % columns == 0 else [""] * len(methods)
        axis.set_yticks(range(len(methods)), labels)
        axis.set_ylim(-0.6, len(methods) - 0.4)
        axis.locator_params(axis="x", nbins=4)
        axis.set_title(f"{readable(metric, unit)}{_better(metric)}", fontsize=9)
        axis.ticklabel_format(axis="x", useOffset=False, style="plain")
        axis.tick_params(axis="x", labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    if differences:
        figure.suptitle(
            f"Difference to {differences[0].baseline}, mean over cases and 95 % interval",
            fontsize=11,
        )
    return figure


def _better(metric: str) -> str:
    """On which side the better values are."""
    row = metric_of(metric)
    if row is None or row.better is None:
        return ""
    return f" (better to the {'right' if row.better == 'higher' else 'left'})"
