"""Class 0 left out of what is summed up by class: K - 1 classes count, and its logit goes free."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from segcal.neighbourhood import class_proportions
from segcal.penalties.cals import CALS
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import Margin
from segcal.penalties.nacl import NACL
from segcal.recipes import build
from tests.conftest import close

K = 3
CASES = [
    (NACL, {}),
    (NACL, {"distance": "l2", "class_reduction": "sum"}),
    (NACL, {"space": "softmax"}),
    (Margin, {"margin": 2.0}),
    (Margin, {"margin": 2.0, "power": 2, "class_reduction": "sum"}),
    (CRaC, {"lambda0": 0.3}),
    (CRaC, {"lambda0": 0.3, "function": "p2"}),
    (CALS, {"lambda0": 0.3, "margin": 2.0}),
]


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(2, K, 6, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, K, (2, 6, 5), generator=generator)
    labels[:, :3, :3] = 1
    return logits, labels


def value_and_gradient(penalty, logits, labels):
    x = logits.clone().requires_grad_()
    value = penalty(x, labels)
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("make", "options"), CASES)
def test_slots_of_a_penalty_add_up(make, options, fused):
    """Slot k of K: all classes minus those from 1 on leaves class 0, in its own mean."""
    logits, labels = batch()
    whole = make(K, fused=fused, **options)
    part = make(K, fused=fused, include_background=False, **options)
    weight = K - 1 if options.get("class_reduction", "mean") == "mean" else 1
    total = K if weight > 1 else 1
    value, gradient = value_and_gradient(part, logits, labels)
    all_value, all_gradient = value_and_gradient(whole, logits, labels)
    background = total * all_value - weight * value
    slope = total * all_gradient - weight * gradient
    assert background > 0
    if make in (NACL, CRaC) and options.get("space") != "softmax":  # a class at a time
        assert (gradient[:, 0] == 0).all()
        close(slope[:, 1:], torch.zeros_like(slope[:, 1:]), atol=1e-12)
        assert (gradient[:, 1:].abs().amax((0, 2, 3)) > 0).all()


def test_worked_values():
    """One voxel (z = 2, patch of itself): NACL |0 - 5| = 5 and |1 - 3| = 2; margin 5 - 3 = 2."""
    logits = torch.tensor([1.0, 5.0, 3.0]).double().view(1, 3, 1)
    labels = torch.tensor([[2]])
    close(NACL(3, 1.0, include_background=False)(logits, labels), (5 + 2) / 2)
    close(NACL(3, 1.0)(logits, labels), (1 + 5 + 2) / 3)
    close(Margin(3, 1.0, margin=1.0, include_background=False)(logits, labels), (0 + 1) / 2)
    close(Margin(3, 1.0, margin=1.0)(logits, labels), (3 + 0 + 1) / 3)
    # PHR with lam 1, rho 2: z + z^2, z = |5 tau - l| in an inner voxel, an average over 2 regions
    crac = CRaC(3, lambda0=1.0, rho0=2.0, include_background=False)
    close(crac(logits, labels), ((5 + 25) + (2 + 4)) / (2 * 2))


@pytest.mark.parametrize("make", [CRaC, CALS])
def test_multipliers_of_the_other_classes_are_the_same(make):
    options = {"lambda0": 0.3, "rho_period": 1, "margin_inner" if make is CRaC else "margin": 2.0}
    whole, part = make(K, **options), make(K, include_background=False, **options)
    for epoch in range(3):
        for penalty in (whole, part):
            penalty.observe(*batch(epoch))
            penalty.dual_step()
    assert torch.equal(part.lam[:, 1:], whole.lam[:, 1:])
    assert torch.equal(part.rho[:, 1:], whole.rho[:, 1:])
    assert (part.lam[:, 0] == 0.3).all()
    assert (part.rho[:, 0] == part.rho_bounds[0]).all()
    assert not torch.equal(whole.lam[:, 0], part.lam[:, 0])
    with pytest.raises(ValueError, match="include_background False, here None"):
        whole.load_state_dict(part.state_dict())


def test_recipe():
    """Dice and the penalty without class 0, cross-entropy of all voxels."""
    logits, labels = batch()
    objective = build("nacl", K, include_background=False)
    _, values = objective.loss_and_terms(logits, labels)
    close(values["cross_entropy"], F.cross_entropy(logits, labels))
    p, t = logits.softmax(1)[:, 1:], F.one_hot(labels, K).movedim(-1, 1)[:, 1:]
    overlap, sizes = (p * t).sum((2, 3)), (p + t).sum((2, 3))
    close(values["soft_dice"], (1 - (2 * overlap + 1e-5) / (sizes + 1e-5)).mean())
    tau = class_proportions(labels, K, dtype=torch.float64)
    close(values["nacl"], 0.1 * (tau - logits)[:, 1:].abs().mean())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ce", "cross_entropy cannot leave class 0 out"),
        ("fl", "focal cannot"),
        ("mmce", "mmce cannot"),
        ("logit_norm", "logit_norm cannot"),
        ("cals_hr", "cals_hr cannot"),
    ],
)
def test_methods_without_such_a_form(name, message):
    with pytest.raises(ValueError, match=message):
        build(name, K, include_background=False)


@pytest.mark.parametrize("make", [NACL, Margin, CRaC])
def test_channels_have_no_background(make):
    with pytest.raises(ValueError, match="no channel is the background"):
        make(K, per_channel=True, include_background=False)
    with pytest.raises(ValueError, match="no channel is the background"):
        build("nacl", K, per_channel=True, include_background=False)
