"""Work that is shared among threads, because compiled code releases the interpreter's lock."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["cores", "in_threads", "threads_for", "use_threads"]

Item = TypeVar("Item")
Result = TypeVar("Result")
NUMBER = "OMP_NUM_THREADS"
"""Variable of the environment with the number of threads of OpenMP, which torch reads, too."""
OF_MKL = "MKL_NUM_THREADS"
"""The same of a library of torch, which comes before the other where both are set."""


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def use_threads(number: int) -> None:
    """Let this process use so many threads, here and in torch, even if torch is imported later."""
    for name in (NUMBER, OF_MKL):
        os.environ[name] = str(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(number)


def threads_for(items: int) -> int:
    """Number of threads for this many items: at most as many as torch has, and at least one.

    Torch is not imported only to be asked: it has a thread for each core, unless told otherwise.
    """
    if (torch := sys.modules.get("torch")) is not None:
        most = torch.get_num_threads()
    else:
        told = os.environ.get(NUMBER, "").partition(",")[0].strip()
        most = int(told) if told.isdigit() and int(told) else cores()
    return max(1, min(most, items))


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results of the work on every item, in their order.

    Args:
        work: function that may be called from several threads at once.
        items: items of similar effort; a single item is processed in the calling thread.
    """
    threads = threads_for(len(items))
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
