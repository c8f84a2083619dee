"""Calibration of multi-label posteriors: reliability table, ECE, ACE and MCE."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from torch import Tensor

from segcal.arrays import check_choice
from segcal.binning import BinStatistics, Reduction, equal_width_statistics
from segcal.tensors import as_tensor, check_probabilities, label_masks

__all__ = ["multilabel_calibration_error", "multilabel_reliability"]


def multilabel_reliability(probs: Any, targets: Any, *, bins: int = 10) -> BinStatistics:
    """Bin statistics of all (sample, label) pairs together, which batches can add up.

    The confidence of a pair is the posterior of the label; it is a hit where the label applies.

    Args:
        probs: posteriors ``(B, T)``, floating (array or tensor), as from
            :meth:`segcal.losses.multilabel.posterior.MultiLabelLoss.probabilities`.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out.
        bins: M; bins are (lo, hi] of equal width, and 0 is in the first bin.

    Raises:
        ValueError: shapes, targets or probabilities that do not fit.
    """
    p, positive, known = _entries(probs, targets)
    return equal_width_statistics(p[known], positive[known], bins)


def multilabel_calibration_error(
    probs: Any,
    targets: Any,
    *,
    reduction: Reduction = "average",
    bins: int = 10,
    classwise: bool = False,
) -> float:
    """Gap between posterior and frequency over the bins: ACE, MCE or ECE.

    ``average`` (ACE) is the mean gap of the bins that are not empty, ``maximum`` (MCE) the largest
    gap, and ``expected`` (ECE) weighs the gaps by the number of entries.

    Args:
        probs: posteriors ``(B, T)``, floating (array or tensor).
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out.
        reduction: how the gaps of the bins become one number.
        bins: M.
        classwise: bin every label on its own and take the mean over the labels that have a known
            entry, instead of binning all pairs together.

    Returns:
        a fraction of 1; NaN when nothing is known.

    Raises:
        ValueError: as :func:`multilabel_reliability`, or an unknown reduction.
    """
    check_choice("reduction", reduction, get_args(Reduction))
    if not classwise:
        return multilabel_reliability(probs, targets, bins=bins).error(reduction)
    p, positive, known = _entries(probs, targets)
    errors = [
        equal_width_statistics(p[keep, t], positive[keep, t], bins).error(reduction)
        for t, keep in enumerate(known.T)
        if keep.any()
    ]
    return float(np.mean(errors)) if errors else float("nan")


def _entries(probs: Any, targets: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities, where labels apply, and where that is known."""
    p = as_tensor(probs)
    positive, negative = label_masks(p, as_tensor(targets), name="probs")
    check_probabilities(p)
    return p, positive, positive | negative
