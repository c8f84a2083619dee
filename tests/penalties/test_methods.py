"""Published penalties against the papers' programs and worked examples."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from segcal.penalties.acls import ACLS, acls
from segcal.penalties.cals import CALS, CALSHR
from segcal.penalties.entropy import Entropy, entropy
from segcal.penalties.logit_norm import logit_norm
from segcal.penalties.margin import Margin, margin
from segcal.penalties.nacl import NACL, nacl
from tests.conftest import close


def grad(loss, logits):
    x = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def test_golden_entropy(golden):
    g = golden("point_losses")
    x, y = g["logits"], g["labels"]
    total, ce, ent = g["ecp_a0.1"]
    module = Entropy(4, class_reduction="mean")
    close(F.cross_entropy(x, y), ce)
    close(entropy(x, y, class_reduction="mean"), ent.abs())
    close(F.cross_entropy(x, y) + module(x, y), total)
    close(grad(lambda z: F.cross_entropy(z, y) + module(z, y), x), g["grad_ecp_a0.1"], atol=1e-8)


def test_entropy_without_zero_times_log_zero():
    x = torch.tensor([[200.0, 0, -200], [0, 0, 0]], requires_grad=True)
    value = entropy(x, torch.zeros(2, dtype=torch.long))
    close(value.detach(), math.log(3) / 2, rtol=1e-6)
    assert torch.isfinite(torch.autograd.grad(value, x)[0]).all()


def test_golden_logit_norm(golden):
    g = golden("point_losses")
    x, y = g["logits2"], g["labels2"]
    close(logit_norm(x, y), g["lp_norm_logits_p1_mean"])
    close(logit_norm(x, y, p=2), g["lp_norm_logits_p2_mean"])
    total, ce, l1 = g["penalty_l1_prob_a0.1"]
    close(logit_norm(x, y, space="softmax"), l1)
    close(ce + 0.1 * logit_norm(x, y, space="softmax"), total)


@pytest.mark.parametrize("p", [1, 2, 3.5])
def test_logit_norm_at_zero_and_at_huge_logits(p):
    x = torch.tensor([[0.0, 0, 0], [1e30, -1e30, 0]], requires_grad=True)
    value = logit_norm(x, torch.zeros(2, dtype=torch.long), p=p)
    (slope,) = torch.autograd.grad(value, x)
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    assert (slope[0] == 0).all()


@pytest.mark.parametrize("m", [2, 5, 10])
def test_golden_margin(golden, m):
    g = golden("mbls")
    x, y = g["logits"], g["labels"]
    total, ce, value = g[f"l1_m{m}"]
    close(margin(x, y, margin=m), value)
    close(ce + Margin(4, margin=m)(x, y), total)
    close(margin(x, y, margin=m, power=2, two_sided=True), g[f"l2_m{m}"][2])
    assert margin(x, y, margin=m, power=2) <= margin(x, y, margin=m, power=2, two_sided=True)
    close(margin(x, y, margin=m, class_reduction="sum"), 4 * value)
    if m == 2:
        module, two = Margin(4, margin=2), Margin(4, margin=2, power=2, two_sided=True)
        close(grad(lambda z: F.cross_entropy(z, y) + module(z, y), x), g["grad_l1_m2"])
        close(grad(lambda z: F.cross_entropy(z, y) + two(z, y), x), g["grad_l2_m2"])
        ignoring = Margin(4, margin=2, ignore_index=255)
        y = g["labels_ignore255"]
        loss = F.cross_entropy(x, y, ignore_index=255) + ignoring(x, y)
        close(loss, g["l1_m2_ignore255"][0])


@pytest.mark.parametrize("penalty", ["phr", "p2", "p3"])
@pytest.mark.parametrize("period", [10, 3])
@pytest.mark.filterwarnings("ignore:function (p3|relu)")
def test_golden_cals(golden, penalty, period):
    g = golden("cals_alm")
    key = f"{penalty}_rs{period}"
    cals = CALS(5, function=penalty, rho_period=period, clamp_elementwise=True)
    labels = torch.zeros(20, dtype=torch.long)
    for epoch in range(12):
        close(cals.lam[0], g[f"lambda_{key}"][epoch])
        close(cals.rho[0], g[f"rho_{key}"][epoch])
        x = g["train_logits"]
        close(cals(x, labels[:10]), g[f"train_pen_{key}"][epoch][0])
        if epoch == 11:
            close(grad(lambda z: cals(z, labels[:10]), x), g[f"train_grad_last_{key}"])
        first = int(g["batch_sizes"][0])
        for batch in (g["val_logits"][epoch][:first], g["val_logits"][epoch][first:]):
            cals.observe(batch, labels[: len(batch)])
        cals.dual_step()
        close(cals.previous[0], g[f"constraint_{key}"][epoch])
    close(cals.lam[0], g[f"lambda_{key}"][12])
    close(cals.rho[0], g[f"rho_{key}"][12])


def test_golden_cals_on_images(golden):
    g = golden("cals_alm")
    cals = CALS(4, margin=float(g["seg_margin"]))
    cals.lam.copy_(g["seg_lambda"][None])
    cals.rho.copy_(g["seg_rho"][None])
    labels = torch.zeros(1, 8, 8, dtype=torch.long)
    close(cals(g["seg_logits"], labels), g["seg_penalty"])
    close(grad(lambda z: cals(z, labels), g["seg_logits"]), g["seg_grad"])


def test_golden_cals_hr(golden):
    g = golden("cals_hr")
    hr = CALSHR(5, score="weighted")
    labels = torch.zeros(20, dtype=torch.long)
    for epoch in range(12):
        close(hr.lam, g["lam"][epoch])
        total, ce, _ = g["train_loss"][epoch]
        close(ce + hr(g["train_logits"], g["train_labels"]), total)
        for batch in (g["val_logits"][epoch][:12], g["val_logits"][epoch][12:]):
            hr.observe(batch, labels[: len(batch)])
        hr.dual_step()
        close(hr.previous, g["score"][epoch])
    close(hr.lam, g["lam"][12])


def test_cals_hr_follows_the_rule():
    """Score doubles: up; falls below 1/1.1: down; in between: stays; nothing seen: stays."""
    hr = CALSHR(2, margin=1.0)
    labels = torch.zeros(1, dtype=torch.long)

    def one_pass(distance):
        hr.observe(torch.tensor([[0.0, -distance]]), labels)
        hr.dual_step()
        return float(hr.lam[1])

    assert one_pass(3.0) == pytest.approx(0.1)
    assert one_pass(5.0) == pytest.approx(0.11)
    assert one_pass(5.1) == pytest.approx(0.11)
    hr.dual_step()
    assert float(hr.lam[1]) == pytest.approx(0.11)
    assert one_pass(2.0) == pytest.approx(0.1)
    assert one_pass(1.0) == pytest.approx(0.1 / 1.1)
    assert one_pass(0.5) == pytest.approx(0.1 / 1.1)  # 0 and 0: stays
    assert one_pass(2.0) == pytest.approx(0.1)  # from 0 to something: up


def test_golden_nacl_gaussian(golden):
    m = golden("nacl_monai")
    for dim, suffix in (("2d", ""), ("3d", "3d")):
        x, y = m[f"logits{suffix}"], m[f"labels{suffix}"]
        for distance in ("l1", "l2"):
            module = NACL(x.shape[1], kernel="gaussian_full", padding="zeros", distance=distance)
            loss = F.cross_entropy(x, y) + module(x, y)
            close(loss, m[f"loss_{dim}_gaussian_{distance}"], 1e-5, 1e-6)
    g = golden("nacl_marginloss")
    value = nacl(g["logits"], g["labels"], kernel="svls", sigma=2.0, distance="l2")
    close(value, g["loss_gauss3s2_l2"][2])


def test_acls_by_hand():
    """Logits 7, 1, -2 and margin 3: (7 - 3)^2 + .1 (3^2 + 6^2) / 2; slopes of it, l_max held."""
    x = torch.tensor([[7.0, 1.0, -2.0], [2.0, 1.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([2, 0])
    close(acls(x, y, margin=3.0), (16 + 0.1 * 45 / 2) / 2)
    close(ACLS(3, 0.5, margin=3.0, others=2.0)(x, y), 0.5 * (16 + 2.0 * 45 / 2) / 2)
    slope = grad(lambda z: acls(z, y, margin=3.0), x)
    close(slope, [[8 / 2, -0.1 * 3 / 2, -0.1 * 6 / 2], [0, 0, 0]])


def test_acls_is_the_published_program():
    """Its arithmetic, voxels as rows, with its indicator of the largest logit."""
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (2, 5, 6), generator=generator)
    kept = torch.rand(2, 5, 6, generator=generator) < 0.8
    rows = x.movedim(1, -1)[kept].requires_grad_()
    largest = rows.max(1, keepdim=True).values
    is_largest = (largest == rows).double().detach()
    near = (is_largest * F.relu(largest - 4) ** 2).sum() / len(rows)
    far = ((1 - is_largest) * F.relu(largest.detach() - rows - 4) ** 2).sum() / (3 * len(rows))
    expected = near + 0.3 * far
    labels = torch.where(kept, y, 9)
    options = {"margin": 4.0, "others": 0.3, "ignore_index": 9}
    close(acls(x, labels, **options), expected.detach())
    slope = grad(lambda z: acls(z, labels, **options), x)
    close(slope.movedim(1, -1)[kept], torch.autograd.grad(expected, rows)[0])
    assert (slope.movedim(1, -1)[~kept] == 0).all()


def test_acls_of_ties_extreme_logits_and_wrong_options():
    x = torch.tensor([[20.0, 20.0, 0.0]], dtype=torch.float64)
    close(acls(x, torch.tensor([0]), margin=5.0), 225 + 0.1 * 225 / 2)
    close(grad(lambda z: acls(z, torch.tensor([0]), margin=5.0, others=0), x), [[15, 15, 0]])
    half = torch.tensor([[1e4, -1e4, 0.0]], dtype=torch.float16)
    assert torch.isfinite(grad(lambda z: acls(z, torch.tensor([1])), half)).all()
    for name in ("alpha", "margin", "top", "others"):
        with pytest.raises(ValueError, match=f"{name}: expected a finite number >= 0, got -1"):
            ACLS(3, **{name: -1})
