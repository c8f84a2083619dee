"""Temperature scaling against SciPy's minimiser and the published program."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

from segcal.posthoc.scale import BOUNDS
from segcal.posthoc.temperature import Temperature
from tests.conftest import close


def test_golden(golden):
    g = golden("temperature")
    fitted = Temperature().fit(g["logits"], g["labels"])
    close(fitted.value, g["T_exact_nll"], rtol=1e-7)  # SciPy's tolerance on a flat minimum
    close(fitted.value, g["T_lbfgs"], rtol=1e-2)  # which stops early
    close(fitted.facts["nll_before"], g["nll_T1"])
    close(fitted.facts["nll_after"], g["nll_exact"], rtol=1e-12)


@pytest.mark.parametrize("true", [0.2, 0.7, 1.0, 3.0])
def test_finds_the_temperature_that_made_the_labels(true):
    generator = np.random.default_rng(3)
    logits = generator.normal(size=(20_000, 3))
    p = np.exp(logits / true)
    p /= p.sum(1, keepdims=True)
    labels = (p.cumsum(1) < generator.random((len(p), 1))).sum(1)
    fitted = Temperature().fit(torch.from_numpy(logits), torch.from_numpy(labels))
    assert fitted.value == pytest.approx(true, rel=0.05)

    def nll(log_t):
        z = torch.log_softmax(torch.from_numpy(logits) / np.exp(log_t), 1)
        return float(torch.nn.functional.nll_loss(z, torch.from_numpy(labels)))

    best = minimize_scalar(nll, bounds=(-3, 4), method="bounded", options={"xatol": 1e-10})
    close(fitted.value, np.exp(best.x), rtol=1e-5)


def test_separable_and_reversed_data_end_at_a_bound():
    x = torch.tensor([[2.0, -1.0], [-1.0, 2.0]])
    with pytest.warns(UserWarning, match="separable"):
        assert Temperature().fit(x, torch.tensor([0, 1])).value == pytest.approx(BOUNDS[0])
    with pytest.warns(UserWarning, match="misclassified"):
        assert Temperature().fit(x, torch.tensor([1, 0])).value == pytest.approx(BOUNDS[1])
    assert Temperature().fit(0 * x, torch.tensor([1, 0])).value == 1


def test_a_voxel_that_is_utterly_wrong_counts_in_full():
    x = torch.tensor([[0.0, 60_000.0], *[[1.0, 0.0]] * 999])
    y = torch.zeros(1000, dtype=torch.long)
    with pytest.warns(UserWarning, match="bound"):
        fitted = Temperature().fit(x, y)
    expected = torch.nn.functional.cross_entropy(x.double() / fitted.value, y)
    close(fitted.facts["nll_after"], expected)


def test_a_damaged_temperature_is_refused():
    x = torch.tensor([[1.0, 0.0]] * 3)
    state = Temperature().fit(x, torch.tensor([0, 0, 1])).state()
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="positive temperature"):
            Temperature.from_state({**state, "learned": {"value": value}})


@pytest.mark.parametrize(
    ("logits", "accuracy", "expected"),
    [
        ((0.0, 4.0), 0.9, 1.820478),
        ((0.0, 20.0), 0.99, 4.352444),
        ((0.0, 60.0), 0.95, 20.377396),
        ((3.0, 0.0, 0.0), 0.7, 1.947489),
    ],
)
def test_the_temperature_at_which_confidence_is_accuracy(logits, accuracy, expected):
    x = torch.tensor([logits] * 1000)
    top = int(x[0].argmax())
    others = [k for k in range(len(logits)) if k != top]
    wrong = round(1000 * (1 - accuracy))
    y = torch.full((1000,), top)
    y[:wrong] = torch.tensor(others).repeat(wrong)[:wrong]
    fitted = Temperature().fit(x, y)
    close(fitted.value, expected, rtol=1e-6)
    close(fitted.apply(x)[0, top], accuracy, rtol=1e-5)
    if logits == (0.0, 4.0):
        close(fitted.value, 4 / np.log(9), rtol=1e-8)
        close(fitted.facts["nll_before"], 0.418150, atol=1e-6)
        close(fitted.facts["nll_after"], 0.325083, atol=1e-6)
    log_p = torch.log_softmax(x.double(), 1)
    close(Temperature().fit(log_p, y).value, fitted.value, rtol=1e-9)


def test_a_coin_has_no_temperature():
    x, y = torch.tensor([[0.0, 4.0]] * 1000), torch.arange(1000) % 2
    with pytest.warns(UserWarning, match="bound"):
        fitted = Temperature().fit(x, y)
    assert fitted.value == pytest.approx(BOUNDS[1])
    assert fitted.facts["notes"]
    assert fitted.facts["nll_after"] < fitted.facts["nll_before"]
    close(fitted.facts["nll_after"], np.log(2), rtol=1e-3)
