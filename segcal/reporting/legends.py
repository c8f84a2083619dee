"""What lines and colours of a figure mean: legends, a colour bar of many classes, epochs."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator

COLOURS = (
    *(f"C{i}" for i in range(10)),
    "black", "gold", "navy", "lime", "magenta",
    "darkgreen", "aquamarine", "maroon", "blue", "lightsalmon",
)  # fmt: skip
"""Of lines, ten that are usual and ten that differ from them."""
MOST_CLASSES = 20
"""Classes up to which a legend names each."""
TICKS = 5
"""Of a colour bar, at most."""
NAME_WIDTH = 26
"""Letters of a name in a line."""
ENTRY, MARGIN = 0.2, 0.8
"""Inches of a line of a legend at the side, and of what lies above and below all of them."""


def marker(points: int) -> str:
    """Of a line: one of a single point would not be seen."""
    return "o" if points == 1 else ""


def label_epochs(axis: Axes) -> None:
    """Say that an axis counts epochs, in whole numbers even of a single one."""
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def shades(classes: int) -> Sequence[Any]:
    """Colours of classes in the order of their numbers."""
    return list(mpl.colormaps["viridis"](np.linspace(0, 0.92, classes)))


def class_colours(classes: int) -> Sequence[Any]:
    """Colours that tell classes apart; many are shaded."""
    return COLOURS[:classes] if classes <= MOST_CLASSES else shades(classes)


def add_legend(parent: Figure | Axes, handles: Sequence[Any], **options: Any) -> Legend:
    """Add a legend of what the handles are labelled.

    Matplotlib hides labels that begin with ``_``; these names may.

    Args:
        parent: figure or axes.
        handles: labelled artists.
        options: of Matplotlib's legend.
    """
    legend = parent.legend(handles, ["."] * len(handles), **options)
    for text, handle in zip(legend.get_texts(), handles, strict=True):
        text.set_text(fill(str(handle.get_label()), NAME_WIDTH))
    return legend


def add_side_legend(figure: Figure, handles: Sequence[Any], **options: Any) -> None:
    """Add a legend at the right of a figure, which grows until the legend fits."""
    place = {"loc": "outside right center", "frameon": False, "fontsize": "small"}
    legend = add_legend(figure, handles, **place, **options)
    lines = sum(text.get_text().count("\n") + 1 for text in legend.get_texts())
    figure.set_figheight(max(figure.get_figheight(), MARGIN + ENTRY * lines))


def add_class_bar(
    figure: Figure, axes: Sequence[Axes], names: Sequence[str], colours: Sequence[Any]
) -> None:
    """Add a colour bar of the classes by their number, with the names of the first and last.

    Args:
        figure: to add it to.
        axes: beside which it stands.
        names: of the classes.
        colours: of the classes.
    """
    last = len(names) - 1
    ticks = [round(i * last / (TICKS - 1)) for i in range(TICKS)]
    colour_map = ListedColormap(list(colours))
    bar = figure.colorbar(ScalarMappable(Normalize(0, last), colour_map), ax=axes, label="class")
    named = [fill(f"{k}: {names[k]}" if k in (0, last) else str(k), NAME_WIDTH) for k in ticks]
    bar.set_ticks(ticks, labels=named, fontsize="small")
