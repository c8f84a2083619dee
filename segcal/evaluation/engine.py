"""Run one function on many items, in this process or in several on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection
from typing import TypeVar

from segcal.threads import cores, use_threads

Item = TypeVar("Item")
Result = TypeVar("Result")
CASES_PER_PROCESS = 4
"""Fewest cases per process, since starting a process costs some seconds of imports."""
AHEAD = 4
"""Most items per process that wait for earlier items, since results are yielded in order."""


def default_jobs(items: int) -> int:
    """Number of processes for so many items: one per core, if each has enough work."""
    return max(1, min(cores(), items // CASES_PER_PROCESS))


def run(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    lost: Callable[[Item, str], Result],
    jobs: int = 1,
) -> Generator[tuple[int, Result]]:
    """Yield index and result of every item, in order.

    At most ``AHEAD * jobs`` items are started and not yet yielded. If a process dies (for example,
    out of memory), the items under way are run again, each in a process of its own, and an item
    whose own process dies is lost. However this process ends, by Ctrl-C or killed, the others end
    with it.

    Args:
        function: takes an item and handles its errors; it can be pickled.
        items: items, which can be pickled.
        lost: takes an item and the reason why it has no result; returns a result instead.
        jobs: number of processes; 1 uses this process alone.
    """
    if jobs == 1:
        return in_order(lambda item: partial(function, item), items, lambda: 1)
    return _in_processes(function, items, lost, jobs)


def in_order(
    start: Callable[[Item], Callable[[], Result]], items: Sequence[Item], ahead: Callable[[], int]
) -> Generator[tuple[int, Result]]:
    """Yield index and result of every item, in order.

    Args:
        start: starts an item and returns the function that waits for its result.
        items: all items.
        ahead: returns how many items may be started and not yet yielded at the moment; 1 or more.
    """
    rest = iter(items)
    waiting: deque[Callable[[], Result]] = deque()
    for index in range(len(items)):
        waiting.extend(map(start, islice(rest, max(0, ahead() - len(waiting)))))
        yield index, waiting.popleft()()


def _in_processes(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    lost: Callable[[Item, str], Result],
    jobs: int,
) -> Generator[tuple[int, Result]]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit OpenMP's locks
    theirs, ours = context.Pipe(duplex=False)

    def pool_of(processes: int) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(
            processes, mp_context=context, initializer=_begin, initargs=(theirs,)
        )

    def alone(item: Item) -> Result:
        with pool_of(1) as pool:
            try:
                return pool.submit(function, item).result()
            except BrokenProcessPool:
                return lost(item, "the process that worked on it died; out of memory?")

    pool = pool_of(jobs)

    def start(item: Item) -> Callable[[], Result]:
        nonlocal pool
        try:
            future = pool.submit(function, item)
        except BrokenProcessPool:
            pool.shutdown()
            pool = pool_of(jobs)
            future = pool.submit(function, item)

        def result() -> Result:
            try:
                return future.result()
            except BrokenProcessPool:
                return alone(item)

        return result

    with theirs, ours:
        try:
            yield from in_order(start, items, lambda: AHEAD * jobs)
        finally:
            ours.close()  # ends the processes
            pool.shutdown()


def _begin(parent: Connection) -> None:
    """Use one thread, leave Ctrl-C to the process that started this one, and end with it."""
    use_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """Exit at once when the other end of the pipe is closed; nothing is ever sent."""
    parent.poll(None)
    os._exit(1)
