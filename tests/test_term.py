"""What a loss or penalty declares, and that nothing is declared in vain."""

from __future__ import annotations

from inspect import get_annotations

import pytest
import torch

from segcal.losses.multilabel.bce import BCE
from segcal.objective import Objective
from segcal.penalties.bwcr import BWCR
from segcal.penalties.nacl import NACL
from segcal.term import CAPABILITIES, Capabilities, OtherTerm, Term, TwoViewTerm


@pytest.mark.parametrize(
    ("name", "meant"),
    [("need_image", "needs_image"), ("two_view", "two_views"), ("includes_background", "include"),
     ("per_chanel", "per_channel"), ("ignored_index", "ignore_index"), ("sweept", "swept")],
)  # fmt: skip
def test_misspelt_capabilities_are_refused(name, meant):
    with pytest.raises(TypeError, match=rf"Own: declares {name}; is {meant}.* meant\?"):
        type("Own", (Term,), {name: True})


def test_defaults_are_those_of_a_loss_that_needs_nothing():
    plain = Term()
    assert {name: getattr(plain, name) for name in get_annotations(Capabilities)} == {
        "needs_image": False,
        "two_views": False,
        "include_background": True,
        "per_channel": False,
        "ignore_index": None,
    }
    assert plain.swept() is None
    assert plain.dual_step() is None
    assert set(CAPABILITIES) == {"swept", *get_annotations(Capabilities)}


def test_who_declares_what():
    assert isinstance(BWCR(2), TwoViewTerm)
    assert BWCR(2).two_views
    assert NACL(2, kernel="image_l1").needs_image
    assert not NACL(2).needs_image
    assert isinstance(BCE(), Term)


def test_a_module_of_another_library_becomes_a_term():
    x, y = torch.randn(2, 3, 4, 4, requires_grad=True), torch.randint(0, 3, (2, 4, 4))
    objective = Objective({"theirs": torch.nn.CrossEntropyLoss(), "nacl": NACL(3)}, {"theirs": 2.0})
    assert isinstance(objective.terms["theirs"], OtherTerm)
    total, values = objective.loss_and_terms(x, y)
    expected = torch.nn.functional.cross_entropy(x, y)
    torch.testing.assert_close(values["theirs"], expected.detach())
    torch.testing.assert_close(total, 2 * expected + values["nacl"])
    objective.observe(x.detach(), y)
    assert objective.dual_step() == {}
    theirs = torch.nn.CrossEntropyLoss()
    theirs.needs_image = True
    with pytest.raises(ValueError, match=r"CrossEntropyLoss: has needs_image; make it"):
        Objective({"theirs": theirs})
