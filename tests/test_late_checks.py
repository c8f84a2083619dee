"""Labels on a GPU are checked without waiting for it: an error comes later, and says the same.

There is no GPU in these tests: the CPU is declared to be one that the host does not wait for.
"""

from __future__ import annotations

import re

import pytest
import torch

from segcal import late_checks, tensors
from segcal.late_checks import LabelWatch, label_watch, raise_wrong_labels
from segcal.objective import Objective
from segcal.recipes import names
from segcal.tensors import check_labels_of_step
from tests.test_contracts import data, method

LOSSES = [("losses", name) for name in names("losses")]
LOSSES += [("penalties", name) for name in names("penalties")]


@pytest.fixture(autouse=True)
def late_cpu(monkeypatch):
    monkeypatch.setattr(tensors, "LATE_DEVICES", {"cpu"})
    monkeypatch.setattr(late_checks, "_WATCHES", {})


def without_fast_path(kind, name):
    term = method(kind, name)
    term.fused = False
    return term


@pytest.mark.parametrize(("kind", "name"), LOSSES, ids=[name for _, name in LOSSES])
def test_every_loss_goes_on_and_the_next_step_raises(kind, name):
    """A wrong label is no index out of bounds meanwhile, which would end the program on a GPU."""
    term = without_fast_path(kind, name)
    if getattr(term, "two_views", False):
        pytest.skip("compares two views, and looks at labels on the CPU")
    logits, labels = data()
    labels[0, 1, 2], labels[1, 0, 0] = 7, -3
    image = {"image": logits[:, :1]} if term.needs_image else {}
    term(logits, labels, *image.values())
    with pytest.raises(ValueError, match=r"0 to 2, got values from -3 to 7 in \d+ voxels, on cpu"):
        term(logits, data()[1], *image.values())
    term(logits, data()[1], *image.values())


def test_the_message_is_the_one_of_the_cpu_but_for_the_place():
    labels = torch.tensor([[0, 1, 9, 255]])
    check_labels_of_step(labels, 2, 255)
    with pytest.raises(ValueError, match="got") as late:
        raise_wrong_labels()
    with pytest.raises(ValueError, match="got") as now:
        tensors.check_label_values(labels, 2, 255)
    start = "labels: expected 0 to 1 or ignore_index 255, got "
    assert str(now.value).startswith(f"{start}[9] in 1 voxels")
    assert str(late.value) == f"{start}9 in 1 voxels, on cpu in this batch or one before"


def test_right_labels_are_never_refused():
    for dtype in (torch.uint8, torch.int16, torch.int64):
        for _ in range(3):
            check_labels_of_step(torch.tensor([[0, 1, 255]]).to(dtype), 2, 255)
            check_labels_of_step(torch.empty(0, 3, dtype=dtype), 2, None)
    raise_wrong_labels()


@pytest.mark.parametrize("name", ["crac", "confidence"])
def test_multipliers_do_not_learn_from_wrong_labels(name):
    """The end of a batch of validation waits in any case, so that the error comes at once."""
    term = without_fast_path("penalties", name)
    logits, labels = data()
    labels[0, 0, 0] = 5
    before = {key: value.clone() for key, value in term.state_dict().items()}
    with pytest.raises(ValueError, match="got 5 in 1 voxels"):
        term.observe(logits, labels)
    for key, value in before.items():
        assert torch.equal(term.state_dict()[key], value)


def test_the_end_of_an_epoch_waits():
    objective = Objective({"focal": method("losses", "focal")})
    logits, labels = data()
    labels[0, 0, 0] = 5
    objective(logits, labels)
    with pytest.raises(ValueError, match=re.escape("is an ignore_index missing?")):
        objective.start_pass()


class Arrival:
    """Stands for an event of CUDA: the copy arrives when the test says so."""

    here = False

    def query(self):
        return self.here

    def record(self, _):
        self.recorded = True


def test_what_has_not_arrived_is_not_read(monkeypatch):
    """A step neither waits for a copy nor starts a second one over it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    watch = LabelWatch(torch.device("cpu"), 3, None)
    watch._on_gpu, watch._arrives = True, Arrival()
    watch.seen.copy_(torch.tensor([2.0, 4.0, 4.0]))
    watch.ask()
    assert watch._arrives.recorded
    watch._told.zero_()  # as long as the GPU has not written it
    watch.look()
    watch.ask()
    assert not watch._told.any()
    watch._told.copy_(watch.seen)
    watch._arrives.here = True
    with pytest.raises(ValueError, match="got 4 in 2 voxels"):
        watch.look()
    watch.look()
    watch.ask()
    watch.look()


def test_nothing_is_read_while_a_graph_is_captured(monkeypatch):
    watch = LabelWatch(torch.device("cpu"), 3, None)
    watch.seen.copy_(torch.tensor([2.0, 4.0, 4.0]))
    watch._on_gpu = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    watch.ask()
    watch.look()
    with pytest.raises(ValueError, match="got 4 in 2 voxels"):
        watch.wait()


def test_there_is_one_watch_of_what_is_expected():
    cpu = torch.device("cpu")
    with torch.inference_mode():
        watch = label_watch(cpu, 3, None)
    assert label_watch(cpu, 3, None) is watch
    assert label_watch(cpu, 3, 9) is not watch
    watch.add(torch.tensor([True, False]), torch.tensor([5, 0]))  # no inference tensor
    assert watch.seen.tolist() == [1, 5, 5]
