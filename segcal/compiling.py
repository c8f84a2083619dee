"""Loops over voxels, compiled by Numba when they are first needed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], *, fastmath: Collection[str] = ()) -> Callable[P, R]:
    """Compile without the interpreter's lock; keep the result on disk where there is a place.

    Numba is imported here and not above, so that programs which need no such loop start faster.

    Args:
        function: a loop that Numba understands.
        fastmath: liberties that LLVM may take with floating-point numbers; none by default.
    """
    from numba import njit

    options = {"nogil": True, "fastmath": set(fastmath)}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written
        return njit(**options)(function)
