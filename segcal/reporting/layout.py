"""Lays out figures whose panels, titles and legend have known sizes.

Matplotlib's own layout measures every text, which takes as long as drawing it. Here the number of
lines of a title and the number of digits beside an axis say how much room they need.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from segcal.reporting.picture import wrapped

TITLE_POINTS = 12
LINE = 0.19
"""Height in inches of a line of a title or of a legend."""
NUMBERS = 0.2
"""Height in inches of the numbers below an axis, with its ticks."""
LABEL = 0.25
"""Height in inches of the name of an axis."""
DIGIT = 0.09
"""Width in inches of a digit beside an axis."""
EDGE = 0.2
"""Inches at the edges of a figure; half of a number may stand there."""


def lay_out(
    figure: Figure,
    axes: Sequence[Sequence[Axes]],
    title: str,
    *,
    left: float,
    between: float,
    right: float = EDGE,
    legend_lines: int = 0,
    apart: float | None = None,
) -> None:
    """Add the title of a figure, and place its panels between the title and the legend.

    Args:
        figure: figure with the axes of one grid.
        axes: axes in rows, all with a name below.
        title: title of the figure, may be empty.
        left: inches to the left of the first column.
        between: inches between columns.
        right: inches to the right of the last column.
        legend_lines: number of lines of the legend at the bottom.
        apart: inches between rows, beside their titles; None leaves them as they are.
    """
    width, height = figure.get_size_inches()
    lines = max((axis.get_title().count("\n") + 1 for row in axes for axis in row), default=0)
    above, below = LINE * lines + 0.1, NUMBERS + LABEL + 0.1 + LINE * legend_lines
    if title:
        title = wrapped(title, width, TITLE_POINTS)
        figure.suptitle(title, y=1 - 0.08 / height, va="top", fontsize=TITLE_POINTS)
        above += 0.1 + LINE * (title.count("\n") + 1)
    columns, rows = len(axes[0]), len(axes)
    wide = (width - left - right - between * (columns - 1)) / columns
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, bottom=below / height, top=1 - above / height,
        wspace=between / wide,
    )  # fmt: skip
    if apart is not None:
        gap = apart + LINE * lines
        high = (height - above - below - gap * (rows - 1)) / rows
        figure.subplots_adjust(hspace=gap / high)


def room_for_numbers(axes: Sequence[Axes]) -> float:
    """Inches that the numbers and the name beside vertical axes need."""
    return DIGIT * (_longest([axis.yaxis for axis in axes]) + 1) + NUMBERS + LABEL


def half_a_number(axes: Sequence[Axes]) -> float:
    """Inches by which a number below the end of a horizontal axis may stand out."""
    return max(EDGE, DIGIT * (_longest([axis.xaxis for axis in axes]) + 1) / 2)


def _longest(axes: Sequence[Axis]) -> int:
    """Letters of the longest number."""
    numbers = (axis.get_major_formatter().format_ticks(list(axis.get_ticklocs())) for axis in axes)
    return max((len(number) for of_axis in numbers for number in of_axis), default=0)
