"""The floor of ECE: what calibrated probabilities score by chance, and whether data exceed it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from segcal.binning import BinStatistics, equal_width_statistics
from segcal.metrics.ece import ece
from segcal.metrics.ece_floor import NORMAL_FROM, ece_floor, floor_of_cells, floor_over_cases
from segcal.metrics.isotonic_ece import _increasing, isotonic_ece, isotonic_error
from segcal.tally import Voxels
from tests.conftest import close


def drawn(confidence, seed=0):
    """Probabilities of two classes, and labels drawn from them."""
    rng = np.random.default_rng(seed)
    hit = rng.random(len(confidence)) < confidence
    return np.stack([confidence, 1 - confidence]), (~hit).astype(int)


def brute_force(confidence, bins, draws=4000, seed=1):
    """ECE of as many data sets, their labels drawn one by one."""
    rng = np.random.default_rng(seed)
    index = np.ceil(confidence * bins).astype(int) - 1
    hits = rng.random((draws, len(confidence))) < confidence
    gaps = [(hits[:, index == m] - confidence[index == m]).sum(1) for m in range(bins)]
    return np.abs(gaps).sum(0) / len(confidence)


@pytest.mark.parametrize("n", [20, 355, 4000])
def test_of_independent_predictions(n):
    confidence = 0.5 + 0.5 * np.random.default_rng(n).beta(3, 1, n)
    floor = ece_floor(*drawn(confidence))
    wanted = brute_force(confidence, 15, draws=min(4000, 2**22 // n))
    close(floor.ece, ece(*drawn(confidence)))
    close(floor.expected, wanted.mean(), rtol=0.04)
    close(floor.q95, np.quantile(wanted, 0.95), rtol=0.05)
    close(floor.p, np.mean(wanted >= floor.ece), rtol=0, atol=0.05)
    assert floor.independent == floor.expected
    assert floor.effective_share == 1
    assert ece_floor(*drawn(confidence)).expected == floor.expected


def test_of_355_samples_is_as_large_as_what_papers_report():
    """Of networks whose mean confidence is between 0.87 and 0.93."""
    for a, wanted in ((3, 0.034), (6, 0.022)):
        confidence = 0.5 + 0.5 * stats.beta(a, 1).ppf((np.arange(355) + 0.5) / 355)
        close(ece_floor(*drawn(confidence)).expected, wanted, rtol=0.05)


def test_one_bin_is_half_normal():
    """4000 predictions of 0.8: gap N(0, .16 / 4000), its mean .4 sqrt(2 / (4000 pi))."""
    floor = ece_floor(*drawn(np.full(4000, 0.8)))
    close(floor.expected, 0.4 * math.sqrt(2 / (4000 * math.pi)), rtol=0.05)
    close(floor.q95, 1.96 * 0.4 / math.sqrt(4000), rtol=0.07)
    close(floor.spread[11], 0.4 / math.sqrt(4000), rtol=1e-6)
    assert np.isnan(np.delete(floor.spread, 11)).all()


def test_a_single_prediction():
    """Of confidence 3/4: wrong by 1/4 in three of four draws, else by 3/4."""
    floor = ece_floor(np.array([[0.75], [0.25]]), np.array([0]))
    close(floor.expected, 0.75 * 0.25 + 0.25 * 0.75, rtol=0.05)
    assert floor.p == 1


def test_miscalibrated_predictions_are_told():
    confidence = np.linspace(0.6, 1, 2000)
    probs, labels = drawn(confidence - 0.1)
    probs = np.stack([confidence, 1 - confidence])
    floor = ece_floor(probs, labels)
    assert floor.p == 1 / 2000
    assert floor.ece > 3 * floor.q95


def test_p_is_uniform_if_calibrated():
    confidence = 0.5 + 0.5 * np.random.default_rng(0).beta(2, 1, 500)
    p = [ece_floor(*drawn(confidence, seed)).p for seed in range(60)]
    assert stats.kstest(p, "uniform").pvalue > 0.01


def block_case(rng, blocks=20, size=20):
    """A case whose voxels come true by the block: calibrated, and far from independent."""
    confidence = np.repeat(0.5 + 0.5 * rng.beta(3, 1, blocks), size)
    label = np.repeat(rng.random(blocks), size) > confidence
    return np.stack([confidence, 1 - confidence]), label.astype(int)


def over_cases(cases, bins=15):
    top = [(torch.from_numpy(p.max(0)), torch.from_numpy(y == p.argmax(0))) for p, y in cases]
    cells = [equal_width_statistics(*one, 64 * bins) for one in top]
    bins_of = [equal_width_statistics(*one, bins) for one in top]
    return floor_over_cases(sum(cells[1:], cells[0]), bins_of)


def test_voxels_that_go_together_raise_the_floor():
    """The truth by simulation: 20 cases of blocks of 20 voxels."""
    rng = np.random.default_rng(3)
    floors = [over_cases([block_case(rng) for _ in range(20)]) for _ in range(40)]
    truth = np.mean([floor.ece for floor in floors])
    close(np.mean([floor.expected for floor in floors]), truth, rtol=0.1)
    assert all(3 < floor.expected / floor.independent < 6 for floor in floors)  # sqrt(20)
    close(np.mean([floor.effective_share for floor in floors]), 1 / 20, rtol=0.35)
    assert np.mean([floor.p <= 0.05 for floor in floors]) <= 0.15
    assert np.mean([floor.p <= 0.5 for floor in floors]) > 0.25


def test_cases_of_one_opinion_are_told():
    """Six cases that all promise 0.1 too much: only all signs alike reach it, 2 of 64."""
    case = BinStatistics(np.array([0, 1000]), np.array([0.0, 900.0]), np.array([0, 800]))
    cells = BinStatistics(6 * case.count, 6 * case.confidence_sum, 6 * case.hit_sum)
    floor = floor_over_cases(cells, [case] * 6)
    close(floor.ece, 0.1)
    close(floor.p, 2 / 64, rtol=0.3)
    assert floor.expected == floor.independent  # the cases do not differ


def test_a_single_case_tells_nothing_of_its_voxels():
    case = block_case(np.random.default_rng(0))
    floor = over_cases([case])
    assert floor.expected == floor.independent > 0
    assert np.isnan(floor.p)


def test_nothing_to_count():
    empty = BinStatistics(np.zeros(30, int), np.zeros(30), np.zeros(30, int))
    for floor in (floor_of_cells(empty, 15), floor_over_cases(empty, [])):
        assert np.isnan([floor.ece, floor.expected, floor.q95, floor.p]).all()
        assert np.isnan(floor.effective_share)


def test_cells_that_do_not_fit_the_bins():
    cells = equal_width_statistics(torch.tensor([0.5]), torch.tensor([True]), 20)
    with pytest.raises(ValueError, match="expected a divisor of 20 cells, got 15"):
        floor_of_cells(cells, 15)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(0.5, 1, width=32), min_size=1, max_size=60),
    bins=st.integers(1, 40),
    seed=st.integers(0, 9),
)
def test_bounds(values, bins, seed):
    floor = ece_floor(*drawn(np.array(values), seed), bins=bins)
    assert 0 <= floor.expected <= 1
    assert 0 <= floor.q95 <= 1
    assert 0 < floor.p <= 1


def increasing(confidence, hits):
    """Isotonic regression by its max-min formula."""
    order = np.argsort(confidence, kind="stable")
    value = np.unique(confidence)
    share = np.array([hits[order][confidence[order] == v].mean() for v in value])
    weight = np.array([(confidence == v).sum() for v in value])
    n = len(value)
    mean = np.array(
        [[np.average(share[i : j + 1], weights=weight[i : j + 1]) if j >= i else np.inf
          for j in range(n)] for i in range(n)]
    )  # fmt: skip
    fit = [max(mean[i, k:].min() for i in range(k + 1)) for k in range(n)]
    return float(np.sum(weight * np.abs(fit - value)) / weight.sum())


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.integers(50, 100), min_size=1, max_size=40), seed=st.integers(0, 9))
def test_without_bins_is_the_distance_to_the_isotonic_fit(values, seed):
    confidence = np.array(values) / 100
    probs, labels = drawn(confidence, seed)
    close(isotonic_ece(probs, labels), increasing(probs.max(0), labels == probs.argmax(0)))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 1000)), min_size=1, max_size=60),
    divisor=st.sampled_from([1.0, 3.0, 7.0]),
)
def test_the_increasing_curve_is_that_of_scipy(values, divisor):
    """To the last bit, with ties between neighbours and between pools."""
    shares, weights = np.array(values, np.float64).T
    expected = optimize.isotonic_regression(shares / divisor, weights=weights).x
    assert _increasing()(shares / divisor, weights).tolist() == expected.tolist()


def test_without_bins_by_hand():
    """Hits 1, 0 | 1 at .6, .7 | .9: the first two are pooled to 1/2, so (.1 + .2 + .1) / 3."""
    probs = np.array([[0.6, 0.7, 0.9], [0.4, 0.3, 0.1]])
    close(isotonic_ece(probs, np.array([0, 1, 0])), 0.4 / 3)
    empty = BinStatistics(np.zeros(3, int), np.zeros(3), np.zeros(3, int))
    assert np.isnan(isotonic_error(empty))


def test_without_bins_the_number_of_bins_does_not_matter():
    """True probabilities: ECE grows with the bins, from .003 to .2, and this does not."""
    confidence = 0.5 + 0.5 * np.random.default_rng(0).beta(2, 1, 5000)
    probs, labels = drawn(confidence)
    assert ece(probs, labels, bins=5) < 0.02
    assert ece(probs, labels, bins=2000) > 0.1
    assert isotonic_ece(probs, labels) < 0.03
    tally = Voxels(probs, labels).tally()["all"]
    close(isotonic_error(tally.top_mass.statistics), isotonic_ece(probs, labels), atol=1e-3)


@pytest.mark.parametrize("p", [0.5, 0.9, 0.99, 0.999])
def test_normal_hits_are_as_good_as_binomial_ones(p):
    """Mean |X - np| of a binomial X (De Moivre), where its variance is just large enough."""
    n = math.ceil(NORMAL_FROM / (p * (1 - p)))
    m = math.floor(n * p) + 1
    exact = 2 * m * (1 - p) * stats.binom(n, p).pmf(m) / n
    close(math.sqrt(2 / math.pi * p * (1 - p) / n), exact, rtol=1e-3)
    count = np.array([0, n])
    floor = floor_of_cells(BinStatistics(count, count * p, count), 2)
    close(floor.expected, exact, rtol=0.04)
