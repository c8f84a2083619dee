"""Options of the intervals of volumes, alike in every command that states some."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

GROUP = "Intervals of volumes"
"""Group of the options in the help."""


OPTIONS = {"intervals": "--intervals", "interval": "--interval", "level": "--level"}
"""Options by the arguments they become."""


class Interval(str, Enum):
    """How intervals are made of what was fitted to validation cases."""

    conformal = "conformal"
    inflated = "inflated"


Intervals = Annotated[
    Path | None,
    typer.Option(
        "--intervals",
        rich_help_panel=GROUP,
        help="File that segcal trust fit wrote; without it they are as wide as if all voxels of a "
        "structure erred together.",
    ),
]
IntervalKind = Annotated[
    Interval,
    typer.Option(
        "--interval",
        rich_help_panel=GROUP,
        help="With --intervals: conformal trusts nothing but that new cases are like those of "
        "validation; inflated needs fewer cases and trusts that errors are normal.",
    ),
]
Level = Annotated[
    float,
    typer.Option(
        "--level", rich_help_panel=GROUP, help="Share of true volumes that lie in their intervals."
    ),
]
AnyModel = Annotated[
    bool,
    typer.Option(
        "--any-model", rich_help_panel=GROUP, help="Take --intervals of another model, too."
    ),
]
