"""Draws figures as PNG, once for both the page and a file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from segcal.io.files import whole_file

DPI = 120
FAST = 1
"""Compression of PNG in half the time; without the opacity, files are no larger."""
LETTERS = 120
"""Letters per inch in a font of one point."""


@dataclass(frozen=True)
class Picture:
    """A picture, and a text for readers who cannot see it."""

    png: bytes
    alt: str

    @property
    def uri(self) -> str:
        """The picture as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    def save(self, path: Path) -> None:
        """Write it as a file, whole or not at all."""
        with whole_file(path) as temporary:
            temporary.write_bytes(self.png)


def wrapped(title: str, inches: float, points: float) -> str:
    """A title, broken into lines that fit a figure of this width."""
    return fill(title, int(inches * LETTERS / points))


def draw(figure: Figure, alt: str) -> Picture:
    """Draw a figure as PNG, with long titles wrapped, and ``$`` and ``_`` in names taken literally.

    The numbers of log axes are still set as formulas.

    Args:
        figure: figure to draw.
        alt: what it shows, in words.
    """
    log = [axes for axes in figure.axes if axes.get_yscale() == "log"]
    numbers = {label for axes in log for label in axes.get_yticklabels(which="both")}
    for text in figure.findobj(Text):
        text.set_parse_math(text in numbers)
    for title in figure.texts:
        points = float(title.get_fontsize())
        title.set_text(wrapped(title.get_text(), figure.get_figwidth(), points))
    figure.set_dpi(DPI)  # before the layout, so that texts are measured as they are drawn
    canvas = FigureCanvasAgg(figure)
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)  # once: savefig would lay everything out and draw it twice
        figure.set_layout_engine("none")
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            if not axis.get_label_text():
                axis.set_label_coords(0, 0)  # else its numbers are measured to place no name
    canvas.draw()
    drawn = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")  # it is opaque
    buffer = io.BytesIO()
    drawn.save(buffer, "png", dpi=(DPI, DPI), compress_level=FAST)
    return Picture(buffer.getvalue(), alt)
