"""Figures as PNG, drawn once for the page and for a file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from matplotlib.figure import Figure
from matplotlib.text import Text

from segcal.io.files import whole_file

DPI = 120
LETTERS = 120
"""Of one point in an inch."""


@dataclass(frozen=True)
class Picture:
    """A picture, and words for those who do not see it."""

    png: bytes
    alt: str

    @property
    def uri(self) -> str:
        """The picture itself as an address."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    def save(self, path: Path) -> None:
        """Write it as a file, whole or not at all."""
        with whole_file(path) as temporary:
            temporary.write_bytes(self.png)


def wrapped(title: str, inches: float, points: float) -> str:
    """A title in lines that fit into a figure of this width."""
    return fill(title, int(inches * LETTERS / points))


def draw(figure: Figure, alt: str) -> Picture:
    """Draw a figure, in which ``$`` and ``_`` of names are letters and long titles are wrapped.

    The numbers of log axes stay formulas.

    Args:
        figure: to draw.
        alt: what it shows, in words.
    """
    log = [axes for axes in figure.axes if axes.get_yscale() == "log"]
    numbers = {label for axes in log for label in axes.get_yticklabels(which="both")}
    for text in figure.findobj(Text):
        text.set_parse_math(text in numbers)
    for title in figure.texts:
        points = float(title.get_fontsize())
        title.set_text(wrapped(title.get_text(), figure.get_figwidth(), points))
    if (engine := figure.get_layout_engine()) is not None:
        engine.execute(figure)  # once: savefig would lay everything out and draw it twice
        figure.set_layout_engine("none")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return Picture(buffer.getvalue(), alt)
