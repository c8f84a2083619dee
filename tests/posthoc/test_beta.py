"""Beta calibration against SciPy's minimiser under bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from segcal.posthoc.beta import BetaCalibration
from segcal.posthoc.one_vs_rest import OwnLogs
from tests.conftest import close
from tests.posthoc.data import wrong_logits


def nll(x, log_p, log_q, hits):
    odds = x[0] * log_p - x[1] * log_q + x[2]
    away = x - np.array([1, 1, 0])
    return np.mean(np.logaddexp(0, odds) - hits * odds) + 1e-7 * away @ away


def bounded(log_p, log_q, hits):
    return minimize(
        nll, [1.0, 1.0, 0.0], args=(log_p, log_q, hits), method="SLSQP",
        bounds=[(0, None), (0, None), (None, None)], options={"ftol": 1e-15, "maxiter": 1000},
    )  # fmt: skip


def made(kind):
    """ln p, ln (1 - p) and hits of which the best a, or b, or both would be negative."""
    generator = np.random.default_rng(0)
    p = generator.uniform(0.01, 0.99, 4000)
    share = {
        "inside": 1 / (1 + np.exp(-(0.5 * np.log(p) - 1.5 * np.log1p(-p) + 0.3))),
        "a": 1 / (1 + np.exp(-(-0.4 * np.log(p) - 1.5 * np.log1p(-p)))),
        "b": 1 / (1 + np.exp(-(1.5 * np.log(p) + 0.4 * np.log1p(-p)))),
        "both": 1 - p,
    }[kind]
    return np.log(p), np.log1p(-p), (generator.random(4000) < share).astype(float)


@pytest.mark.parametrize("kind", ["inside", "a", "b", "both"])
def test_is_the_minimum_under_the_bounds(kind):
    log_p, log_q, hits = made(kind)
    x = torch.from_numpy(np.stack([log_q, log_p], 1))
    found = BetaCalibration().fit(x, torch.from_numpy(hits).long()).maps[0]
    at_zero = {"inside": [], "a": [0], "b": [1], "both": [0, 1]}[kind]
    assert [i for i in (0, 1) if found[i] == 0] == at_zero
    other = bounded(log_p, log_q, hits)
    close(nll(found, log_p, log_q, hits), other.fun, rtol=1e-8)
    close(found, other.x, atol=1e-3)


def test_every_class_against_the_rest():
    x, y = wrong_logits(1000, 3)
    fitted = BetaCalibration().fit(x, y)
    log_p = torch.log_softmax(x, 1)
    parts = []
    for k in range(3):
        log_q = torch.log1p(-log_p[:, k].exp())
        found = bounded(log_p[:, k].numpy(), log_q.numpy(), (y == k).double().numpy()).x
        close(fitted.maps[k], found, rtol=1e-3, atol=1e-3)
        a, b, c = fitted.maps[k]
        parts.append(torch.sigmoid(a * log_p[:, k] - b * log_q + c))
    p = torch.stack(parts, 1)
    close(fitted.apply(x), p / p.sum(1, keepdim=True))


def test_two_classes_have_one_map_that_knows_no_order():
    x, y = wrong_logits(500, 2)
    one, other = BetaCalibration().fit(x, y), BetaCalibration().fit(x.flip(1), 1 - y)
    (a, b, c), (d, e, f) = one.maps[0], other.maps[0]
    close([a, b, c], [e, d, -f], rtol=1e-6)
    close(one.apply(x), other.apply(x.flip(1)).flip(1), rtol=1e-7)


def test_logarithms_near_0_and_1_keep_their_digits():
    x = torch.tensor([[0.0, 50.0, -3.0], [-800.0, 0.0, 2.0]], dtype=torch.float64)
    own = OwnLogs.of([x[:1], x[1:]])
    small, one = -np.exp(-50), np.log1p(np.exp(-2))
    pairs = [own.pair(x[:, k], k) for k in range(3)]
    close(pairs[0][0], [-50, -802 - one])
    close(pairs[0][1], [small, 0], rtol=1e-9, atol=0)
    close(pairs[1][0], [small * (1 + np.exp(-3)), -2 - one], rtol=1e-9, atol=1e-16)
    close(pairs[1][1], [-50 + np.log1p(np.exp(-3)), -one])
    close(pairs[2][0], [-53, -one])
    close(pairs[2][1], [-np.exp(-53), -2 - one], rtol=1e-9, atol=0)


def test_separable_cases_are_finite_and_noted():
    x = torch.tensor([[2.0, -1.0], [-1.0, 2.0]] * 20)
    with pytest.warns(UserWarning, match="separable"):
        fitted = BetaCalibration().fit(x, torch.tensor([0, 1] * 20))
    assert np.abs(fitted.maps[0]).max() < 100
    assert fitted.facts["nll_after"] < 1e-3


def test_damaged_maps_are_refused():
    x, y = wrong_logits(50, 3)
    state = BetaCalibration().fit(x, y).state()
    for damaged in ([1.0, 1.0], [-1.0, 1.0, 0.0], [1.0, 1.0, float("nan")]):
        with pytest.raises(ValueError, match="map 0"):
            BetaCalibration.from_state({**state, "learned": {"maps": [damaged]}})
