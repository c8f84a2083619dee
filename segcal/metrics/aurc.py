"""Selective prediction: the risk of the most confident items, and the area under its curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import special

from segcal.arrays import as_array

__all__ = ["aurc", "excess_aurc", "risk_coverage"]

Numbers = NDArray[np.float64]


def aurc(confidence: Any, loss: Any, *, counts: Any = None) -> float:
    """Area under the risk-coverage curve: ``1/n sum_k (mean loss of the k most confident)``.

    Geifman, El-Yaniv, "Selective Classification for Deep Neural Networks" (2017). For items of
    equal confidence the mean over all their orders is taken, exactly. Where confidence tells
    nothing, the area is the mean loss.

    Args:
        confidence: ``(n,)``, of each item.
        loss: ``(n,)``, finite, of each item; 1 - DSC of cases, or 0 and 1 of right and wrong
            voxels.
        counts: ``(n,)``, how many items each entry stands for, all with its confidence and with its
            loss as their mean; None counts each entry once.

    Returns:
        the area in the unit of the loss, lower is better; NaN without items.

    Raises:
        ValueError: lengths that differ, values that are not finite, negative counts.
    """
    ties = _ties(confidence, loss, counts)
    if not ties.count.size:
        return float("nan")
    before = np.concatenate([[0.0], np.cumsum(ties.count)])
    lost = np.concatenate([[0.0], np.cumsum(ties.loss * ties.count)])
    start, done = before[:-1], lost[:-1]
    # sum_{j=1..c} (L + j l) / (N + j) = c l + (L - N l) (H(N + c) - H(N)) with harmonic numbers H
    harmonic = special.digamma(start + ties.count + 1) - special.digamma(start + 1)
    total = ties.count * ties.loss + (done - start * ties.loss) * harmonic
    return float(total.sum() / before[-1])


def excess_aurc(confidence: Any, loss: Any, *, counts: Any = None) -> float:
    """AURC minus the AURC of the ideal order, which sorts by the loss itself; 0 is best.

    Geifman, Uziel, El-Yaniv, "Bias-Reduced Uncertainty Estimation for Deep Neural Classifiers"
    (2019).

    Args:
        confidence: ``(n,)``, of each item.
        loss: ``(n,)``, finite, of each item. Where an entry stands for several items, all of them
            must have this loss (0 or 1, say).
        counts: ``(n,)``, how many items each entry stands for; None counts each entry once.

    Raises:
        ValueError: as :func:`aurc`.
    """
    return aurc(confidence, loss, counts=counts) - aurc(-as_array(loss), loss, counts=counts)


def risk_coverage(confidence: Any, loss: Any, *, counts: Any = None) -> tuple[Numbers, Numbers]:
    """Coverage (share of items kept) and risk (their mean loss) wherever the confidence changes.

    Args:
        confidence: ``(n,)``, of each item.
        loss: ``(n,)``, finite, of each item.
        counts: ``(n,)``, how many items each entry stands for; None counts each entry once.

    Returns:
        shares of the items kept, ascending to 1, and the mean loss of the items kept; empty without
        items.

    Raises:
        ValueError: as :func:`aurc`.
    """
    ties = _ties(confidence, loss, counts)
    kept = np.cumsum(ties.count)
    return kept / kept[-1:], np.cumsum(ties.loss * ties.count) / kept


@dataclass(frozen=True)
class _Ties:
    """Number and mean loss of the items of each confidence, the most confident first."""

    count: Numbers
    loss: Numbers


def _ties(confidence: Any, loss: Any, counts: Any) -> _Ties:
    c, x = (np.asarray(as_array(v), dtype=np.float64) for v in (confidence, loss))
    n = np.ones_like(x) if counts is None else np.asarray(as_array(counts), dtype=np.float64)
    if c.ndim != 1 or not c.shape == x.shape == n.shape:
        raise ValueError(
            f"confidence, loss, counts: expected one length, got {c.shape}, {x.shape}, {n.shape}"
        )
    if not (np.isfinite(c).all() and np.isfinite(x).all() and (n >= 0).all()):
        raise ValueError(
            "confidence, loss, counts: expected finite numbers, and counts of 0 or more"
        )
    c, x, n = c[n > 0], x[n > 0], n[n > 0]
    _, group = np.unique(-c, return_inverse=True)
    size, lost = (np.bincount(group, of).astype(np.float64) for of in (n, n * x))
    return _Ties(size, lost / size)
