"""Work that is shared out among threads: compiled code lets go of the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["in_threads", "threads_for"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def threads_for(items: int) -> int:
    """How many threads so many items are worth: as many as torch has, and at least one."""
    return max(1, min(torch.get_num_threads(), items))


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results of the work on every item, in their order.

    Args:
        work: may be called from several threads at once.
        items: of like effort; a single one is worked on in the thread that calls.
    """
    threads = threads_for(len(items))
    if threads == 1:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))
