"""Isotonic calibration against scikit-learn, which is the same where nothing is pooled."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from scipy.optimize import isotonic_regression

from segcal.posthoc import isotonic
from segcal.posthoc.isotonic import IsotonicCalibration
from tests.conftest import close
from tests.posthoc.data import wrong_logits


def known(p, hits, weights=None):
    module = pytest.importorskip("sklearn.isotonic")
    return module.IsotonicRegression(out_of_bounds="clip").fit(p, hits, weights)


def test_two_classes_are_those_of_scikit_learn():
    (x, y), (probe, _) = wrong_logits(500, 2), wrong_logits(300, 2, seed=1)
    probe = 3 * probe  # beyond what was seen
    expected = known(torch.softmax(x, 1)[:, 1].numpy(), y.numpy())
    fitted = IsotonicCalibration().fit(x, y)
    for z in (x, probe):
        p = expected.predict(torch.softmax(z, 1)[:, 1].numpy())
        close(fitted.apply(z)[:, 1], p)
        close(fitted.apply(z)[:, 0], 1 - p)


def test_classes_are_those_of_scikit_learn_over_their_sum():
    (x, y), (probe, _) = wrong_logits(500, 4), wrong_logits(300, 4, seed=1)
    p, q = torch.softmax(x, 1).numpy(), torch.softmax(probe, 1).numpy()
    parts = [known(p[:, k], y.numpy() == k).predict(q[:, k]) for k in range(4)]
    expected = np.stack(parts, 1)
    total = expected.sum(1, keepdims=True)
    expected = np.where(total > 0, expected / np.maximum(total, 1e-300), q)
    close(IsotonicCalibration().fit(x, y).apply(probe), expected)


def test_ties_and_weights_are_those_of_scikit_learn():
    x, y = wrong_logits(600, 2)
    x = x.round()  # many ties
    calibrator = IsotonicCalibration()
    (rows,) = calibrator.collect([(x, y)])
    weights = torch.rand(600, generator=torch.Generator().manual_seed(0)).double() + 0.1
    rows.weights.copy_(weights)
    calibrator.fit_rows([rows])
    p = torch.softmax(x, 1)[:, 1].numpy()
    expected = known(p, y.numpy(), weights.numpy()).predict(p)
    close(calibrator.apply(x)[:, 1], expected, atol=1e-9)


def test_many_values_are_pooled_to_levels_of_equal_mass(monkeypatch):
    x, y = wrong_logits(20_000, 2)
    exact = IsotonicCalibration().fit(x, y)
    assert len(torch.softmax(x, 1)[:, 1].unique()) > isotonic.LEVELS
    p = torch.softmax(x, 1)[:, 1].numpy()
    difference = exact.apply(x)[:, 1].numpy() - known(p, y.numpy()).predict(p)
    assert np.abs(difference).mean() < 1e-4
    monkeypatch.setattr(isotonic, "LEVELS", 100)
    coarse = IsotonicCalibration().fit(x, y)
    assert (coarse.apply(x) - exact.apply(x)).abs().mean() < 0.01
    assert coarse.maps[0].shape[1] <= 200


def test_levels_are_ascending_and_keep_the_sums():
    p = np.random.default_rng(0).beta(0.01, 0.2, 200_000)
    hits = np.random.default_rng(1).random(len(p)) < p
    weights = np.random.default_rng(2).uniform(0.5, 30, len(p))
    values, share, mass = isotonic._levels(p, hits, weights)
    assert len(values) <= isotonic.LEVELS
    assert (np.diff(values) > 0).all()
    close(mass.sum(), weights.sum())
    close((mass * share).sum(), weights[hits].sum())
    close((mass * values).sum(), (weights * p).sum())


def test_steps_are_joined_where_it_costs_least():
    share = np.array([0.1, 0.11, 0.5, 0.9])
    found = isotonic._joined(np.arange(5), np.ones(4), share, 3)
    assert found.tolist() == [0, 2, 3, 4]
    assert isotonic._joined(np.arange(5), np.ones(4), share, 9).tolist() == [0, 1, 2, 3, 4]


def test_a_map_has_few_points_whatever_the_data(monkeypatch):
    """Every value is a step of its own, which real labels never are."""
    x = torch.linspace(-4, 4, 3000, dtype=torch.float64)
    calibrator = IsotonicCalibration()
    (rows,) = calibrator.collect(
        [
            (
                torch.stack([0 * x, 2 * x], 1).repeat(2, 1),
                torch.tensor([0, 1]).repeat_interleave(3000),
            )
        ]
    )
    rows.weights.copy_(torch.cat([x.sigmoid().flip(0), x.sigmoid()]))
    assert calibrator.fit_rows([rows]).maps[0].shape[1] == 3000
    monkeypatch.setattr(isotonic, "POINTS", 200)
    fewer = IsotonicCalibration().fit_rows([rows])
    assert fewer.maps[0].shape[1] <= 200
    assert len(json.dumps(fewer.state())) < 20_000
    close(fewer.apply(rows.logits), calibrator.apply(rows.logits), atol=0.02, rtol=0)


def test_a_row_of_zeros_keeps_its_probabilities_and_an_unseen_class_its_p():
    x, y = wrong_logits(50, 3)
    y[y == 2] = 1
    fitted = IsotonicCalibration().fit(x, y)
    assert fitted.maps[2] is None
    p = torch.softmax(x, 1).numpy()
    parts = np.stack(
        [np.interp(p[:, 0], *fitted.maps[0]), np.interp(p[:, 1], *fitted.maps[1]), p[:, 2]]
    )
    close(fitted.apply(x), (parts / parts.sum(0)).T)
    fitted.maps = [np.array([[0.0, 1.0], [0.0, 0.0]])] * 3
    close(fitted.apply(x), p)


def test_separable_cases_are_noted():
    x = torch.tensor([[2.0, -1.0], [-1.0, 2.0]] * 20)
    with pytest.warns(UserWarning, match="separable"):
        fitted = IsotonicCalibration().fit(x, torch.tensor([0, 1] * 20))
    assert fitted.facts["nll_after"] == 0


def test_scipy_gives_steps_by_their_ends():
    """What the points of a map are made of."""
    found = isotonic_regression(np.array([0.0, 1.0, 0.0, 1.0]), weights=np.ones(4))
    assert found.blocks.tolist() == [0, 1, 3, 4]


def test_damaged_maps_are_refused():
    x, y = wrong_logits(50, 3)
    state = IsotonicCalibration().fit(x, y).state()
    for damaged in ([1.0], [[0.5, 0.4], [0.1, 0.2]], [[0.1, 0.2], [0.9, 0.1]], [[0.1], [2.0]]):
        with pytest.raises(ValueError, match="map 0"):
            IsotonicCalibration.from_state({**state, "learned": {"maps": [damaged]}})
