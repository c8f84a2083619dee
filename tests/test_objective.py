"""The weighted sum and its three verbs."""

from __future__ import annotations

import pytest
import torch

from segcal.losses.cross_entropy import CrossEntropy
from segcal.objective import Objective
from segcal.penalties.crac import CRaC
from segcal.penalties.nacl import NACL
from tests.conftest import close


def test_sums_and_forwards():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 3, 5, 6, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (1, 5, 6), generator=generator)
    objective = Objective(
        {"ce": CrossEntropy(3), "nacl": NACL(3), "crac": CRaC(3)}, {"nacl": 2.0, "crac": 0.5}
    )
    values = objective.each(logits, labels)
    expected = values["ce"] + 2 * values["nacl"] + 0.5 * values["crac"]
    close(objective(logits, labels), expected)
    objective.observe(logits, labels)
    steps = objective.dual_step()
    assert list(steps) == ["crac"]
    assert sum(steps["crac"].count) == 30
    assert "terms.crac.lam" in objective.state_dict()


def test_refuses_weights_without_a_term():
    with pytest.raises(ValueError, match="no term of that name"):
        Objective({"ce": CrossEntropy(3)}, {"cr": 1.0})
    with pytest.raises(ValueError, match="at least one"):
        Objective({})
