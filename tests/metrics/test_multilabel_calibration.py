"""Calibration of multi-label posteriors, and the single-label metrics on rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.metrics.aece import aece
from segcal.metrics.ece import ece
from segcal.metrics.iou import accuracy, confusion_matrix
from segcal.metrics.multilabel_calibration import (
    multilabel_calibration_error,
    multilabel_reliability,
)
from tests.conftest import close
from tests.oracles import multilabel as oracle


def example(seed, n=30, t=4):
    rng = np.random.default_rng(seed)
    return np.round(rng.random((n, t)), 2), rng.choice([-1, 0, 1], (n, t), p=[0.2, 0.5, 0.3])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 10, 20]))
def test_loops_agree(seed, bins):
    p, y = example(seed)

    def errors(gaps):
        n = sum(size for _, size in gaps)
        return {
            "average": np.mean([g for g, _ in gaps]),
            "maximum": max(g for g, _ in gaps),
            "expected": sum(g * size for g, size in gaps) / n,
        }

    pooled = errors(oracle.calibration_gaps(p, y, bins))
    per_label = [errors(oracle.calibration_gaps(p[:, [c]], y[:, [c]], bins)) for c in range(4)]
    for reduction, expected in pooled.items():
        close(multilabel_calibration_error(p, y, reduction=reduction, bins=bins), expected)
        classwise = multilabel_calibration_error(
            p, y, reduction=reduction, bins=bins, classwise=True
        )
        close(classwise, np.mean([e[reduction] for e in per_label]))


def test_worked_example():
    """Bin (.2, .3]: mean .25, half positive; (.8, .9]: mean .9, none; the unknown one is out."""
    p = torch.tensor([[0.3, 0.2001], [0.9, 0.9]], dtype=torch.float64)
    y = torch.tensor([[1, 0], [0, -1]])
    table = multilabel_reliability(p, y)
    assert table.count.tolist() == [0, 0, 2, 0, 0, 0, 0, 0, 1, 0]
    assert table.hit_sum.tolist()[2] == 1
    close(multilabel_calibration_error(p, y), (0.5 - 0.25005 + 0.9) / 2)
    close(multilabel_calibration_error(p, y, reduction="maximum"), 0.9)
    close(multilabel_calibration_error(p, y, reduction="expected"), (2 * 0.24995 + 0.9) / 3)
    # by label: the first has gaps .7 and .9, the second .2001
    close(multilabel_calibration_error(p, y, classwise=True), (0.8 + 0.2001) / 2)


def test_batches_add_up():
    p, y = example(3)
    parts = [multilabel_reliability(p[a:b], y[a:b]) for a, b in ((0, 7), (7, 30))]
    whole, sums = multilabel_reliability(p, y), parts[0] + parts[1]
    assert whole.count.tolist() == sums.count.tolist()
    close(sums.average_error(), whole.average_error())


def test_nothing_known_and_labels_that_nobody_knows():
    p, y = example(4)
    nothing = np.full_like(y, -1)
    for classwise in (False, True):
        assert math.isnan(multilabel_calibration_error(p, nothing, classwise=classwise))
    y[:, 1] = -1
    kept = [0, 2, 3]
    close(
        multilabel_calibration_error(p, y, classwise=True),
        multilabel_calibration_error(p[:, kept], y[:, kept], classwise=True),
    )


def test_wrong_input_is_named():
    p, y = example(5)
    with pytest.raises(ValueError, match=r"probs: expected values in \[0, 1\]"):
        multilabel_calibration_error(10 * p, y)
    with pytest.raises(ValueError, match="reduction: expected one of"):
        multilabel_calibration_error(p, y, reduction="mean")
    with pytest.raises(ValueError, match="targets: expected 0, 1 or -1 like probs"):
        multilabel_reliability(p, y[:, :2])


def test_single_label_metrics_take_rows():
    """(N, K) and (N,): confidences .9, .8, .6, .6, of which the first and third are right."""
    p = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.4, 0.6]], dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0])
    close(accuracy(confusion_matrix(p.argmax(1), y, 2)), 0.5)
    close(ece(p, y, bins=10), (0.1 + 0.8 + abs(1 - 1.2)) / 4)
    # two groups of two: .6 and .6 with one hit, .8 and .9 with one
    close(aece(p, y, bins=2), (abs(1 - 1.2) + abs(1 - 1.7)) / 4)
