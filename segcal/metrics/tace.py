"""Thresholded adaptive calibration error, and what the CRaC paper reports under that name."""

from __future__ import annotations

import itertools
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from segcal.binning import (
    equal_mass_statistics,
    equal_width_statistics,
    error_between_edges,
    mean_gap,
)
from segcal.tensors import as_tensor, check_choice, select_voxels

Compat = Literal["svls"]
RefCompat = Literal["crac"]


def tace(
    probs: Any,
    labels: Any,
    *,
    threshold: float = 1e-3,
    bins: int = 15,
    compat: Compat | None = None,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """TACE: mean gap over classes and ranges of equal mass, tiny probabilities left out.

    For each class k, the voxels with ``p_k > threshold`` are sorted by ``p_k`` and cut into `bins`
    ranges of equal size; the result is the mean over all non-empty (class, range) pairs of
    ``|frequency of y = k - mean p_k|`` (Nixon et al., "Measuring calibration in deep learning").
    Tied values are shared pro rata by the ranges they span. A class without a voxel above the
    threshold contributes nothing.

    Args:
        probs: as in :func:`segcal.metrics.ece.ece`.
        labels: see there.
        threshold: probabilities up to this are left out.
        bins: R, ranges per class.
        compat: ``svls`` is what the SVLS and BWCR code calls TACE: foreground classes alone, the
            rest of the division in the last range, and every range weighted by its share before
            the mean over ranges, which makes it R times smaller (they take 10 ranges and
            thresholds 1e-3 and 1e-2).
        mask: see there.
        ignore_index: see there.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`, or an unknown `compat`.
    """
    if compat is not None:
        check_choice("compat", compat, get_args(Compat))
    p, y = select_voxels(probs, labels, mask, ignore_index)
    if compat == "svls":
        return _of_svls(p, y, threshold, bins)
    kept = [pk > threshold for pk in p]
    return mean_gap(
        [
            equal_mass_statistics(pk[keep], y[keep] == k, bins)
            for k, (pk, keep) in enumerate(zip(p, kept, strict=True))
        ]
    )


def _of_svls(p: Tensor, y: Tensor, threshold: float, bins: int) -> float:
    errors = []
    for k in range(1, len(p)):
        kept = p[k] > threshold
        order = torch.sort(p[k][kept], stable=True)
        confidence = order.values.double().numpy(force=True)
        hits = (y[kept] == k)[order.indices].numpy(force=True)
        cuts = [*(r * (len(hits) // bins) for r in range(bins)), len(hits)]
        gaps = [
            abs(float(hits[a:b].sum()) - float(confidence[a:b].sum()))
            for a, b in itertools.pairwise(cuts)
        ]
        if len(hits):
            errors.append(sum(gaps) / len(hits) / bins)
    return float(np.mean(errors)) if errors else float("nan")


def tace_ref(
    probs: Any,
    labels: Any,
    *,
    threshold: float = 1e-3,
    bins: int = 15,
    compat: RefCompat | None = None,
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """What the CRaC poster and code call TACE: a thresholded classwise ECE of the foreground.

    ``(1/K') sum_k sum_m (n_mk / n_k) |frequency_mk - confidence_mk|`` over equal-WIDTH bins of
    the voxels with ``p_k > threshold``, for the classes from 0 to the largest label that occurs
    (K' of them; one without a voxel above the threshold counts as 0). Not Nixon's TACE: for
    comparison with the published tables only.

    Args:
        probs: as in :func:`tace`.
        labels: see there.
        threshold: see there.
        bins: M.
        compat: ``crac`` rounds the edges to the precision of `probs`, without tolerance, and has
            no bin for a probability above 1, as the published code, bit for bit.
        mask: the voxels to count; None takes the foreground-LABELLED ones, as the publication
            does, so that false positives in the background are never counted.
        ignore_index: see there.

    Returns:
        a fraction of 1; NaN when no voxel counts.

    Raises:
        ValueError: as :func:`segcal.metrics.ece.ece`, or an unknown `compat`.
    """
    if compat is not None:
        check_choice("compat", compat, get_args(RefCompat))
    if mask is None:
        mask = as_tensor(labels) != 0
    p, y = select_voxels(probs, labels, mask, ignore_index)
    if not y.numel():
        return float("nan")
    edges = torch.linspace(0, 1, bins + 1, dtype=p.dtype)
    errors = []
    for k in range(int(y.max()) + 1):
        kept = p[k] > threshold
        confidence, hits = p[k][kept], y[kept] == k
        if compat is None:
            error = equal_width_statistics(confidence, hits, bins).expected_error()
        else:
            error = error_between_edges(confidence, hits, edges)
        errors.append(0.0 if np.isnan(error) else error)
    return float(np.mean(errors))
