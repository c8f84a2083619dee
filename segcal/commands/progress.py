"""One kind of progress bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from segcal.commands.console import open_console


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar on stderr; yield a function that advances it by one and names what was done."""
    with progress_bars({what: total}) as (advance,):
        yield advance


@contextmanager
def progress_bars(totals: Mapping[str, int]) -> Iterator[list[Callable[[str], None]]]:
    """Show a bar for each step, as :func:`progress_bar` does for one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[last]}", markup=False),
    )
    with Progress(*columns, console=open_console(stderr=True)) as progress:
        tasks = [progress.add_task(what, total=n, last="") for what, n in totals.items()]

        def advancing(task: TaskID) -> Callable[[str], None]:
            return lambda name: progress.update(task, advance=1, last=name)

        yield [advancing(task) for task in tasks]
