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
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    lost: Callable[[Item, str], Result],
    jobs: int = 1,
) -> Generator[tuple[int, Result]]:
    """Yield index and result of every item, in order.

    At most ``AHEAD * jobs`` items are started and not yet yielded. If a process dies (out of
    memory, say), what was under way is run again, one by one in a process each, and an item whose
    own process dies is lost. However this process ends, by Ctrl-C or killed, the others end with
    it.

    Args:
        function: takes an item, catches what may go wrong with it, can be pickled.
        items: can be pickled.
        lost: takes an item and why it has no result; gives the result instead.
        jobs: processes; 1 is this one alone.
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
        items: all there are.
        ahead: how many may, just now, be started and not yet yielded; 1 or more.
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
    """One thread a process; Ctrl-C is for the process that started us, whose end is ours."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """Leave in the middle of whatever it is when the other end is closed; nothing is ever sent."""
    parent.poll(None)
    os._exit(1)
