"""Figure of multi-label losses over the logit, and of the posteriors that belong to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.reporting.legends import COLOURS, add_side_legend

__all__ = ["loss_curves", "plot_label_losses"]

REACH, POINTS = 6.0, 241
"""Largest logit to each side of 0, and number of values that are drawn."""


def loss_curves(loss: MultiLabelLoss, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of a single positive label, of a single negative label, and the posterior.

    Args:
        loss: with a posterior; a part that compares labels, such as LPR, has no effect here.
        logits: float64 ``(N,)``.

    Returns:
        ``(N,)`` each.

    Raises:
        ValueError: the loss has no posterior, and no value for a single label.
    """
    posterior = loss.probabilities(logits[:, None])[:, 0]
    one = torch.ones(1, 1, dtype=torch.int64)
    of_positive, of_negative = (
        torch.stack([loss(v.view(1, 1), y).sum() for v in logits]) for y in (one, 0 * one)
    )
    return of_positive, of_negative, posterior


@torch.no_grad()
def plot_label_losses(losses: Mapping[str, MultiLabelLoss]) -> Figure:
    """Draw the losses of a positive and a negative label, and the posterior by the loss's link.

    Args:
        losses: with posteriors, by name.

    Raises:
        ValueError: one of the losses has no posterior.
    """
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True)
    logits = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    v = logits.numpy()
    for i, (name, loss) in enumerate(losses.items()):
        of_positive, of_negative, posterior = (c.numpy() for c in loss_curves(loss, logits))
        width = 1.6 + 1.4 * (len(losses) - 1 - i)  # of curves that lie on each other
        look: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "linewidth": width}
        left.plot(v, of_positive, label=f"{name}, label applies", **look)
        left.plot(v, of_negative, "--", label=f"{name}, it does not", **look)
        right.plot(v, posterior, label=name, **look)
    sigmoid = right.plot(v, torch.sigmoid(logits).numpy(), ":", color="0.45", label="sigmoid")
    left.set_ylabel("loss of one label")
    right.set_ylabel("posterior by the link of the loss")
    right.axhline(0.5, color="0.8", linewidth=0.8, zorder=0)
    for axis in (left, right):
        axis.set_xlabel("logit v")
        axis.axvline(0, color="0.8", linewidth=0.8, zorder=0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    add_side_legend(figure, [*left.lines[: 2 * len(losses)], *sigmoid])
    figure.suptitle("Losses of a label, and the posterior of its logit")
    return figure
