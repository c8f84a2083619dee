"""Options for intervals of volumes, shared by every command that reports them."""

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
        help="File that segcal trust fit wrote. Without it, intervals are as wide as if all voxels "
        "of a structure erred together.",
    ),
]
IntervalKind = Annotated[
    Interval,
    typer.Option(
        "--interval",
        rich_help_panel=GROUP,
        help="With --intervals: conformal assumes only that new cases are like the validation "
        "cases; inflated needs fewer cases and assumes that errors are normally distributed.",
    ),
]
Level = Annotated[
    float,
    typer.Option(
        "--level",
        rich_help_panel=GROUP,
        help="Share of structures whose interval is to hold the true volume.",
    ),
]
AnyModel = Annotated[
    bool,
    typer.Option(
        "--any-model",
        rich_help_panel=GROUP,
        help="Accept --intervals that were fitted to another model.",
    ),
]
