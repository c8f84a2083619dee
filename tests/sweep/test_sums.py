"""Losses of sums in the sweep have what their readable versions have: soft Dice and mL1-ACE."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.losses.ml1_ace import ML1ACE
from segcal.objective import _KINDS, Objective
from segcal.penalties.cals import CALS
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.recipes import build
from segcal.sweep.fused import Weights, sweep
from segcal.sweep.terms import CrossEntropyTerm, OverlapTerm, Residual, Together
from tests.conftest import close
from tests.test_contracts import data

K, IGNORED = 4, 9
PENALTIES = {"none": None, "crac": CRaC, "cals": CALS, "confidence": Confidence}
OPTIONS = {
    "default": {},
    "nnunet": {"batch": True, "include_background": False},
    "skip_empty": {"skip_empty": True, "smooth": 1.0},
}


def objective(fused, penalty=None, ignored=IGNORED, k=K, ace=None, class_weight=None, **options):
    terms = {
        "dice": SoftDiceLoss(k, ignore_index=ignored, fused=fused, **options),
        "ce": CrossEntropy(k, ignore_index=ignored, class_weight=class_weight),
    }
    if penalty is not None:
        terms["penalty"] = penalty(k, ignore_index=ignored, fused=fused)
        terms["penalty"].lam.fill_(0.3)
    if ace is not None:
        terms["ace"] = ML1ACE(k, binning=ace, ignore_index=ignored, fused=fused)
    weights = {"dice": 0.7, "ce": 1.1, "penalty": 0.4, "ace": 0.6}
    return Objective(terms, {name: weights[name] for name in terms})


def found(one, logits, labels):
    x = logits.clone().requires_grad_()
    total, values = one.loss_and_terms(x, labels)
    return [total.detach(), *values.values(), *torch.autograd.grad(total, x)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(70,), (9, 21), (4, 5, 33), (2, 3, 1100)])
@pytest.mark.parametrize(
    ("options", "ace"),
    [("default", None), ("nnunet", None), ("skip_empty", None), ("nnunet", "soft"),
     ("default", "hard")],
)  # fmt: skip
@pytest.mark.parametrize("penalty", PENALTIES)
def test_swept_equals_readable(penalty, options, ace, shape, dtype):
    logits, labels = data(shape, k=K, dtype=dtype, scale=6.0)
    labels[labels == 2] = 1  # one class is nowhere
    labels.flatten()[::7] = IGNORED
    both = []
    for fused in (True, False):
        one = objective(fused, PENALTIES[penalty], ace=ace, **OPTIONS[options])
        assert one.shares_sweep(logits) == fused
        assert len(one._shared(logits)) == (len(one.terms) if fused else 0)
        both.append(found(one, logits, labels))
    exact = dtype == torch.float64
    # slopes of bins are 2 M times as steep as p, and so is the rounding of the gradient
    steep = 1e-8 if ace is None else 1e-4 * both[1][-1].abs().max().item()
    single = [1e-8] * (len(both[0]) - 1) + [steep]
    for a, b, at_most in zip(*both, single, strict=True):
        assert a.dtype == b.dtype
        close(a, b, rtol=1e-10 if exact else 2e-5, atol=1e-12 if exact else at_most)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_class_weights_of_the_cross_entropy(penalty):
    logits, labels = data((9, 700), k=K, scale=4.0)
    labels.flatten()[::7] = IGNORED
    options = {"ace": "soft", "class_weight": [0.2, 1.0, 3.0, 0.7]}
    both = [
        found(objective(fused, PENALTIES[penalty], **options), logits, labels)
        for fused in (True, False)
    ]
    for a, b in zip(*both, strict=True):
        close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_backward_scaled_and_again(penalty):
    logits, labels = data((9, 21), k=K)
    x = logits.requires_grad_()
    value = objective(True, PENALTIES[penalty], ignored=None, ace="soft")(x, labels)
    (once,) = torch.autograd.grad(value, x, retain_graph=True)
    kept = once.clone()
    for factor in (8.0, 0.5, 1.0):
        (again,) = torch.autograd.grad(factor * value, x, retain_graph=True)
        close(again, factor * kept)


def test_kinds_have_one_order():
    assert tuple(_KINDS) == Weights._fields == tuple(f.name for f in fields(Together))


def test_nothing_is_compiled_that_is_not_used(monkeypatch):
    logits, _ = data((5, 6), k=K)
    tried = []
    monkeypatch.setattr(
        "segcal.sweep.fused._compiles", lambda variant: tried.append(variant) or True
    )
    for term in (CrossEntropy(K), SoftDiceLoss(K)):
        assert not Objective({"one": term}).shares_sweep(logits)
    other = {"ce": CrossEntropy(K), "dice": SoftDiceLoss(K, ignore_index=7)}
    assert not Objective(other).shares_sweep(logits)
    assert not tried
    assert Objective({"ce": CrossEntropy(K), "penalty": CRaC(K)}).shares_sweep(logits)
    assert [(v.of_log_odds, v.of_sums) for v in tried] == [(False, False)]
    tried.clear()
    whole = {"dice": SoftDiceLoss(K), "ce": CrossEntropy(K), "penalty": Confidence(K)}
    assert Objective(whole).shares_sweep(logits)
    assert [(v.of_log_odds, v.of_sums) for v in tried] == [(True, False), (True, True)]


@pytest.mark.parametrize("ace", [None, "soft"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_values_without_a_gradient_are_the_same(penalty, ace):
    logits, labels = data((9, 700), k=K, dtype=torch.float32)
    labels[:, :, ::5] = IGNORED
    one = objective(True, PENALTIES[penalty], ace=ace)
    expected = found(one, logits, labels)[:-1]
    total, values = one.loss_and_terms(logits, labels)
    assert not total.requires_grad
    for a, b in zip((total, *values.values()), expected, strict=True):
        close(a, b, rtol=1e-6)


def test_terms_that_go_together_share_a_sweep_without_a_cross_entropy():
    logits, labels = data((9, 33), k=K)
    terms = {"dice": SoftDiceLoss, "ace": ML1ACE, "penalty": CRaC, "confidence": Confidence}
    for names in (("dice", "ace"), ("dice", "penalty"), ("ace", "confidence")):
        both = []
        for fast in (True, False):
            one = Objective({n: terms[n](K, fused=fast) for n in names})
            assert one.shares_sweep(logits) == fast
            for name in names:
                if hasattr(one.terms[name], "lam"):
                    one.terms[name].lam.fill_(0.3)
            both.append(found(one, logits, labels))
        for a, b in zip(*both, strict=True):
            close(a, b, rtol=1e-10, atol=1e-12)


def test_the_largest_group_of_terms_shares_the_sweep():
    logits, labels = data((9, 33), k=K)
    one = objective(True, CRaC, ignored=None)
    alone = {"first": SoftDiceLoss(K, ignore_index=IGNORED)}
    alone["other"] = CrossEntropy(K, ignore_index=IGNORED)
    one.terms = torch.nn.ModuleDict({**alone, **one.terms, "second": CrossEntropy(K)})
    one.in_force |= {"first": 0.3, "other": 1.0, "second": 0.5}
    assert {name for name, _ in one._shared(logits).values()} == {"dice", "ce", "penalty"}
    _, values = one.loss_and_terms(logits, labels)
    assert list(values) == list(one.terms)
    close(values["second"], values["ce"])
    close(values["first"], values["dice"])


@given(
    st.integers(2, 6), st.integers(1, 3), st.integers(1, 40), st.integers(0, 999), st.booleans(),
    st.booleans(),
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_size(k, n, width, seed, batch, background):
    draw = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(n, k, 3, width, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, k, (n, 3, width), generator=draw)
    options = {"batch": batch, "include_background": background, "ignored": None, "k": k}
    for a, b in zip(
        *(found(objective(fused, **options), logits, labels) for fused in (True, False)),
        strict=True,
    ):
        close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("ace", [None, "soft"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_gradient_is_that_of_difference_quotients(penalty, ace):
    logits, labels = data((3, 4), n=2, k=K, scale=2.0)
    one = objective(True, PENALTIES[penalty], ignored=None, ace=ace)
    assert torch.autograd.gradcheck(lambda x: one(x, labels), logits.requires_grad_())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(half):
    logits, labels = data((8, 9), k=K, dtype=torch.float32, scale=3.0)
    x = logits.to(half)
    one = objective(True, CRaC, ignored=None, ace="soft")
    both = [found(one, x, labels), found(one, x.float(), labels)]
    assert both[0][-1].dtype == half
    for a, b in zip(*both, strict=True):
        close(a.float(), b.to(a.dtype).float())


@pytest.mark.parametrize("ace", [None, "soft", "hard"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_what_does_not_count_gives_nothing(penalty, ace):
    logits, labels = data((5, 6), k=K)
    one = objective(True, PENALTIES[penalty], ace=ace)
    labels[0, 2, 3] = IGNORED
    expected = found(one, logits, labels)
    logits[0, 1, 2, 3] = float("nan")
    for a, b in zip(found(one, logits, labels), expected, strict=True):
        assert torch.equal(a, b)
    labels[:] = IGNORED
    assert not any(x.any() for x in found(one, logits, labels))


@pytest.mark.parametrize("penalty", PENALTIES)
def test_nan_and_logits_without_bounds_do_what_they_do_elsewhere(penalty):
    kind = PENALTIES[penalty]
    logits, labels = data((5, 6), k=K)
    logits[0, 1, 2, 3] = float("nan")
    for ace in ("soft", "hard"):
        values = found(objective(True, kind, ace=ace), logits, labels)[:-1]
        assert torch.stack(values).isnan().all()
    logits, labels = data((5, 6), k=K, dtype=torch.float32, scale=1e4)
    both = [found(objective(fused, kind, ace="soft"), logits, labels) for fused in (True, False)]
    for a, b in zip(*both, strict=True):
        assert a.isfinite().all()
        close(a, b, rtol=2e-5, atol=1e-8)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_same_bits_on_any_number_of_threads(penalty):
    logits, labels = data((90, 700), n=2, k=K, dtype=torch.float32)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(found(objective(True, PENALTIES[penalty], ace="soft"), logits, labels))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_only_sums_of_overlaps_are_swept():
    logits, labels = data((5, 6), k=K)
    for options in ({"gamma": 2.0}, {"surgery": True}, {"fused": False}):
        dice = SoftDiceLoss(K, **options)
        assert dice.swept() is None
        one = Objective({"ce": CrossEntropy(K), "dice": dice})
        assert not one.shares_sweep(logits)
        assert one(logits, labels).isfinite()
    assert SoftDiceLoss(K, per_channel=True).swept() is None
    assert build("dice_ce", num_classes=K).shares_sweep(logits)
    assert not Objective({"dice": SoftDiceLoss(K)}).shares_sweep(logits)
    assert ML1ACE(K, per_channel=True).swept() is None
    other = Objective({"ce": CrossEntropy(K, ignore_index=8), "dice": SoftDiceLoss(K)})
    assert not other.shares_sweep(logits)


def test_any_loss_of_the_sums():
    """The least that a loss can be: the mean overlap, whose gradient is known."""
    logits, labels = data((5, 6), n=2, k=K)
    x = logits.requires_grad_()

    def loss(p, o, t):
        by_p = torch.zeros_like(p)
        by_p[:, 0] = -1 / t.sum()
        return (o.sum() - p[:, 0].sum()) / t.sum(), by_p, torch.ones_like(o) / t.sum()

    terms = Together(None, CrossEntropyTerm(K), OverlapTerm(K, loss))
    total, (penalty, ce, value, _) = sweep(x, labels, terms, Weights(1.0, 0.0, 3.0))
    p = torch.softmax(x, 1)
    expected = (p.gather(1, labels[:, None]).sum() - p[:, 0].sum()) / labels.numel()
    close(value, expected.detach())
    close(total.detach(), 3 * expected.detach())
    assert penalty == 0
    assert ce > 0
    close(*(torch.autograd.grad(y, x, retain_graph=True)[0] for y in (total, 3 * expected)))


def test_what_does_not_go_together_is_refused():
    overlap = OverlapTerm(K, lambda p, o, t: (p.sum(), p, o))
    with pytest.raises(ValueError, match="one number of classes"):
        Together(None, CrossEntropyTerm(3), overlap)
    ones = torch.ones(1, 3)
    penalty = Residual(ones, ones, "phr", "abs", (1.0,), ignore_index=IGNORED)
    assert (Together(penalty).num_classes, Together(penalty).ignore_index) == (3, IGNORED)
    with pytest.raises(ValueError, match="one number of classes"):
        Together(penalty, CrossEntropyTerm(3))
    with pytest.raises(ValueError, match="one number of classes"):
        Together(None)
