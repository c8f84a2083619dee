"""Conjunctive retrieval: scores by hand, in log space, relevance, drawn queries, the curve."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from segcal.metrics.retrieval import (
    draw_queries,
    query_log_scores,
    query_relevance,
    retrieval_curve,
    retrieval_map,
)
from tests.conftest import close
from tests.oracles import multilabel as oracle


def example(seed=0, n=40, t=6):
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn((n, t), generator=generator, dtype=torch.float64)
    y = (torch.rand((n, t), generator=generator) < torch.sigmoid(z)).long()
    y[torch.rand((n, t), generator=generator) < 0.1] = -1
    return z, y


def test_scores_are_products_of_posteriors():
    z, _ = example()
    eta = torch.sigmoid(z)
    wanted = torch.tensor([[1, 0, 1, 0, 0, 0], [0] * 6, [0, 0, 0, 0, 0, 1]])
    unwanted = torch.tensor([[0, 1, 0, 0, 0, 0], [0] * 6, [1, 1, 0, 0, 0, 0]])
    found = query_log_scores(z, wanted, unwanted)
    assert found.shape == (3, 40)
    close(found[0].exp(), eta[:, 0] * (1 - eta[:, 1]) * eta[:, 2])
    close(found[1], torch.zeros(40))
    close(found[2].exp(), (1 - eta[:, 0]) * (1 - eta[:, 1]) * eta[:, 5])


def test_log_space_keeps_what_products_round_to_zero():
    z = torch.tensor([[-400.0, -401.0], [-401.0, -401.0], [-500.0, 3.0]])
    both, none = torch.ones(1, 2), torch.zeros(1, 2)
    close(query_log_scores(z, both, none), [[-801.0, -802.0, -500 - math.log1p(math.exp(-3))]])
    assert (torch.sigmoid(z).prod(1) == 0).all()
    close(query_log_scores(-z, none, both), query_log_scores(z, both, none))


def test_impossible_conditions():
    """A posterior of 0 makes a wanted label impossible and an unwanted one certain."""
    z = torch.tensor([[-math.inf, 0.0], [math.inf, 0.0]])
    found = query_log_scores(z, [[1, 1], [0, 1], [0, 0]], [[0, 0], [1, 0], [1, 0]])
    close(found[0, 1], math.log(0.5))
    close(found[1, 0], math.log(0.5))
    close(found[2, 0], 0.0)
    assert torch.isneginf(found[[0, 1, 2], [0, 1, 1]]).all()


def test_relevance():
    y = [[1, 0, -1], [1, 1, -1], [-1, 0, 0], [0, 0, 1]]
    wanted, unwanted = [[1, 0, 0], [0, 0, 1], [0, 0, 0]], [[0, 1, 0], [0, 1, 0], [0, 0, 0]]
    expected = [[1, 0, -1, 0], [-1, 0, 0, 1], [1, 1, 1, 1]]
    assert query_relevance(y, wanted, unwanted).tolist() == expected


def test_map_is_the_mean_over_queries():
    z, y = example(1)
    wanted, unwanted = draw_queries(y, 2, 30)
    eta, values = torch.sigmoid(z), []
    for w, u in zip(wanted.tolist(), unwanted.tolist(), strict=True):
        scores, relevant = [], []
        for p, labels in zip(eta.tolist(), y.tolist(), strict=True):
            conditions = [(labels[t], 1 if w[t] else 0, p[t] if w[t] else 1 - p[t])
                          for t in range(6) if w[t] or u[t]]  # fmt: skip
            broken = any(label == 1 - want for label, want, _ in conditions)
            if broken or all(label == want for label, want, _ in conditions):
                scores.append(math.prod(c[2] for c in conditions))
                relevant.append(int(not broken))
        values.append(oracle.average_precision(scores, relevant))
    close(retrieval_map(z, y, wanted, unwanted), np.mean(values))


def test_queries_that_nobody_meets_are_left_out():
    z = torch.tensor([[2.0, 1.0], [1.0, 2.0], [0.0, 0.0]])
    y = [[1, 0], [0, 0], [0, 0]]
    wanted, none = [[1, 0], [0, 1]], [[0, 0], [0, 0]]
    close(retrieval_map(z, y, wanted, none), 1.0)
    assert math.isnan(retrieval_map(z, y, [[0, 1]], [[0, 0]]))
    assert math.isnan(retrieval_map(z, y, np.zeros((0, 2)), np.zeros((0, 2))))


@pytest.mark.parametrize("conditions", [1, 2, 5])
def test_drawn_queries_are_met_by_a_sample(conditions):
    _, y = example(2)
    wanted, unwanted = draw_queries(y, conditions, 60, seed=3)
    assert wanted.dtype == torch.bool
    assert 0 < len(wanted) <= 60
    assert ((wanted.long() + unwanted.long()).sum(1) == conditions).all()
    assert wanted.any(1).all()
    assert (query_relevance(y, wanted, unwanted) == 1).any(1).all()
    assert len({tuple(q) for q in torch.cat([wanted, unwanted], 1).tolist()}) == len(wanted)
    again = draw_queries(y, conditions, 60, seed=3)
    assert torch.equal(again.wanted, wanted)
    if conditions == 1:  # every label that applies to a sample
        assert len(wanted) == 6
        assert not unwanted.any()


def test_no_query_where_too_little_is_known():
    wanted, unwanted = draw_queries([[0, 0, 0], [1, -1, -1]], 2, 10)
    assert wanted.shape == unwanted.shape == (0, 3)


def test_curve():
    z, y = example(4, n=200)
    curve = retrieval_curve(z, y, conditions=(1, 3), count=50, seed=1)
    assert list(curve) == [1, 3]
    for n, value in curve.items():
        close(value, retrieval_map(z, y, *draw_queries(y, n, 50, seed=1)))
    perfect = torch.where(y == 1, 9.0, -9.0)
    assert set(retrieval_curve(perfect, y, conditions=(1, 2, 4), count=50).values()) == {1.0}
    assert all(value < 0.9 for value in curve.values())


def test_calibrated_posteriors_retrieve_better_than_distorted_ones():
    """Every label keeps its own ranking, but a product of badly scaled scores ranks wrongly."""
    generator = torch.Generator().manual_seed(0)
    z = 2 * torch.randn((4000, 6), generator=generator, dtype=torch.float64) - 1
    y = (torch.rand(z.shape, generator=generator) < torch.sigmoid(z)).long()
    distorted = z * torch.tensor([0.1, 4.0, 0.2, 3.0, 1.0, 0.1]) + torch.tensor(
        [2.0, -3, 0, 4, 0, -2]
    )
    true, other = (retrieval_curve(s, y, conditions=(1, 3)) for s in (z, distorted))
    close(true[1], other[1])
    assert true[3] > other[3] + 0.05


def test_wrong_input_is_named():
    z = torch.zeros(3, 2)
    for w, u, message in (
        ([[1, 0]], [[1, 0]], r"a label is in both in queries \[0\]"),
        ([1, 0], [0, 0], r"wanted: expected 0 and 1, \(Q, 2\)"),
        ([[1, 0]], [[0, 2]], "unwanted: expected 0 and 1"),
        ([[1, 0]], [[0, 0], [0, 0]], "expected one shape"),
    ):
        with pytest.raises(ValueError, match=message):
            query_log_scores(z, w, u)
    for wrong in (z[0], z.long(), z * math.nan):
        with pytest.raises(ValueError, match=r"log_odds: expected floating \(B, T\) without NaN"):
            query_log_scores(wrong, [[1, 0]], [[0, 0]])
    with pytest.raises(ValueError, match=r"targets: expected \(B, T\) = \(3, 2\)"):
        retrieval_map(z, [[1, 0]], [[1, 0]], [[0, 0]])
    with pytest.raises(ValueError, match="conditions, count: expected at least 1"):
        draw_queries([[1, 0]], 0, 5)
