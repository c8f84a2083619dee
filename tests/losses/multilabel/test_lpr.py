"""The label pair regulariser: golden values, a loop over pairs, its memory, and its links."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import segcal.losses.multilabel.lpr as module_of_lpr
from segcal.components import build_component
from segcal.losses.multilabel.asymmetric import Asymmetric
from segcal.losses.multilabel.bce import BCE
from segcal.losses.multilabel.lpr import LPR, lpr
from segcal.losses.multilabel.spa import SPA
from segcal.losses.multilabel.two_way import TwoWay
from segcal.recipes import load_component
from tests.conftest import close
from tests.oracles import multilabel as oracle


def dense(z, y):
    """The (B, T, T) form, for the gradient."""
    known = (y >= 0).sum(1)
    pairs = (y == 1)[:, :, None] & (y == 0)[:, None, :]
    gaps = torch.nn.functional.softplus(z[:, None, :] - z[:, :, None])
    per_sample = torch.where(pairs, gaps, 0.0).sum((1, 2)) * 2 / (known * (known - 1)).clamp(min=1)
    return per_sample.sum() / (known > 0).sum()


def example(seed, n=5, t=7):
    rng = np.random.default_rng(seed)
    y = rng.choice([-1, 0, 1], (n, t), p=[0.2, 0.4, 0.4])
    y[0], y[1] = rng.choice([-1, 0, 1]), np.where(rng.random(t) < 0.9, 1, 0)
    return torch.as_tensor(3 * rng.standard_normal((n, t))), torch.as_tensor(y)


def test_golden(golden):
    g = golden("spa_lpr_phi")
    z, y = g["logit_eta"], g["targets"]
    for i in range(8):
        close(lpr(z[[i]], y[[i]]), g["lpr_sample"][i])
    close(lpr(z, y), g["lpr_sample"].mean())
    total = LPR(SPA(negative=g["params"][1, 3:].tolist()), 0.5)(g["logits"], y)
    close(total, g["spa_sample"].mean() + 0.5 * g["lpr_sample"].mean())


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 8, 2**20]))
def test_parts_agree_with_the_loop_and_the_dense_gradient(seed, at_once):
    z, y = example(seed)
    before, module_of_lpr.PAIRS_AT_ONCE = module_of_lpr.PAIRS_AT_ONCE, at_once
    try:
        x = z.clone().requires_grad_()
        value = lpr(x, y)
        (slope,) = torch.autograd.grad(value, x)
    finally:
        module_of_lpr.PAIRS_AT_ONCE = before
    eta = torch.sigmoid(z).tolist()
    close(value.detach(), oracle.lpr(eta, y.tolist()), rtol=1e-9)
    x = z.clone().requires_grad_()
    close(slope, torch.autograd.grad(dense(x, y), x)[0])


def test_worked_example():
    """Two unequal pairs of three: [softplus(1 - 2) + softplus(3 - 2)] / 3."""
    z = torch.tensor([[2.0, 1.0, 3.0], [9.0, 8.0, 7.0]], dtype=torch.float64)
    y = torch.tensor([[1, 0, 0], [1, 1, 1]])
    expected = (np.log1p(np.exp(-1)) + np.log1p(np.exp(1))) / 3
    close(lpr(z, y), expected / 2)  # the sample of positives alone counts as 0
    close(lpr(z, torch.tensor([[1, 0, 0], [-1, -1, -1]])), expected)
    close(lpr(z, torch.tensor([[1, 0, -1], [-1, -1, -1]])), np.log1p(np.exp(-1)))
    assert lpr(z[:, :1], torch.tensor([[1], [0]])) == 0


class Largest(TorchDispatchMode):
    """Entries of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return out


@pytest.mark.parametrize("share", [0.02, 0.98])
def test_memory_grows_with_the_labels_not_with_their_pairs(monkeypatch, share):
    n, t = 4, 1500
    monkeypatch.setattr(module_of_lpr, "PAIRS_AT_ONCE", 2**15)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, t, generator=generator, dtype=torch.float64).requires_grad_()
    y = (torch.rand(n, t, generator=generator) < share).long()
    saved = []

    def keep(tensor):
        saved.append(tensor.numel())
        return tensor

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        value = lpr(z, y)
        (slope,) = torch.autograd.grad(value, z)
    assert largest.entries <= 2**15  # the pairs are 9 million
    assert sum(saved) <= 4 * n * t
    x = z[:1].detach().requires_grad_()
    close(lpr(x, y[:1]).detach(), dense(x, y[:1]).detach())
    close(slope[:1] * n, torch.autograd.grad(dense(x, y[:1]), x)[0])


def test_which_scores_are_compared():
    x, y = example(3)
    y[y == -1] = 0
    close(LPR(BCE(), 2.0)(x, y), BCE()(x, y) + 2 * lpr(x, y))
    close(LPR(SPA(), 2.0)(x, y), SPA()(x, y) + 2 * lpr(SPA().log_odds(x), y))
    close(LPR(SPA(), link="identity")(x, y), SPA()(x, y) + lpr(x, y))
    assert (LPR(SPA())(x, y) - LPR(SPA(), link="identity")(x, y)).abs() > 1e-3
    for base in (TwoWay(), Asymmetric()):
        close(LPR(base, link="identity")(x, y), base(x, y) + lpr(x, y))
    focal = Asymmetric(2.0, 2.0, 0.0)
    close(LPR(focal)(x, y), focal(x, y) + lpr(focal.log_odds(x), y))
    close(LPR(SPA()).probabilities(x), SPA().probabilities(x))
    close(LPR(Asymmetric(), link="identity").probabilities(x), Asymmetric().probabilities(x))


def test_extreme_log_odds():
    z = torch.tensor([[1e30, -1e30, 0.0]], requires_grad=True)
    for y, expected in (([[1, 0, -1]], 0.0), ([[0, 1, -1]], 2e30)):
        value = lpr(z, torch.tensor(y))
        (slope,) = torch.autograd.grad(value, z)
        close(value.detach(), expected, rtol=1e-6)
        assert torch.isfinite(slope).all()


@pytest.mark.parametrize("name", ["bce", "focal", "asymmetric", "two_way"])
def test_shipped_pairs_on_other_losses_compare_logits(name):
    """Table 4 of the paper: LPR with losses whose scores stand for themselves."""
    generator = torch.Generator().manual_seed(4)
    x = 2 * torch.randn((6, 5), generator=generator, dtype=torch.float64)
    y = torch.randint(-1, 2, (6, 5), generator=generator)
    base, paired = (
        build_component(load_component("multilabel", one)) for one in (name, f"{name}_lpr")
    )
    close(paired(x, y), base(x, y) + lpr(x, y))
    if not base.no_posterior:
        close(paired.probabilities(x), base.probabilities(x))
