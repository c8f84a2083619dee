"""Draws panels of slices: images, labels in their colours, probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from numpy.typing import NDArray

FEW = ("#3b6ea5", "#d9a13b", "#5a9e6f", "#c0504d", "#8064a2", "#4bacc6", "#9c6b3f", "#d87fb0")
MANY = tuple(matplotlib.colormaps["tab20"](range(20)))
SIDE = 2.6
"""Size of a panel in inches."""


def palette(n: int) -> list[Any]:
    """Colours of n labels, which repeat if there are many."""
    chosen = FEW if n <= len(FEW) else MANY
    return [chosen[i % len(chosen)] for i in range(n)]


def panel(axis: Axes, title: str, image: NDArray[np.float32] | None, aspect: float) -> None:
    """Draw a titled frame without ticks, with the image between its 1st and 99th percentile."""
    axis.set_title(title, fontsize=10, y=1)
    for hidden in (axis.xaxis, axis.yaxis):  # no ticks would be made all the same, and then removed
        hidden.set_visible(False)
    if image is not None:
        finite = image[np.isfinite(image)]
        low, high = np.percentile(finite, (1, 99)) if finite.size else (0, 1)
        axis.imshow(image, cmap="gray", vmin=low, vmax=high, interpolation="nearest", aspect=aspect)


def draw_levels(
    figure: Figure,
    axis: Axes,
    title: str,
    levels: NDArray[Any],
    aspect: float,
    cmap: str = "viridis",
) -> None:
    """Draw a number from 0 to 1 for every voxel of a slice, with a colour bar."""
    panel(axis, title, None, aspect)
    shown = axis.imshow(
        np.asarray(levels, dtype=np.float32), cmap=cmap, vmin=0, vmax=1, interpolation="nearest",
        aspect=aspect,
    )  # fmt: skip
    figure.colorbar(shown, ax=axis, shrink=0.75)


def overlay(
    axis: Axes, labels: NDArray[Any], colours: Mapping[int, Any], aspect: float, alpha: float
) -> None:
    """Draw labels in their colours, with an outline if they are half transparent."""
    painted = np.zeros((*labels.shape, 4))
    for value, colour in colours.items():
        mask = labels == value
        painted[mask] = to_rgba(colour, alpha)
        if alpha < 0.5 and mask.any() and not mask.all():
            axis.contour(mask, levels=[0.5], colors=[colour], linewidths=1)
    axis.imshow(painted, interpolation="nearest", aspect=aspect)
