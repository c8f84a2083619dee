"""Focal and asymmetric (ASL) losses, and the map from their scores to the posterior."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.losses.multilabel.posterior import MultiLabelLoss, bisect
from segcal.tensors import ClassReduction, Reduction, full_precision, label_masks, reduce_labels

__all__ = ["Asymmetric", "asymmetric", "from_log_odds", "inverse_phi", "log_odds", "phi"]

FAR = 1e4
"""Logits beyond this are as good as infinite to the inverse of phi."""
TAIL = -30.0
"""Below this, log(softplus(x)) is x - exp(x) / 2 in any precision."""


def asymmetric(
    logits: Tensor,
    targets: Tensor,
    *,
    gamma_neg: float = 4.0,
    gamma_pos: float = 0.0,
    margin: float = 0.05,
    detach_weight: bool = False,
    reduction: Reduction = "mean",
    class_reduction: ClassReduction = "mean",
) -> Tensor:
    """Focal binary cross-entropy, with a power for positives and negatives and a negative margin.

    ``l+ = -(1 - q)^{g+} log q`` and ``l- = -q_m^{g-} log(1 - q_m)``, ``q = sigmoid(v)``,
    ``q_m = max(q - m, 0)`` (Ridnik et al. 2021). Equal powers with m = 0 give the focal loss,
    different powers with m = 0 the asymmetric focal loss, and all three at 0 binary cross-entropy.
    A negative with ``q <= m`` has neither loss nor gradient.

    The published code adds up all entries, bounds the logarithms at 1e-8, and by default lets no
    gradient through the focal factor, as ``reduction="sum", detach_weight=True`` does here.

    Args:
        logits: floating ``(B, T)``; half precision is promoted to float32.
        targets: ``(B, T)`` of 0, 1, and -1 where unknown, which is left out.
        gamma_neg: g- >= 0.
        gamma_pos: g+ >= 0.
        margin: m, at least 0 and below 1.
        detach_weight: take the focal factor as constant.
        reduction: ``mean`` over the known entries, their ``sum``, or ``none`` for ``(B, T)``.
        class_reduction: ``sum`` adds the labels of a sample up before the mean over samples.

    Returns:
        scalar, or ``(B, T)``; 0 with zero gradient when nothing is known.

    Raises:
        ValueError: shapes, targets or options that do not fit.
    """
    _check(gamma_neg, gamma_pos, margin)
    positive, negative = label_masks(logits, targets)
    with full_precision(logits) as x:
        weight_pos = torch.exp(gamma_pos * F.logsigmoid(-x))
        if margin == 0:
            weight_neg, loss_neg = torch.exp(gamma_neg * F.logsigmoid(x)), F.softplus(x)
        else:
            q = torch.sigmoid(x)
            above = q > margin
            u = torch.where(above, q - margin, 0.5)  # 0 would give an infinite slope
            weight_neg, loss_neg = u**gamma_neg, torch.where(above, -torch.log1p(-u), 0.0)
        if detach_weight:
            weight_pos, weight_neg = weight_pos.detach(), weight_neg.detach()
        value = torch.where(positive, weight_pos * F.softplus(-x), weight_neg * loss_neg)
        return reduce_labels(value, positive | negative, reduction, class_reduction)


def log_odds(logits: Tensor, *, gamma_neg: float, gamma_pos: float, margin: float) -> Tensor:
    """Log-odds of the posterior that belongs to `logits` trained with an asymmetric loss.

    ``logit phi = log h(q_m; g-) - log h(1 - q; g+)`` with
    ``h(u; g) = (u^g - g u^{g-1} (1 - u) log(1 - u)) / (1 - u)``. This phi is the posterior eta at
    which the expected loss is stationary in v (Cheng & Vasconcelos 2024, eqs. 14 and 15). Without a
    margin the result is exact for logits of any size, even where q itself is rounded to 0 or 1.

    Args:
        logits: floating, any shape; half precision is promoted to float32.
        gamma_neg: g- of the training.
        gamma_pos: g+ of the training.
        margin: m of the training. With a margin, all ``q <= m`` have phi = 0, and so log-odds -inf.

    Returns:
        log-odds like `logits`; they increase with the logits, strictly where ``q > margin``.

    Raises:
        ValueError: options that do not fit.
    """
    _check(gamma_neg, gamma_pos, margin)
    with full_precision(logits) as x:
        return _log_odds(x, torch.sigmoid(x), gamma_neg, gamma_pos, margin)


def _log_odds(x: Tensor, q: Tensor, gamma_neg: float, gamma_pos: float, margin: float) -> Tensor:
    """Log-odds of phi at logits `x` with scores `q`, whose distance from the margin is exact."""
    of_positive = _log_h(-x, gamma_pos)
    if margin == 0:
        return _log_h(x, gamma_neg) - of_positive
    above = q > margin
    u = torch.where(above, q - margin, 0.5)
    of_negative = _log_h(torch.log(u) - torch.log1p(-u), gamma_neg)
    return torch.where(above, of_negative - of_positive, -math.inf)


def from_log_odds(
    eta_log_odds: Tensor, *, gamma_neg: float, gamma_pos: float, margin: float
) -> Tensor:
    """Logits that belong to given posteriors, as the inverse of :func:`log_odds` by bisection.

    Args:
        eta_log_odds: log-odds of the posteriors, floating, any shape; half precision is promoted to
            float32.
        gamma_neg: g- of the training.
        gamma_pos: g+ of the training.
        margin: m of the training. -inf gives the logit of m, posteriors above phi(1) give 1e4.

    Returns:
        logits between -1e4 and 1e4, without gradient.

    Raises:
        ValueError: options that do not fit.
    """
    _check(gamma_neg, gamma_pos, margin)
    with full_precision(eta_log_odds) as z:
        target = z.detach().double()
        low = -FAR if margin == 0 else math.log(margin) - math.log1p(-margin)
        found = bisect(
            lambda v: log_odds(v, gamma_neg=gamma_neg, gamma_pos=gamma_pos, margin=margin),
            target,
            torch.full_like(target, low),
            torch.full_like(target, FAR),
        )
        return found.to(z)


def phi(scores: Tensor, *, gamma_neg: float, gamma_pos: float, margin: float) -> Tensor:
    """Posterior that belongs to the scores ``q = sigmoid(v)`` of an asymmetric loss.

    It is strictly increasing for m = 0; with a margin, all ``q <= m`` give 0, and with g+ = 0 even
    q = 1 gives less than 1. :func:`log_odds` is the same without the rounding of q.

    Args:
        scores: floating in [0, 1], any shape.
        gamma_neg: g- of the training.
        gamma_pos: g+ of the training.
        margin: m of the training.

    Returns:
        probabilities like `scores`.

    Raises:
        ValueError: options that do not fit.
    """
    _check(gamma_neg, gamma_pos, margin)
    with full_precision(scores) as q:
        x = torch.logit(q).clamp(-FAR, FAR)
        return torch.sigmoid(_log_odds(x, q, gamma_neg, gamma_pos, margin))


def inverse_phi(
    probabilities: Tensor, *, gamma_neg: float, gamma_pos: float, margin: float
) -> Tensor:
    """Scores ``q = sigmoid(v)`` that minimise the expected loss at given posteriors.

    Args:
        probabilities: posteriors, floating in [0, 1], any shape.
        gamma_neg: g- of the training.
        gamma_pos: g+ of the training.
        margin: m of the training; a posterior of 0 gives m, posteriors above phi(1) give 1.

    Returns:
        scores like `probabilities`, without gradient.

    Raises:
        ValueError: options that do not fit.
    """
    with full_precision(probabilities) as p:
        z = torch.logit(p)
        return torch.sigmoid(
            from_log_odds(z, gamma_neg=gamma_neg, gamma_pos=gamma_pos, margin=margin)
        )


def _log_h(x: Tensor, gamma: float) -> Tensor:
    """``log h(u; gamma)`` of ``u = sigmoid(x)``."""
    spread = x
    if gamma > 0:
        tail = x - torch.exp(x.clamp(max=TAIL)) / 2
        log_softplus = torch.where(x < TAIL, tail, torch.log(F.softplus(x.clamp(min=TAIL))))
        spread = torch.logaddexp(x, math.log(gamma) + log_softplus)
    return (gamma - 1) * F.logsigmoid(x) + spread


class Asymmetric(MultiLabelLoss):
    """Module form of :func:`asymmetric`.

    Raises:
        ValueError: powers or margin out of range.
    """

    def __init__(
        self,
        gamma_neg: float = 4.0,
        gamma_pos: float = 0.0,
        margin: float = 0.05,
        *,
        detach_weight: bool = False,
        reduction: Reduction = "mean",
        class_reduction: ClassReduction = "mean",
    ) -> None:
        super().__init__()
        _check(gamma_neg, gamma_pos, margin)
        self.gamma_neg = gamma_neg
        self.gamma_pos = gamma_pos
        self.margin = margin
        self.detach_weight = detach_weight
        self.reduction: Reduction = reduction
        self.class_reduction: ClassReduction = class_reduction
        self.bijective = margin == 0
        self.link_name = "phi"

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of `logits` ``(B, T)`` against `targets` ``(B, T)``."""
        return asymmetric(
            logits,
            targets,
            gamma_neg=self.gamma_neg,
            gamma_pos=self.gamma_pos,
            margin=self.margin,
            detach_weight=self.detach_weight,
            reduction=self.reduction,
            class_reduction=self.class_reduction,
        )

    def log_odds(self, logits: Tensor) -> Tensor:
        """Return the log-odds of the posterior at `logits` ``(B, T)``, as :func:`log_odds` does."""
        return log_odds(
            logits, gamma_neg=self.gamma_neg, gamma_pos=self.gamma_pos, margin=self.margin
        )


def _check(gamma_neg: float, gamma_pos: float, margin: float) -> None:
    if not (0 <= gamma_neg < math.inf and 0 <= gamma_pos < math.inf):
        raise ValueError(
            f"gamma_neg, gamma_pos: expected numbers >= 0, got {gamma_neg} and {gamma_pos}"
        )
    if not 0 <= margin < 1:
        raise ValueError(f"margin: expected 0 <= margin < 1, got {margin}")
