"""Classwise expected calibration error."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch

from segcal.binning import equal_width_statistics, error_between_edges
from segcal.tensors import check_choice, select_voxels

Compat = Literal["crac"]


def classwise_ece(
    probs: Any,
    labels: Any,
    *,
    bins: int = 15,
    compat: Compat | None = None,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """Mean over classes of the binary ECE of ``p_k`` against ``y = k``.

    ``(1/K) sum_k sum_m (n_mk / n) |frequency_mk - confidence_mk|`` over all K classes of the model
    (Kull et al. 2019, "classwise-ECE"). Bins as in :func:`segcal.metrics.ece.ece`.

    Args:
        probs: as in :func:`segcal.metrics.ece.ece`.
        labels: see there.
        bins: M.
        compat: ``crac`` averages over the classes from 0 to the largest label that occurs, rounds
            the edges to the precision of `probs`, without tolerance, and has no bin for a
            probability of 0 or above 1, as the published code.
        mask: see there.
        ignore_index: see there.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    if compat is None:
        errors = [
            equal_width_statistics(pk, y == k, bins).expected_error() for k, pk in enumerate(p)
        ]
        return float(np.mean(errors))
    check_choice("compat", compat, get_args(Compat))
    if not y.numel():
        return float("nan")
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype)
    classes = range(int(y.max()) + 1)
    return float(np.mean([error_between_edges(p[k], y == k, edges) for k in classes]))
