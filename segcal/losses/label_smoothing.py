"""Label smoothing."""

from __future__ import annotations

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

__all__ = ["LabelSmoothing", "label_smoothing"]


def label_smoothing(
    logits: Tensor, labels: Tensor, *, alpha: float = 0.1, ignore_index: int | None = None
) -> Tensor:
    """Cross-entropy against ``(1 - alpha) one_hot + alpha / K``.

    ``L = (1 - alpha) CE + alpha mean_k(-log p_k)``, averaged over the valid voxels (Szegedy et
    al. 2016). The segmentation papers have alpha = 0.1, CALS has 0.05.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``.
        alpha: share of the uniform distribution, in [0, 1].
        ignore_index: label to leave out, before smoothing.

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes, label values or options that do not fit.
    """
    _check_alpha(alpha)
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    valid = valid_mask(labels, ignore_index)
    index = label_index(labels, valid, logits.shape[1])
    with full_precision(logits) as x:
        log_p = F.log_softmax(x, dim=1)
        nll = F.nll_loss(log_p, index, reduction="none")
        return reduce_voxels((1 - alpha) * nll - alpha * log_p.mean(1), valid)


class LabelSmoothing(Term):
    """Module form of :func:`label_smoothing`.

    Raises:
        ValueError: alpha out of range.
    """

    def __init__(
        self, num_classes: int, alpha: float = 0.1, *, ignore_index: int | None = None
    ) -> None:
        super().__init__()
        _check_alpha(alpha)
        self.num_classes = num_classes
        self.alpha = alpha
        self.ignore_index = ignore_index

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return label_smoothing(logits, labels, alpha=self.alpha, ignore_index=self.ignore_index)


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha: expected a share in [0, 1], got {alpha}")
