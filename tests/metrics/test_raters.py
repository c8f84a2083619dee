"""Several raters: their vote, where they agree and not, volumes and energy distances."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from segcal.metrics.crps import crps_empirical, crps_gaussian
from segcal.metrics.generalised_energy_distance import generalised_energy_distance
from segcal.metrics.rater_agreement import majority, rater_disagreement, rater_sums
from tests.conftest import close


@pytest.mark.parametrize(
    ("mean", "sd", "value"), [(0, 1, 0), (10, 2, 13.5), (5, 0.1, 4), (3, 7, 3)]
)
def test_gaussian_is_its_integral(mean, sd, value):
    def squared(y):
        return (stats.norm.cdf(y, mean, sd) - (y >= value)) ** 2

    low, high = min(mean - 12 * sd, value - 1), max(mean + 12 * sd, value + 1)
    wanted = sum(
        integrate.quad(squared, *part, limit=200)[0] for part in ((low, value), (value, high))
    )
    close(crps_gaussian(mean, sd, value), wanted, rtol=1e-6)


def test_gaussian_by_hand():
    """At its mean: 2 phi(0) - 1 / sqrt(pi) = (sqrt 2 - 1) / sqrt pi; without a spread |v - m|."""
    close(crps_gaussian(0, 1, 0), (math.sqrt(2) - 1) / math.sqrt(math.pi))
    close(crps_gaussian(4, 0, 1), 3.0)
    with pytest.raises(ValueError, match="sd: expected 0 or more"):
        crps_gaussian(0, -1, 0)


@settings(max_examples=60, deadline=None)
@given(members=st.lists(st.floats(-100, 100), min_size=1, max_size=8), value=st.floats(-100, 100))
def test_empirical_is_all_pairs_and_its_integral(members, value):
    x = np.array(members)
    pairs = np.abs(x[:, None] - x[None]).mean()
    found = crps_empirical(members, value)
    close(found, np.abs(x - value).mean() - pairs / 2, atol=1e-9)
    cuts = np.unique([*members, value])
    steps = [((x <= a).mean() - (a >= value)) ** 2 * (b - a) for a, b in pairwise(cuts)]
    close(found, sum(steps), atol=1e-9)


def test_empirical_by_hand():
    """Volumes 1 and 3, value 2: mean distance 1 less a quarter of 2 |1 - 3|... = 1 - 1/2."""
    close(crps_empirical([1, 3], 2), 0.5)
    close(crps_empirical([7], 4), 3.0)
    with pytest.raises(ValueError, match="members"):
        crps_empirical([], 1)


def test_majority():
    raters = [np.array([0, 1, 2, 1, 0]), np.array([0, 1, 1, 2, 3]), np.array([1, 2, 0, 2, 3])]
    assert majority(raters).tolist() == [0, 1, 0, 2, 3]  # a tie of three: the smallest
    assert majority([np.array([7, 3])]).tolist() == [7, 3]


@settings(max_examples=40, deadline=None)
@given(r=st.integers(1, 5), k=st.integers(1, 4), seed=st.integers(0, 99))
def test_votes_and_disagreement_are_of_the_shares(r, k, seed):
    raters = list(np.random.default_rng(seed).integers(0, k, (r, 50)))
    share = np.stack([np.mean([one == c for one in raters], axis=0) for c in range(k)])
    assert (majority(raters) == share.argmax(0)).all()
    close(rater_disagreement(raters), 1 - (share**2).sum(0), atol=1e-6)


def test_sums_by_hand():
    """Six voxels, three raters: two agreed in, one out, three apart (shares 1/3, 2/3, 2/3)."""
    a, b, c = (
        np.array([row], bool)
        for row in ([1, 1, 0, 1, 1, 1], [1, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1])
    )
    p = np.array([[0.9, 0.4, 0.6, 0.5, 0.7, 0.2]])
    sums = rater_sums(p, p > 0.45, [a, b, c], voxel_ml=0.5)
    assert sums.volumes.tolist() == [5, 3, 3]
    assert (sums.inside, sums.hits, sums.predicted, sums.disagreed) == (2, 1, 2, 3)
    close(sums.dsc_agreed, 2 * 1 / (2 + 2))
    close(sums.p_agreed, 0.65)
    close(sums.confidence_disagreed, (0.5 + 0.7 + 0.8) / 3)
    close(sums.gap_disagreed, (1 / 6 + 1 / 30 + 7 / 15) / 3)
    close(sums.total, 3.3)
    close(sums.variance, float((p * (1 - p)).sum()))
    with pytest.raises(ValueError, match="raters: expected one or more"):
        rater_sums(p, p > 0.5, [])


@settings(max_examples=30, deadline=None)
@given(r=st.integers(1, 4), seed=st.integers(0, 99))
def test_sums_slice_by_slice_are_those_of_all(r, seed):
    rng = np.random.default_rng(seed)
    p = rng.random((3, 4, 5))
    raters = list(rng.random((r, 3, 4, 5)) < 0.4)
    mask = p > 0.5
    sums, share = rater_sums(p, mask, raters), np.mean(raters, axis=0)
    apart = (share > 0) & (share < 1)
    assert sums.volumes.tolist() == [one.sum() for one in raters]
    assert sums.predicted == (mask & ~apart).sum()
    close(sums.gap_sum, np.abs(p - share)[apart].sum())
    close(sums.confidence_sum, np.maximum(p, 1 - p)[apart].sum())
    close(sums.inside_sum, p[share == 1].sum())


def masks(*rows):
    return [np.array(row, bool) for row in rows]


def test_energy_distance_by_hand():
    """Samples {1 2}, {2 3} of IoU 1/3; raters twice {1 2}: 2 (0 + 2/3) / 2 - 2 * (2/3) / 4 - 0."""
    samples, raters = masks([1, 1, 0], [0, 1, 1]), masks([1, 1, 0], [1, 1, 0])
    close(generalised_energy_distance(samples, raters), 2 / 3 - 1 / 3)
    close(generalised_energy_distance(masks([1, 0]), masks([0, 1])), 2.0)
    close(generalised_energy_distance(masks([0, 0]), masks([0, 0])), 0.0)
    with pytest.raises(ValueError, match="expected one or more"):
        generalised_energy_distance([], raters)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 4), m=st.integers(1, 4), seed=st.integers(0, 99))
def test_energy_distance_is_not_negative_and_0_for_the_same(n, m, seed):
    rng = np.random.default_rng(seed)
    a, b = list(rng.random((n, 12)) < 0.4), list(rng.random((m, 12)) < 0.6)
    assert generalised_energy_distance(a, b) >= -1e-12  # 1 - IoU is a metric of negative type
    close(generalised_energy_distance(a, a), 0.0, atol=1e-12)
    close(generalised_energy_distance(a, b), generalised_energy_distance(b, a))
