"""Calibration of multi-label posteriors: reliability table, ECE, ACE and MCE."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
from torch import Tensor

from segcal.binning import BinStatistics, Reduction, equal_width_statistics
from segcal.tensors import as_tensor, check_choice, check_probabilities, label_masks

__all__ = ["multilabel_calibration_error", "multilabel_reliability"]


def multilabel_reliability(probs: Any, targets: Any, *, bins: int = 10) -> BinStatistics:
    """Bin statistics of all (sample, label) pairs pooled; those of batches add up.

    Confidence is the posterior of the label, a hit that the label applies.

    Args:
        probs: posteriors ``(B, T)``, floating (array or tensor); see
            :meth:`segcal.losses.multilabel.posterior.MultiLabelLoss.probabilities`.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out.
        bins: M, (lo, hi] of equal width, 0 in the first.

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

    ``average`` (ACE) is the mean over the bins that are not empty, ``maximum`` (MCE) the largest,
    ``expected`` (ECE) weighs bins by their entries.

    Args:
        probs: see :func:`multilabel_reliability`, as the next.
        targets: see there.
        reduction: over the bins.
        bins: M.
        classwise: bin every label on its own and take the mean over those that have a known
            entry, instead of pooling all pairs.

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
