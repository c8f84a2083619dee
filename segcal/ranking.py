"""Average precision of a ranking."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["average_precision"]

Ties = Literal["grouped", "reversed"]


def average_precision(
    scores: NDArray[np.floating], relevant: NDArray[np.bool_], *, ties: Ties = "grouped"
) -> float:
    """Mean precision at the ranks of the relevant entries, in descending order of the scores.

    Args:
        scores: ``(n,)``; infinite scores are allowed.
        relevant: bool ``(n,)``.
        ties: ``grouped`` gives equal scores one rank, the last of their ranks, so that the order of
            the entries has no effect (as in scikit-learn); ``reversed`` ranks the later entry
            first.

    Returns:
        a fraction of 1; NaN when nothing is relevant.

    Raises:
        ValueError: a score that is NaN.
    """
    if np.isnan(scores).any():
        raise ValueError("scores: expected numbers, got NaN")
    order = np.argsort(scores, kind="stable")[::-1]
    ordered, hits = scores[order], relevant[order]
    total = int(hits.sum())
    if not total:
        return float("nan")
    last = np.append(ordered[1:] != ordered[:-1], True) if ties == "grouped" else hits
    ranks = np.flatnonzero(last)
    found = np.cumsum(hits)[ranks]
    return float((np.diff(found, prepend=0) * found / (ranks + 1)).sum() / total)
