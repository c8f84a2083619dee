"""Calibrating predictions to correctness by pairwise constraints (CPC)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.tensors import (
    check_logits_labels,
    check_num_classes,
    full_precision,
    label_index,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["CPC", "cpc"]


def cpc(
    logits: Tensor,
    labels: Tensor,
    *,
    a_bdc: float = 10.0,
    a_bec: float = 1.0,
    ignore_index: int | None = None,
) -> Tensor:
    """Binary discrimination and binary exclusion constraints, weighted and added.

    ``BDC = (1/N) sum_i mean_{j != y} softplus(l_j - l_y)``;
    ``BEC = (1/N) sum_i mean_{j != j', both != y} softplus(l_j' - l_j) / 2`` (Cheng and Vasconcelos
    2022, as the CALS paper writes them). The code of CALS also counts the constant pairs j = j',
    and divides by zero for K = 2; here these pairs are left out and BEC is 0 for K = 2. The default
    weights are those of the CALS paper (App. C); its released configuration has 0.1 and 1.

    Pairs are summed one class at a time, so the loss needs about as much memory as the logits.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        a_bdc: weight of BDC.
        a_bec: weight of BEC.
        ignore_index: label to leave out.

    Returns:
        scalar, to be added to cross-entropy; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check(a_bdc, a_bec)
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    k = logits.shape[1]
    valid = valid_mask(labels, ignore_index)
    index = label_index(labels, valid, k).unsqueeze(1)
    with full_precision(logits) as x:
        of_label = x.gather(1, index)
        rest = torch.ones_like(x).scatter(1, index, 0.0)  # 1 where j != y
        bdc = (F.softplus(x - of_label) * rest).sum(1) / (k - 1)
        total = a_bdc * bdc
        if k > 2 and a_bec:
            bec = torch.zeros_like(bdc)
            for j in range(k):
                pairs = F.softplus(x - x[:, j : j + 1]) * rest * rest[:, j : j + 1]
                bec = bec + pairs.sum(1) - math.log(2) * rest[:, j]  # without the pair j = j'
            total = total + a_bec * bec / (2 * (k - 1) * (k - 2))
        return reduce_voxels(total, valid)


class CPC(Term):
    """Module form of :func:`cpc`.

    Raises:
        ValueError: weights out of range.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        a_bdc: float = 10.0,
        a_bec: float = 1.0,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        _check(a_bdc, a_bec)
        self.num_classes = num_classes
        self.a_bdc = a_bdc
        self.a_bec = a_bec
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar term of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return cpc(
            logits, labels, a_bdc=self.a_bdc, a_bec=self.a_bec, ignore_index=self.ignore_index
        )


def _check(a_bdc: float, a_bec: float) -> None:
    if not (0 <= a_bdc < math.inf and 0 <= a_bec < math.inf):
        raise ValueError(f"a_bdc, a_bec: expected finite weights >= 0, got {a_bdc}, {a_bec}")
