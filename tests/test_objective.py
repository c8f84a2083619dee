"""The weighted sum and its three verbs."""

from __future__ import annotations

import pytest
import torch

from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.objective import Objective
from segcal.penalties.cals import CALS, CALSHR
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import Margin
from segcal.penalties.nacl import NACL
from tests.conftest import close


def test_sums_and_forwards():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 5, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (1, 5, 6), generator=generator)
    objective = Objective(
        {"ce": CrossEntropy(3), "nacl": NACL(3), "crac": CRaC(3)}, {"nacl": 2.0, "crac": 0.5}
    )
    terms = objective.terms
    expected = {name: terms[name](logits, labels) for name in terms}
    total, values = objective.loss_and_terms(logits, labels)
    assert list(values) == ["ce", "nacl", "crac"]
    for name, value in values.items():
        close(value, expected[name])
    close(total, expected["ce"] + 2 * expected["nacl"] + 0.5 * expected["crac"])
    close(objective(logits, labels), total)
    objective.observe(logits, labels)
    steps = objective.dual_step()
    assert list(steps) == ["crac"]
    assert sum(steps["crac"].count) == 30
    assert "terms.crac.lam" in objective.state_dict()


@pytest.mark.parametrize("loss", [{}, {"class_weight": [0.2, 1.0, 3.0]}])
@pytest.mark.parametrize("penalty", [CRaC, NACL, Margin, CALS, CALSHR])
def test_cross_entropy_and_a_penalty_share_a_sweep(penalty, loss, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(2, 3, 7, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (2, 7, 6), generator=generator)
    labels[:, 2:4, 1:3] = 9
    results = []
    for fused in (True, False):
        objective = Objective(
            {
                "ce": CrossEntropy(3, ignore_index=9, **loss),
                "dice": SoftDiceLoss(3, ignore_index=9),
                "penalty": penalty(3, ignore_index=9, fused=fused),
            },
            {"ce": 0.7, "penalty": 1.5},
        )
        for buffer_name, buffer in objective.named_buffers():
            if buffer_name.endswith("lam"):
                buffer.copy_(torch.rand(buffer.shape, generator=torch.Generator().manual_seed(3)))
        if fused:  # then cross-entropy comes with the sweep
            monkeypatch.setattr(CrossEntropy, "forward", None)
        x = logits.clone().requires_grad_()
        total, values = objective.loss_and_terms(x, labels)
        (3 * total).backward()
        monkeypatch.undo()
        results.append((total.detach(), *values.values(), x.grad))
    for a, b in zip(*results, strict=True):
        close(a, b)


def test_a_cross_entropy_for_other_classes_is_refused_in_a_sweep_too():
    objective = Objective({"ce": CrossEntropy(5), "nacl": NACL(3)})
    with pytest.raises(ValueError, match="expected 5 classes on axis 1"):
        objective(torch.zeros(1, 3, 4, 4), torch.zeros(1, 4, 4, dtype=torch.int64))


def test_what_is_no_set_of_logits_is_named():
    objective = Objective({"ce": CrossEntropy(3)})
    labels = torch.zeros(1, 4, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"got list.*full-resolution head"):
        objective([torch.zeros(1, 3, 4, 4)], labels)
    with pytest.raises(ValueError, match=r"use \.squeeze\(1\)"):
        objective(torch.zeros(1, 3, 4, 4), labels[:, None])


def test_terms_with_different_ignore_labels_do_not_share():
    logits, labels = torch.randn(1, 3, 4, 4), torch.zeros(1, 4, 4, dtype=torch.int64)
    labels[0, 0] = 9
    objective = Objective({"ce": CrossEntropy(3, ignore_index=9), "nacl": NACL(3, ignore_index=9)})
    assert objective.shares_sweep(logits)
    objective.terms["ce"] = CrossEntropy(3)
    assert not objective.shares_sweep(logits)
    with pytest.raises(ValueError, match="is an ignore_index missing"):
        objective(logits, labels)


def test_refuses_weights_without_a_term():
    with pytest.raises(ValueError, match="no term of that name"):
        Objective({"ce": CrossEntropy(3)}, {"cr": 1.0})
    with pytest.raises(ValueError, match="at least one"):
        Objective({})
