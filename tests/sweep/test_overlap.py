"""Soft Dice in the sweep has what its readable version has; so has whatever sums the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.objective import Objective
from segcal.penalties.cals import CALS
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.recipes import build
from segcal.sweep.fused import sweep
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


def objective(fused, penalty=None, ignored=IGNORED, k=K, **options):
    terms = {
        "dice": SoftDiceLoss(k, ignore_index=ignored, fused=fused, **options),
        "ce": CrossEntropy(k, ignore_index=ignored),
    }
    if penalty is not None:
        terms["penalty"] = penalty(k, ignore_index=ignored, fused=fused)
        terms["penalty"].lam.fill_(0.3)
    weights = {"dice": 0.7, "ce": 1.1, "penalty": 0.4}
    return Objective(terms, {name: weights[name] for name in terms})


def found(one, logits, labels):
    x = logits.clone().requires_grad_()
    total, values = one.loss_and_terms(x, labels)
    return [total.detach(), *values.values(), *torch.autograd.grad(total, x)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(70,), (9, 21), (4, 5, 33), (2, 3, 1100)])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_swept_equals_readable(penalty, options, shape, dtype):
    logits, labels = data(shape, k=K, dtype=dtype, scale=6.0)
    labels[labels == 2] = 1  # one class is nowhere
    labels.flatten()[::7] = IGNORED
    both = []
    for fused in (True, False):
        one = objective(fused, PENALTIES[penalty], **OPTIONS[options])
        assert one.shares_sweep(logits) == fused
        both.append(found(one, logits, labels))
    exact = dtype == torch.float64
    for a, b in zip(*both, strict=True):
        assert a.dtype == b.dtype
        close(a, b, rtol=1e-10 if exact else 2e-5, atol=1e-12 if exact else 1e-8)


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


@pytest.mark.parametrize("penalty", PENALTIES)
def test_the_gradient_is_that_of_difference_quotients(penalty):
    logits, labels = data((3, 4), n=2, k=K, scale=2.0)
    one = objective(True, PENALTIES[penalty], ignored=None)
    assert torch.autograd.gradcheck(lambda x: one(x, labels), logits.requires_grad_())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_single(half):
    logits, labels = data((8, 9), k=K, dtype=torch.float32, scale=3.0)
    x = logits.to(half)
    one = objective(True, CRaC, ignored=None)
    both = [found(one, x, labels), found(one, x.float(), labels)]
    assert both[0][-1].dtype == half
    for a, b in zip(*both, strict=True):
        close(a.float(), b.to(a.dtype).float())


@pytest.mark.parametrize("penalty", PENALTIES)
def test_what_does_not_count_gives_nothing(penalty):
    logits, labels = data((5, 6), k=K)
    one = objective(True, PENALTIES[penalty])
    labels[0, 2, 3] = IGNORED
    expected = found(one, logits, labels)
    logits[0, 1, 2, 3] = float("nan")
    for a, b in zip(found(one, logits, labels), expected, strict=True):
        assert torch.equal(a, b)
    labels[:] = IGNORED
    assert not any(x.any() for x in found(one, logits, labels))


def test_nan_and_logits_without_bounds_do_what_they_do_elsewhere():
    logits, labels = data((5, 6), k=K)
    logits[0, 1, 2, 3] = float("nan")
    assert torch.isnan(torch.stack(found(objective(True), logits, labels)[:3])).all()
    logits, labels = data((5, 6), k=K, dtype=torch.float32, scale=1e4)
    both = [found(objective(fused), logits, labels) for fused in (True, False)]
    for a, b in zip(*both, strict=True):
        assert a.isfinite().all()
        close(a, b, rtol=2e-5, atol=1e-8)


def test_same_bits_on_any_number_of_threads():
    logits, labels = data((90, 700), n=2, k=K, dtype=torch.float32)
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(found(objective(True, CRaC), logits, labels))
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
    other = Objective({"ce": CrossEntropy(K, ignore_index=8), "dice": SoftDiceLoss(K)})
    assert not other.shares_sweep(logits)


def test_any_loss_of_the_sums():
    """The least that a loss can be: the mean overlap, whose gradient is known."""
    logits, labels = data((5, 6), n=2, k=K)
    x = logits.requires_grad_()
    term = OverlapTerm(K, lambda p, o, t: (o.sum() - p[:, 0].sum()) / t.sum())
    total, ce, penalty, value = sweep(
        x, labels, None, cross_entropy=CrossEntropyTerm(K), cross_entropy_weight=0.0,
        overlap=term, overlap_weight=3.0,
    )  # fmt: skip
    p = torch.softmax(x, 1)
    expected = (p.gather(1, labels[:, None]).sum() - p[:, 0].sum()) / labels.numel()
    close(value, expected.detach())
    close(total.detach(), 3 * expected.detach())
    assert penalty == 0
    assert ce > 0
    close(*(torch.autograd.grad(y, x, retain_graph=True)[0] for y in (total, 3 * expected)))


def test_what_does_not_go_together_is_refused():
    overlap = OverlapTerm(K, lambda p, o, t: p.sum())
    with pytest.raises(ValueError, match="cross-entropy beside it"):
        Together(None, None, overlap)
    with pytest.raises(ValueError, match="one number of classes"):
        Together(None, CrossEntropyTerm(3), overlap)
    ones = torch.ones(1, 3)
    penalty = Residual(ones, ones, "phr", "abs", (1.0,), ignore_index=IGNORED)
    assert (Together(penalty).num_classes, Together(penalty).ignore_index) == (3, IGNORED)
    with pytest.raises(ValueError, match="one number of classes"):
        Together(penalty, CrossEntropyTerm(3))
    with pytest.raises(ValueError, match="one number of classes"):
        Together(None)
