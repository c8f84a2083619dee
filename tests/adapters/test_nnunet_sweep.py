"""nnU-Net's cross-entropy and Dice share a sweep with a penalty, and nothing else changes."""

from __future__ import annotations

import math

import pytest
import torch
from nnunetv2.training.loss.compound_losses import (
    DC_and_BCE_loss,
    DC_and_CE_loss,
    DC_and_topk_loss,
)
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

from segcal.adapters.nnunet.host_loss import HeadLoss, HostDice, head_of, take_apart, without
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.loss import PenalisedLoss
from segcal.losses.focal import Focal
from segcal.objective import Objective
from segcal.penalties.bwcr import BWCR
from segcal.penalties.crac import CRaC
from segcal.penalties.entropy import Entropy
from segcal.penalties.nacl import NACL
from segcal.schedule import Ramp, Schedules
from tests.conftest import close

K, IGNORED = 3, 3
WEIGHTS = (4 / 7, 2 / 7, 1 / 7, 0.0)
PENALTIES = {
    "crac": lambda i: Objective({"crac": CRaC(K, ignore_index=i)}),
    "nacl, crac": lambda i: Objective(
        {"nacl": NACL(K, ignore_index=i), "crac": CRaC(K, ignore_index=i)}, {"nacl": 0.1}
    ),
}


def compound(*, ignore=None, batch_dice=False, **options):
    dice = {"batch_dice": batch_dice, "smooth": 1e-5, "do_bg": False, "ddp": False}
    return DC_and_CE_loss(
        dice, {}, ignore_label=ignore, dice_class=MemoryEfficientSoftDiceLoss, **options
    )


def deep(head):
    return DeepSupervisionWrapper(head, WEIGHTS)


