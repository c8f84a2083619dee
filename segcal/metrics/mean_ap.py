"""Mean average precision of multi-label scores, over classes or over samples."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from segcal.arrays import as_array, check_choice
from segcal.ranking import Ties, average_precision
from segcal.tensors import as_tensor, label_masks

__all__ = ["average_precisions", "mean_average_precision"]

Average = Literal["class", "sample"]


def mean_average_precision(scores: Any, targets: Any, *, average: Average = "class") -> float:
    """Mean over classes (mAP@class) or samples (mAP@sample) of the average precision.

    ``AP = (1/P) sum over positives of the precision at their rank``, in descending order of the
    scores; equal scores share a rank. A class (sample) without a positive is left out of the mean.

    Args:
        scores: floating ``(B, T)`` that rank, such as logits or probabilities.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out of the ranking.
        average: ``class`` ranks the samples of each class, ``sample`` the labels of each sample.

    Returns:
        a fraction of 1; NaN when there is no positive.

    Raises:
        ValueError: shapes, targets, scores or options that do not fit.
    """
    values = average_precisions(scores, targets, average=average)
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")


def average_precisions(
    scores: Any, targets: Any, *, average: Average = "class", ties: Ties = "grouped"
) -> NDArray[np.float64]:
    """Average precision of every class ``(T,)`` or sample ``(B,)``; NaN without a positive.

    Arguments and errors are as in :func:`mean_average_precision`.
    """
    check_choice("average", average, get_args(Average))
    check_choice("ties", ties, get_args(Ties))
    positive, negative = (
        m.numpy(force=True)
        for m in label_masks(as_tensor(scores), as_tensor(targets), name="scores")
    )
    s, known = as_array(scores), positive | negative
    if average == "class":
        s, positive, known = s.T, positive.T, known.T
    return np.array(
        [
            average_precision(row[k], p[k], ties=ties)
            for row, p, k in zip(s, positive, known, strict=True)
        ],
        dtype=np.float64,
    )
