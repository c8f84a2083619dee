"""Work that is shared among threads, because compiled code releases the interpreter's lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["in_threads", "threads_for"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def threads_for(items: int) -> int:
    """Number of threads for this many items: at most as many as torch has, and at least one."""
    return max(1, min(torch.get_num_threads(), items))


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
