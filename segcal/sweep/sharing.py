"""How threads share the blocks of a loop: each takes the next number of one counter."""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic


@intrinsic  # type: ignore[untyped-decorator]
def take(typingctx: Any, counter: Any) -> Any:
    """Return ``counter[0]``, int64, and add 1 to it; no two threads get the same.

    It is for compiled code. Every thread calls a loop once, and the loop takes blocks until there
    is none, because a call from Python costs as much as some thousand voxels.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        one = context.get_constant(types.int64, 1)
        return builder.atomic_rmw("add", array.data, one, "monotonic")

    return types.int64(counter), generate
