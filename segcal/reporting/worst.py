"""What a case looks like: reference, prediction, confidence and errors in one slice."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from numpy.typing import NDArray

COLOURS = ("#00000000", "#3b6ea5", "#d9a13b", "#5a9e6f", "#c0504d", "#8064a2", "#4bacc6", "#9c6b3f")


def plot_case(
    reference: NDArray[Any],
    prediction: NDArray[Any],
    confidence: NDArray[Any] | None,
    *,
    spacing_mm: tuple[float, ...],
    title: str,
) -> Figure:
    """Draw the slice across the first axis with most errors.

    Args:
        reference: labels ``(z, y, x)``.
        prediction: labels, same shape.
        confidence: largest probability, same shape; None without probabilities.
        spacing_mm: voxel size along the axes.
        title: of the figure.
    """
    wrong = prediction != reference
    z = int(np.argmax(wrong.sum((1, 2)))) if wrong.any() else reference.shape[0] // 2
    aspect = spacing_mm[-2] / spacing_mm[-1]
    panels = 3 if confidence is None else 4
    figure = Figure(figsize=(3 * panels, 3.4), layout="constrained")
    axes = figure.subplots(1, panels)
    labels = ListedColormap([COLOURS[i % len(COLOURS)] if i else COLOURS[0] for i in range(256)])
    for axis, (name, array) in zip(
        axes, (("reference", reference[z]), ("prediction", prediction[z])), strict=False
    ):
        shown = array.astype(np.int64) % 256
        axis.imshow(shown, cmap=labels, vmin=0, vmax=255, interpolation="nearest", aspect=aspect)
        axis.set_title(name)
    if confidence is not None:
        levels = axes[2].imshow(
            np.asarray(confidence[z], dtype=np.float32), cmap="viridis", vmin=0.25, vmax=1,
            interpolation="nearest", aspect=aspect,
        )  # fmt: skip
        axes[2].set_title("confidence")
        figure.colorbar(levels, ax=axes[2], shrink=0.75)
    axes[-1].imshow(wrong[z], cmap="Greys", vmin=0, vmax=1, interpolation="nearest", aspect=aspect)
    axes[-1].set_title("errors")
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    figure.suptitle(f"{title}, slice {z + 1} of {reference.shape[0]}")
    return figure
