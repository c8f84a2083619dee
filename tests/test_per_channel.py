"""Region-based labels: a sigmoid per channel, channels that overlap; or a refusal when built."""

from __future__ import annotations

import pytest
import torch

from segcal.components import accepted_arguments, build_component, target
from segcal.losses.cross_entropy import cross_entropy
from segcal.losses.dice import soft_dice_loss
from segcal.losses.svls import svls
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import margin
from segcal.penalties.nacl import nacl
from segcal.recipes import build as build_objective
from segcal.recipes import load_component
from segcal.term import Term
from tests.conftest import close
from tests.test_contracts import METHODS

HAVE = {
    "cross_entropy", "soft_dice", "dicepp", "svls", "nacl", "margin", "crac", "crac_bands",
    "confidence", "ml1_ace", "ml1_ace_soft",
}  # fmt: skip
methods = pytest.mark.parametrize(("kind", "name"), [m for m in METHODS if m[1] in HAVE])


def example(shape=(6, 7), k=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, k, *shape, generator=generator, dtype=torch.float64)
    labels = torch.rand(2, k, *shape, generator=generator) < 0.4
    labels[:, 0] |= labels[:, -1]  # the last channel lies in the first
    return logits, labels.long()


def method(kind, name, k=3, **arguments):
    term = build_component(load_component(kind, name), num_classes=k, per_channel=True, **arguments)
    if hasattr(term, "lam"):
        term.lam.copy_(torch.rand(term.lam.shape, generator=torch.Generator().manual_seed(1)))
    return term


@pytest.mark.parametrize(("kind", "name"), METHODS)
def test_others_say_so_when_built(kind, name):
    has = "per_channel" in accepted_arguments(target(load_component(kind, name)))
    assert has == (name in HAVE)
    if not has:
        with pytest.raises(ValueError, match="has no form per channel"):
            method(kind, name)


def test_recipes():
    logits, labels = example()
    objective = build_objective("crac", 3, per_channel=True)
    total, values = objective.loss_and_terms(logits, labels)
    close(total, sum(values.values()))
    objective.observe(logits, labels)
    assert objective.dual_step()["crac"].step == 1
    with pytest.raises(ValueError, match=r"CALS: has no form per channel"):
        build_objective("cals", 3, per_channel=True)


@methods
def test_gradcheck(kind, name):
    logits, labels = example((4, 3, 5))
    labels[0, 1, 1] = 9
    term = method(kind, name, ignore_index=9)
    assert torch.autograd.gradcheck(lambda x: term(x, labels), logits.requires_grad_())


@methods
def test_channels_do_not_know_each_other(kind, name):
    """The gradient of a channel depends on its own labels alone; it may overlap any other."""
    logits, labels = example()
    x = logits.requires_grad_()
    other = labels.clone()
    other[:, 2] = 1 - other[:, 2]
    slopes = [torch.autograd.grad(method(kind, name)(x, y), x)[0] for y in (labels, other)]
    close(slopes[0][:, :2], slopes[1][:, :2])
    assert (slopes[0] != 0).any()


@methods
def test_ignored_voxels_are_irrelevant(kind, name):
    logits, labels = example()
    labels[:, 1, 2:4, 2:4] = 255
    changed = logits.clone()
    changed[:, 1, 2:4, 2:4] = 77
    values = []
    for x in (logits, changed):
        term = method(kind, name, ignore_index=255)
        values.append(term(x, labels))
        if isinstance(term, Term):
            term.observe(x, labels)
            term.dual_step()
            values += [b.double() for b in term.buffers()]
    half = len(values) // 2
    for a, b in zip(values[:half], values[half:], strict=True):
        close(a, b)


@methods
@pytest.mark.parametrize("size", [0.0, 1e4])
def test_finite_where_nothing_is_valid_and_for_large_logits(kind, name, size):
    logits, labels = example()
    for y in (labels, torch.zeros_like(labels), torch.full_like(labels, 9), labels[:0]):
        x = (size * logits[: len(y)].sign()).float().requires_grad_()
        value = method(kind, name, ignore_index=9)(x, y)
        assert torch.isfinite(value)
        assert torch.isfinite(torch.autograd.grad(value, x)[0]).all()


