"""Multi-label losses for classes that exclude each other: a sample's class is its one label."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.tensors import check_logits_labels
from segcal.term import Term

__all__ = ["OfClasses"]


class OfClasses(Term):
    """A multi-label loss, applied to exclusive classes (Kobayashi 2023, section 4.4).

    The two-way loss along samples alone, with both temperatures 1, is then cross-entropy.

    Args:
        base: the multi-label loss.
    """

    def __init__(self, base: MultiLabelLoss) -> None:
        super().__init__()
        self.base = base

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of `logits` ``(N, K)`` against classes `labels` ``(N,)``.

        Raises:
            ValueError: shapes or classes that do not fit.
        """
        check_logits_labels(logits, labels)
        value: Tensor = self.base(logits, F.one_hot(labels.long(), logits.shape[1]))
        return value
