"""What a user sees when something is wrong with what they gave."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from segcal.commands.console import open_console


@contextmanager
def user_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Turn an error that a user can mend (ValueError, OSError) into its message and exit code 2.

    Wrap it around checks and access to files, not around hours of work: a failure there needs its
    traceback.

    Args:
        options: the option's name for each argument's name that a message may begin with, before a
            colon or a space. Leave out names of arguments that folders often have, too.
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