def heads_and_targets(shape, *, samples=2, ignore=None, dtype=torch.float32, seed=0):
    """Four heads, each of half the size of the one before, as nnU-Net gives them."""
    generator = torch.Generator().manual_seed(seed)
    heads, targets = [], []
    for i in range(len(WEIGHTS)):
        size = [max(s >> i, 1) for s in shape]
        heads.append(3 * torch.randn(samples, K, *size, generator=generator, dtype=dtype))
        target = torch.randint(0, K, (samples, 1, *size), generator=generator).to(torch.int16)
        if ignore is not None:
            target[0, 0, : (size[0] + 1) // 2] = ignore
        targets.append(target)
    return heads, targets


def pair(host, penalties, consistency=None, ignore=None):
    """The loss with one sweep for both, and without: nnU-Net's loss, then the penalties."""
    labels = Labels(K, per_channel=False, ignore_index=ignore, channels=1)
    found = [PenalisedLoss(host(), labels, penalties(ignore), consistency) for _ in range(2)]
    assert found[0].joined is not None
    found[1].joined = None
    return found


def run(loss, heads, targets, *, training=False):
    """Value, gradients, means of the terms, and how often nnU-Net computed a cross-entropy."""
    leaves = [h.detach().clone().requires_grad_() for h in heads]
    calls = []
    hook = head_of(loss.host).ce.register_forward_hook(lambda *_: calls.append(1))
    loss.start_pass(measuring=not training, observing=not training)
    is_deep = isinstance(loss.host, DeepSupervisionWrapper)
    value = loss(leaves, targets) if is_deep else loss(leaves[0], targets[0])
    value.backward()
    hook.remove()
    return value.detach(), [x.grad for x in leaves], loss.means(), len(calls)


def same(one, other, rtol=1e-6, atol=1e-8):
    (a, grads_a, means_a, _), (b, grads_b, means_b, _) = one, other
    assert a.dtype == b.dtype
    close(a, b, rtol=rtol)
    assert list(means_a) == list(means_b)
    close(list(means_a.values()), list(means_b.values()), rtol=rtol)
    for x, y in zip(grads_a, grads_b, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            close(x, y, rtol=10 * rtol, atol=atol)


@pytest.mark.parametrize("dice", [True, False])
@pytest.mark.parametrize("names", PENALTIES)
@pytest.mark.parametrize("ignore", [None, IGNORED])
@pytest.mark.parametrize("shape", [(16, 12), (6, 10, 8)])
@pytest.mark.parametrize("supervised", [True, False])
def test_values_and_gradients_stay(supervised, shape, ignore, names, dice):
    def host():
        head = compound(ignore=ignore, batch_dice=len(shape) == 2)
        if not dice:
            without(head, "weight_dice")
        return deep(head) if supervised else head

    heads, targets = heads_and_targets(shape, ignore=ignore)
    one, other = (run(x, heads, targets) for x in pair(host, PENALTIES[names], ignore=ignore))
    same(one, other)
    used = sum(w != 0 for w in WEIGHTS) if supervised else 1
    assert (one[3], other[3]) == (used - 1, used)


def test_double_precision():
    heads, targets = heads_and_targets((16, 12), dtype=torch.float64)
    losses = pair(lambda: deep(compound()), PENALTIES["crac"])
    one, other = (run(x, heads, targets) for x in losses)
    assert one[0].dtype == torch.float64
    same(one, other, rtol=1e-8)  # nnU-Net's Dice is in single precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """As under autocast on a GPU: no further from single precision than the two were apart."""
    heads, targets = heads_and_targets((16, 12))
    heads = [h.to(dtype) for h in heads]
    losses = pair(lambda: deep(compound()), PENALTIES["crac"])
    exact = run(losses[1], [h.float() for h in heads], targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        one, other = (run(x, heads, targets) for x in losses)
    assert one[0].dtype == torch.float32
    assert one[1][0].dtype == dtype
    assert abs(one[0] - exact[0]) <= abs(other[0] - exact[0]) + 1e-3
    close(one[1][0].float(), exact[1][0], rtol=0.02, atol=1e-4)


def test_class_weights_of_nnunets_cross_entropy():
    def host():
        head = compound()
        head.ce.weight = torch.tensor([0.2, 1.0, 3.0])
        return deep(head)

    heads, targets = heads_and_targets((16, 12))
    one, other = (run(x, heads, targets) for x in pair(host, PENALTIES["crac"]))
    same(one, other)


def test_weights_of_nnunets_loss():
    """A user's own: cross-entropy and Dice are not weighed alike, nor are heads to sum to 1."""

    def host():
        return DeepSupervisionWrapper(
            compound(weight_ce=0.3, weight_dice=2.0), (3.0, 1.0, 1.0, 1.0)
        )

    heads, targets = heads_and_targets((16, 12))
    one, other = (run(x, heads, targets) for x in pair(host, PENALTIES["crac"]))
    same(one, other)


@pytest.mark.parametrize("supervised", [True, False])
def test_all_voxels_ignored(supervised):
    def host():
        return deep(compound(ignore=IGNORED)) if supervised else compound(ignore=IGNORED)

    heads, targets = heads_and_targets((16, 12))
    targets = [torch.full_like(t, IGNORED) for t in targets]
    losses = pair(host, PENALTIES["crac"], ignore=IGNORED)
    one, other = (run(x, heads, targets) for x in losses)
    same(one, other)
    assert one[0].isfinite()
    expected = host()(heads, targets) if supervised else host()(heads[0], targets[0])
    close(one[0], expected, rtol=1e-6)


def test_a_weight_of_0_leaves_nnunets_loss():
    heads, targets = heads_and_targets((16, 12))
    penalties = Objective({"crac": CRaC(K)}, {"crac": 0.0})
    layout = Labels(K, per_channel=False, ignore_index=None, channels=1)
    loss = PenalisedLoss(deep(compound()), layout, penalties)
    value, gradients, means, _ = run(loss, heads, targets)
    leaves = [h.clone().requires_grad_() for h in heads]
    expected = deep(compound())(leaves, targets)
    expected.backward()
    close(value, expected, rtol=1e-6)
    close(means["base"], expected, rtol=1e-6)
    for x, y in zip(gradients, leaves, strict=True):
        if x is not None:
            close(x, y.grad, rtol=1e-5, atol=1e-8)


def test_two_views():
    """Both views of the full-resolution head share their sweeps, too."""
    heads, targets = heads_and_targets((16, 12), samples=2)
    losses = pair(
        lambda: deep(compound()), PENALTIES["crac"], consistency=(2.0, "bwcr", BWCR(K, alpha=0.5))
    )
    results = []
    for loss in losses:
        torch.manual_seed(5)
        loss.prepare(torch.rand(2, 1, 16, 12))
        twice = [torch.cat([h, 1 - h]) for h in heads]
        results.append(run(loss, twice, targets, training=True))
    same(*results)
    assert list(results[0][2]) == ["base", "crac", "bwcr"]
    assert (results[0][3], results[1][3]) == (4, 6)


def test_multipliers_learn_alike():
    heads, targets = heads_and_targets((16, 12))
    losses = pair(lambda: deep(compound()), PENALTIES["crac"])
    before = [x.learned_state()["terms.crac.lam"].clone() for x in losses]
    for loss in losses:
        run(loss, heads, targets)
        loss.dual_step()
    states = [x.learned_state() for x in losses]
    assert list(states[0]) == list(states[1])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name])
    assert not torch.equal(before[0], states[0]["terms.crac.lam"])
    same(*(run(x, heads, targets) for x in losses))  # the sweep has the new ones


def test_validation_has_no_gradient():
    heads, targets = heads_and_targets((16, 12))
    losses = pair(lambda: deep(compound()), PENALTIES["crac"])
    with torch.no_grad():
        values = [loss.eval()(heads, targets) for loss in losses]
    close(values[0], values[1], rtol=1e-6)
    assert not values[0].requires_grad


def test_where_the_sweep_does_not_apply(monkeypatch):
    heads, targets = heads_and_targets((16, 12))
    layout = Labels(K, per_channel=False, ignore_index=None, channels=1)
    for penalties in (
        Objective({"entropy": Entropy(K)}),
        Objective({"crac": CRaC(K, fused=False)}),
    ):
        loss = PenalisedLoss(deep(compound()), layout, penalties)
        assert run(loss, heads, targets)[3] == 2  # its own Dice shares a sweep all the same
        loss = PenalisedLoss(deep(compound(weight_dice=0)), layout, penalties)
        assert run(loss, heads, targets)[3] == 3  # nnU-Net computes every cross-entropy
    loss, _ = pair(lambda: deep(compound()), PENALTIES["crac"])
    expected = run(loss, heads, targets)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = run(loss, heads, targets)
    assert (expected[3], found[3]) == (2, 3)
    same(found, expected)


@pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")  # nnU-Net's
def test_losses_of_another_kind_are_left_whole():
    dice = {"batch_dice": False, "smooth": 1e-5, "do_bg": False}
    memory = {"dice_class": MemoryEfficientSoftDiceLoss}
    layout = Labels(K, per_channel=False, ignore_index=None, channels=1)
    smoothed = DC_and_CE_loss({**dice, "ddp": False}, {"label_smoothing": 0.1}, **memory)
    for head in (
        DC_and_BCE_loss({}, {**dice, "ddp": False}, **memory),
        DC_and_topk_loss({**dice, "ddp": False}, {"k": 10}),
        smoothed,
        compound(weight_ce=0),
        HeadLoss(compound(), Objective({"focal": Focal(K)}), layout),
        torch.nn.CrossEntropyLoss(),
    ):
        assert take_apart(head, K) is None
        assert take_apart(deep(head), K) is None
    assert take_apart(compound(), K) is not None


@pytest.mark.parametrize("ignore", [None, IGNORED])
@pytest.mark.parametrize("batch_dice", [False, True])
def test_nnunets_own_loss_is_swept(batch_dice, ignore):
    """Without a penalty, too: Dice + cross-entropy with nnU-Net's value and gradient."""
    layout = Labels(K, per_channel=False, ignore_index=ignore, channels=1)
    host = deep(compound(batch_dice=batch_dice, ignore=ignore))
    heads, targets = heads_and_targets((16, 12), ignore=ignore)
    leaves = [h.clone().requires_grad_() for h in heads]
    expected = host(leaves, targets)
    slopes = torch.autograd.grad(expected, leaves[:3])
    value, found, means, calls = run(PenalisedLoss(host, layout), heads, targets)
    assert calls == 2
    close(value, expected.detach(), rtol=1e-6)
    close(means["base"], expected.item(), rtol=1e-6)
    for a, b in zip(found, slopes, strict=False):
        close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("batch_dice", [False, True])
def test_slopes_of_nnunets_dice_where_its_denominator_is_held(batch_dice, background):
    """Without smoothing, a class may have less mass than the least denominator."""
    host = compound(batch_dice=batch_dice)
    host.dc.smooth, host.dc.do_bg = 0.0, background
    p = torch.rand(2, K, dtype=torch.float64)
    p[:, -1] = 1e-10
    t, o = torch.rand_like(p), 0.5 * p
    t[:, -1] = 0
    value, *slopes = HostDice(host, K).swept().loss(p, o, t)
    leaves = [x.clone().requires_grad_() for x in (p, o)]
    sums = [x[:, 0 if background else 1 :] for x in (*leaves, t)]
    a, b, c = (x.sum(0) for x in sums) if batch_dice else sums
    expected = -(2 * b / (c + a).clamp_min(1e-8)).mean()
    close(value, expected.detach())
    for one, other in zip(slopes, torch.autograd.grad(expected, leaves), strict=True):
        close(one, other)


def test_a_dice_of_another_kind_stays_nnunets():
    heads, targets = heads_and_targets((16, 12))
    layout = Labels(K, per_channel=False, ignore_index=None, channels=1)
    usual = DC_and_CE_loss({"batch_dice": True, "smooth": 1e-5, "do_bg": False, "ddp": False}, {})
    shared = compound(batch_dice=True)
    shared.dc.ddp = True  # sums over the batches of several processes
    for head in (usual, shared):
        assert HostDice(head, K).swept() is None
    loss = PenalisedLoss(usual, layout, PENALTIES["crac"](None))
    calls = []
    usual.dc.register_forward_hook(lambda *_: calls.append(1))
    value, *_ = run(loss, heads, targets)
    assert calls == [1]
    crac = PENALTIES["crac"](None)(heads[0], targets[0][:, 0].long())
    close(value, usual(heads[0], targets[0]) + crac, rtol=1e-6)


def test_nnunets_loss_is_left_as_it_is():
    heads, targets = heads_and_targets((16, 12))
    host = deep(compound())
    before = host(heads, targets)
    rest = take_apart(host, K)
    assert torch.equal(host(heads, targets), before)
    labels = targets[0][:, 0].long()
    values = {name: term(heads[0], labels) for name, term in rest.terms.items()}
    close(rest(heads, targets) + rest.take(values), before, rtol=1e-6)
    assert not values
    assert set(rest.weights.values()) == {WEIGHTS[0]}


def test_the_likelihood_of_a_pass():
    """Mean cross-entropy of the full resolution over samples, for schedules by the gap."""
    heads, targets = heads_and_targets((16, 12), ignore=IGNORED)
    layout = Labels(K, per_channel=False, ignore_index=IGNORED, channels=1)
    schedules = Schedules({"crac": Ramp(0.0, 1.0, gap=(0.0, 0.5))})
    host = deep(compound(ignore=IGNORED))
    loss = PenalisedLoss(host, layout, PENALTIES["crac"](IGNORED), schedules=schedules)
    loss(heads, targets)
    loss([x[:1] for x in heads], [y[1:] for y in targets])
    expected = [
        torch.nn.functional.cross_entropy(x, y[:, 0].long(), ignore_index=IGNORED)
        for x, y in ((heads[0], targets[0]), (heads[0][:1], targets[0][1:]))
    ]
    close(loss.likelihood(), float(2 * expected[0] + expected[1]) / 3, rtol=1e-6)
    loss.schedules.see_gap(0.125)
    assert loss.advance(0.5) == {"crac": 0.25}
    loss.start_pass()
    assert math.isnan(loss.likelihood())
    assert math.isnan(PenalisedLoss(host, layout).likelihood())
