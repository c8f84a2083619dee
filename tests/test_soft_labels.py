"""Shares of raters as labels: what losses and penalties make of them, where they are smallest."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.losses.cross_entropy import CrossEntropy, cross_entropy
from segcal.losses.dice import SoftDiceLoss, soft_dice_loss
from segcal.losses.svls import SVLS, svls
from segcal.neighbourhood import class_proportions, share_proportions
from segcal.objective import Objective
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.tensors import check_shares, one_hot
from tests.conftest import close

N, K, S = 2, 3, (5, 6)
TERMS = {
    "cross_entropy": lambda: CrossEntropy(K),
    "weighted": lambda: CrossEntropy(K, class_weight=[0.2, 1.0, 3.0]),
    "dice": lambda: SoftDiceLoss(K),
    "dice_batch": lambda: SoftDiceLoss(K, batch=True, include_background=False, gamma=2.0),
    "dice_surgery": lambda: SoftDiceLoss(K, surgery=True),
    "svls": lambda: SVLS(K),
    "svls_background": lambda: SVLS(K, padding="background", kernel_size=5),
    "crac": lambda: CRaC(K, fused=False),
    "crac_zeros": lambda: CRaC(K, padding="renormalize", constraint="signed", fused=False),
    "crac_smoothed": lambda: CRaC(K, space="probability", target="smoothed", fused=False),
    "confidence": lambda: Confidence(K, fused=False),
}


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(N, K, *S, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, K, (N, *S), generator=generator)
    labels[:, :3, :3] = 1  # an inner region
    return logits, labels


def shares(seed=0, raters=4):
    """Of raters who label at random, and their labels ``(N, R, *S)``."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, K, (N, raters, *S), generator=generator)
    return sum(one_hot(one, K, dtype=torch.float64) for one in labels.unbind(1)) / raters, labels


def learned(term):
    """A term whose multipliers are not 0."""
    if hasattr(term, "lam"):
        with torch.no_grad():
            term.lam.copy_(torch.linspace(0.01, 0.2, term.lam.numel()).view_as(term.lam))
    return term


@pytest.mark.parametrize("name", TERMS)
def test_of_one_rater_they_are_the_labels(name):
    term, (logits, labels) = learned(TERMS[name]()), batch()
    hard, soft = (logits.clone().requires_grad_() for _ in range(2))
    term(hard, labels).backward()
    value = term(soft, one_hot(labels, K, dtype=torch.float64))
    value.backward()
    close(value.detach(), term(logits, labels))
    close(soft.grad, hard.grad, atol=1e-12)
    of_half = term(logits.half(), one_hot(labels, K).half())
    assert of_half.dtype == torch.float32
    assert torch.isfinite(of_half)


@pytest.mark.parametrize("name", TERMS)
def test_voxels_without_shares_are_left_out(name):
    logits, labels = batch()
    ignored = torch.zeros(N, *S, dtype=torch.bool)
    ignored[:, 3:, 2:4] = True
    soft = one_hot(labels.masked_fill(ignored, 9), K, ignore_index=9, dtype=torch.float64)
    term, other = learned(TERMS[name]()), learned(TERMS[name]())
    other.ignore_index = 9
    close(term(logits, soft), other(logits, labels.masked_fill(ignored, 9)))
    empty = term(logits.requires_grad_(), torch.zeros_like(soft))
    assert torch.isfinite(empty)
    empty.backward()
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("name", ["crac", "crac_zeros", "crac_smoothed", "confidence"])
def test_multipliers_learn_the_same(name):
    logits, labels = batch()
    learns = [learned(TERMS[name]()) for _ in range(2)]
    for term, y in zip(learns, (labels, one_hot(labels, K, dtype=torch.float64)), strict=True):
        term.observe(logits, y)
        term.dual_step()
    close(learns[1].lam, learns[0].lam)


def test_confidence_follows_the_share_of_the_decided_class():
    logits, (soft, _) = batch()[0], shares()
    term = Confidence(K)
    term.observe(logits, soft)
    p = logits.softmax(1)
    close(term.hits.sum(), soft.gather(1, p.argmax(1, keepdim=True)).sum())
    close(term.confidence_sum.sum(), p.amax(1).sum())
    assert int(term.count.sum()) == N * S[0] * S[1]


def test_cross_entropy_is_the_mean_over_the_raters():
    logits, (soft, labels) = batch()[0], shares()
    each = [cross_entropy(logits, one) for one in labels.unbind(1)]
    close(cross_entropy(logits, soft), torch.stack(each).mean())
    close(cross_entropy(logits, soft), F.cross_entropy(logits, soft))


