"""Brier score, its decomposition, and its comparison with soft labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from segcal.binning import MurphyParts, equal_width_statistics
from segcal.neighbourhood import KernelSize, Padding, class_proportions
from segcal.tensors import as_tensor, select_voxels, valid_mask

__all__ = ["BrierParts", "brier", "brier_parts", "soft_brier"]


def brier(probs: Any, labels: Any, *, mask: Any = None, ignore_index: int | None = None) -> float:
    """Mean over voxels of ``sum_k (p_k - 1[y = k])^2``, between 0 and 2 (Brier 1950).

    Arguments and errors are as in :func:`segcal.metrics.ece.ece`.

    Returns:
        the score; NaN when no voxel counts.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    if not y.numel():
        return float("nan")
    # (p_k - t)^2 = p_k^2 - 2 t p_k + t^2, one class at a time
    of_label = torch.gather(p, 0, y.unsqueeze(0)).double()
    squares = sum(float(pk.double().square().sum()) for pk in p)
    return (squares - 2 * float(of_label.sum())) / y.numel() + 1.0


@dataclass(frozen=True)
class BrierParts(MurphyParts):
    """``brier = reliability - resolution + uncertainty + rest``, each summed over the classes.

    Attributes:
        rest: what is lost within the bins, namely the variance of p within a bin minus twice its
            covariance with the label; 0 where all p of a bin are equal.
    """

    rest: float


def brier_parts(
    probs: Any,
    labels: Any,
    *,
    bins: int = 15,
    mask: Any = None,
    ignore_index: int | None = None,
) -> BrierParts:
    """Murphy's decomposition of the Brier score over equal-width bins (Murphy 1973).

    Arguments and errors are as in :func:`segcal.metrics.ece.ece`. The rest holds the two within-bin
    terms of Stephenson et al. 2008.
    """
    p, y = select_voxels(probs, labels, mask, ignore_index)
    parts = [equal_width_statistics(pk, y == k, bins).murphy() for k, pk in enumerate(p)]
    reliability, resolution, uncertainty = (
        sum(getattr(part, name) for part in parts)
        for name in ("reliability", "resolution", "uncertainty")
    )
    score = brier(probs, labels, mask=mask, ignore_index=ignore_index)
    rest = score - (reliability - resolution + uncertainty)
    return BrierParts(reliability, resolution, uncertainty, rest)


def soft_brier(
    probs: Any,
    labels: Any,
    *,
    kernel_size: KernelSize = 3,
    padding: Padding = "replicate",
    mask: Any = None,
    ignore_index: int | None = None,
) -> float:
    """Mean over voxels of ``sum_k (p_k - tau_k)^2``, tau the class proportions of the patch.

    The published CRaC evaluation reports this as Brier score, over foreground-labelled voxels and
    slice by slice (its labels are padded with 0, as with ``padding="background"``).

    Args:
        probs: probabilities ``(N, K, *S)``.
        labels: integer ``(N, *S)``.
        kernel_size: odd size of the patch, one number or one per spatial axis.
        padding: labels outside the image, as in :func:`segcal.neighbourhood.class_proportions`.
        mask: bool like `labels`, the voxels to count; None counts all.
        ignore_index: label to leave out of the score and of the neighbourhoods.

    Returns:
        the score; NaN when no voxel counts.

    Raises:
        ValueError: shapes, labels or options that do not fit.
    """
    p, y = as_tensor(probs), as_tensor(labels).long()
    if p.ndim < 3 or y.shape != (p.shape[0], *p.shape[2:]):
        raise ValueError(
            f"probs {tuple(p.shape)} and labels {tuple(y.shape)}: expected (N, K, *S) and (N, *S)"
        )
    tau = class_proportions(
        y, p.shape[1], kernel_size=kernel_size, padding=padding, ignore_index=ignore_index
    )
    keep = valid_mask(y, ignore_index)
    if mask is not None:
        keep = keep & as_tensor(mask)
    square = (p.double() - tau).square().sum(1)[keep]
    return float(square.mean()) if square.numel() else float("nan")
