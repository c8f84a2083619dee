"""Published losses against the papers' programs, torch, and worked examples."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from segcal.losses.cpc import cpc
from segcal.losses.cross_entropy import cross_entropy
from segcal.losses.flsd import flsd
from segcal.losses.focal import focal
from segcal.losses.label_smoothing import label_smoothing
from segcal.losses.ml1_ace import ml1_ace
from segcal.losses.mmce import mmce
from segcal.losses.svls import svls
from tests.conftest import close


def grad(loss, logits):
    x = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def test_golden_focal(golden):
    g = golden("point_losses")
    x, y = g["logits"], g["labels"]
    for gamma in (0, 1, 2, 3):
        close(focal(x, y, gamma=gamma), g[f"focal_g{gamma}_mean"])
        close(focal(x, y, gamma=gamma, reduction="sum"), g[f"focal_g{gamma}_sum"])
    close(grad(lambda z: focal(z, y), x), g["grad_focal_g3_mean"])
    close(flsd(x, y), g["flsd_g3_mean"])
    close(grad(lambda z: flsd(z, y), x), g["grad_flsd_g3_mean"])
    per_voxel = focal(x, y, reduction="none")
    close(per_voxel.mean(), focal(x, y))
    assert per_voxel.shape == y.shape


@pytest.mark.parametrize("gamma", [0.5, 1.0, 3.0])
def test_focal_at_saturated_logits(gamma):
    """The plain formula has an infinite slope where p is 1, and NaN times 0."""
    x = torch.tensor([[100.0, -100.0], [-100.0, 100.0], [100.0, -100.0]], requires_grad=True)
    value = focal(x, torch.tensor([0, 1, 1]), gamma=gamma)
    (slope,) = torch.autograd.grad(value, x)
    close(value.detach(), 200 / 3, rtol=1e-6)
    close(slope[:2], torch.zeros(2, 2))
    close(slope[2], [1 / 3, -1 / 3], rtol=1e-6)


def test_golden_label_smoothing(golden):
    g = golden("point_losses")
    x, y = g["logits"], g["labels"]
    for a in ("0.05", "0.1"):
        close(label_smoothing(x, y, alpha=float(a)), g[f"ls_a{a}"])
        close(
            label_smoothing(x, y, alpha=float(a)), F.cross_entropy(x, y, label_smoothing=float(a))
        )
    close(grad(lambda z: label_smoothing(z, y), x), g["grad_ls_a0.1"])
    two = torch.tensor([[2.0, 0], [0, 1]])
    close(
        label_smoothing(two, torch.tensor([0, 9]), alpha=0.2, ignore_index=9), 0.326928, atol=1e-6
    )


@pytest.mark.parametrize("sigma", [1, 2])
def test_golden_svls(golden, sigma):
    g = golden("svls")
    for suffix, d in (("", "2d"), ("3d", "3d")):
        x, y = g[f"logits{suffix}"], g[f"labels{suffix}"]
        close(svls(x, y, sigma=sigma), g[f"loss{d}_s{sigma}"])
        if sigma == 1:
            close(grad(lambda z: svls(z, y), x), g[f"grad{d}_s1"])  # noqa: B023


def test_svls_smooths_boundaries_alone():
    x = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.ones(1, 6, 6, dtype=torch.long)
    close(svls(x, y), cross_entropy(x, y))
    raters = torch.stack([y, y.clone()], 1)
    close(svls(x, raters), svls(x, y))
    raters[0, 1, :3] = 2
    mean = (svls(x, raters[:, 0]) + svls(x, raters[:, 1])) / 2  # linear in the soft label
    close(svls(x, raters), mean)
    raters[0, 1, 5] = 9
    value = svls(x, raters, ignore_index=9)
    assert torch.isfinite(value)


def test_golden_mmce(golden):
    g = golden("mmce_cpc")
    x, y = g["logits"], g["labels"]
    close(mmce(x, y), g["mmce_term"])
    close(mmce(x, y), g["mmce_exact_sq"])
    close(F.cross_entropy(x, y) + mmce(x, y), g["mmce_total_l1"])
    close(grad(lambda z: F.cross_entropy(z, y) + mmce(z, y), x), g["grad_mmce_total_l1"])
    close(mmce(x, y, weighted=True), g["mmcew_exact_sq"])
    close(mmce(x, y, sqrt=True), math.sqrt(float(g["mmce_term"]) + 1e-10))


def test_mmce_of_a_subset():
    x = torch.randn(1, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    y = torch.randint(0, 3, (1, 40, 40), generator=torch.Generator().manual_seed(1))

    def drawn(seed):
        return mmce(x, y, max_samples=200, generator=torch.Generator().manual_seed(seed))

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    all_right = torch.nn.functional.one_hot(y, 3).movedim(-1, 1) * 5.0
    assert mmce(all_right, y, weighted=True) == 0


def test_golden_cpc(golden):
    g = golden("mmce_cpc")
    x, y = g["logits"], g["labels"]
    total, ce, bdc, bec = g["cpc_10_1"]
    constant = g["cpc_bec_diag_constant"]
    close(cpc(x, y, a_bdc=1, a_bec=0), bdc)
    close(cpc(x, y, a_bdc=0, a_bec=1), bec - constant)
    close(cpc(x, y, a_bdc=0, a_bec=1), g["cpc_bec_numpy_offdiag"])
    close(F.cross_entropy(x, y) + cpc(x, y), total - constant)
    close(ce, F.cross_entropy(x, y))
    close(grad(lambda z: F.cross_entropy(z, y) + cpc(z, y), x), g["grad_cpc_10_1"])
    assert torch.isfinite(cpc(x[:, :2], y.clamp(max=1)))  # K = 2 has no pairs to exclude


@pytest.mark.parametrize("bins", [10, 20])
def test_golden_ml1_ace(golden, bins):
    """The file holds probabilities of a softmax; their logarithm gives them back."""
    g = golden("ml1_ace")
    p, y = g["probs"], g["onehot"].argmax(1)
    if not torch.allclose(p.sum(1), torch.ones_like(p[:, 0]), atol=1e-12):
        pytest.fail("the golden probabilities do not sum to one")
    x = p.log()
    close(ml1_ace(x, y, bins=bins), g[f"loss_{bins}"])
    if bins == 20:
        close(ml1_ace(x, y, include_background=False), g["loss_20_nobg"])
    # through the softmax: dL/dl_j = p_j (g_j - sum_k p_k g_k) with the published g = dL/dp
    outer = g[f"grad_{bins}"]
    expected = p * (outer - (p * outer).sum(1, keepdim=True))
    close(grad(lambda z: ml1_ace(z, y, bins=bins), x), expected)
