"""Run one function on many items, in this process or in several on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
CASES_PER_PROCESS = 4
"""Starting a process costs some seconds of imports: fewer cases are not worth one."""


def default_jobs(items: int) -> int:
    """Processes for so many items: one a core, as far as each has some work to do."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(cores or 1, items // CASES_PER_PROCESS))


def run(
    function: Callable[[Item], Result], items: Sequence[Item], jobs: int = 1
) -> Generator[tuple[int, Result]]:
    """Yield index and result of every item as they are done; in order with one job.

    If a process dies (out of memory, say), what is not done is run in this one.

    Args:
        function: takes an item, catches what may go wrong with it, can be pickled.
        items: can be pickled.
        jobs: processes.
    """
    left = dict(enumerate(items))
    if jobs > 1:
        yield from _in_processes(function, left, jobs)
    for index in list(left):
        yield index, function(left.pop(index))


def _in_processes(
    function: Callable[[Item], Result], left: dict[int, Item], jobs: int
) -> Iterator[tuple[int, Result]]:
    """Yield results and take their items out of `left`."""
    context = multiprocessing.get_context("spawn")  # a fork would inherit OpenMP's locks
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_start) as pool:
        futures = {pool.submit(function, item): index for index, item in left.items()}
        try:
            for future in as_completed(futures):
                index = futures[future]
                yield index, future.result()
                del left[index]
        except BrokenProcessPool:
            return
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start() -> None:
    """One thread a process; Ctrl-C is for the process that started us."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
