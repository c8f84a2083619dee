"""Mean average precision: golden values, scikit-learn, a loop, ties and empty classes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.metrics.mean_ap import average_precisions, mean_average_precision
from segcal.ranking import average_precision
from segcal.reproduction import two_way
from tests.conftest import close
from tests.oracles import multilabel as oracle


def example(seed, n=9, t=6):
    """Scores with many ties, classes without positives, and unknown targets."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 6, (n, t)) / 4.0
    targets = rng.choice([-1, 0, 1], (n, t), p=[0.1, 0.5, 0.4])
    targets[:, rng.random(t) < 0.2] = 0
    return scores, targets


def test_golden(golden):
    g = golden("map")
    s, y = g["scores"], g["targets"]
    for average in ("class", "sample"):
        expected = g[f"sk_ap_{average}"].numpy()
        np.testing.assert_allclose(average_precisions(s, y, average=average), expected, rtol=1e-12)
        close(mean_average_precision(s, y, average=average), np.nanmean(expected))
        value = two_way.mean_average_precision(s, y, average=average)
        close(100 * value, g[f"ref_map_{average}"])
    tied = g["tied_scores"][:, None], g["tied_targets"][:, None]
    close(mean_average_precision(*tied), g["tied_sklearn"])
    close(two_way.mean_average_precision(*tied), g["tied_ref"])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_scikit_learn_and_a_loop_agree(seed):
    sklearn = pytest.importorskip("sklearn.metrics")
    scores, targets = example(seed)
    found = average_precisions(scores, targets)
    for c, value in enumerate(found):
        known = targets[:, c] >= 0
        s, y = scores[known, c], targets[known, c]
        if y.sum() == 0:
            assert np.isnan(value)
            continue
        close(value, sklearn.average_precision_score(y, s))
        close(value, oracle.average_precision(s.tolist(), y.tolist()))
    transposed = average_precisions(scores.T, targets.T, average="sample")
    np.testing.assert_array_equal(transposed, found)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_order_and_scale_have_no_effect(seed):
    scores, targets = example(seed)
    order = np.random.default_rng(seed).permutation(len(scores))
    for average in ("class", "sample"):
        value = mean_average_precision(scores, targets, average=average)
        shuffled = mean_average_precision(scores[order], targets[order], average=average)
        np.testing.assert_allclose(shuffled, value)
        rising = mean_average_precision(np.exp(3 * scores) - 7, targets, average=average)
        np.testing.assert_allclose(rising, value)


def test_worked_examples():
    # positives at ranks 1 and 3 of 4: (1 + 2/3) / 2; all equal: 2 of 4 at the one rank
    column = np.array([[0.9], [0.8], [0.7], [0.1]])
    y = np.array([[1], [0], [1], [0]])
    close(mean_average_precision(column, y), 5 / 6)
    close(mean_average_precision(np.zeros((4, 1)), y), 0.5)
    # an unknown target leaves the ranking: then ranks 1 and 2
    close(mean_average_precision(column, np.array([[1], [-1], [1], [0]])), 1.0)
    # a class without a positive is left out, not 0
    two = np.hstack([column, column])
    close(mean_average_precision(two, np.hstack([y, np.zeros_like(y)])), 5 / 6)
    assert np.isnan(mean_average_precision(column, np.zeros((4, 1))))
    assert np.isnan(mean_average_precision(np.zeros((0, 3)), np.zeros((0, 3))))


def test_infinite_scores_and_any_container():
    scores = torch.tensor([[-torch.inf, 1.0, -torch.inf, torch.inf]]).T
    y = torch.tensor([[1, 0, 0, 1]]).T
    # inf first (1), then 1.0, then two tied at -inf of which one counts: (1 + 2/4) / 2
    close(mean_average_precision(scores, y), 0.75)
    half = torch.tensor([[0.5], [0.25]], dtype=torch.bfloat16)
    close(mean_average_precision(half, [[0], [1]]), 0.5)
    close(mean_average_precision([[0.5], [0.25]], np.array([[False], [True]])), 0.5)


def test_wrong_input_is_named():
    with pytest.raises(ValueError, match="scores: expected numbers, got NaN"):
        mean_average_precision([[float("nan")], [0.0]], [[1], [0]])
    with pytest.raises(ValueError, match="average: expected one of"):
        mean_average_precision([[0.0]], [[1]], average="macro")
    with pytest.raises(ValueError, match="ties: expected one of"):
        average_precisions([[0.0]], [[1]], ties="asl")
    with pytest.raises(ValueError, match=r"targets: expected .*like scores \(1, 1\)"):
        mean_average_precision([[0.0]], [[1, 0]])
    with pytest.raises(ValueError, match=r"targets: .*got \[2\]"):
        mean_average_precision([[0.0]], [[2]])


def test_reversed_ties_rank_the_later_entry_first():
    scores, relevant = np.array([0.5, 0.5]), np.array([False, True])
    assert average_precision(scores, relevant, ties="reversed") == 1.0
    assert average_precision(scores, ~relevant, ties="reversed") == 0.5
    assert average_precision(scores, relevant) == 0.5
