"""Risk and coverage against hand-worked values and the mean over all orders."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segcal.metrics.aurc import aurc, excess_aurc, risk_coverage


def of_order(losses):
    return float(np.mean(np.cumsum(losses) / np.arange(1, len(losses) + 1)))


def over_all_orders(confidence, loss):
    """Mean over the orders that the confidence allows, one by one."""
    orders = [
        of_order([loss[i] for i in order])
        for order in itertools.permutations(range(len(loss)))
        if all(confidence[a] >= confidence[b] for a, b in itertools.pairwise(order))
    ]
    return float(np.mean(orders))


items = st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=5)


def test_by_hand():
    # kept one by one: 0, then .2 / 2, then .8 / 3
    c, x = [0.9, 0.7, 0.5], [0.0, 0.2, 0.6]
    assert aurc(c, x) == pytest.approx((0 + 0.1 + 0.8 / 3) / 3)
    assert excess_aurc(c, x) == pytest.approx(0)
    # the other way round: .6, .8 / 2, .8 / 3
    worst = (0.6 + 0.4 + 0.8 / 3) / 3
    assert aurc(c, x[::-1]) == pytest.approx(worst)
    assert excess_aurc(c, x[::-1]) == pytest.approx(worst - (0.1 + 0.8 / 3) / 3)
    coverage, risk = risk_coverage(c, x)
    np.testing.assert_allclose(coverage, [1 / 3, 2 / 3, 1])
    np.testing.assert_allclose(risk, [0, 0.1, 0.8 / 3])


@given(items)
def test_ties_are_the_mean_over_orders(found):
    confidence, loss = zip(*found, strict=True)
    assert aurc(confidence, loss) == pytest.approx(over_all_orders(confidence, loss))
    assert excess_aurc(confidence, loss) >= -1e-12


@given(items)
def test_confidence_that_tells_nothing_gives_the_mean(found):
    _, loss = zip(*found, strict=True)
    assert aurc(np.ones(len(loss)), loss) == pytest.approx(np.mean(loss))


@given(items, st.lists(st.integers(0, 4), min_size=5, max_size=5))
def test_counts_stand_for_so_many_items(found, counts):
    confidence, loss = map(np.array, zip(*found, strict=True))
    n = np.array(counts[: len(loss)])
    each = np.repeat(confidence, n), np.repeat(loss, n)
    assert aurc(confidence, loss, counts=n) == pytest.approx(aurc(*each), nan_ok=True)
    for ours, theirs in zip(
        risk_coverage(confidence, loss, counts=n), risk_coverage(*each), strict=True
    ):
        np.testing.assert_allclose(ours, theirs)


def test_many_voxels_in_few_entries():
    # a million right ones first, then a million wrong ones: 1/n sum_j j / (10^6 + j)
    n = 1_000_000
    j = np.arange(1, n + 1)
    expected = float(np.sum(j / (n + j))) / (2 * n)
    assert aurc([1, 0], [0, 1], counts=[n, n]) == pytest.approx(expected, rel=1e-9)


def test_nothing_and_nonsense():
    assert math.isnan(aurc([], []))
    assert [len(x) for x in risk_coverage([], [])] == [0, 0]
    with pytest.raises(ValueError, match="one length"):
        aurc([1, 2], [1])
    with pytest.raises(ValueError, match="finite"):
        aurc([1.0, math.nan], [1, 2])
