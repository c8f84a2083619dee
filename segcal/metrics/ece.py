"""Expected calibration error of the top label."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch

from segcal.binning import BinStatistics, equal_width_statistics, error_between_edges
from segcal.tensors import check_choice, select_voxels

Compat = Literal["crac"]


def ece(
    probs: Any,
    labels: Any,
    *,
    bins: int = 15,
    compat: Compat | None = None,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """Top-label ECE: ``sum_m (n_m / n) |accuracy_m - confidence_m|``.

    Confidence is the largest probability of a voxel, a hit that its class is the label's (ties go
    to the lowest class). Bins are (lo, hi] of equal width, 0 in the first; a value within 1e-6
    bin widths above an edge counts as on it (Guo et al. 2017; 15 bins as in CALS and CRaC).

    Args:
        probs: probabilities ``(N, K, *S)`` (array or tensor), or ``(K, *S)`` with labels ``(*S)``.
        labels: integer ``(N, *S)``.
        bins: M.
        compat: ``crac`` rounds the edges to the precision of `probs`, without tolerance, and has
            no bin for a confidence above 1, as the published code.
        mask: bool like `labels`, the voxels to count; None counts all.
        ignore_index: label to leave out.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: shapes, labels or probabilities that do not fit, or an unknown `compat`.
    """
    if compat is None:
        return reliability(
            probs, labels, bins=bins, mask=mask, ignore_index=ignore_index
        ).expected_error()
    check_choice("compat", compat, get_args(Compat))
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype)
    return error_between_edges(confidence, predicted == y, edges)


def reliability(
    probs: Any, labels: Any, *, bins: int = 15, mask: Any = None, ignore_index: int | None = None
) -> BinStatistics:
    """Bin statistics behind :func:`ece` and the reliability diagram; those of cases add up.

    Arguments and errors as in :func:`ece`.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    confidence, predicted = p.max(dim=0)
    return equal_width_statistics(confidence, predicted == y, bins)
