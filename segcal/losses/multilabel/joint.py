"""Joint-way loss: all positive labels of a batch against all negative labels."""

from __future__ import annotations

from torch import Tensor

from segcal.losses.multilabel.contrast import check_temperatures, contrast
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.tensors import full_precision, label_masks

__all__ = ["Joint", "joint"]


def joint(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature_pos: float = 4.0,
    temperature_neg: float = 1.0,
    bias: float = 0.0,
) -> Tensor:
    """Softplus of the soft maximum of negative scores minus the soft minimum of positive scores.

    ``softplus(T_N log sum exp(x_n / T_N) + T_P log sum exp(-x_p / T_P) + bias)`` with the sums
    over all negative and all positive entries of the batch (Kobayashi 2023, eq. 22, where we read
    the index ``y_ip`` of the second sum as ``y_jp``). It does not change when c is added to all
    scores.

    Args:
        logits: floating ``(B, T)``; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is in neither set.
        temperature_pos: T_P >= 0; 0 takes the smallest positive score.
        temperature_neg: T_N >= 0; 0 takes the largest negative score.
        bias: added inside the softplus.

    Returns:
        scalar; 0 with zero gradient when there is no positive or no negative label.

    Raises:
        ValueError: shapes, targets or options that do not fit.
    """
    check_temperatures(temperature_pos, temperature_neg)
    positive, negative = label_masks(logits, targets)
    with full_precision(logits) as x:
        return contrast(
            x.flatten(),
            positive.flatten(),
            negative.flatten(),
            temperature_pos=temperature_pos,
            temperature_neg=temperature_neg,
            bias=bias,
        )


class Joint(MultiLabelLoss):
    """Module form of :func:`joint`.

    Raises:
        ValueError: temperatures out of range.
    """

    no_posterior = "it does not change when a constant is added to all scores"

    def __init__(
        self, temperature_pos: float = 4.0, temperature_neg: float = 1.0, *, bias: float = 0.0
    ) -> None:
        super().__init__()
        check_temperatures(temperature_pos, temperature_neg)
        self.temperature_pos = temperature_pos
        self.temperature_neg = temperature_neg
        self.bias = bias

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        return joint(
            logits,
            targets,
            temperature_pos=self.temperature_pos,
            temperature_neg=self.temperature_neg,
            bias=self.bias,
        )
