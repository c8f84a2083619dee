"""Probabilities of samples from a trained network."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from segcal.classify.data import Part
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.objective import Objective

EVALUATED_AT_ONCE, VALUES_AT_ONCE = 1024, 2**23
"""Largest number of samples that are evaluated at a time, and of their values together."""
SIGMOID, SOFTMAX = "sigmoid", "softmax"
"""Kinds of probabilities without a link of the loss."""


@torch.no_grad()
def predict(network: nn.Module, part: Part) -> Tensor:
    """Logits ``(N, K)`` float32 of all samples of a part, in eval mode."""
    network.eval()
    size = max(1, min(EVALUATED_AT_ONCE, VALUES_AT_ONCE // math.prod(part.shape)))
    return torch.cat([network(b.inputs).float() for b in part.batches(size)])


def label_loss(objective: Objective) -> MultiLabelLoss | None:
    """The multi-label loss in an objective; None for a loss of classes."""
    found = [t for t in objective.terms.values() if isinstance(t, MultiLabelLoss)]
    return found[0] if found else None


def probabilities(logits: Tensor, loss: MultiLabelLoss | None) -> dict[str, Tensor]:
    """Probabilities of logits, by kind.

    Args:
        logits: ``(N, K)``.
        loss: multi-label loss; None for a softmax over classes.

    Returns:
        ``softmax`` for classes; ``sigmoid`` for labels and, if the posterior of the loss differs
        from it, also the posterior, under the name of its link.
    """
    if loss is None:
        return {SOFTMAX: torch.softmax(logits.double(), 1)}
    return {kind: torch.sigmoid(z) for kind, z in log_odds_by_kind(logits, loss).items()}


def log_odds_by_kind(logits: Tensor, loss: MultiLabelLoss) -> dict[str, Tensor]:
    """Log-odds of labels, by kind, see :func:`probabilities`."""
    found = {SIGMOID: logits.double()}
    if not loss.no_posterior:
        probe = torch.linspace(-3, 3, 7, dtype=torch.float64)[:, None].expand(7, logits.shape[1])
        if not torch.equal(loss.log_odds(probe), probe):
            found[loss.link_name] = loss.log_odds(logits.double())
    return found
