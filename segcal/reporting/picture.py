"""Figures as PNG, drawn once for the page and for a file."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from segcal.io.files import whole_file

DPI = 120


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


def draw(figure: Figure, alt: str) -> Picture:
    """Draw a figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    return Picture(buffer.getvalue(), alt)
