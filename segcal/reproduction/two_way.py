"""Mean average precision as the program of the two-way loss computes it."""

from __future__ import annotations

from typing import Any

import numpy as np

from segcal.arrays import as_array
from segcal.metrics.mean_ap import Average, average_precisions

__all__ = ["mean_average_precision"]


def mean_average_precision(scores: Any, targets: Any, *, average: Average = "class") -> float:
    """Mean average precision that ranks the later of two equal scores first.

    It adds 1e-8 to the number of positives (the program also prints percent). Arguments, result and
    errors are those of :func:`segcal.metrics.mean_ap.mean_average_precision`.
    """
    values = average_precisions(scores, targets, average=average, ties="reversed")
    positives = (as_array(targets) == 1).sum(0 if average == "class" else 1)
    values = values * positives / (positives + 1e-8)
    values = values[~np.isnan(values)]
    return float(values.mean()) if values.size else float("nan")
