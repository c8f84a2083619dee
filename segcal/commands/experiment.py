"""What the commands that train from a YAML file share: options, and how a training may end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from segcal.commands.console import say
from segcal.commands.errors import user_errors

if TYPE_CHECKING:  # torch is imported when there is work to do
    from segcal.training.results import Trained

OPTIONS = {"setting": "--set"}
"""Options by what the library calls them, for messages."""
SetOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Replace a setting of the file: key=value, with dots in nested keys "
        "(training.epochs=3, terms.crac.margin_inner=3). May be given several times.",
    ),
]
ResumeOption = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue from the last checkpoint as if the training had not been stopped; start "
        "from the beginning if there is no checkpoint yet.",
    ),
]


@contextmanager
def training_begins() -> Iterator[None]:
    """Turn an error that a user can mend into a message that names options, and exit code 2."""
    from segcal.training.beginning import OutputInUseError

    with user_errors(OPTIONS):
        try:
            yield
        except OutputInUseError as error:
            raise ValueError(f"{error} (--resume, or --set output=FOLDER)") from None


@contextmanager
def training_ends(console: Console) -> Iterator[None]:
    """Say how a training ended that was interrupted (exit code 130) or diverged (1).

    Other errors keep their traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        say(console, "Interrupted: the same command with --resume goes on from there.", "red")
        raise typer.Exit(130) from None
    except FloatingPointError as error:
        say(console, f"Stopped: {error}.", "red")
        raise typer.Exit(1) from None


def say_trained(console: Console, done: Trained, early_stop: int | None) -> None:
    """Print the outcome of a training.

    Args:
        console: where it is printed.
        done: results of the training.
        early_stop: epochs without improvement after which the experiment stops; None: never.
    """
    ended = f"no improvement for {early_stop} epochs" if done.early else "done"
    say(
        console,
        f"{done.epochs} epochs, {ended}. Best: epoch {done.best_epoch}, validation {done.metric} "
        f"{done.best:.4f}. Written: {done.folder}",
    )
