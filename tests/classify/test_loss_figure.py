"""Losses of labels and their links, drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from segcal.classify.loss_figure import loss_curves, plot_label_losses
from segcal.losses.multilabel.asymmetric import Asymmetric
from segcal.losses.multilabel.bce import BCE
from segcal.losses.multilabel.lpr import LPR
from segcal.losses.multilabel.spa import SPA
from segcal.losses.multilabel.two_way import TwoWay
from tests.conftest import close


def softplus(a):
    return math.log1p(math.exp(a))


def test_curves_by_hand():
    """SPA of (5, 3, 1) at v = 1: log(1 + 1/e), log(2) / 5, and the posterior that they tie."""
    v = torch.tensor([-2.0, 0.0, 1.0], dtype=torch.float64)
    of_positive, of_negative, posterior = loss_curves(SPA(negative=(5, 3, 1)), v)
    close(of_positive, [softplus(-x) for x in v.tolist()])
    close(of_negative, [softplus(3 * (x - 1)) / 5 for x in v.tolist()])
    # stationary: eta * sigmoid(-v) = (1 - eta) * 3 / 5 * sigmoid(3 (v - 1))
    pull = [3 / 5 / (1 + math.exp(-3 * (x - 1))) * (1 + math.exp(x)) for x in v.tolist()]
    close(posterior, [a / (1 + a) for a in pull])
    for with_pairs, alone in zip(loss_curves(LPR(SPA()), v), loss_curves(SPA(), v), strict=True):
        close(with_pairs, alone)  # a label alone is in no pair


def test_a_figure_of_several():
    losses = {"bce": BCE(), "focal": Asymmetric(2.0, 2.0, 0.0), "asymmetric": Asymmetric()}
    figure = plot_label_losses(losses)
    left, right = figure.axes
    assert [line.get_label() for line in right.lines[:3]] == list(losses)
    values = {line.get_label(): line.get_data() for line in (*left.lines, *right.lines)}
    close(np.interp(0.0, *values["bce, label applies"]), math.log(2))
    close(np.interp(0.0, *values["focal, it does not"]), 0.25 * math.log(2))
    close(np.interp(0.0, *values["bce"]), 0.5)
    assert values["asymmetric"][1][0] == 0  # within the margin
    assert len(figure.legends[0].get_texts()) == 7


def test_losses_that_compare_labels_have_none():
    with pytest.raises(ValueError, match="no posterior goes with this loss"):
        plot_label_losses({"two_way": TwoWay()})
