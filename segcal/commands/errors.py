"""What a user sees when something is wrong with what they gave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn what a user can mend (ValueError, OSError) into its message and exit code 2.

    Wrap the checks and the files, not hours of work: what fails in there needs its traceback.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        Console(stderr=True).print(
            f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True
        )  # paths stay in one piece
        raise typer.Exit(2) from error
