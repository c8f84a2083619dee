"""Numbers of classified samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.classify.measures import (
    CLASS_METRICS,
    LABEL_METRICS,
    measure,
    probabilities,
    record,
)
from segcal.losses.multilabel.asymmetric import Asymmetric
from segcal.losses.multilabel.bce import BCE
from segcal.losses.multilabel.lpr import LPR
from segcal.losses.multilabel.spa import SPA, inverse_link
from segcal.losses.multilabel.two_way import TwoWay
from segcal.metrics.retrieval import draw_queries, retrieval_map
from tests.conftest import close


def test_classes_by_hand():
    """Confidences .6, .7, .8, .9 with hits 1, 0, 1, 1 lie in four of the fifteen bins."""
    p = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]], dtype=torch.float64)
    classes = torch.tensor([0, 1, 1, 0])
    found = measure(p.log(), classes, ("a", "b"), None, full=True)["softmax"]
    assert set(found.metrics) == set(CLASS_METRICS)
    close(found.metrics["accuracy"], 0.75)
    close(found.metrics["ece"], (0.4 + 0.7 + 0.2 + 0.1) / 4)
    close(found.metrics["nll"], -np.log([0.6, 0.3, 0.8, 0.9]).mean())
    close(found.metrics["brier"], np.mean([2 * 0.16, 2 * 0.49, 2 * 0.04, 2 * 0.01]))
    assert found.table["n"].tolist() == [2, 2]
    assert found.table["recall"].tolist() == [1.0, 0.5]
    close(found.table["precision"].tolist(), [2 / 3, 1.0])
    assert found.top.count.sum() == 4
    # each is alone in its bin: it is off by 1 - p with probability p, and by p with 1 - p
    close(found.metrics["ece_floor"], np.mean([0.48, 0.42, 0.32, 0.18]), atol=0.02)
    assert "ece_floor" not in measure(p.log(), classes, ("a", "b"), None)["softmax"].metrics


def test_the_floor_of_labels():
    """Of calibrated log-odds, the ECE of 4,000 pairs is what its floor says, within its spread."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(1000, 4)))
    targets = torch.from_numpy((rng.random((1000, 4)) < torch.sigmoid(logits).numpy()).astype(int))
    found = measure(logits, targets, tuple("abcd"), BCE(), full=True)["sigmoid"]
    assert found.floor.p > 0.05
    close(found.metrics["ece_floor"], found.metrics["ece"], atol=0.01)
    surer = measure(3 * logits, targets, tuple("abcd"), BCE(), full=True)["sigmoid"]
    assert surer.floor.p < 0.01


@pytest.mark.parametrize(("bins", "error"), [(1, 0.0), (2, 0.0), (3, 0.0), (10, 1.4 / 4)])
def test_the_number_of_bins_is_that_asked_for(bins, error):
    """Confidences .6, .7, .8, .9 with hits 1, 0, 1, 1: .75 is the mean of both, in one bin.

    Of three bins, .6 is the only one in the second: .4 of a quarter, and 2/3 against .8 in the
    third. Of labels, all pairs lie in bins of their own: .4, .7, .2, .1 to each side.
    """
    p = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]], dtype=torch.float64)
    classes = torch.tensor([0, 1, 1, 0])
    found = measure(p.log(), classes, ("a", "b"), None, bins=bins)["softmax"]
    error = (0.4 + 3 * (0.8 - 2 / 3)) / 4 if bins == 3 else error
    close(found.metrics["ece"], error, atol=1e-12)
    assert len(found.top.count) == len(found.classes[1].count) == bins
    labels = torch.tensor([[1, 0], [0, 1], [0, 1], [1, 0]])
    of = measure(torch.logit(p), labels, ("a", "b"), BCE(), bins=bins)["sigmoid"]
    assert len(of.top.count) == len(of.classes[1].count) == bins
    if bins == 1:  # half of the pairs are positive, and their mean is a half
        close(of.metrics["ece"], 0.0, atol=1e-12)


