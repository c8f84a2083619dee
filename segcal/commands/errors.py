"""What a user sees when something is wrong with what they gave."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from segcal.commands.console import open_console


@contextmanager
def user_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn what a user can mend (ValueError, OSError) into its message and exit code 2.

    Wrap the checks and the files, not hours of work: what fails in there needs its traceback.

    Args:
        options: names of options by that of the argument a message begins with, before a colon or a
            space. Names of arguments that folders often have do not belong in there.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        text = re.sub(
            r"^\w+(?=[: ])", lambda word: (options or {}).get(word[0], word[0]), str(error)
        )
        open_console(stderr=True).print(
            f"Error: {text}", style="red", markup=False, highlight=False, soft_wrap=True
        )  # paths stay in one piece
        raise typer.Exit(2) from error
