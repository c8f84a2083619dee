"""Explains lines and colours of a figure: legends, a colour bar of many classes, epochs."""

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
"""Colours of lines: Matplotlib's ten, and ten that differ from them."""
MOST_CLASSES = 20
"""Most classes that a legend names one by one."""
TICKS = 5
"""Most ticks of a colour bar."""
NAME_WIDTH = 26
"""Most letters of a name in a line."""
ENTRY, MARGIN = 0.2, 0.8
"""Height in inches of a line of a legend at the side, and of its margins together."""


def marker(points: int) -> str:
    """Marker of a line; a line of a single point would be invisible without one."""
    return "o" if points == 1 else ""


def label_epochs(axis: Axes) -> None:
    """Label the horizontal axis as epochs, in whole numbers even for a single epoch."""
    axis.set_xlabel("epoch")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def shades(classes: int) -> Sequence[Any]:
    """Colours of classes in the order of their numbers."""
    return list(mpl.colormaps["viridis"](np.linspace(0, 0.92, classes)))


def class_colours(classes: int) -> Sequence[Any]:
    """Colours that tell classes apart; many classes get shades."""
    return COLOURS[:classes] if classes <= MOST_CLASSES else shades(classes)


def add_legend(parent: Figure | Axes, handles: Sequence[Any], **options: Any) -> Legend:
    """Add a legend with the labels of the handles.

    Matplotlib hides labels that begin with ``_``; here they are shown.

    Args:
        parent: figure or axes.
        handles: labelled artists.
        options: options of Matplotlib's legend.
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
        figure: figure to add it to.
        axes: axes beside which it stands.
        names: names of the classes.
        colours: colours of the classes.
    """
    last = len(names) - 1
    ticks = [round(i * last / (TICKS - 1)) for i in range(TICKS)]
    colour_map = ListedColormap(list(colours))
    bar = figure.colorbar(ScalarMappable(Normalize(0, last), colour_map), ax=axes, label="class")
    named = [fill(f"{k}: {names[k]}" if k in (0, last) else str(k), NAME_WIDTH) for k in ticks]
    bar.set_ticks(ticks, labels=named, fontsize="small")
