"""What a loss or penalty declares, and that nothing is declared in vain."""

from __future__ import annotations

from inspect import get_annotations
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from segcal import term
from segcal.losses.multilabel.bce import BCE
from segcal.objective import Objective
from segcal.penalties.bwcr import BWCR
from segcal.penalties.nacl import NACL
from segcal.recipes import build
from segcal.term import CAPABILITIES, Capabilities, OtherTerm, Term, TwoViewTerm
from segcal.training.devices import choose_device
from tests.test_contracts import method


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


@pytest.mark.parametrize(
    ("bound", "chosen", "local", "expected"),
    [(None, 0, "3", 3), (None, 2, "3", 2), (1, 0, "3", 1), (None, 0, None, 0), (None, 0, "5", 1)],
    ids=["local rank", "chosen", "bound", "one process", "one GPU to see"],
)
def test_nccl_sums_on_the_gpu_of_the_rank(monkeypatch, bound, chosen, local, expected):
    """Two processes that sum on one GPU wait for ever."""
    group = SimpleNamespace(bound_device_id=None if bound is None else torch.device("cuda", bound))
    monkeypatch.setattr(term, "dist", SimpleNamespace(
        group=SimpleNamespace(WORLD=group), get_node_local_rank=dist.get_node_local_rank
    ))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert term._device_of_rank() == torch.device("cuda", expected)


def test_nccl_gets_no_numbers_of_the_cpu(monkeypatch):
    sent = []
    monkeypatch.setattr(term, "dist", SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_backend=lambda: "nccl",
        all_reduce=sent.append,
    ))  # fmt: skip
    monkeypatch.setattr(term, "_device_of_rank", lambda: torch.device("meta"))
    with pytest.raises(NotImplementedError, match="meta"):  # on the way back
        term.sum_over_ranks(torch.ones(3))
    assert sent[0].device.type == "meta"


def as_on_mps(x):
    """Move a tensor as torch does to Apple's GPUs."""
    if x.dtype == torch.float64:
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            "float64. Please use float32 instead."
        )
    return x.clone()


@pytest.mark.parametrize("name", ["crac", "cals", "cals_hr", "confidence"])
def test_a_device_without_float64_is_refused_with_what_to_do(name):
    learned = method("penalties", name)
    before = learned.lam
    for module in (learned, Objective({"penalty": learned})):
        with pytest.raises(ValueError, match=r"float64, which this device does not have.*CPU or"):
            module._apply(as_on_mps)
        assert learned.lam is before


def test_a_schedule_needs_float64_too():
    with pytest.raises(ValueError, match=r"Objective: keeps .* in float64"):
        build("nacl_ramp", num_classes=3)._apply(as_on_mps)


@pytest.mark.parametrize("name", ["nacl", "margin"])
def test_penalties_that_learn_nothing_need_no_float64(name):
    method("penalties", name)._apply(as_on_mps)


def test_other_errors_of_a_move_are_left_as_they_are():
    def fails(x):
        raise TypeError("something else")

    with pytest.raises(TypeError, match="something else"):
        method("penalties", "crac")._apply(fails)


def test_trainers_refuse_mps_with_what_to_do():
    with pytest.raises(ValueError, match=r"device: mps has no float64.*use cpu"):
        choose_device("mps")
