"""Maps of uncertainty: entropy and confidence of every voxel."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from segcal.arrays import as_array

__all__ = ["confidence_map", "entropy_map"]

Float = NDArray[np.float32]


def entropy_map(probs: Any, *, regions: bool = False) -> Float:
    """Entropy of every voxel as a share of the largest possible: ``-sum_k p_k log p_k / log K``.

    It is 0 where one class is certain and 1 where all are equally likely (Shannon 1948). For
    regions, which may overlap, it is the mean of the binary entropies ``h(p_k) / log 2``.

    Args:
        probs: probabilities ``(K, *S)``, array or tensor.
        regions: whether channels are regions that may overlap, with a probability each.

    Returns:
        ``(*S)`` float32, 0 to 1.

    Raises:
        ValueError: a shape or type that holds no probabilities.
    """
    p = _checked(probs, regions)
    out = np.zeros(p.shape[1:], np.float32)
    for channel in p:
        value = channel.astype(np.float32, copy=False)
        out += entr(value) + entr(1 - value) if regions else entr(value)
    return np.clip(out / (len(p) * np.log(2) if regions else np.log(len(p))), 0, 1)


def confidence_map(probs: Any, *, regions: bool = False) -> Float:
    """Probability of the most likely class of every voxel.

    For regions, which are decided one by one, it is the confidence of the least confident decision,
    ``min_k max(p_k, 1 - p_k)``.

    Args:
        probs: probabilities ``(K, *S)``, array or tensor.
        regions: whether channels are regions that may overlap, with a probability each.

    Returns:
        ``(*S)`` float32; at least 1 / K, or 1/2 for regions.

    Raises:
        ValueError: a shape or type that holds no probabilities.
    """
    p = _checked(probs, regions)
    if not regions:
        return p.max(0).astype(np.float32)
    out = np.ones(p.shape[1:], np.float32)
    for channel in p:
        value = channel.astype(np.float32, copy=False)
        np.minimum(out, np.maximum(value, 1 - value), out=out)
    return out


def _checked(probs: Any, regions: bool) -> NDArray[Any]:
    p = as_array(probs)
    if p.dtype.kind != "f" or p.ndim < 2 or len(p) < 2 - regions:
        raise ValueError(
            f"probs: expected floating (K, *S) of {2 - regions} channels or more, got {p.dtype} "
            f"{p.shape}"
        )
    return p
