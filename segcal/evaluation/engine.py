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

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
CASES_PER_PROCESS = 4
"""Starting a process costs some seconds of imports: fewer cases are not worth one."""
AHEAD = 4
"""Items per process that may be started and not yet yielded: what order costs in memory."""


def default_jobs(items: int) -> int:
    """Processes for so many items: one a core, as far as each has some work to do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, items // CASES_PER_PROCESS))


def run(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int = 1
) -> Generator[tuple[int, Result]]:
    """Yield index and result of every item, in order.

    At most ``AHEAD * jobs`` items are started and not yet yielded. If a process dies (out of
    memory, say), what is not done is run in this one. However this one ends, by Ctrl-C or killed,
    the others end with it.

    Args:
        function: takes an item, catches what may go wrong with it, can be pickled.
        items: can be pickled.
        jobs: processes.
    """
    if jobs == 1:
        return in_order(lambda item: partial(function, item), items, lambda: 1)
    return _in_processes(function, items, jobs)


def in_order(
    start: Callable[[Item], Callable[[], Result]], items: Sequence[Item], ahead: Callable[[], int]
) -> Generator[tuple[int, Result]]:
    """Yield index and result of every item, in order.

    Args:
        start: starts an item and returns the function that waits for its result.
        items: all there are.
        ahead: how many may, just now, be started and not yet yielded; 1 or more.
    """
    rest = iter(items)
    waiting: deque[Callable[[], Result]] = deque()
    for index in range(len(items)):
        waiting.extend(map(start, islice(rest, max(0, ahead() - len(waiting)))))
        yield index, waiting.popleft()()


def _in_processes(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int
) -> Generator[tuple[int, Result]]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit OpenMP's locks
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin, initargs=(theirs,))

    def start(item: Item) -> Callable[[], Result]:
        try:
            future = pool.submit(function, item)
        except BrokenProcessPool:
            return partial(function, item)

        def result() -> Result:
            try:
                return future.result()
            except BrokenProcessPool:
                return function(item)

        return result

    with theirs, pool, ours:  # ours is closed first, which ends the processes
        yield from in_order(start, items, lambda: AHEAD * jobs)


def _begin(parent: Connection) -> None:
    """One thread a process; Ctrl-C is for the process that started us, whose end is ours."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """Leave in the middle of whatever it is when the other end is closed; nothing is ever sent."""
    parent.poll(None)
    os._exit(1)
