"""Soft Dice confidence against hand-worked values, a plain loop and the expected DSC itself."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segcal.metrics.dice import dice
from segcal.metrics.soft_dice_confidence import soft_dice_confidence

probabilities = st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30).map(
    lambda values: np.array(values, np.float32)
)


def test_by_hand():
    # mask: .9 and .8; 2 * 1.7 / (.9 + .8 + .3 + 2) = 3.4 / 4
    assert soft_dice_confidence(np.array([[0.9, 0.8], [0.3, 0.0]])) == pytest.approx(0.85)
    # one voxel of .6 alone was decided: 2 * .6 / (1.1 + 1)
    p, mask = np.array([0.6, 0.5]), np.array([True, False])
    assert soft_dice_confidence(p, mask) == pytest.approx(1.2 / 2.1)
    assert soft_dice_confidence(torch.tensor([0.6, 0.5]), torch.tensor([True, False])) == (
        pytest.approx(1.2 / 2.1)
    )


def test_where_nothing_is():
    assert math.isnan(soft_dice_confidence(np.zeros(4)))
    assert soft_dice_confidence(np.full(4, 0.1)) == 0
    assert soft_dice_confidence(np.zeros(4), np.ones(4, bool)) == 0
    assert soft_dice_confidence(np.ones(4)) == 1


@pytest.mark.parametrize("mask", [np.ones(3, bool), np.ones(4, int)])
def test_masks_that_do_not_fit(mask):
    with pytest.raises(ValueError, match=r"mask: expected bool \(4,\), got"):
        soft_dice_confidence(np.zeros(4), mask)


@given(probabilities, st.randoms(use_true_random=False))
def test_is_the_plain_loop(p, random):
    mask = np.array([random.random() < 0.5 for _ in p])
    inside = math.fsum(float(v) for v, m in zip(p, mask, strict=True) if m)
    both = math.fsum(map(float, p)) + mask.sum()
    expected = 2 * inside / both if both else math.nan
    assert soft_dice_confidence(p, mask) == pytest.approx(expected, nan_ok=True)
    order = np.argsort(p)
    assert soft_dice_confidence(p[order], mask[order]) == pytest.approx(expected, nan_ok=True)


@given(probabilities)
def test_of_certain_voxels_it_is_the_dsc(p):
    truth = p > 0.5
    mask = np.roll(truth, 1)
    expected = dice(mask.astype(int), truth.astype(int), 1)
    assert soft_dice_confidence(truth.astype(float), mask) == pytest.approx(expected, nan_ok=True)


def test_large_sums_of_half_precision_are_exact():
    p = np.full((64, 64, 64), 0.75, np.float16)  # 196608 is no number of half precision
    assert soft_dice_confidence(p) == pytest.approx(1.5 / 1.75, rel=1e-12)


def test_near_the_expected_dsc_of_independent_voxels():
    rng = np.random.default_rng(0)
    p = rng.beta(0.4, 0.4, 12)
    mask, expected = p > 0.5, 0.0
    for drawn in itertools.product((0, 1), repeat=len(p)):  # the expectation, over all 4096 truths
        truth = np.array(drawn)
        chance = np.prod(np.where(truth, p, 1 - p))
        expected += chance * dice(mask.astype(int), truth, 1)
    assert soft_dice_confidence(p) == pytest.approx(expected, abs=0.01)
