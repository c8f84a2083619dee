"""Generalised energy distance between the samples of a model and the masks of the raters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["generalised_energy_distance"]

Masks = Sequence[NDArray[np.bool_]]


def generalised_energy_distance(samples: Masks, raters: Masks) -> float:
    """Squared distance ``2 E d(S, Y) - E d(S, S') - E d(Y, Y')`` with ``d = 1 - IoU``, 0 to 2.

    S and S' are drawn independently from the samples of the model, Y and Y' from the raters, so
    that a mask is also paired with itself. The distance is 0 where both distributions are the same
    (Kohl et al. 2018, equation 4; Szekely and Rizzo 2013). For two empty masks d = 0.

    Args:
        samples: masks of the model, bool ``(*S)``, one or more.
        raters: masks of the raters, bool, same shape, one or more.

    Raises:
        ValueError: no samples or no raters.
    """
    if not len(samples) or not len(raters):
        raise ValueError(
            f"samples, raters: expected one or more of each, got {len(samples)}, {len(raters)}"
        )
    between = np.mean([_distance(s, y) for s in samples for y in raters])
    return float(2 * between - _within(samples) - _within(raters))


def _within(masks: Masks) -> float:
    """Mean distance of two masks, each drawn from all."""
    pairs = [_distance(a, b) for i, a in enumerate(masks) for b in masks[i + 1 :]]
    return 2 * float(np.sum(pairs)) / len(masks) ** 2


def _distance(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> float:
    union = np.count_nonzero(a | b)
    return 1 - np.count_nonzero(a & b) / union if union else 0.0