def test_labels_against_another_program():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(60, 5)))
    targets = torch.from_numpy((rng.random((60, 5)) < torch.sigmoid(logits).numpy()).astype(int))
    found = measure(logits, targets, tuple("abcde"), BCE())
    assert list(found) == ["sigmoid"]
    m = found["sigmoid"].metrics
    assert set(m) == set(LABEL_METRICS) - {"ece_floor"}
    y, p = targets.numpy(), torch.sigmoid(logits).numpy()
    close(m["map_class"], metrics.average_precision_score(y, p, average="macro"))
    rows = y.any(1)
    close(m["map_sample"], metrics.average_precision_score(y[rows], p[rows], average="samples"))
    close(m["nll"], metrics.log_loss(y.ravel(), p.ravel()))
    close(m["brier"], metrics.brier_score_loss(y.ravel(), p.ravel()))
    by_label = found["sigmoid"].table
    close(
        by_label["average_precision"].tolist(),
        metrics.average_precision_score(y, p, average=None).tolist(),
    )
    assert by_label["positive"].tolist() == y.sum(0).tolist()


def test_unknown_labels_count_nowhere():
    logits = torch.randn(40, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = (torch.arange(120).view(40, 3) % 2).long()
    targets[:, 1] = -1
    kept = measure(logits[:, [0, 2]], targets[:, [0, 2]], ("a", "c"), BCE())["sigmoid"]
    found = measure(logits, targets, ("a", "b", "c"), BCE())["sigmoid"]
    for name in kept.metrics:
        close(found.metrics[name], kept.metrics[name])
    assert found.table.loc["b", "n"] == 0


def test_links_have_rows_of_their_own():
    logits = torch.linspace(-4, 4, 8, dtype=torch.float64).view(4, 2)
    weighted = BCE("balanced", positives=[1, 2], negatives=[3, 2])
    two_way = TwoWay()
    for loss, kinds in (
        (BCE(), ["sigmoid"]),
        (weighted, ["sigmoid", "link"]),
        (Asymmetric(), ["sigmoid", "phi"]),
        (Asymmetric(0.0, 0.0, 0.0), ["sigmoid"]),
        (SPA(), ["sigmoid", "link"]),
        (LPR(SPA()), ["sigmoid", "link"]),
        (LPR(Asymmetric(), link="identity"), ["sigmoid", "phi"]),
        (two_way, ["sigmoid"]),
        (LPR(two_way, link="identity"), ["sigmoid"]),
    ):
        found = probabilities(logits, loss)
        assert list(found) == kinds, loss
        close(found["sigmoid"], torch.sigmoid(logits))
    close(probabilities(logits, SPA())["link"], inverse_link(logits))
    assert list(probabilities(logits, None)) == ["softmax"]


def test_a_link_that_is_one_to_one_does_not_change_rankings():
    """The posterior of far logits rounds to 0 or 1, which would be ties."""
    logits = torch.tensor([[-800.0, 60.0], [-900.0, 70.0], [-1000.0, 50.0]], dtype=torch.float64)
    targets = torch.tensor([[1, 0], [0, 1], [0, 0]])
    found = measure(logits, targets, ("a", "b"), SPA())
    assert [o.metrics["map_class"] for o in found.values()] == [1.0, 1.0]


def test_queries_are_answered_by_the_posterior_of_the_loss():
    """Sums of log-probabilities rank otherwise by the link than by the sigmoid."""
    targets = torch.randint(0, 2, (30, 3), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(30, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = measure(logits, targets, ("a", "b", "c"), SPA(), full=True)
    z = {"sigmoid": logits, "link": SPA().log_odds(logits)}
    for kind, outcome in found.items():
        queries = draw_queries(targets, 2, 500)
        assert list(outcome.retrieval) == [1, 2, 3]  # there are three labels
        close(outcome.retrieval[2], retrieval_map(z[kind], targets, *queries))
        assert record(outcome)["retrieval"]["2"] == outcome.retrieval[2]
    assert found["link"].retrieval[1] == found["sigmoid"].retrieval[1]
    assert found["link"].retrieval[2] != found["sigmoid"].retrieval[2]
    assert measure(logits, targets, ("a", "b", "c"), SPA())["link"].retrieval == {}


def test_record_is_fit_for_json():
    logits, targets = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.long)
    found = record(measure(logits, targets, ("a", "b"), BCE())["sigmoid"])
    assert found["metrics"]["map_class"] is None  # no positive
    assert found["metrics"]["brier"] == 0.25
    assert sum(found["reliability"]["count"]) == 4
