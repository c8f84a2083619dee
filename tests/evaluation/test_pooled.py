"""Sums that merge: many cases in constant memory equal one pass over all voxels."""

from __future__ import annotations

import functools
import json
import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.binning import MassHistogram, equal_mass_statistics
from segcal.evaluation.pooled import PooledCalibration
from segcal.metrics.aece import aece
from segcal.metrics.brier import brier
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll
from segcal.metrics.tace import tace
from tests.conftest import close


def cases(n=5, k=3, seed=0, size=4000):
    rng = np.random.default_rng(seed)
    for i in range(n):
        logits = rng.normal(size=(1, k, size + 100 * i)) * rng.uniform(0.5, 6)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        yield p, rng.integers(0, k, (1, size + 100 * i))


def test_the_sum_over_cases_is_the_whole():
    whole_p = np.concatenate([p for p, _ in cases()], axis=2)
    whole_y = np.concatenate([y for _, y in cases()], axis=1)
    pooled = functools.reduce(operator.add, (PooledCalibration.of(p, y) for p, y in cases()))
    found = pooled.metrics()
    for name, metric in (
        ("ece", ece), ("cece", classwise_ece), ("nll", nll), ("brier", brier),
    ):  # fmt: skip
        close(found[name], metric(whole_p, whole_y), rtol=1e-12)
    close(found["overconfidence"] + found["underconfidence"], found["ece"])
    assert abs(found["aece"] - aece(whole_p, whole_y)) <= found["aece_bound"] + 1e-12
    assert found["aece_bound"] < 0.01
    close(found["tace"], tace(whole_p, whole_y), atol=2e-4)
    backwards = functools.reduce(
        operator.add, reversed([PooledCalibration.of(p, y) for p, y in cases()])
    )
    close(list(backwards.metrics().values()), list(found.values()), rtol=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.floats(0, 1), min_size=1, max_size=60),
    groups=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_bound_holds(values, groups, seed):
    confidence = torch.tensor(values, dtype=torch.float64)
    hits = torch.rand(len(values), generator=torch.Generator().manual_seed(seed)) < 0.5
    exact = equal_mass_statistics(confidence, hits, groups).expected_error()
    histogram = MassHistogram.of(confidence, hits)
    difference = abs(histogram.groups(groups).expected_error() - exact)
    assert difference <= histogram.error_bound(groups) + 1e-12


def test_values_that_lie_apart_are_exact():
    confidence = (torch.randperm(1000, generator=torch.Generator().manual_seed(0)) + 0.5) / 1000
    hits = torch.arange(1000) % 3 == 0
    exact = equal_mass_statistics(confidence, hits, 15)
    found = MassHistogram.of(confidence, hits).groups(15)
    close(found.hit_sum, exact.hit_sum)
    close(found.confidence_sum, exact.confidence_sum, rtol=1e-6)


def test_through_json_and_back():
    pooled = functools.reduce(operator.add, (PooledCalibration.of(p, y) for p, y in cases()))
    text = json.dumps(pooled.to_dict())
    again = PooledCalibration.from_dict(json.loads(text))
    assert again.metrics() == pooled.metrics()
    assert (again + pooled).voxels == 2 * pooled.voxels
    broken = json.loads(text)
    del broken["classes"]
    with pytest.raises(ValueError, match="'classes' is missing"):
        PooledCalibration.from_dict(broken)
    broken = json.loads(text)
    broken["top_mass"]["index"][0] = 10**6
    with pytest.raises(ValueError, match="does not fit"):
        PooledCalibration.from_dict(broken)


def test_what_cannot_be_added():
    (p, y), *_ = cases()
    with pytest.raises(ValueError, match=r"cannot add 3 classes, threshold 0\.001"):
        PooledCalibration.of(p, y) + PooledCalibration.of(p, y, threshold=0.01)
    with pytest.raises(ValueError, match="cannot add 15 and 10 bins"):
        PooledCalibration.of(p, y) + PooledCalibration.of(p, y, bins=10)


def test_nothing_is_nan_and_does_not_change_a_sum():
    (p, y), *_ = cases()
    nothing = PooledCalibration.of(p, np.full_like(y, 9), ignore_index=9)
    assert all(np.isnan(v) for k, v in nothing.metrics().items() if k != "aece_bound")
    one = PooledCalibration.of(p, y)
    assert (one + nothing).metrics() == one.metrics()


@pytest.mark.slow
def test_thirty_million_voxels_against_an_oracle():
    """Perfectly calibrated: float32 counters would say 0.0137."""
    rng = np.random.default_rng(0)
    n = 30_000_000
    confidence = rng.uniform(0.5, 1.0, n)
    labels = (rng.random(n) >= confidence).astype(np.int64)
    index = np.clip(np.ceil(confidence * 15 - 1e-6).astype(np.int64) - 1, 0, 14)
    expected = sum(
        abs(float(confidence[index == m].sum() - (labels[index == m] == 0).sum()))
        for m in range(15)
    )
    probs = np.stack([confidence, 1 - confidence])[None]
    del index
    pooled = sum(
        (
            PooledCalibration.of(probs[:, :, i : i + 10**7], labels[None, i : i + 10**7])
            for i in range(10**7, n, 10**7)
        ),
        start=PooledCalibration.of(probs[:, :, : 10**7], labels[None, : 10**7]),
    )
    found = pooled.metrics()
    close(found["ece"], expected / n, rtol=1e-9, atol=1e-12)
    assert found["ece"] < 3e-4
    assert found["aece"] < 4e-4
