"""Draws one slice of a case: image, reference, prediction, confidence and errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from segcal.reporting.legends import add_legend
from segcal.reporting.panels import SIDE, draw_levels, overlay, palette, panel

IGNORED = "ignored"
ERRORS = {
    "false positive": "#d1495b", "false negative": "#2e86ab", "wrong class": "#edae49",
    IGNORED: "#b0b0b0",
}  # fmt: skip


def plot_case(
    reference: NDArray[Any],
    prediction: NDArray[Any],
    confidence: NDArray[Any] | None,
    *,
    names: Mapping[int, str],
    spacing_mm: tuple[float, ...],
    title: str,
    image: NDArray[Any] | None = None,
    ignore_index: int | None = None,
) -> Figure:
    """Draw the slice across the first axis with the most errors, as it is stored.

    Labels are drawn over the image, if there is one, with an outline around each class. Errors are
    false positives (foreground where the reference has none), false negatives, and foreground of
    the wrong class.

    Args:
        reference: labels ``(z, y, x)``.
        prediction: labels, same shape.
        confidence: largest probability, same shape; None without probabilities.
        names: names of the foreground labels, by value.
        spacing_mm: voxel size along the axes.
        title: title of the figure.
        image: grey values, same shape, or None.
        ignore_index: reference label in which nothing is an error.
    """
    errors = error_map(prediction, reference, ignore_index)
    z = _slice(errors, reference)
    below = None if image is None else np.asarray(image[z], dtype=np.float32)
    aspect = spacing_mm[1] / spacing_mm[2]
    if ignore_index is not None:
        names = {**names, ignore_index: IGNORED}
    present = [v for v in names if (reference[z] == v).any() or (prediction[z] == v).any()]
    panels = 3 + (image is not None) + (confidence is not None)
    columns = panels - 1
    _, high, wide = reference.shape
    tall = min(max(aspect * high / wide, 0.3), 2.0)
    lines = max(2, -(-len(present) // columns))
    size = (SIDE * panels, SIDE * tall + 0.8 + 0.22 * lines)
    figure = Figure(figsize=size, layout="constrained")
    axes = iter(figure.subplots(1, panels))
    colours = dict(zip(names, palette(len(names)), strict=True))
    if ignore_index is not None:
        colours[ignore_index] = ERRORS[IGNORED]
    if below is not None:
        panel(next(axes), "image", below, aspect)
    for name, labels in (("reference", reference[z]), ("prediction", prediction[z])):
        axis = next(axes)
        panel(axis, name, below, aspect)
        overlay(axis, labels, colours, aspect, alpha=1 if below is None else 0.45)
    if confidence is not None:
        draw_levels(figure, next(axes), "confidence", confidence[z], aspect)
    axis = next(axes)
    panel(axis, "errors", below, aspect)
    overlay(axis, errors[z], dict(enumerate(ERRORS.values(), 1)), aspect, alpha=0.85)
    _add_legends(figure, errors[z], [(colours[v], names[v]) for v in present], columns)
    figure.suptitle(f"{title}, slice {z + 1} of {len(reference)}, as stored", fontsize=11)
    return figure


def error_map(
    prediction: NDArray[Any], reference: NDArray[Any], ignore_index: int | None
) -> NDArray[np.uint8]:
    """Kind of error of every voxel: 0 for none, else the position (from 1) in ``ERRORS``."""
    kinds = [
        (prediction != 0) & (reference == 0),
        (prediction == 0) & (reference != 0),
        prediction != reference,
    ]
    if ignore_index is not None:
        return np.select([reference == ignore_index, *kinds], [4, 1, 2, 3], 0).astype(np.uint8)
    return np.select(kinds, [1, 2, 3], 0).astype(np.uint8)


def _slice(errors: NDArray[np.uint8], reference: NDArray[Any]) -> int:
    """The slice with the most errors; if there are none, the slice with the most foreground."""
    wrong = ((errors > 0) & (errors < 4)).sum((1, 2))
    return int(np.argmax(wrong if wrong.any() else (reference != 0).sum((1, 2))))


def _add_legends(
    figure: Figure, errors: NDArray[np.uint8], labels: list[tuple[Any, str]], columns: int
) -> None:
    """Add legends of the colours of the labels, and of the errors that occur."""
    shown = {"frameon": False, "fontsize": "small"}
    kinds = [k for v, k in enumerate(ERRORS, 1) if (errors == v).any()]
    patches = [Patch(color=ERRORS[k], label=k) for k in kinds]
    figure.legend(handles=patches, loc="outside lower right", ncols=2, **shown)
    patches = [Patch(color=colour, label=name) for colour, name in labels]
    add_legend(figure, patches, loc="outside lower left", ncols=columns, **shown)
