"""Which losses find the true posterior, where it is known, and how their error falls with n.

Samples x are 12 cells; the posterior of each label in each cell is drawn once. A model with a free
logit per cell and label can represent every posterior, so what is left is the loss's own bias
and the sampling error of a cell's frequency, which falls as the inverse root of n.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.losses.multilabel.asymmetric import Asymmetric
from segcal.losses.multilabel.bce import BCE
from segcal.losses.multilabel.lpr import LPR
from segcal.losses.multilabel.spa import SPA

CELLS, LABELS = 12, 4


def posterior():
    rng = np.random.default_rng(7)
    return torch.as_tensor(rng.beta(0.8, 1.6, (CELLS, LABELS)).clip(0.03, 0.97))


def fitted(loss, n, seed=0):
    """Logits per cell and label that minimise the loss on n samples."""
    generator = torch.Generator().manual_seed(seed)
    eta = posterior()
    cell = torch.arange(n) % CELLS
    targets = (torch.rand((n, LABELS), generator=generator, dtype=torch.float64) < eta[cell]).long()
    logits = torch.zeros(CELLS, LABELS, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [logits],
        max_iter=400,
        tolerance_grad=1e-9,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimiser.zero_grad()
        value = CELLS * LABELS * loss(logits[cell], targets)
        value.backward()
        return value

    optimiser.step(closure)
    return logits.detach()


def error(probabilities):
    return float((probabilities - posterior()).abs().mean())


@pytest.mark.parametrize(
    "loss",
    [
        BCE(),
        SPA(),
        SPA((2.0, 1.5, 0.3), (5.0, 3.0, 1.0)),
        Asymmetric(2.0, 2.0, 0.0),
        Asymmetric(4.0, 0.0, 0.0),
    ],
    ids=["bce", "spa", "spa_shifted", "focal", "asymmetric"],
)
def test_the_posterior_is_found_and_better_with_more_samples(loss):
    errors = [error(loss.probabilities(fitted(loss, n))) for n in (240, 3_840, 30_720)]
    # 20, 320 and 2560 samples per cell: E|frequency - eta| is 0.8 sqrt(eta (1 - eta) / samples)
    for found, samples in zip(errors, (20, 320, 2560), strict=True):
        eta = posterior()
        expected = float((0.8 * (eta * (1 - eta) / samples).sqrt()).mean())
        assert 0.7 * expected < found < 1.3 * expected


def test_scores_themselves_are_no_posteriors():
    for loss in (Asymmetric(4.0, 0.0, 0.0), Asymmetric(2.0, 2.0, 0.0), Asymmetric(), SPA()):
        logits = fitted(loss, 30_720)
        assert error(torch.sigmoid(logits)) > 0.1
        assert error(loss.probabilities(logits)) < 0.01


def test_pairs_do_not_move_the_minimiser():
    """With independent labels the pairs' own minimiser is the posterior as well."""
    for loss in (LPR(SPA()), LPR(BCE())):
        assert error(loss.probabilities(fitted(loss, 30_720))) < 0.01
