"""Options for running many cases, shared by every command that goes through a folder."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

GROUP = "Running"
"""Group of the options in the help."""

OPTIONS = {"scheduler": "--scheduler"}
"""Options by the arguments they become."""


class Engine(str, Enum):
    """What runs the cases."""

    processes = "processes"
    dask = "dask"


Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        "-p",
        rich_help_panel=GROUP,
        min=1,
        help="Number of cases at the same time, each held in memory. Default: one per core, but "
        "no more than a quarter of the cases.",
    ),
]
RunsOn = Annotated[
    Engine,
    typer.Option(
        "--engine",
        rich_help_panel=GROUP,
        help="What runs the cases: processes on this machine, or a Dask cluster (needs "
        'pip install "segcal[dask]"). The numbers are the same.',
    ),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        "--scheduler",
        rich_help_panel=GROUP,
        help="With --engine dask: tcp://HOST:PORT of a running scheduler, or its scheduler file. "
        "Its workers must see the files under the same paths. Default: a cluster of --processes on "
        "this machine. Connect only to a scheduler that you trust.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        rich_help_panel=GROUP,
        help="Continue an earlier run into the same folder that was interrupted or in which some "
        "case failed. Results for files that have not changed are kept.",
    ),
]