@methods
def test_wrong_labels_are_named(kind, name):
    logits, labels = example()
    with pytest.raises(ValueError, match="one channel per region"):
        method(kind, name)(logits, labels[:, 0])
    with pytest.raises(ValueError, match="labels: expected 0 to 1"):
        method(kind, name)(logits, 2 * labels)
    with pytest.raises(ValueError, match="expected 3 classes on axis 1"):
        method(kind, name)(logits[:, :2], labels[:, :2])


def test_a_voxel_leaves_its_own_channel_alone():
    logits, labels = example()
    labels[:, 1, 2:5] = 9
    kept = labels != 9
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        logits[kept], labels[kept].double()
    )
    close(cross_entropy(logits, labels, per_channel=True, ignore_index=9), expected)


@methods
def test_half_precision_and_a_volume_of_depth_one(kind, name):
    logits, labels = example()
    term = method(kind, name)
    if name != "svls":  # a 3-D Gaussian gives other weights than a 2-D one
        close(term(logits[:, :, None], labels[:, :, None]), term(logits, labels))
    x = (100 * logits).half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = term(x, labels)
    close(value.detach(), term(x.detach().double(), labels), rtol=1e-5)
    assert torch.isfinite(torch.autograd.grad(value, x)[0]).all()


def two_logits(logits):
    """A sigmoid of l is a softmax of 0 and l."""
    return torch.cat([torch.zeros_like(logits), logits], 1)


def test_a_channel_is_a_problem_of_two_classes():
    logits, labels = example(k=1)
    x, y = logits.requires_grad_(), labels[:, 0]

    def slope(value):
        return torch.autograd.grad(value, x)[0]

    for function in (cross_entropy, svls):
        close(function(x, labels, per_channel=True).detach(), function(two_logits(x), y).detach())
    # means over two classes, one of which has the constant logit 0
    close(slope(nacl(x, labels, per_channel=True)), 2 * slope(nacl(two_logits(x), y)))
    close(
        slope(margin(x, labels, margin=1.0, per_channel=True)),
        2 * slope(margin(two_logits(x), y, margin=1.0)),
    )
    one, two = CRaC(1, per_channel=True, lambda0=0.3), CRaC(2, lambda0=0.3)
    close(slope(one(x, labels)), 2 * slope(two(two_logits(x), y)))
    one.observe(x.detach(), labels)
    two.observe(two_logits(x.detach()), y)
    one.dual_step()
    two.dual_step()
    close(one.lam[:, 0], two.lam[:, 1])


def test_dice_per_channel():
    logits, labels = example(k=2)
    p = torch.sigmoid(logits)
    overlap, sizes = (p * labels).sum((2, 3)), (p + labels).sum((2, 3))
    expected = (1 - (2 * overlap + 1e-5) / (sizes + 1e-5)).mean()
    close(soft_dice_loss(logits, labels, per_channel=True), expected)


def test_multipliers_of_a_channel_are_those_of_it_alone():
    """Channels with regions of different sizes, one of them without an outer region."""
    logits, labels = example()
    labels[:, 2] = 0
    labels[:, 1, 2:5] = 9
    crac = CRaC(3, per_channel=True, rho_period=1, ignore_index=9)
    alone = [CRaC(1, per_channel=True, rho_period=1, ignore_index=9) for _ in range(3)]
    for _ in range(3):
        crac.observe(logits, labels)
        step = crac.dual_step()
        for k, one in enumerate(alone):
            one.observe(logits[:, k : k + 1], labels[:, k : k + 1])
            one.dual_step()
            close(crac.lam[:, k], one.lam[:, 0])
            close(crac.rho[:, k], one.rho[:, 0])
    assert sum(step.count) == (labels != 9).sum()
    assert float(crac.lam[1, 2]) == 1e-6
