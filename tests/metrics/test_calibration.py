"""Calibration metrics against golden values, worked examples, naive oracles and properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.binning import equal_mass_statistics, equal_width_index, equal_width_statistics
from segcal.metrics.brier import brier
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.ece import ece, reliability
from segcal.metrics.nll import nll
from segcal.metrics.tace import tace
from segcal.reproduction.crac import tace_ref
from tests.conftest import close
from tests.oracles import calibration as oracle

METRICS = (ece, classwise_ece, tace, tace_ref, nll, brier)


def binary(p_of_one, y):
    """(1, 2, n) probabilities and (1, n) labels."""
    p = torch.as_tensor(p_of_one, dtype=torch.float64)
    return torch.stack([1 - p, p])[None], torch.as_tensor(y)[None]


@pytest.mark.parametrize("scope", ["all", "fg"])
def test_golden(golden, scope):
    g = golden("calibration_metrics")
    p, y = torch.softmax(g["logits"], 1), g["labels"]
    mask = y > 0 if scope == "fg" else torch.ones_like(y, dtype=torch.bool)
    for m in (15, 10):
        close(ece(p, y, bins=m, mask=mask), g[f"ece{m}_{scope}"][0])
    close(nll(p, y, mask=mask), g[f"nll_{scope}"])
    close(brier(p, y, mask=mask), g[f"brier_{scope}"])
    for threshold, name in ((1e-3, "1e-3"), (1e-2, "1e-2")):
        value = tace_ref(p, y, threshold=threshold, mask=mask)
        close(value, g[f"tcece15_t{name}_{scope}"])
        close(tace(p, y, threshold=threshold, mask=mask), g[f"nixon_tace15_{name}_{scope}"])
    close(tace(p, y, threshold=-1, mask=mask), g[f"nixon_ace15_{scope}"])
    close(classwise_ece(p, y, mask=mask), g[f"cece15_{scope}"])
    if scope == "fg":  # the definition selects the foreground itself
        close(tace_ref(p, y), g["tcece15_t1e-3_fg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bin_edges(dtype):
    values = torch.tensor([0.0, 1e-9, 0.1, 0.1 + 1e-9, 0.1 + 1e-6, 0.2, 0.95, 1.0], dtype=dtype)
    expected = [0, 0, 0, 0, 1, 1, 9, 9]
    assert equal_width_index(values, 10).tolist() == expected
    for m in (10, 15, 20):  # every edge belongs to the bin below, in either precision
        edges = torch.arange(1, m + 1, dtype=torch.float64).div(m).to(dtype)
        assert equal_width_index(edges, m).tolist() == list(range(m))


def test_worked_examples():
    close(ece(*binary([0.95, 1.0], [1, 0]), bins=10), 0.475)  # 1.0 is in the last bin
    p = torch.tensor([[[0.8, 0.7, 0.3, 0.2], [0.1, 0.2, 0.3, 0.3], [0.1, 0.1, 0.4, 0.5]]])
    y = torch.tensor([[1, 1, 2, 2]])
    close(ece(p, y, bins=10), 0.65, rtol=1e-6)
    # class 0 is in no label: 0.5. class 1, bins (0, .1], (.1, .2], (.2, .3]: (.9 + .8 + .6) / 4.
    # class 2, bins (0, .1], (.3, .4], (.4, .5]: (.2 + .6 + .5) / 4
    close(classwise_ece(p, y, bins=10), (0.5 + 0.575 + 0.325) / 3, rtol=1e-6)
    # one group of ties cut into many ranges: the gap is that of the group in every range
    for m in (1, 3, 15):
        statistics = equal_mass_statistics(torch.full((10,), 0.7), torch.arange(10) < 3, m)
        close(statistics.gap[statistics.count > 0], [0.4] * min(m, 10), rtol=1e-6)
        close(tace(*binary([0.7] * 10, [1, 1, 1, *[0] * 7]), bins=m), 0.4)
    # a class wholly below the threshold has no part in the mean
    p1 = torch.tensor([1e-4, 1e-4, 0.6, 0.8], dtype=torch.float64)
    y = torch.tensor([[0, 0, 1, 1]])
    two = torch.stack([1 - p1, p1])[None]
    close(tace(two, y, bins=2), 0.225025)
    three = torch.stack([1 - p1 - 1e-5, p1, torch.full_like(p1, 1e-5)])[None]
    close(tace(three, y, bins=2), 0.225025, atol=1e-5)
    # background hides miscalibration of the foreground
    confidence = torch.cat([torch.zeros(9900), torch.full((100,), 0.99)])
    labels = (torch.arange(10000) >= 9950).long()
    p, y = binary(confidence, labels)
    close(ece(p, y), 0.0049, rtol=1e-5)
    fg = torch.arange(10000)[None] >= 9900
    close(ece(p, y, mask=fg), 0.49, rtol=1e-5)


@pytest.mark.parametrize("ignore", [255, -1, -100])
def test_ignored_voxels_leave(ignore):
    p, y = binary([0.1, 0.8, 0.4, 0.7], [0, 1, ignore, 0])
    p, y = p.reshape(1, 2, 2, 2), y.reshape(1, 2, 2)
    close(ece(p, y, bins=10, ignore_index=ignore), 1 / 3)


def test_half_precision_sums():
    n = 200_000
    p = torch.full((n,), 0.75, dtype=torch.float16)
    y = (torch.arange(n) < 150_000).long()[None]
    close(ece(torch.stack([1 - p, p])[None], y, bins=10), 0.0)


def test_counts_beyond_float32():
    """20 million voxels in one bin: float32 counters stop at 16,777,216."""
    n = 20_000_000
    confidence = torch.full((n,), 0.97)
    hits = torch.zeros(n, dtype=torch.bool)
    hits[: n * 97 // 100] = True
    statistics = equal_width_statistics(confidence, hits, 15)
    assert statistics.count.sum() == n
    close(statistics.expected_error(), abs(0.97 - float(np.float32(0.97))), atol=1e-12)
    close(equal_mass_statistics(confidence, hits, 15).expected_error(), 0.0, atol=3e-8)


def random_case(seed, n, k, decimals):
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(k, 0.3), n)
    if decimals is not None:  # many ties
        p = np.round(p, decimals)
        p /= np.maximum(p.sum(1, keepdims=True), 1e-9)
    return p.T, rng.integers(0, k, n)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    n=st.integers(1, 60),
    k=st.integers(2, 4),
    bins=st.integers(1, 20),
    decimals=st.sampled_from([None, 1, 2]),
)
def test_against_the_naive_oracle(seed, n, k, bins, decimals):
    p, y = random_case(seed, n, k, decimals)
    p_case, y_case = p, y
    p, y = p[None], y[None]
    close(ece(p, y, bins=bins), oracle.ece(p_case, y_case, bins))
    close(classwise_ece(p, y, bins=bins), oracle.classwise_ece(p_case, y_case, bins))
    close(tace(p, y, bins=bins), oracle.tace(p_case, y_case, bins, 1e-3))
    close(nll(p, y), oracle.nll(p_case, y_case, 1e-12))
    close(brier(p, y), oracle.brier(p_case, y_case))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), decimals=st.sampled_from([None, 1, 2]))
def test_order_of_voxels_does_not_matter(seed, decimals):
    p, y = random_case(seed, 50, 3, decimals)
    order = np.random.default_rng(seed + 1).permutation(50)
    for metric in METRICS:
        close(metric(p[:, order], y[order]), metric(p, y))


def test_float32_and_float64_agree():
    p, y = random_case(3, 5000, 4, None)
    for metric in METRICS:
        close(metric(p.astype(np.float32), y), metric(p, y), rtol=1e-5, atol=1e-6)


def test_statistics_of_cases_add_up():
    p, y = random_case(0, 300, 3, None)
    whole = reliability(p, y)
    parts = reliability(p[:, :100], y[:100]) + reliability(p[:, 100:], y[100:])
    assert (parts.count == whole.count).all()
    assert parts.count.dtype == np.int64
    close(parts.expected_error(), whole.expected_error())
    with pytest.raises(ValueError, match="cannot add 15 and 10 bins"):
        whole + reliability(p, y, bins=10)


def test_empty_bins_are_blank():
    statistics = reliability(*binary([0, 0, 1, 1, 1], [0, 0, 1, 1, 1]), bins=10)
    assert statistics.expected_error() == 0
    assert (statistics.count == 0).sum() == 9  # all top-label confidences are 1
    assert np.isnan(statistics.accuracy[:9]).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_inputs_stay_as_they_are(metric, dtype):
    p, y = random_case(0, 50, 3, None)
    p = p.astype(dtype)
    p_before, y_before = p.copy(), y.copy()
    metric(p, y)
    assert (p == p_before).all()
    assert (y == y_before).all()


def test_a_mask_has_the_shape_of_the_labels():
    p, y = random_case(0, 120, 3, None)
    p, y = p.reshape(3, 4, 5, 6), y.reshape(4, 5, 6)
    for metric in METRICS:
        with pytest.raises(ValueError, match=r"mask: expected bool \(4, 5, 6\), got .*\(6, 5, 4\)"):
            metric(p, y, mask=np.ones((6, 5, 4), bool))


def test_arrays_that_torch_does_not_take():
    p, y = random_case(0, 200, 3, None)
    frozen = p.copy()
    frozen.setflags(write=False)
    for metric in METRICS:
        expected = metric(p, y)
        close(metric(p[:, ::-1], y[::-1]), expected)  # negative strides
        close(metric(p.astype(">f8"), y.astype(">i4")), expected)  # foreign byte order
        close(metric(frozen, y.astype(np.uint16)), expected)
        close(metric(p.astype(np.longdouble), y.astype(np.uint32)), expected)


@pytest.mark.parametrize("metric", METRICS)
def test_no_voxel_is_nan(metric):
    p, y = random_case(0, 5, 3, None)
    assert np.isnan(metric(p, y, mask=np.zeros(5, bool)))
    assert np.isnan(metric(p, np.full(5, 9), ignore_index=9))


def test_layouts():
    """Channel first without a batch axis, with one, and labels with a channel axis agree."""
    rng = np.random.default_rng(0)
    p = np.moveaxis(rng.dirichlet(np.ones(3), (3, 4, 4)), -1, 0)
    y = rng.integers(0, 3, (3, 4, 4))
    values = [ece(p, y), ece(p[None], y[None]), ece(p[None], y[None, None])]
    assert values[0] == values[1] == values[2]
    batch = np.moveaxis(p, 0, 1)  # (N, K, *S) with N = K: the class axis is where sums are one
    assert ece(batch, y) == ece(np.moveaxis(batch, 1, 0), y)
    with pytest.raises(ValueError, match=r"probs \(3, 3, 4, 4\) and labels \(4, 4, 3\)"):
        ece(p, y.transpose(1, 2, 0))


@pytest.mark.parametrize(
    ("p", "y", "message"),
    [
        (np.array([[2.0, -1.0], [-1.0, 2.0]]), np.array([0, 1]), "logits need a softmax"),
        (np.array([[0.5, np.nan], [0.5, 0.5]]), np.array([0, 1]), r"expected values in \[0, 1\]"),
        (np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([0, 2]), "expected 0 to 1"),
        (np.array([[1, 0], [0, 1]]), np.array([0, 1]), "expected floating"),
        (np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([0.0, 1.0]), "expected integers"),
    ],
)
def test_refuses(p, y, message):
    for metric in METRICS:
        with pytest.raises(ValueError, match=message):
            metric(p[None], y[None])
