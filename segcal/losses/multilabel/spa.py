"""SPA: a strictly proper asymmetric loss, and its link to the posterior."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.losses.multilabel.posterior import MultiLabelLoss, bisect
from segcal.tensors import ClassReduction, Reduction, full_precision, label_masks, reduce_labels

__all__ = ["SPA", "from_log_odds", "inverse_link", "link", "log_odds", "spa"]

Triple = Sequence[float]
"""zeta, k and b of one side."""
POSITIVE: Triple = (1.0, 1.0, 0.0)
NEGATIVE: Triple = (5.0, 3.0, 1.0)


def spa(
    logits: Tensor,
    targets: Tensor,
    *,
    positive: Triple = POSITIVE,
    negative: Triple = NEGATIVE,
    reduction: Reduction = "mean",
    class_reduction: ClassReduction = "mean",
) -> Tensor:
    """A softplus loss for positives and one for negatives, each with scale, slope and offset.

    ``l+(v) = softplus(-k+ (v - b+)) / zeta+`` and ``l-(v) = softplus(k- (v - b-)) / zeta-``
    (Cheng & Vasconcelos 2024, eq. 16). With both triples (zeta, k, b) at (1, 1, 0) this is binary
    cross-entropy. :func:`log_odds` gives the posterior at which v minimises the expected loss; a
    posterior of 1/2 is in general not at v = 0.

    Args:
        logits: floating ``(B, T)``; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out.
        positive: zeta+ > 0, k+ > 0 and b+.
        negative: zeta- > 0, k- > 0 and b-; the default is the one published example.
        reduction: ``mean`` over the known entries, their ``sum``, or ``none`` for ``(B, T)``.
        class_reduction: ``sum`` adds the labels of a sample up before the mean over samples.

    Returns:
        scalar, or ``(B, T)``; 0 with zero gradient when nothing is known.

    Raises:
        ValueError: shapes, targets or options that do not fit.
    """
    (zeta_pos, k_pos, b_pos), (zeta_neg, k_neg, b_neg) = _checked(positive, negative)
    is_positive, is_negative = label_masks(logits, targets)
    with full_precision(logits) as x:
        value = torch.where(
            is_positive,
            F.softplus(-k_pos * (x - b_pos)) / zeta_pos,
            F.softplus(k_neg * (x - b_neg)) / zeta_neg,
        )
        return reduce_labels(value, is_positive | is_negative, reduction, class_reduction)


def log_odds(logits: Tensor, *, positive: Triple = POSITIVE, negative: Triple = NEGATIVE) -> Tensor:
    """Log-odds of the posterior at which the expected loss is stationary in the logit.

    ``log(k- zeta+ / (k+ zeta-)) - softplus(-k- (v - b-)) + softplus(k+ (v - b+))``, strictly
    increasing and exact for logits of any size. The paper's eq. 17 has the opposite signs inside
    its sigmoids and so decreases; this function is the one that the paper's theorem describes.

    Args:
        logits: floating, any shape; half precision is promoted to float32.
        positive: zeta+, k+ and b+ of the training.
        negative: zeta-, k- and b- of the training.

    Returns:
        log-odds like `logits`.

    Raises:
        ValueError: options that do not fit.
    """
    (zeta_pos, k_pos, b_pos), (zeta_neg, k_neg, b_neg) = _checked(positive, negative)
    with full_precision(logits) as x:
        constant = math.log(k_neg) + math.log(zeta_pos) - math.log(k_pos) - math.log(zeta_neg)
        return constant - F.softplus(-k_neg * (x - b_neg)) + F.softplus(k_pos * (x - b_pos))


def from_log_odds(
    eta_log_odds: Tensor, *, positive: Triple = POSITIVE, negative: Triple = NEGATIVE
) -> Tensor:
    """Logits that belong to given posteriors, as the inverse of :func:`log_odds` by bisection.

    Args:
        eta_log_odds: log-odds of the posteriors, floating, any shape; half precision is promoted to
            float32.
        positive: zeta+, k+ and b+ of the training.
        negative: zeta-, k- and b- of the training.

    Returns:
        logits, without gradient.

    Raises:
        ValueError: options that do not fit.
    """
    (zeta_pos, k_pos, b_pos), (zeta_neg, k_neg, b_neg) = _checked(positive, negative)
    with full_precision(eta_log_odds) as z:
        target = z.detach().double()
        rest = target - (math.log(k_neg * zeta_pos) - math.log(k_pos * zeta_neg))
        # above b- the first softplus is below log 2, so the second is found from the right; and
        # the other way round below b+
        found = bisect(
            lambda v: log_odds(v, positive=positive, negative=negative),
            target,
            (b_neg + (rest - math.log(2)) / k_neg).clamp(max=b_pos),
            (b_pos + (rest + math.log(2)) / k_pos).clamp(min=b_neg),
        )
        return torch.where(target.isinf(), target, found).to(z)


def inverse_link(
    logits: Tensor, *, positive: Triple = POSITIVE, negative: Triple = NEGATIVE
) -> Tensor:
    """Posterior eta at `logits`: the sigmoid of :func:`log_odds`, with the same arguments."""
    return torch.sigmoid(log_odds(logits, positive=positive, negative=negative))


def link(
    probabilities: Tensor, *, positive: Triple = POSITIVE, negative: Triple = NEGATIVE
) -> Tensor:
    """Logits that minimise the expected loss at given posteriors.

    This is the inverse of :func:`inverse_link`; `positive` and `negative` are as in
    :func:`from_log_odds`.
    """
    with full_precision(probabilities) as p:
        return from_log_odds(torch.logit(p), positive=positive, negative=negative)


class SPA(MultiLabelLoss):
    """Module form of :func:`spa`.

    Raises:
        ValueError: triples out of range.
    """

    bijective = True

    def __init__(
        self,
        positive: Triple = POSITIVE,
        negative: Triple = NEGATIVE,
        *,
        reduction: Reduction = "mean",
        class_reduction: ClassReduction = "mean",
    ) -> None:
        super().__init__()
        self.positive, self.negative = _checked(positive, negative)
        self.reduction: Reduction = reduction
        self.class_reduction: ClassReduction = class_reduction

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        return spa(
            logits,
            targets,
            positive=self.positive,
            negative=self.negative,
            reduction=self.reduction,
            class_reduction=self.class_reduction,
        )

    def log_odds(self, logits: Tensor) -> Tensor:
        """Return the log-odds of the posterior at `logits` ``(B, T)``, as :func:`log_odds` does."""
        return log_odds(logits, positive=self.positive, negative=self.negative)


def _checked(positive: Triple, negative: Triple) -> list[tuple[float, float, float]]:
    found = []
    for name, triple in (("positive", positive), ("negative", negative)):
        values = tuple(float(v) for v in triple)
        if len(values) != 3 or not all(map(math.isfinite, values)) or min(values[:2]) <= 0:
            raise ValueError(f"{name}: expected (zeta, k, b) with zeta and k above 0, got {values}")
        found.append((values[0], values[1], values[2]))
    return found
