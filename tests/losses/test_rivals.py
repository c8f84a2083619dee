"""Losses made against overconfidence, against loops written from their formulas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from segcal.losses.dice import SoftDiceLoss, soft_dice_loss
from segcal.losses.ml1_ace import ML1ACE, ml1_ace
from segcal.recipes import build
from tests.conftest import close


def example(shape=(6, 7), k=3, n=2, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((n, k, *shape), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, k, (n, *shape), generator=generator)
    return logits, labels


def grad(loss, logits):
    x = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def soft_ml1_ace(logits, labels, bins, *, ignore=None, first=0, skip_empty=False, least=0.01):
    """Every voxel, class and bin one after the other."""
    probabilities = torch.softmax(logits, 1).numpy()
    n, k = probabilities.shape[:2]
    rows = []
    for b, c in itertools.product(range(n), range(first, k)):
        y = labels[b].numpy().ravel()
        p, hit = probabilities[b, c].ravel()[y != ignore], (y == c)[y != ignore]
        if not len(p):
            continue
        gaps = []
        for m in range(bins):
            weights = np.maximum(0, 1 - np.abs(bins * p - m - 0.5))
            if m == 0:
                weights[p < 0.5 / bins] = 1
            if m == bins - 1:
                weights[p > 1 - 0.5 / bins] = 1
            if weights.sum() >= least:
                gaps.append(abs((weights * (p - hit)).sum() / weights.sum()))
        rows.append(np.mean(gaps) if hit.any() or not skip_empty else 0.0)
    return np.mean(rows) if rows else 0.0


@pytest.mark.parametrize("bins", [1, 2, 5, 20])
@pytest.mark.parametrize("ignore", [None, 9])
def test_soft_bins_against_a_loop(bins, ignore):
    logits, labels = example()
    labels[labels == 2] = 0
    labels[1, 0, 0] = 2
    if ignore is not None:
        labels[0, 2:4] = ignore
    options = {"bins": bins, "binning": "soft", "ignore_index": ignore}
    close(ml1_ace(logits, labels, **options), soft_ml1_ace(logits, labels, bins, ignore=ignore))
    for skip, first in itertools.product((False, True), (0, 1)):
        value = ml1_ace(logits, labels, **options, skip_empty=skip, include_background=not first)
        expected = soft_ml1_ace(logits, labels, bins, ignore=ignore, first=first, skip_empty=skip)
        close(value, expected)
    high = ml1_ace(logits, labels, **options, empty_weight=3.0)
    close(high, soft_ml1_ace(logits, labels, bins, ignore=ignore, least=3.0))


def test_soft_bins_by_hand():
    """p = 1/2 is shared by the bins around 1/4 and 3/4, p = 0.9 is all in the latter."""
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.6, 0.4]], dtype=torch.float64)
    y = torch.tensor([0, 0, 1])
    above = abs(0.5 * 0.5 + 0.9 + 0.7 * 0.6 - 1.5) / (0.5 + 1 + 0.7)  # class 0, centre 3/4
    below = abs(0.5 * 0.5 + 0.3 * 0.6 - 0.5) / (0.5 + 0.3)
    close(ml1_ace(p.log(), y, bins=2, binning="soft"), (above + below) / 2)  # class 1 is 1 - p


@pytest.mark.parametrize("bins", [2, 20])
def test_the_gradient_of_soft_bins_flows_through_the_membership(bins):
    logits, labels = example()
    assert torch.autograd.gradcheck(
        lambda x: ml1_ace(x, labels, bins=bins, binning="soft"), logits.requires_grad_()
    )


def test_soft_bins_are_continuous_across_the_edge_of_a_bin():
    """Two voxels of other labels change places at the edge."""
    labels = torch.tensor([[0, 1, 1, 0]])
    values = []
    for step in (-1e-5, 1e-5):
        p = torch.tensor([[[0.5 + step, 0.5 - step, 0.3, 0.8]]], dtype=torch.float64)
        x = torch.cat([p, 1 - p], 1).log()
        values.append([ml1_ace(x, labels, bins=2, binning=b) for b in ("soft", "hard")])
    (soft_a, hard_a), (soft_b, hard_b) = values
    close(soft_a, soft_b, atol=1e-4)
    close(hard_a, (0.1 + 0.15) / 2, atol=1e-4)
    close(hard_b, (0.4 + 0.35) / 2, atol=1e-4)


def test_soft_bins_where_nothing_is_left():
    logits, labels = example()
    for y in (torch.full_like(labels, 9), torch.full_like(labels, 1)):
        slope = grad(lambda x: ml1_ace(x, y, binning="soft", ignore_index=9), logits)  # noqa: B023
        assert torch.isfinite(slope).all()
    assert ml1_ace(logits, torch.full_like(labels, 9), binning="soft", ignore_index=9) == 0
    with pytest.raises(ValueError, match=r"binning: expected one of \('hard', 'soft'\), got 'no'"):
        ML1ACE(3, binning="no")
    with pytest.raises(ValueError, match="empty_weight: expected a positive number, got 0"):
        ml1_ace(logits, labels, empty_weight=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_soft_bins_in_half_precision(dtype):
    logits, labels = example()
    half = logits.to(dtype)
    expected = ml1_ace(half.double(), labels, binning="soft")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(ml1_ace(half, labels, binning="soft"), expected, rtol=1e-5)


def dice_by_loop(p, t, groups, gamma=1.0, smooth=1e-5):
    """Loss and its gradient in p ``(N, K, n)``, written out; `groups` of images share a ratio."""
    losses, slope = [], np.zeros_like(p)
    for group, k in itertools.product(groups, range(p.shape[1])):
        tp = sum((p[b, k] * t[b, k]).sum() for b in group)
        fn = sum(((t[b, k] * (1 - p[b, k])) ** gamma).sum() for b in group)
        fp = sum((((1 - t[b, k]) * p[b, k]) ** gamma).sum() for b in group)
        up, down = 2 * tp + smooth, 2 * tp + fn + fp + smooth
        losses.append(1 - up / down)
        for b in group:
            own, away = t[b, k], 1 - t[b, k]
            errors = -own * gamma * (1 - p[b, k]) ** (gamma - 1)
            errors = errors + away * gamma * p[b, k] ** (gamma - 1)
            slope[b, k] = -(2 * own * down - up * (2 * own + errors)) / down**2
    return np.mean(losses), slope / len(losses)


def through_the_softmax(p, slope):
    """dL/dl_j = p_j (g_j - sum_k p_k g_k) with g = dL/dp."""
    return p * (slope - (p * slope).sum(1, keepdims=True))


@pytest.mark.parametrize("surgery", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("batch", [False, True])
def test_dice_and_its_gradient_against_a_loop(gamma, surgery, batch):
    logits, labels = example()
    labels[0][labels[0] == 2] = 0  # a class is absent
    p = torch.softmax(logits, 1).flatten(2).numpy()
    t = np.stack([(labels.flatten(1) == k).numpy() for k in range(3)], 1).astype(float)
    expected, slope = dice_by_loop(p, t, [[0, 1]] if batch else [[0], [1]], gamma)
    if surgery:
        slope = slope * np.abs(p - t)
    options = {"gamma": gamma, "surgery": surgery, "batch": batch}
    close(soft_dice_loss(logits, labels, **options), expected)
    found = grad(lambda x: soft_dice_loss(x, labels, **options), logits)
    close(found.flatten(2), through_the_softmax(p, slope))


def test_dice_plus_plus_is_the_published_program():
    """Its arithmetic in NumPy; it clips p and t by 1e-7, which changes the loss by as little."""
    logits, labels = example()
    p = np.clip(torch.softmax(logits, 1).numpy(), 1e-7, 1 - 1e-7)
    t = np.clip(np.stack([(labels == k).numpy() for k in range(3)], 1), 1e-7, 1 - 1e-7)
    tp, fn = (t * p).sum((2, 3)), ((t * (1 - p)) ** 2).sum((2, 3))
    fp = (((1 - t) * p) ** 2).sum((2, 3))
    expected = np.mean(1 - (tp + 1e-7) / (tp + 0.5 * fn + 0.5 * fp + 1e-7))
    close(soft_dice_loss(logits, labels, gamma=2, smooth=2e-7), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"gamma": 2.0}, {"include_background": False}, {"skip_empty": True}], ids=str
)
def test_surgery_leaves_the_value_to_the_last_bit(options):
    logits, labels = example()
    labels[0][labels[0] == 2] = 9
    for dtype in (torch.float64, torch.float32, torch.float16):
        x = (3 * logits).to(dtype)
        plain, operated = (
            soft_dice_loss(x, labels, ignore_index=9, surgery=s, **options) for s in (False, True)
        )
        assert torch.equal(plain, operated)


def test_surgery_of_the_voxels_that_count():
    """Ignored rows have no gradient; the others that of an image without those rows."""
    logits, labels = example()
    kept = [0, 1, 4, 5]
    masked = labels.clone()
    masked[:, 2:4] = 9
    slope = grad(lambda x: soft_dice_loss(x, masked, ignore_index=9, surgery=True), logits)
    assert (slope[:, :, 2:4] == 0).all()
    cropped = logits[:, :, kept]
    expected = grad(lambda x: soft_dice_loss(x, labels[:, kept], surgery=True), cropped)
    close(slope[:, :, kept], expected)


def test_surgery_per_channel():
    logits, _ = example()
    labels = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) < 0.4
    p, t = torch.sigmoid(logits), labels.double()
    _, slope = dice_by_loop(p.flatten(2).numpy(), t.flatten(2).numpy(), [[0], [1]])
    expected = torch.from_numpy(slope).view(p.shape) * (p - t).abs() * p * (1 - p)
    close(
        grad(lambda x: soft_dice_loss(x, labels, per_channel=True, surgery=True), logits), expected
    )


@pytest.mark.parametrize("size", [0.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_surgery_is_finite(dtype, size):
    logits, labels = example()
    x = (size * logits.sign()).to(dtype)
    for y in (labels, torch.full_like(labels, 1), torch.full_like(labels, 9)):
        slope = grad(
            lambda z: soft_dice_loss(z, y, ignore_index=9, surgery=True, gamma=2.0),  # noqa: B023
            x,
        )
        assert torch.isfinite(slope).all()


def test_recipes_of_dice():
    logits, labels = example()
    plain, operated = (build(name, 3)(logits, labels) for name in ("dice_ce", "dice_ce_surgery"))
    assert torch.equal(plain, operated)
    assert build("dice_ce_surgery", 3).terms["soft_dice"].surgery
    assert build("dicepp_ce", 3).terms["dicepp"].gamma == 2
    for gamma in (0.5, float("nan")):
        with pytest.raises(ValueError, match="gamma: expected a number >= 1, got"):
            SoftDiceLoss(3, gamma=gamma)
        with pytest.raises(ValueError, match="gamma: expected a number >= 1, got"):
            soft_dice_loss(logits, labels, gamma=gamma)
    for smooth in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="smooth: expected a positive number, got"):
            SoftDiceLoss(3, smooth=smooth)
        with pytest.raises(ValueError, match="smooth: expected a positive number, got"):
            soft_dice_loss(logits, labels, smooth=smooth)
