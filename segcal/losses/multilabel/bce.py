"""Binary cross-entropy over the labels, plain or weighted by how frequent they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.arrays import check_choice
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.tensors import ClassReduction, Reduction, full_precision, label_masks, reduce_labels

__all__ = ["BCE", "bce", "frequency_weights"]

Scheme = Literal["balanced", "pos_weight"]
WEIGHT_LIMIT = 50.0
"""Largest weight of a label; its inverse is the smallest."""


def bce(
    logits: Tensor,
    targets: Tensor,
    *,
    positive_weight: Tensor | None = None,
    negative_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    class_reduction: ClassReduction = "mean",
) -> Tensor:
    """Binary cross-entropy of every known label: ``-w+ y log s(v) - w- (1 - y) log s(-v)``.

    s is the sigmoid. Without weights, the expected loss is smallest where ``s(v)`` is the
    posterior.

    Args:
        logits: floating ``(B, T)``; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out.
        positive_weight: w+ per label ``(T,)``; None gives all labels the weight 1.
        negative_weight: w- per label ``(T,)``; None gives all labels the weight 1.
        reduction: ``mean`` over the known entries, their ``sum``, or ``none`` for ``(B, T)``.
        class_reduction: ``sum`` adds the labels of a sample up before the mean over samples.

    Returns:
        scalar, or ``(B, T)``; 0 with zero gradient when nothing is known.

    Raises:
        ValueError: shapes, targets or options that do not fit.
    """
    positive, negative = label_masks(logits, targets)
    with full_precision(logits) as x:
        of_positive, of_negative = F.softplus(-x), F.softplus(x)
        if positive_weight is not None:
            of_positive = of_positive * positive_weight.to(x)
        if negative_weight is not None:
            of_negative = of_negative * negative_weight.to(x)
        value = torch.where(positive, of_positive, of_negative)
        return reduce_labels(value, positive | negative, reduction, class_reduction)


def frequency_weights(
    positives: Tensor, negatives: Tensor, *, scheme: Scheme = "balanced"
) -> tuple[Tensor, Tensor]:
    """Weights w+ and w- of labels from how often they are 1 and 0 in the training set.

    With ``balanced``, ``w+ = N / (2 N+)`` and ``w- = N / (2 N-)``, where ``N = N+ + N-``. With
    ``pos_weight``, ``w+ = N- / N+`` and ``w- = 1``. Weights are clipped to [1/50, 50]. Where a
    label is never 1, or never 0, the weight of that side has no effect and is 0.

    Args:
        positives: number N+ of samples with the label, per label ``(T,)``.
        negatives: number N- of samples without it, per label ``(T,)``.
        scheme: ``balanced`` or ``pos_weight``.

    Returns:
        w+ and w-, float64 ``(T,)``.

    Raises:
        ValueError: counts or scheme that do not fit.
    """
    check_choice("scheme", scheme, get_args(Scheme))
    n_pos, n_neg = positives.double(), negatives.double()
    if n_pos.ndim != 1 or n_pos.shape != n_neg.shape or bool((n_pos < 0).any() | (n_neg < 0).any()):
        raise ValueError(
            f"positives, negatives: expected counts >= 0 per label, (T,) both, got "
            f"{tuple(n_pos.shape)} and {tuple(n_neg.shape)}"
        )
    if scheme == "balanced":
        half = (n_pos + n_neg) / 2
        weights = (half / n_pos, half / n_neg)
    else:
        weights = (n_neg / n_pos, torch.ones_like(n_neg))
    w_pos, w_neg = (w.nan_to_num(0.0).clamp(1 / WEIGHT_LIMIT, WEIGHT_LIMIT) for w in weights)
    return torch.where(n_pos > 0, w_pos, 0.0), torch.where(n_neg > 0, w_neg, 0.0)


class BCE(MultiLabelLoss):
    """Module form of :func:`bce`; weights are buffers.

    With weights the sigmoid of a logit v is not the posterior, whose log-odds are
    ``v - log(w+ / w-)``; :meth:`log_odds` returns these. Logits of a label that was never 1, or
    never 0, in training are returned as they are.

    Args:
        scheme: how :func:`frequency_weights` makes the weights; None has no weights.
        positives: number of training samples with each label; only used with a scheme.
        negatives: number of training samples without each label; unknown labels count in neither.
        reduction: ``mean`` over the known entries, their ``sum``, or ``none`` for ``(B, T)``.
        class_reduction: ``sum`` adds up the labels of a sample before the mean over samples.

    Raises:
        ValueError: a scheme without counts, or counts that do not fit.
    """

    bijective = True
    positive_weight: Tensor | None
    negative_weight: Tensor | None

    def __init__(
        self,
        scheme: Scheme | None = None,
        *,
        positives: Sequence[int] | Tensor | None = None,
        negatives: Sequence[int] | Tensor | None = None,
        reduction: Reduction = "mean",
        class_reduction: ClassReduction = "mean",
    ) -> None:
        super().__init__()
        weights: tuple[Tensor | None, Tensor | None] = (None, None)
        if scheme is not None:
            if positives is None or negatives is None:
                raise ValueError(
                    f"positives, negatives: scheme {scheme!r} needs the counts per label of the "
                    "training set"
                )
            counts = torch.as_tensor(positives), torch.as_tensor(negatives)
            weights = frequency_weights(*counts, scheme=scheme)
        self.reduction: Reduction = reduction
        self.class_reduction: ClassReduction = class_reduction
        self.register_buffer("positive_weight", weights[0])
        self.register_buffer("negative_weight", weights[1])

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        return bce(
            logits,
            targets,
            positive_weight=self.positive_weight,
            negative_weight=self.negative_weight,
            reduction=self.reduction,
            class_reduction=self.class_reduction,
        )

    def log_odds(self, logits: Tensor) -> Tensor:
        """Return the log-odds of the posterior: `logits` minus the log-ratio of the weights."""
        with full_precision(logits) as x:
            if self.positive_weight is None or self.negative_weight is None:
                return x
            seen = (self.positive_weight > 0) & (self.negative_weight > 0)
            ratio = torch.where(seen, self.positive_weight / self.negative_weight, 1.0)
            return x - torch.log(ratio).to(x)
