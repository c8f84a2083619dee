"""Intervals of volumes: hand-worked values, coverage of draws, too few cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from segcal.metrics.volume_interval import (
    conformal_factor,
    conformal_scores,
    fewest_cases,
    highest_level,
    inflated_factor,
    interval,
    variance_inflation,
)


def test_by_hand():
    # scores: |12 - 10| / 2 = 1 and |5 - 8| / 1 = 3
    scores = conformal_scores([12, 5], [10, 8], [4, 1])
    np.testing.assert_allclose(scores, [1, 3])
    assert variance_inflation([12, 5], [10, 8], [4, 1]) == pytest.approx((1 + 9) / 2)
    assert inflated_factor(5, 0.9, 2) == pytest.approx(2.919986 * math.sqrt(5), rel=1e-6)
    assert interval(10, 4, 3) == (4, 16)
    assert interval(1, 4, 3) == (0, 7)
    assert interval(1, 4, math.inf) == (0, math.inf)
    assert conformal_scores([3, 4], [3, 3], [0, 0]).tolist() == [0, math.inf]
    assert math.isnan(variance_inflation([], [], []))


@pytest.mark.parametrize(
    ("level", "fewest"), [(0.5, 1), (0.8, 4), (0.9, 9), (0.95, 19), (0.97, 33), (0.99, 99)]
)
def test_too_few_cases_promise_nothing_finite(level, fewest):
    assert fewest_cases(level) == fewest
    scores = np.arange(fewest, dtype=float)
    assert conformal_factor(scores, level) == fewest - 1  # just enough: the largest
    assert conformal_factor(scores[1:], level) == math.inf
    assert highest_level(fewest) >= level - 1e-12
    assert highest_level(fewest - 1) < level


@given(st.lists(st.floats(0, 100), min_size=1, max_size=60), st.floats(0.05, 0.95))
def test_the_conformal_factor_is_the_smallest_that_leaves_room_for_one_more(scores, level):
    factor = conformal_factor(scores, level)
    needed = (len(scores) + 1) * level
    covered = sum(score <= factor for score in scores)
    if math.isinf(factor):
        assert len(scores) < needed
    else:
        assert covered >= needed - 1e-6
        assert sum(score < factor for score in scores) < needed + 1e-6


def test_the_inflation_is_the_maximum_of_the_likelihood():
    rng = np.random.default_rng(0)
    m, s2 = rng.uniform(50, 90, 15), rng.uniform(1, 9, 15)
    v = rng.normal(m, np.sqrt(7 * s2))

    def minus_log_likelihood(kappa):
        return -stats.norm.logpdf(v, m, np.sqrt(kappa * s2)).sum()

    best = optimize.minimize_scalar(
        minus_log_likelihood, bounds=(0.1, 100), method="bounded", options={"xatol": 1e-9}
    )
    assert variance_inflation(v, m, s2) == pytest.approx(best.x, rel=1e-5)


@pytest.mark.parametrize("kind", ["inflated", "conformal"])
@pytest.mark.parametrize("level", [0.8, 0.9])
def test_coverage_of_new_cases_is_what_is_stated(kind, level):
    """Of normal volumes both are exact in the mean over fits: t, and (n + 1) level in n + 1."""
    rng = np.random.default_rng(1)
    n, repeats = 9, 20_000  # 10 * level is whole
    z = rng.normal(0, 3, (repeats, n + 1))  # (V - sum p) / s with inflation 9
    covered = 0
    for row in z:
        fit = np.abs(row[:n])
        if kind == "inflated":
            factor = inflated_factor(float(np.mean(fit**2)), level, n)
        else:
            factor = conformal_factor(fit, level)
        covered += abs(row[n]) <= factor
    assert covered / repeats == pytest.approx(
        level, abs=4 * math.sqrt(level * (1 - level) / repeats)
    )


def test_what_is_refused():
    for level in (0, 1, 95):
        with pytest.raises(
            ValueError, match=f"level: expected a number between 0 and 1, got {level}"
        ):
            fewest_cases(level)
    with pytest.raises(ValueError, match="one length"):
        conformal_scores([1], [1, 2], [1, 2])
    with pytest.raises(ValueError, match="finite"):
        conformal_scores([math.nan], [1], [1])
    with pytest.raises(ValueError, match="cases: expected 1 or more, got 0"):
        inflated_factor(1, 0.9, 0)
