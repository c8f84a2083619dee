"""Vector, matrix and Dirichlet calibration against SciPy's minimiser and scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from segcal.posthoc import affine
from segcal.posthoc.dirichlet import DirichletCalibration
from segcal.posthoc.matrix import MatrixScaling
from segcal.posthoc.vector import VectorScaling
from tests.conftest import close
from tests.posthoc.data import wrong_logits

RIDGE = 1e-7


def vector_objective(theta, x, y):
    w, b = theta.view(2, -1)
    away = torch.cat([w - 1, b])
    return torch.nn.functional.cross_entropy(w * x + b, y) + RIDGE * away @ away


def full_objective(theta, x, y, off_diagonal=1e-3, bias=1e-3):
    k = x.shape[1]
    w, b = theta.view(k, k + 1).split([k, 1], 1)
    away = w - torch.eye(k, dtype=w.dtype)
    odir = off_diagonal * away[~torch.eye(k, dtype=torch.bool)].square().mean()
    ridge = RIDGE * (away.square().sum() + b.square().sum())
    nll = torch.nn.functional.cross_entropy(x @ w.T + b[:, 0], y)
    return nll + odir + bias * b.square().mean() + ridge


def dirichlet_objective(theta, x, y):
    return full_objective(theta, torch.log_softmax(x, 1), y)


CASES = [
    (VectorScaling, vector_objective),
    (MatrixScaling, full_objective),
    (DirichletCalibration, dirichlet_objective),
]


def value_and_gradient(objective, x, y):
    def found(point):
        theta = torch.tensor(point, requires_grad=True)
        value = objective(theta, x, y)
        value.backward()
        return value.item(), theta.grad.numpy()

    return found


@pytest.mark.parametrize(("method", "objective"), CASES)
@pytest.mark.parametrize("k", [2, 4])
def test_is_the_minimum(method, objective, k):
    x, y = wrong_logits(400, k)
    fitted = method().fit(x, y)
    at = value_and_gradient(objective, x, y)
    value, gradient = at(fitted.parameters.ravel())
    assert np.linalg.norm(gradient) <= 1e-8
    start = np.random.default_rng(0).normal(size=gradient.shape)
    other = minimize(at, start, jac=True, method="BFGS", options={"gtol": 1e-9})
    close(value, other.fun)
    close(fitted.parameters.ravel(), other.x, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("method", "objective"), CASES)
def test_many_rows_have_the_same_minimum(method, objective, monkeypatch):
    x, y = wrong_logits(3000, 4)
    y[y == 3] = 2  # so that one class occurs twice only
    y[[5, 17]] = 3
    few = method().fit(x, y)
    monkeypatch.setattr(affine, "FEW", 300)
    monkeypatch.setattr(affine, "AT_A_TIME", 100)
    many = method().fit(x, y)
    _, gradient = value_and_gradient(objective, x, y)(many.parameters.ravel())
    assert np.linalg.norm(gradient) <= 1e-8
    close(many.apply(x), few.apply(x), rtol=1e-5)


@pytest.mark.parametrize(("method", "objective"), CASES)
def test_hessian_is_the_derivative_of_the_gradient(method, objective):
    x, y = wrong_logits(60, 3)
    (rows,) = method().collect([(x, y)])
    own = method()
    scores = own._scores(3)
    penalty = np.broadcast_to(own._penalty(3), scores.identity().shape) + RIDGE
    ours = affine._Objective(rows, scores, own._features, penalty)
    point = np.random.default_rng(1).normal(size=len(penalty))
    expected = torch.autograd.functional.hessian(
        lambda theta: objective(theta, x, y), torch.from_numpy(point)
    )
    close(ours.hessian(point), expected)
    close(ours.hessian_times(point, penalty + 1), expected @ torch.from_numpy(penalty + 1))


def test_finds_scales_and_offsets_that_made_the_labels():
    x, y = wrong_logits(100_000, 3)
    w, b = VectorScaling().fit(x, y).parameters
    close(w, [0.5] * 3, rtol=0.03)
    close(b - b[1], [-0.5, 0, 0], atol=0.03)
    close(b.sum(), 0, atol=1e-6)


def test_per_channel_is_platt_scaling():
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = wrong_logits(2000, 2)
    x = x[:, 1:] - x[:, :1]
    fitted = VectorScaling(per_channel=True).fit(x, y[:, None])
    platt = linear_model.LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(x, y)
    close(fitted.apply(x)[:, 0], platt.predict_proba(x.numpy())[:, 1], rtol=1e-4)
    (channel,) = fitted.channels
    w, b = channel.parameters
    close(w[1], platt.coef_[0, 0], rtol=1e-4)
    close(b[1] - b[0], platt.intercept_[0], atol=1e-4)
    close(w[0], 1)  # of a logit that is 0


def test_without_regularisation_matrix_scaling_is_logistic_regression():
    linear_model = pytest.importorskip("sklearn.linear_model")
    x, y = wrong_logits(2000, 3)
    free = MatrixScaling(off_diagonal=0, bias=0).fit(x, y)
    known = linear_model.LogisticRegression(C=1e9, tol=1e-10, max_iter=5000).fit(x, y)
    close(free.apply(x), known.predict_proba(x.numpy()), atol=1e-4)


def test_regularisation_leads_to_a_diagonal():
    x, y = wrong_logits(300, 3)
    sums = []
    for weight in (0, 1e-2, 1e4):
        w = MatrixScaling(off_diagonal=weight).fit(x, y).parameters[:, :3]
        sums.append(np.abs(w[~np.eye(3, dtype=bool)]).sum())
    assert sums[0] > sums[1] > sums[2]
    assert sums[2] < 1e-3


def test_dirichlet_ignores_what_is_added_to_all_logits_and_matrix_scaling_does_not():
    x, y = wrong_logits(300, 3)
    moved = x + 10 * torch.rand((300, 1), generator=torch.Generator().manual_seed(0)).double()
    close(
        DirichletCalibration().fit(moved, y).apply(moved), DirichletCalibration().fit(x, y).apply(x)
    )
    difference = MatrixScaling().fit(moved, y).apply(moved) - MatrixScaling().fit(x, y).apply(x)
    assert difference.abs().max() > 1e-3


def test_dirichlet_of_two_classes_without_bounds_is_beta():
    from segcal.posthoc.beta import BetaCalibration

    x, y = wrong_logits(2000, 2)
    free = DirichletCalibration(off_diagonal=0, bias=0).fit(x, y)
    beta = BetaCalibration().fit(x, y)
    assert (beta.maps[0][:2] > 0).all()
    close(free.apply(x), beta.apply(x), atol=1e-5)


@pytest.mark.parametrize(("method", "objective"), CASES)
def test_separable_cases_are_finite_and_noted(method, objective):
    x = torch.tensor([[2.0, -1.0], [-1.0, 2.0]] * 20)
    with pytest.warns(UserWarning, match="separable"):
        fitted = method().fit(x, torch.tensor([0, 1] * 20))
    assert np.abs(fitted.parameters).max() < 100
    assert fitted.facts["nll_after"] < 1e-3


@pytest.mark.parametrize(("method", "objective"), CASES)
def test_a_voxel_that_is_utterly_wrong_counts_in_full(method, objective):
    x, y = wrong_logits(1000, 2)
    x[0], y[0] = torch.tensor([0.0, 60_000.0]), 0
    fitted = method().fit(x, y)
    _, gradient = value_and_gradient(objective, x, y)(fitted.parameters.ravel())
    assert np.linalg.norm(gradient) <= 1e-8
    close(fitted.facts["nll_before"], torch.nn.functional.cross_entropy(x, y))
    assert fitted.facts["nll_after"] < 0.7  # of 60


def test_what_does_not_fit_is_refused():
    x, y = wrong_logits(50, 3)
    for arguments, message in (
        ({"off_diagonal": -1.0}, "off_diagonal: expected a finite weight"),
        ({"bias": float("nan")}, "bias: expected a finite weight"),
    ):
        with pytest.raises(ValueError, match=message):
            MatrixScaling(**arguments)
    state = VectorScaling().fit(x, y).state()
    for damaged in ([[1.0, 1.0]], [[1.0, float("nan")], [0.0, 0.0]], 1.0, [[[1.0]]]):
        with pytest.raises(ValueError, match="state: expected finite parameters"):
            VectorScaling.from_state({**state, "learned": {"parameters": damaged}})
