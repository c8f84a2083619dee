"""Cross-entropy over the valid voxels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.sweep.terms import CrossEntropyTerm
from segcal.tensors import (
    check_channels,
    check_logits_labels,
    check_num_classes,
    check_shares,
    full_precision,
    is_soft,
    label_index,
    reduce_voxels,
    valid_mask,
)
from segcal.term import Term

__all__ = ["CrossEntropy", "cross_entropy"]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    class_weight: Tensor | None = None,
    per_channel: bool = False,
    ignore_index: int | None = None,
) -> Tensor:
    """Mean negative log-probability of the labelled class.

    ``L = -sum_i w_{y_i} log p_{i, y_i} / sum_i w_{y_i}`` over the valid voxels. Where several
    raters labelled the image, s_ik is the share of raters who gave voxel i the label k, and
    ``L = -sum_i sum_k w_k s_ik log p_ik / sum_i sum_k w_k s_ik``. This is the mean over the raters,
    and it is smallest at p = s.

    Args:
        logits: floating ``(N, K, *S)``; half precision is promoted to float32.
        labels: integer ``(N, *S)``; or the raters' shares, floating ``(N, K, *S)``.
        class_weight: ``(K,)``; with None all classes have the weight 1.
        per_channel: `labels` are ``(N, K, *S)`` of 0 and 1 that may overlap. The loss is then the
            binary cross-entropy of a sigmoid per channel, averaged over the valid voxels of all
            channels.
        ignore_index: label to leave out (the published NACL and CRaC code leaves out -100
            whatever the user asks for).

    Returns:
        scalar; 0 with zero gradient when no voxel is valid.

    Raises:
        ValueError: shapes or label values that do not fit.
    """
    if per_channel:
        if class_weight is not None:
            raise ValueError("class_weight: not with per_channel")
        check_channels(logits, labels, ignore_index=ignore_index)
        with full_precision(logits) as x:
            valid = valid_mask(labels, ignore_index)
            target = torch.where(valid, labels, 0).to(x)
            bce = F.binary_cross_entropy_with_logits(x, target, reduction="none")
            return reduce_voxels(bce, valid)
    if is_soft(logits, labels):
        return _of_shares(logits, labels, class_weight)
    check_logits_labels(logits, labels, ignore_index=ignore_index)
    valid = valid_mask(labels, ignore_index)
    index = label_index(labels, valid, logits.shape[1])
    with full_precision(logits) as x:
        nll = F.nll_loss(F.log_softmax(x, dim=1), index, reduction="none")
        if class_weight is None:
            return reduce_voxels(nll, valid)
        weight = class_weight.to(x)[index] * valid
        return torch.where(valid, nll, 0.0).mul(weight).sum() / weight.sum().clamp(
            min=torch.finfo(x.dtype).tiny
        )


def _of_shares(logits: Tensor, shares: Tensor, class_weight: Tensor | None) -> Tensor:
    counts = check_shares(logits, shares)
    with full_precision(logits) as x:
        s = shares.to(x)
        if class_weight is not None:
            s = s * class_weight.to(x).view(-1, *(1,) * (x.ndim - 2))
        nll = -(s * F.log_softmax(x, dim=1)).sum(1)
        total = s.sum() if class_weight is not None else counts.sum().to(x)
        return torch.where(counts, nll, 0.0).sum() / total.clamp(min=torch.finfo(x.dtype).tiny)


class CrossEntropy(Term):
    """Module form of :func:`cross_entropy`; `class_weight` is a buffer."""

    class_weight: Tensor | None

    def __init__(
        self,
        num_classes: int,
        *,
        class_weight: list[float] | None = None,
        per_channel: bool = False,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__()
        if per_channel and class_weight is not None:
            raise ValueError("class_weight: not with per_channel")
        if class_weight is not None and len(class_weight) != num_classes:
            raise ValueError(
                f"class_weight: expected {num_classes} values, got {len(class_weight)}"
            )
        self.num_classes = num_classes
        self.per_channel = per_channel
        self.ignore_index = ignore_index
        self.register_buffer(
            "class_weight", None if class_weight is None else torch.tensor(class_weight)
        )

    def swept(self) -> CrossEntropyTerm | None:
        """Describe the loss to :mod:`segcal.sweep`; None per channel."""
        if self.per_channel:
            return None
        return CrossEntropyTerm(self.num_classes, self.ignore_index, self.class_weight)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the scalar loss of `logits` ``(N, K, *S)`` against `labels` ``(N, *S)``."""
        check_num_classes(logits, self.num_classes)
        return cross_entropy(
            logits,
            labels,
            class_weight=self.class_weight,
            per_channel=self.per_channel,
            ignore_index=self.ignore_index,
        )
