"""Losses made against overconfidence, against loops written from their formulas."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from segcal.losses.ml1_ace import ML1ACE, ml1_ace
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
