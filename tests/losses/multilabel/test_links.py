"""Links to the posterior: golden values, minimisers of the risk, monotone, inverses, extremes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from segcal.losses.multilabel import asymmetric as asy
from segcal.losses.multilabel import spa
from tests.conftest import close
from tests.oracles import multilabel as oracle

TRIPLES = [
    ((1, 1, 0), (1, 1, 0)),
    ((1, 1, 0), (5, 3, 1)),
    ((2, 1.5, 0.3), (5, 3, 1)),
    ((1, 2, 6), (1, 2, -6)),  # nearly flat in between
    ((1, 2, -6), (1, 2, 6)),
]
ASY = [(2.0, 2.0, 0.0), (4.0, 0.0, 0.0), (4.0, 1.0, 0.0), (0.5, 3.0, 0.0), (0.0, 0.0, 0.0)]


def asy_options(options):
    return dict(zip(("gamma_neg", "gamma_pos", "margin"), options, strict=True))


def test_golden_spa_link(golden):
    g = golden("spa_lpr_phi")
    v = g["v"]
    for i, triple in enumerate(g["params"].tolist()):
        sides = {"positive": triple[:3], "negative": triple[3:]}
        close(spa.log_odds(v, **sides), g["inverse_link_logit"][i])
        close(spa.inverse_link(v, **sides), g["inverse_link"][i])
        close(spa.inverse_link(g["v_star"][i], **sides), g["etas"], rtol=1e-6)
        close(spa.link(g["etas"], **sides), g["v_star"][i], rtol=1e-6, atol=1e-6)
    module = spa.SPA(negative=g["params"][1, 3:].tolist())
    close(module.log_odds(g["logits"]), g["logit_eta"])


def test_the_printed_sign_is_not_the_link(golden):
    g = golden("spa_lpr_phi")
    printed = g["seed17_as_printed"][1, :33]
    assert (printed.diff() < 0).all()
    sides = {"positive": (1, 1, 0), "negative": (5, 3, 1)}
    assert (spa.inverse_link(g["v"][:33], **sides).diff() > 0).all()


@pytest.mark.parametrize(("positive", "negative"), TRIPLES)
@pytest.mark.parametrize("eta", [1e-4, 0.2, 0.5, 0.97])
def test_spa_link_minimises_the_risk(positive, negative, eta):
    (zp, kp, bp), (zn, kn, bn) = positive, negative

    def risk(v):
        return (
            eta * np.logaddexp(0, -kp * (v - bp)) / zp
            + (1 - eta) * np.logaddexp(0, kn * (v - bn)) / zn
        )

    best = minimize_scalar(risk, bounds=(-30, 30), method="bounded", options={"xatol": 1e-12})
    p = torch.tensor([eta], dtype=torch.float64)
    found = float(spa.link(p, positive=positive, negative=negative))
    assert risk(found) <= best.fun + 1e-13
    close(spa.inverse_link(torch.tensor(found), positive=positive, negative=negative), eta,
          rtol=1e-5)  # fmt: skip


@pytest.mark.parametrize(("positive", "negative"), TRIPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_spa_link_and_back(positive, negative, dtype):
    sides = {"positive": positive, "negative": negative}
    z = torch.linspace(-300, 300, 241, dtype=dtype)
    v = spa.from_log_odds(z, **sides)
    rtol = 1e-5 if dtype == torch.float32 else 1e-10
    close(spa.log_odds(v, **sides), z, rtol=rtol, atol=10 * rtol)
    assert v.dtype == dtype
    assert (v.diff() > 0).all()
    ends = torch.tensor([0.0, 1.0], dtype=dtype)
    close(spa.link(ends, **sides), [-math.inf, math.inf])
    far = torch.tensor([-1e5, 1e5], dtype=dtype)
    assert spa.log_odds(far, **sides).isfinite().all()


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-5, 5)),
    st.tuples(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(-5, 5)),
    st.floats(-50, 50),
)
def test_spa_link_of_any_shape(positive, negative, z):
    sides = {"positive": positive, "negative": negative}
    v = spa.from_log_odds(torch.tensor(z, dtype=torch.float64), **sides)
    close(spa.log_odds(v, **sides), z, rtol=1e-9, atol=1e-9)


def test_half_a_posterior_is_not_at_zero():
    half = torch.tensor(0.5, dtype=torch.float64)
    assert spa.link(half).abs() > 0.1
    close(spa.link(half, positive=(1, 1, 0), negative=(1, 1, 0)), 0.0)


def test_golden_phi(golden):
    g = golden("spa_lpr_phi")
    for options, expected in zip(g["phi_params"].tolist(), g["phi"], strict=True):
        close(asy.phi(g["phi_z"], **asy_options(options)), expected)
    for *options, eta, q, at_q in g["phi_check"].tolist():
        score = torch.tensor([q], dtype=torch.float64)
        close(asy.phi(score, **asy_options(options)), [at_q], rtol=1e-6)
        close(asy.phi(score, **asy_options(options)), [eta], rtol=1e-5)
        p = torch.tensor([eta], dtype=torch.float64)
        close(asy.inverse_phi(p, **asy_options(options)), [q], rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    st.floats(1e-3, 1 - 1e-3),
    st.floats(0, 6),
    st.floats(0, 6),
    st.sampled_from([0.0, 0.05, 0.3]),
)
def test_phi_is_the_formula(q, gamma_neg, gamma_pos, margin):
    found = asy.phi(
        torch.tensor(q, dtype=torch.float64),
        gamma_neg=gamma_neg,
        gamma_pos=gamma_pos,
        margin=margin,
    )
    close(found, oracle.phi(q, gamma_neg, gamma_pos, margin), rtol=1e-8)


@pytest.mark.parametrize("options", ASY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_phi_and_back(options, dtype):
    given_ = asy_options(options)
    x = torch.cat([torch.linspace(-40, 40, 161), torch.tensor([-3e3, -200.0, 200.0, 3e3])])
    x = x.to(dtype).sort().values
    z = asy.log_odds(x, **given_)
    assert z.isfinite().all()
    assert (z.diff() > 0).all()
    rtol = 1e-4 if dtype == torch.float32 else 1e-9
    close(asy.from_log_odds(z, **given_), x, rtol=rtol, atol=10 * rtol)
    q = torch.tensor([0.0, 0.01, 0.5, 0.9, 1.0], dtype=dtype)
    p = asy.phi(q, **given_)
    close(p[[0, -1]], [0.0, 1.0])
    close(asy.inverse_phi(p, **given_), q, rtol=1e-3 if dtype == torch.float32 else 1e-9)


def test_phi_without_powers_is_the_identity():
    x = torch.linspace(-50, 50, 101, dtype=torch.float64)
    close(asy.log_odds(x, gamma_neg=0, gamma_pos=0, margin=0), x)


def test_phi_in_the_tails():
    """q = exp(-1000): h(q; 2) = q^2 + 2 q (q + ...) = 3 q^2, and h(1 - q; 2) = 1 / q."""
    x = torch.tensor([-1000.0, 1000.0], dtype=torch.float64)
    z = asy.log_odds(x, gamma_neg=2.0, gamma_pos=2.0, margin=0.0)
    close(z, [-2000 + math.log(3) - 1000, 2000 - math.log(3) + 1000])


def test_phi_with_a_margin():
    given_ = {"gamma_neg": 4.0, "gamma_pos": 0.0, "margin": 0.05}
    q = torch.tensor([0.0, 0.02, 0.05, 0.0500001, 0.5, 1.0], dtype=torch.float64)
    p = asy.phi(q, **given_)
    assert (p[:3] == 0).all()
    assert p[3] > 0
    # h(0.95; 4) = (0.95^4 - 4 0.95^3 0.05 log 0.05) / 0.05, h(0; 0) = 1
    h = (0.95**4 - 4 * 0.95**3 * 0.05 * math.log(0.05)) / 0.05
    close(p[-1], h / (h + 1))
    assert p[-1] < 1
    back = asy.inverse_phi(p, **given_)
    close(back, [0.05, 0.05, 0.05, 0.0500001, 0.5, 1.0], rtol=1e-6)
    close(asy.inverse_phi(torch.tensor(0.999999, dtype=torch.float64), **given_), 1.0)
    # powers of 0: BCE with a kink; the formula alone would give h(0; 0) = 1 below the margin
    assert asy.phi(torch.tensor(0.1), gamma_neg=0, gamma_pos=0, margin=0.2) == 0


@pytest.mark.parametrize("options", ASY)
@pytest.mark.parametrize("eta", [0.01, 0.3, 0.8])
def test_phi_undoes_the_minimiser_of_the_risk(options, eta):
    gamma_neg, gamma_pos, _ = options

    def risk(x):
        q = oracle.sigmoid(x)
        positive = -((1 - q) ** gamma_pos) * math.log(q)
        return eta * positive - (1 - eta) * q**gamma_neg * math.log(1 - q)

    best = minimize_scalar(risk, bounds=(-15, 15), method="bounded", options={"xatol": 1e-10})
    x = torch.tensor(best.x, dtype=torch.float64)
    close(torch.sigmoid(asy.log_odds(x, **asy_options(options))), eta, rtol=1e-5)
