"""AdaFocal: the loss, its bins and the moves of its gammas, against loops from the formulas."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from segcal.losses.adafocal import AdaFocal
from segcal.losses.focal import focal
from segcal.recipes import build
from tests.conftest import close


def example(shape=(6, 7), k=3, n=2, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((n, k, *shape), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, k, (n, *shape), generator=generator)
    return logits, labels


def rows(confidence, right):
    """Logits of two classes with these confidences in class 0, and labels that make them right."""
    p = torch.as_tensor(confidence, dtype=torch.float64)
    return torch.stack([p, 1 - p], 1).log(), torch.where(torch.as_tensor(right), 0, 1)


def test_at_first_it_is_the_focal_loss_of_gamma_1():
    logits, labels = example()
    close(AdaFocal(3)(logits, labels), focal(logits, labels, gamma=1.0))
    close(AdaFocal(3, gamma0=3.0)(logits, labels), focal(logits, labels, gamma=3.0))


def test_loss_against_a_loop():
    """Gammas of both signs; bins of equal width before anything is learned."""
    logits, labels = example((9, 12))
    p = torch.softmax(logits, 1).gather(1, labels.unsqueeze(1)).squeeze(1)
    labels[((4 * p + 0.5) % 1 - 0.5).abs() < 0.08] = 9  # a narrow cell around an edge is in one bin
    loss = AdaFocal(3, bins=4, ignore_index=9)
    gammas = [2.5, -0.7, 0.3, -2.0]
    loss.gamma.copy_(torch.tensor(gammas, dtype=torch.float64))
    found, terms = set(), []
    for at in (labels != 9).nonzero().tolist():
        q = float(p[tuple(at)])
        gamma = gammas[int(4 * q)]
        found.add(gamma)
        terms.append(-((1 - q) ** gamma if gamma > 0 else (1 + q) ** -gamma) * math.log(q))
    assert found == set(gammas)
    close(loss(logits, labels), np.mean(terms))
    assert torch.autograd.gradcheck(lambda x: loss(x, labels), logits.requires_grad_())


def test_bins_hold_equal_shares_of_the_voxels():
    """Groups of ``numpy.array_split`` along the sorted confidences, over two batches."""
    generator = np.random.default_rng(0)
    confidence = 0.5 + 0.5 * (np.arange(60) + 0.5) / 60
    right = generator.random(60) < 0.7
    order = generator.permutation(60)
    loss = AdaFocal(2, bins=6, rate=0.8)
    for part in np.array_split(order, 2):
        loss.observe(*rows(confidence[part], right[part]))
    step = loss.dual_step()
    gaps = [c.mean() - r.mean() for c, r in zip(
        np.array_split(confidence, 6), np.array_split(right, 6), strict=True)]  # fmt: skip
    close(loss.gamma, np.exp(0.8 * np.array(gaps)))
    # the loss takes the gamma of the bin that the label's probability now falls into
    for b in range(6):
        x, y = rows(confidence[10 * b + 5 : 10 * b + 6], [True])
        expected = focal(x, y, gamma=float(loss.gamma[b]))
        close(loss(x, y), expected)
        low, wrong = rows(confidence[10 * b + 5 : 10 * b + 6], [False])  # p_y below all bins
        close(loss(low, wrong), focal(low, wrong, gamma=float(loss.gamma[0])))
    assert step.count == [60]
    close(step.constraint, [[confidence.mean() - right.mean(), 0]])
    close(step.lam, [[float(loss.gamma.mean()), 0]])


def test_gammas_move_with_the_gap_and_change_sides_at_the_switch():
    """One bin; gap .8 - .95 = -.15, then .8 - .3 = .5, by hand."""
    loss = AdaFocal(2, bins=1, rate=2.0, gamma0=0.25, gamma_bounds=(-0.5, 0.4))

    def moved(accuracy):
        right = np.arange(20) < round(20 * accuracy)
        loss.observe(*rows(np.full(20, 0.8), right))
        loss.dual_step()
        return loss.gamma

    close(moved(0.95), [-0.2])  # 0.25 exp(-0.3) = 0.185 is below the switch
    close(moved(0.95), [-0.2 * math.exp(0.3)])
    for _ in range(5):
        moved(0.95)
    close(loss.gamma, [-0.5])
    close(moved(0.3), [0.2])  # -0.5 exp(-1) = -0.184
    close(moved(0.3), [0.4])  # 0.2 exp(1), clipped


def test_a_pass_without_a_voxel_and_a_bin_without_one():
    """Equal confidences are in one bin, that of their middle; the others stay."""
    loss = AdaFocal(2, bins=5, ignore_index=9)
    before = copy.deepcopy(loss.state_dict())
    logits, labels = rows(np.full(20, 0.8), np.ones(20, bool))
    loss.observe(logits, torch.full_like(labels, 9))
    step = loss.dual_step()
    assert step.notes == ["no voxel in validation; its gammas stay"]
    assert step.step == 0
    for key, value in loss.state_dict().items():
        assert torch.equal(value, before[key]), key
    loss.observe(logits, labels)
    loss.dual_step()
    close(loss.gamma, [1, 1, math.exp(-0.2), 1, 1])


def test_two_processes_agree_with_one():
    batches = [example(seed=s) for s in range(3)]
    whole, first, second = (AdaFocal(3) for _ in range(3))
    for i, batch in enumerate(batches):
        whole.observe(*batch)
        (first if i < 2 else second).observe(*batch)
    sums = []
    for term in (first, second):
        copy.deepcopy(term).dual_step(lambda x: sums.append(x) or x)
    expected = whole.dual_step()
    for term in (first, second):
        step = term.dual_step(lambda x: sums[0] + sums[1])
        assert torch.equal(term.bin_of_cell, whole.bin_of_cell)
        close(term.gamma, whole.gamma)
        close(step.lam, expected.lam)
        close(step.constraint, expected.constraint)
    assert (whole.gamma != 1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gamma", [0.2, -2.0])
def test_finite_in_half_precision_and_for_sure_voxels(dtype, gamma):
    logits, labels = example()
    loss = AdaFocal(3)
    loss.gamma.fill_(gamma)
    x = (1e4 * logits.sign()).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(x, labels)
        loss.observe(x.detach(), labels)
    assert value.dtype == torch.float32
    assert torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, x)[0]).all()
    assert torch.isfinite(torch.tensor(loss.dual_step().lam)).all()


def test_recipe_and_what_is_refused():
    objective = build("adafocal", 3)
    logits, labels = example()
    objective.observe(logits, labels)
    assert objective.dual_step()["adafocal"].step == 1
    with pytest.raises(ValueError, match="logits: not finite in a validation batch"):
        objective.observe(logits * float("nan"), labels)
    with pytest.raises(ValueError, match="bins 15, here 5"):
        AdaFocal(3, bins=5).load_state_dict(AdaFocal(3).state_dict())
    for options, message in (
        ({"bins": 0}, "bins: expected at least 1, got 0"),
        ({"rate": 0}, "rate: expected a positive number, got 0"),
        ({"switch": 3}, r"gamma_bounds, switch: expected low <= -switch .* got \(-2.0, 20.0\), 3"),
        ({"gamma0": 0.1}, r"gamma0: expected a number within \(-2.0, 20.0\) .* at least 0.2, got"),
    ):
        with pytest.raises(ValueError, match=message):
            AdaFocal(3, **options)