@pytest.mark.parametrize("padding", ["replicate", "background", "renormalize", "zeros"])
@pytest.mark.parametrize("kernel", ["mean", "svls"])
def test_proportions_are_the_mean_of_the_raters(padding, kernel):
    soft, labels = shares()
    options = {"padding": padding, "kernel": kernel, "kernel_size": (3, 5)}
    each = [class_proportions(one, K, **options) for one in labels.unbind(1)]
    close(share_proportions(soft, **options), torch.stack(each).mean(0))
    logits = batch()[0]
    if kernel == "svls" and padding != "zeros":
        kept = {"padding": padding, "kernel_size": (3, 5)}
        close(svls(logits, soft, **kept), svls(logits, labels, **kept))


def test_crac_calls_a_patch_of_one_class_inner():
    soft = torch.zeros(1, 2, 1, 7, dtype=torch.float64)
    soft[:, 0] = 1
    soft[:, :, :, 6] = 0.5
    _, region = CRaC(2, kernel_size=(1, 3)).constraints(torch.zeros_like(soft), soft)
    assert region.tolist() == [[[0, 0, 0, 0, 0, 1, 1]]]
    with pytest.raises(ValueError, match="bands"):
        CRaC(2, bands=(1,)).constraints(torch.zeros_like(soft), soft)


def minimum(loss, target, steps=400):
    logits = torch.zeros_like(target).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(logits, target).backward()
        optimiser.step()
    return logits.detach().softmax(1)


def test_losses_are_smallest_at_the_shares():
    soft, _ = shares(raters=3)
    soft = 0.9 * soft + 0.1 / K
    close(minimum(cross_entropy, soft), soft, rtol=0, atol=0.02)
    found = minimum(soft_dice_loss, soft)
    assert (found - soft).abs().mean() < 0.05
    as_labels = minimum(lambda x, t: _dice_of_products(x.softmax(1), t), soft)
    assert (as_labels - soft).abs().mean() > 0.2  # the usual form goes to 0 and 1


def _dice_of_products(p, t):
    p, t = p.flatten(2), t.flatten(2)
    return (1 - (2 * (p * t).sum(2)) / (p.sum(2) + t.sum(2))).mean()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 999))
def test_dice_is_0_at_the_shares_alone(seed):
    soft, _ = shares(seed)
    soft = 0.8 * soft + 0.2 / K
    logits = soft.log()
    close(soft_dice_loss(logits, soft), 0.0, atol=1e-12)
    assert soft_dice_loss(logits + 0.3 * batch(seed)[0], soft) > 1e-3


@pytest.mark.parametrize("name", ["cross_entropy", "weighted", "dice", "svls", "crac"])
def test_gradients(name):
    logits, (soft, _) = batch()[0], shares()
    term = learned(TERMS[name]())
    x = logits[:1, :, :3, :3].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda z: term(z, soft[:1, :, :3, :3]), (x,))


@pytest.mark.parametrize("penalty", [CRaC, Confidence])
def test_an_objective_takes_them_without_its_sweep(penalty):
    logits, labels = batch()
    weights = {"penalty": 0.1}
    swept, readable = (
        Objective({"ce": CrossEntropy(K), "penalty": learned(penalty(K, fused=fused))}, weights)
        for fused in (True, False)
    )
    assert swept.shares_sweep(logits)  # which knows whole labels alone
    soft, parts = swept.loss_and_terms(logits, one_hot(labels, K, dtype=torch.float64))
    hard, of_hard = readable.loss_and_terms(logits, labels)
    close(soft, hard)
    assert parts.keys() == of_hard.keys()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda t: 2 * t, "sum to 1"),
        (lambda t: t - 0.5, "shares of 0 or more"),
        (lambda t: t * torch.nan, "sum to 1"),
    ],
)
def test_refuses_what_are_no_shares(wrong, message):
    logits, labels = batch()
    with pytest.raises(ValueError, match=message):
        cross_entropy(logits, wrong(one_hot(labels, K, dtype=torch.float64)))


def test_refuses_floating_labels_of_other_shapes():
    logits, labels = batch()
    for y in (labels.double(), labels.double().unsqueeze(1)):
        with pytest.raises(ValueError, match="labels: expected"):
            cross_entropy(logits, y)
    with pytest.raises(ValueError, match="expected shares of the classes like logits"):
        check_shares(logits, labels.double())


def test_rows_of_a_classification():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, K, generator=generator, dtype=torch.float64)
    soft = torch.rand(8, K, generator=generator, dtype=torch.float64)
    soft = soft / soft.sum(1, keepdim=True)
    close(cross_entropy(logits, soft), F.cross_entropy(logits, soft))
    close(soft_dice_loss(soft.log(), soft), 0.0, atol=1e-9)
