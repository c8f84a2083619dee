"""mL1-ACE: a differentiable average calibration error per image and class."""

from __future__ import annotations

import torch
from torch import Tensor

from segcal.binning import equal_width_index
from segcal.tensors import (
    check_logits_labels,
    check_num_classes,
    full_precision,
    one_hot,
    valid_mask,
)
from segcal.term import Term

__all__ = ["ML1ACE", "ml1_ace"]


def ml1_ace(
    logits: Tensor,
    labels: Tensor,
    *,
    bins: int = 20,
    include_background: bool = True,
    ignore_index: int | None = None,
) -> Tensor:
    """Mean over images and classes of the unweighted gap over non-empty bins.

    ``L = mean_{b,k} (1 / M+) sum_m |conf_m - acc_m|`` with ``conf_m`` the mean ``p_k`` and
    ``acc_m`` the share of label k in bin m of image b; membership in bins is constant, so each
    voxel's gradient is ``sign(conf - acc) / n_m`` (Barfoot et al. 2024, ACE-DLIRIS). Bins are
    (lo, hi], as the published code has them (its docstring says otherwise). It is a companion of
    Dice or cross-entropy, not a loss on its own.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        bins: M.
        include_background: whether class 0 takes part.
        ignore_index: label to leave out.

    Returns:
        scalar; an image without a valid voxel has no part in it, 0 if none has one.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    if bins < 1:
        raise ValueError(f"bins: expected at least 1, got {bins}")
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    n, k = logits.shape[:2]
    valid = valid_mask(labels, ignore_index)
    with full_precision(logits) as x:
        if not x.numel():
            return x.sum()
        p = torch.softmax(x, dim=1)
        hits = one_hot(labels, k, ignore_index=ignore_index, dtype=torch.float64)
        if logits.ndim == 2:  # classification: the batch is the image
            n, p, hits, valid = 1, p.t()[None], hits.t()[None], valid[None]
        first = 0 if include_background else 1
        p = p[:, first:].reshape(n * (k - first), -1)
        hits = hits[:, first:].reshape(n * (k - first), -1)
        counted = valid.reshape(n, 1, -1).expand(-1, k - first, -1).reshape(p.shape)
        with torch.no_grad():
            index = equal_width_index(p, bins)
        zeros = torch.zeros(p.shape[0], bins, dtype=torch.float64, device=p.device)
        count = zeros.scatter_add(1, index, counted.double())
        confidence = zeros.scatter_add(1, index, torch.where(counted, p, 0.0).double())
        accuracy = zeros.scatter_add(1, index, hits)
        gap = (confidence - accuracy).abs() / count.clamp(min=1)
        used = (count > 0).sum(1)
        per_row = gap.sum(1) / used.clamp(min=1)
        return (per_row.sum() / (used > 0).sum().clamp(min=1)).to(x.dtype)


class ML1ACE(Term):
    """Module form of :func:`ml1_ace`.

    Raises:
        ValueError: options out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        bins: int = 20,
        include_background: bool = True,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if bins < 1:
            raise ValueError(f"bins: expected at least 1, got {bins}")
        self.num_classes = num_classes
        self.bins = bins
        self.include_background = include_background
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return ml1_ace(
            logits,
            labels,
            bins=self.bins,
            include_background=self.include_background,
            ignore_index=self.ignore_index,
        )
