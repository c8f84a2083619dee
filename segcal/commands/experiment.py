"""What all commands that train from a YAML file share: options, and how a training may end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

from segcal.commands.console import say

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="A setting in place of that of the file: key=value, with dots "
        "(training.epochs=3, terms.crac.margin_inner=3); as often as needed.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the last checkpoint, as if the training had not been stopped; start "
        "where there is none yet.",
    ),
]


@contextmanager
def training_ends(console: Console) -> Iterator[None]:
    """Say how a training ended that was interrupted (exit code 130) or diverged (1).

    Whatever else fails in there keeps its traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        say(console, "Interrupted: the same command with --resume goes on from there.", "red")
        raise typer.Exit(130) from None
    except FloatingPointError as error:
        say(console, f"Stopped: {error}.", "red")
        raise typer.Exit(1) from None
