"""Two-way loss: positive labels against negative labels, within samples and within classes."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from segcal.arrays import check_choice
from segcal.losses.multilabel.buckets import gather_batches
from segcal.losses.multilabel.contrast import Along, check_temperatures, contrast
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.tensors import full_precision, label_masks

__all__ = ["TwoWay", "two_way"]

Average = Literal["valid", "paper"]


def two_way(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature_pos: float = 4.0,
    temperature_neg: float = 1.0,
    bias: float = 0.0,
    along: Along = "both",
    average: Average = "valid",
    bucket_size: int | None = None,
    gather: bool = False,
) -> Tensor:
    """Softplus of the soft maximum of negative scores minus the soft minimum of positive scores.

    For the scores x of a sample (or of a class over the batch) with positives P and negatives N,
    ``l = softplus(T_N log sum_N exp(x_n / T_N) + T_P log sum_P exp(-x_p / T_P) + bias)``. The
    loss is the mean over samples plus the mean over classes (Kobayashi 2023, eqs. 14 to 17). It
    does not change when c is added to all scores, so a sigmoid of x is no probability.

    A sample or class without positives or without negatives has l = 0 and no gradient.

    Args:
        logits: floating ``(B, T)``; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is in neither set.
        temperature_pos: T_P >= 0; 0 takes the smallest positive score.
        temperature_neg: T_N >= 0; 0 takes the largest negative score.
        bias: added inside the softplus.
        along: ``sample`` or ``class`` for one of the two terms.
        average: ``valid`` takes the mean over samples (classes) that have a positive, as the
            published code does; ``paper`` takes it over all that have a known label.
        bucket_size: number of samples per bucket (fewer in the last bucket). The loss is the mean
            of the losses of the buckets, as if every bucket were the batch of one process. None
            takes the whole batch as one bucket.
        gather: whether the batches of all processes of a training are joined before they are
            split into buckets (:func:`segcal.losses.multilabel.buckets.gather_batches`). Every
            process must then call the loss equally often. In the published code every process has
            a loss of its own batch.

    Returns:
        scalar; 0 with zero gradient when no sample or class has both positives and negatives.

    Raises:
        ValueError: shapes, targets or options that do not fit.
    """
    _check(temperature_pos, temperature_neg, along, average, bucket_size)

    def mean_of_rows(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        values = contrast(
            x,
            positive,
            negative,
            temperature_pos=temperature_pos,
            temperature_neg=temperature_neg,
            bias=bias,
        )
        counted = positive if average == "valid" else positive | negative
        return values.sum() / counted.any(-1).sum().clamp(min=1)

    with full_precision(logits) as x:
        if gather:
            x, targets = gather_batches(x, targets)
        positive, negative = label_masks(x, targets)
        size = bucket_size or max(len(x), 1)
        buckets = [torch.split(t, size) for t in (x, positive, negative)]
        losses = []
        for bucket in zip(*buckets, strict=True):
            total = x.new_zeros(())
            if along != "class":
                total = total + mean_of_rows(*bucket)
            if along != "sample":
                total = total + mean_of_rows(*(t.T for t in bucket))
            losses.append(total)
        return torch.stack(losses).mean()


class TwoWay(MultiLabelLoss):
    """Module form of :func:`two_way`.

    Raises:
        ValueError: options out of range.
    """

    no_posterior = "it does not change when a constant is added to all scores"

    def __init__(
        self,
        temperature_pos: float = 4.0,
        temperature_neg: float = 1.0,
        *,
        bias: float = 0.0,
        along: Along = "both",
        average: Average = "valid",
        bucket_size: int | None = None,
        gather: bool = False,
    ) -> None:
        super().__init__()
        _check(temperature_pos, temperature_neg, along, average, bucket_size)
        self.temperature_pos = temperature_pos
        self.temperature_neg = temperature_neg
        self.bias = bias
        self.along: Along = along
        self.average: Average = average
        self.bucket_size = bucket_size
        self.gather = gather

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        return two_way(
            logits,
            targets,
            temperature_pos=self.temperature_pos,
            temperature_neg=self.temperature_neg,
            bias=self.bias,
            along=self.along,
            average=self.average,
            bucket_size=self.bucket_size,
            gather=self.gather,
        )


def _check(
    temperature_pos: float,
    temperature_neg: float,
    along: str,
    average: str,
    bucket_size: int | None,
) -> None:
    check_temperatures(temperature_pos, temperature_neg)
    check_choice("along", along, get_args(Along))
    check_choice("average", average, get_args(Average))
    if bucket_size is not None and bucket_size < 1:
        raise ValueError(f"bucket_size: expected at least 1, got {bucket_size}")
