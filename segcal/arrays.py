"""Checks and conversions of NumPy arrays, which need no torch.

Importing torch takes as long as the evaluation of a small data set, so that whatever works on
arrays alone takes what it needs from here, and :mod:`segcal.tensors` the rest.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROBABILITY_TOLERANCE = 1e-3
"""How far outside [0, 1] a probability may lie."""
MANY = 1000
"""Number of probabilities that is enough to see whether they are masks or doubly normalised."""
WORTH_TORCH = 2**19
"""Number of float16 values from which on torch is imported to read them."""


def check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ValueError naming the argument unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}: expected one of {tuple(choices)}, got {value!r}")


def as_array(x: Any) -> NDArray[Any]:
    """Return `x` (array, tensor on any device, or nested list) as a NumPy array."""
    torch = sys.modules.get("torch")  # without which there are no tensors
    if torch is not None and isinstance(x, torch.Tensor):
        return (x.float() if x.dtype == torch.bfloat16 else x).numpy(force=True)
    return np.asarray(x)


def copy_floats(values: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    """Copy floating values into an array of a type with fast arithmetic, and return this array.

    Args:
        values: floating, any shape.
        out: float32 or float64 of the same shape, contiguous.
    """
    if values.dtype == np.float16 and ("torch" in sys.modules or values.size >= WORTH_TORCH):
        import torch  # which reads float16 many times faster than NumPy, but takes long to import

        torch.from_numpy(out).copy_(torch.from_numpy(values.copy()))  # it may be read-only
    else:
        out[...] = values
    return out


def distinct_labels(labels: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """Return the labels that occur, ascending, as :func:`numpy.unique` does but faster.

    Args:
        labels: integer or bool ``(*S)``. Of small integers, the first of each run of equal labels
            is looked at, a piece at a time.
    """
    kind = labels.dtype
    if kind.itemsize > 2 or kind.kind not in "iub" or not kind.isnative:
        return np.unique(labels)
    bits = np.dtype(f"u{kind.itemsize}")
    flat = labels.reshape(-1)
    seen = np.zeros(1 << 8 * bits.itemsize, bool)
    for start in range(0, flat.size, 1 << 17):
        piece = np.ascontiguousarray(flat[start : start + (1 << 17)]).view(bits)
        seen[piece[:1]] = True
        seen[piece[1:][piece[1:] != piece[:-1]]] = True
    return np.sort(np.flatnonzero(seen).astype(bits).view(kind))


def holds_masks(x: Any) -> bool:
    """Whether probabilities ``(K, ...)``, array or tensor, are 0 and 1 alone, both in a channel.

    A softmax or sigmoid does not give this at the border of a structure; one-hot masks do.
    """
    few = x.reshape(len(x), -1)[:, :MANY]  # which settles it for most
    if not all(bool(((part == 0) | (part == 1)).all()) for part in (few, x)):
        return False
    return any(bool((channel == 0).any()) and bool((channel == 1).any()) for channel in x)


def applied_twice(low: float, high: float, num_classes: int, *, regions: bool = False) -> str:
    """Return a message if probabilities look like softmax, or sigmoid, applied twice; else "".

    The second softmax of K classes gives at least ``1 / (e + K - 1)`` and at most ``e / (e + K -
    1)``, the second sigmoid 1/2 to .7311; a single one makes most voxels more confident than that.
    A network that is undecided everywhere, as at the beginning of a training, does not get near the
    upper bound of the softmax.

    Args:
        low: smallest probability of a case.
        high: largest probability of the case.
        num_classes: K.
        regions: whether every channel is a sigmoid of its own.
    """
    least, name = (math.e + num_classes - 1) ** -1, "softmax"
    most = math.e * least
    if regions:
        least, most, name = 0.5, math.e / (1 + math.e), "sigmoid"
    if low < least - PROBABILITY_TOLERANCE or high > most + PROBABILITY_TOLERANCE:
        return ""
    if not regions and high < (1 / num_classes + most) / 2:
        return ""
    return (
        f"all probabilities lie between {least:.4f} and {most:.4f}, as if the {name} were applied "
        "twice; is it in the network already?"
    )
