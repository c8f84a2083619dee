"""Draws the least sure slice of a case: mask, probability and doubt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from segcal.reporting.legends import add_legend
from segcal.reporting.panels import SIDE, draw_levels, overlay, palette, panel

FAINT = 0.02
"""Probability above which a voxel is included in the picture."""
LEAST = 32
"""Fewest voxels that a picture shows in each direction."""


def plot_unsure(
    prediction: NDArray[Any],
    probability: NDArray[Any],
    doubt: NDArray[Any],
    *,
    name: str,
    names: Mapping[int, str],
    spacing_mm: tuple[float, ...],
    title: str,
    image: NDArray[Any] | None = None,
) -> Figure:
    """Draw a structure in the slice across the first axis in which it is least sure.

    This is the slice with the most expected errors, ``sum min(p, 1 - p)``.

    Args:
        prediction: labels ``(z, y, x)``.
        probability: probability of the structure, same shape.
        doubt: probability that the label is wrong, same shape.
        name: name of the structure.
        names: names of the foreground labels, by value.
        spacing_mm: voxel size along the axes.
        title: title of the figure.
        image: grey values, same shape, or None.
    """
    z = least_sure_slice(probability)
    window = _window(probability[z])
    labels, p, wrong = prediction[z][window], probability[z][window], doubt[z][window]
    below = None if image is None else np.asarray(image[z][window], dtype=np.float32)
    aspect = spacing_mm[1] / spacing_mm[2]
    panels = 3 + (below is not None)
    tall = min(max(aspect * labels.shape[0] / labels.shape[1], 0.3), 2.0)
    figure = Figure(figsize=(SIDE * panels + 0.8, SIDE * tall + 1.2), layout="constrained")
    axes = iter(figure.subplots(1, panels))
    colours = dict(zip(names, palette(len(names)), strict=True))
    if below is not None:
        panel(next(axes), "image", below, aspect)
    axis = next(axes)
    panel(axis, "prediction", below, aspect)
    overlay(axis, labels, colours, aspect, alpha=1 if below is None else 0.45)
    draw_levels(figure, next(axes), f"probability of {name}", p, aspect)
    draw_levels(figure, next(axes), "doubt", wrong, aspect, cmap="magma")
    patches = [Patch(color=colours[v], label=names[v]) for v in names if (labels == v).any()]
    add_legend(
        figure, patches, loc="outside lower left", ncols=panels, frameon=False, fontsize="small"
    )
    figure.suptitle(f"{title}, slice {z + 1} of {len(prediction)}, as stored", fontsize=11)
    return figure


def least_sure_slice(probability: NDArray[Any]) -> int:
    """Slice across the first axis with the most expected errors, ``sum min(p, 1 - p)``.

    Args:
        probability: ``(z, y, x)``.
    """
    errors = [float(np.minimum(p, 1 - p).sum(dtype=np.float64)) for p in probability]
    return int(np.argmax(errors))


def _window(p: NDArray[Any]) -> tuple[slice, ...]:
    """Part of a slice around the voxels that may belong to a structure, half as large again."""
    found = np.nonzero(p > FAINT)
    if not len(found[0]):
        return (slice(None),) * p.ndim
    ends = []
    for at, n in zip(found, p.shape, strict=True):
        start, stop = int(at.min()), int(at.max()) + 1
        grow = max((stop - start) // 4, (LEAST - stop + start) // 2, 0)
        ends.append(slice(max(0, start - grow), min(n, stop + grow)))
    return tuple(ends)
