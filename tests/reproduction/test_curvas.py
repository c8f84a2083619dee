"""The challenge's numbers: against MONAI, the integral it takes, and a case by hand."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.interpolate import interp1d

from segcal.reproduction.curvas import crps_of_volumes, ece_of_rater, evaluate_case_curvas
from tests.conftest import close

NAMES = {1: "pancreas", 2: "kidney"}


@pytest.mark.filterwarnings("ignore:The maximum number of subdivisions")
@pytest.mark.parametrize("value", [90.0, 99.0, 101.3, 112.0, 400.0])
def test_volumes_are_the_integral_of_the_challenge(value):
    """scipy's quadrature over the same function between the same limits, in pieces."""
    volumes = [95, 100, 111]
    mean, sd = np.mean(volumes), np.std(volumes)
    x = np.linspace(stats.norm.ppf(0.01, mean, sd), stats.norm.ppf(0.99, mean, sd), 100)
    cdf = interp1d(x, stats.norm.cdf(x, mean, sd), bounds_error=False, fill_value=(0, 1))

    def squared(y):
        return (cdf(y) - 0.5 * (np.sign(y - value) + 1)) ** 2

    low, high = mean - 3 * sd, mean + 3 * sd
    cuts = np.unique(np.clip([low, *x, value, high], low, high))
    wanted = sum(integrate.quad(squared, a, b)[0] for a, b in pairwise(cuts))
    close(crps_of_volumes(volumes, value), wanted, rtol=1e-7)
    assert abs(crps_of_volumes(volumes, value) - integrate.quad(squared, low, high)[0]) < 0.02


def test_beyond_three_deviations_nothing_counts():
    volumes = [95, 100, 111]
    far = np.mean(volumes) + 3 * np.std(volumes)
    close(crps_of_volumes(volumes, far), crps_of_volumes(volumes, 10 * far))
    assert np.isnan(crps_of_volumes([5, 5, 5], 5))


def test_bins_hold_their_lower_edge():
    """0.5 is an edge of 50 bins: with [lo, hi) it shares a bin with 0.51, else with 0.49."""
    p = np.array([[0.5, 0.51, 1.0], [0.5, 0.49, 0.0]])
    labels = np.array([0, 1, 1])
    close(ece_of_rater(p, labels), (abs(0.5 + 0.51 - 1) + 1.0) / 3, atol=1e-7)
    close(ece_of_rater(p, labels, np.array([True, False, False])), 0.5)
    assert np.isnan(ece_of_rater(p, labels, np.zeros(3, bool)))


def test_dsc_is_that_of_monai_on_arrays_of_three_axes():
    metrics = pytest.importorskip("monai.metrics")
    rng = np.random.default_rng(0)
    base = rng.random((4, 6, 9))
    raters = [np.digitize(base + 0.1 * rng.random(base.shape), (0.5, 0.8)) for _ in range(3)]
    p = rng.dirichlet(np.ones(3), base.shape).transpose(3, 0, 1, 2)
    prediction = np.digitize(base + 0.05, (0.5, 0.8))
    row = evaluate_case_curvas(prediction, raters, p, labels=NAMES, voxel_mm3=2.0)
    for value, name in NAMES.items():
        masks = np.stack([one == value for one in raters])
        apart = masks.any(0) & ~masks.all(0)
        metric = metrics.DiceMetric(include_background=False, reduction="mean", ignore_empty=True)
        pair = ((prediction == value) & ~apart, masks.all(0))
        metric(*(torch.from_numpy(x.astype(np.uint8)) for x in pair))
        close(row[f"dsc/{name}"], metric.aggregate().item(), atol=1e-6)


def test_a_case_by_hand():
    """One slice of 3 x 4 voxels, two raters; label 1 alone, 2 in none."""
    a = np.array([[[0, 0, 0, 0], [0, 1, 1, 0], [0, 1, 0, 0]]])
    b = np.array([[[0, 0, 0, 0], [0, 1, 1, 1], [0, 0, 0, 0]]])
    p1 = np.array([[[0.1, 0.1, 0.1, 0.1], [0.2, 0.9, 0.4, 0.6], [0.1, 0.7, 0.1, 0.1]]])
    p = np.stack([1 - p1, p1, np.zeros_like(p1)])
    prediction = (p1 > 0.5).astype(int)
    row = evaluate_case_curvas(prediction, [a, b], p, labels={1: "a"}, voxel_mm3=3.0)
    close(row["dsc/a"], 2 * 1 / (1 + 2))  # of two voxels both see, one is predicted, in one line
    outside = [0.1] * 4 + [0.2] + [0.1] * 3
    close(row["confidence/a"], ((0.9 + 0.4) / 2 + 1 - np.mean(outside)) / 2)
    assert np.isnan(row["crps_mm3/a"])  # both volumes are 3
    # of confidence .9 are eight voxels, all right, of .8 one, right; of .6 one that is wrong (both
    # see 1) and one that rater 2 alone sees; of .7 one that rater 1 alone sees
    close(row["ece/rater1"], (8 * 0.1 + 0.2 + 2 * 0.6 + 0.3) / 12, atol=1e-7)
    close(row["ece/rater2"], (8 * 0.1 + 0.2 + (2 * 0.6 - 1) + 0.7) / 12, atol=1e-7)
    close(row["ece"], (2.5 + 1.9) / 24, atol=1e-7)


def test_refuses_one_rater_and_other_shapes():
    y, p = np.zeros((1, 2, 2), int), np.full((2, 1, 2, 2), 0.5)
    with pytest.raises(ValueError, match="raters: expected two or more"):
        evaluate_case_curvas(y, [y], p, labels={1: "a"}, voxel_mm3=1.0)
    with pytest.raises(ValueError, match="expected one shape"):
        evaluate_case_curvas(y, [y, y[:, :1]], p, labels={1: "a"}, voxel_mm3=1.0)
