"""The namesakes and relatives of ECE, TACE and Brier, and overlap from confusion matrices."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.binning import BinStatistics, equal_width_statistics
from segcal.metrics.aece import aece
from segcal.metrics.brier import brier, brier_parts, soft_brier
from segcal.metrics.calibration_error import calibration_error
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.dice import dice
from segcal.metrics.ece import ece, reliability
from segcal.metrics.hausdorff import nsd
from segcal.metrics.iou import accuracy, confusion_matrix, iou, mean_dice, mean_iou
from segcal.metrics.volume_difference import volume_difference
from segcal.reproduction import crac, svls
from tests.conftest import close


@pytest.fixture
def case(golden):
    g = golden("calibration_metrics")
    return g, torch.softmax(g["logits"], 1), g["labels"]


def random_case(seed=0, n=500, k=4):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(1, k, n))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return p, rng.integers(0, k, (1, n))


def test_golden_aece(case):
    g, p, y = case
    close(crac.aece(p, y), g["aece15_all"][0])
    close(crac.aece(p, y, mask=y > 0), g["aece15_fg"][0])


def test_golden_tace_of_svls_and_bwcr(case):
    g, p, y = case
    value = svls.tace(p, y, bins=10)
    close(value, g["svls_tace10_t1e-3"], rtol=1e-7)  # float32 inside the reference
    value = svls.tace(p, y, bins=10, threshold=1e-2)
    close(value, g["bwcr_tace10_t1e-2"], rtol=1e-7)
    for name in ("svls_ece10", "bwcr_ece10"):
        close(ece(p, y, bins=10, mask=y > 0), g[name])


@pytest.mark.parametrize("reduction", ["expected", "average", "maximum"])
def test_golden_monai(case, reduction):
    g, p, y = case
    found = calibration_error(p, y, reduction=reduction)
    close(found, g[f"monai20_{reduction}_bg"][0], 1e-5, 1e-6)
    found = calibration_error(p, y, reduction=reduction, include_background=False)
    close(found, g[f"monai20_{reduction}_nobg"][0], 1e-5, 1e-6)


def test_golden_soft_brier(case):
    g, p, y = case
    close(soft_brier(p, y, mask=y > 0, padding="background"), g["seg_brier_crac"])


def test_aece_by_hand():
    """Four confidences in two groups: (.6, .7) hit 1 of 2, (.8, .9) hit 2 of 2."""
    p = torch.tensor([0.6, 0.7, 0.8, 0.9], dtype=torch.float64)
    probs, labels = torch.stack([p, 1 - p])[None], torch.tensor([[0, 1, 0, 0]])
    close(aece(probs, labels, bins=2), (2 * abs(0.65 - 0.5) + 2 * abs(0.85 - 1.0)) / 4)
    same = torch.full((1, 2, 10), 0.5, dtype=torch.float64)
    same[:, 0], same[:, 1] = 0.7, 0.3
    close(aece(same, (torch.arange(10) >= 3).long()[None]), 0.4)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), bins=st.integers(1, 20))
def test_aece_is_ece_of_its_groups_and_does_not_see_the_order(seed, bins):
    p, y = random_case(seed, 60)
    value = aece(p, y, bins=bins)
    order = np.random.default_rng(seed).permutation(60)
    close(aece(p[:, :, order], y[:, order], bins=bins), value)
    assert 0 <= value <= 1
    close(aece(p, y, bins=1), abs(p.max(1).mean() - (p.argmax(1) == y).mean()))


def of_label_one(p, y, **options):
    """Error of the probability of label 1 in a binary problem."""
    p = np.asarray(p)
    return calibration_error(np.stack([1 - p, p])[None], np.asarray(y)[None], **options)[1]


def test_probabilities_of_exactly_0_and_1():
    """0 is in the first of two bins and 1 in the last: gaps of 1 (one voxel) and 0.5 (four)."""
    p, y = [1.0, 1.0, 1.0, 1.0, 0.0], [0, 0, 1, 1, 1]
    for reduction, value in (("expected", 0.6), ("average", 0.75), ("maximum", 1.0)):
        close(of_label_one(p, y, bins=2, reduction=reduction), value)
    assert np.isfinite(of_label_one(p, y, bins=1))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("library", [torch, np])
def test_precision_and_library_do_not_matter(library, dtype):
    """Bins (0, .5] and (.5, 1]: 2/5 of gap .25, and 3/5 of 1 - (.55 + .75 + .75) / 3."""
    p = np.array([0.25, 0.25, 0.55, 0.75, 0.75])
    probs = np.stack([1 - p, p])[None].astype(dtype)
    y = np.array([[0, 0, 1, 1, 1]])
    if library is torch:
        probs, y = torch.from_numpy(probs), torch.from_numpy(y)
    tolerance = 1e-4 if dtype == "float16" else 1e-6
    close(calibration_error(probs, y, bins=2)[1], 0.29, atol=tolerance)
    close(ece(probs, y, bins=2), 0.29, atol=tolerance)  # all are right, of confidence .71


def test_two_errors_of_a_binary_problem():
    """Label 1 with .2 and .8, never true; the most likely label with .8 twice, true once."""
    p, y = np.array([0.2, 0.8]), np.array([[0, 0]])
    close(of_label_one(p, y[0], bins=10), 0.5)
    close(ece(np.stack([1 - p, p])[None], y, bins=10), 0.3)


def test_calibration_error_is_the_parts_of_the_classwise_ece():
    p, y = random_case()
    close(calibration_error(p, y, bins=15).mean(), classwise_ece(p, y))
    assert np.isnan(calibration_error(p, y, mask=np.zeros(y.shape, dtype=bool))).all()
    with pytest.raises(ValueError, match="reduction: expected one of"):
        calibration_error(p, y, reduction="mean")


def test_over_and_underconfidence_make_up_the_error():
    p, y = random_case()
    statistics = reliability(p, y)
    parts = statistics.overconfidence(), statistics.underconfidence()
    close(sum(parts), statistics.expected_error())
    sure = equal_width_statistics(torch.tensor([0.9, 0.9]), torch.tensor([False, False]), 10)
    close(sure.overconfidence(), 0.9, rtol=1e-6)
    assert sure.underconfidence() == 0
    close(sure.average_error(), sure.maximum_error())
    nothing = equal_width_statistics(torch.zeros(0), torch.zeros(0, dtype=torch.bool), 10)
    for value in (nothing.overconfidence, nothing.average_error, nothing.maximum_error):
        assert np.isnan(value())


def test_worked_bins():
    """p = 1, 1, 1, 1, 0 with y = 0, 0, 1, 1, 1 in two bins: gaps .5 (4 of 5) and 1."""
    p, y = torch.tensor([1.0, 1, 1, 1, 0]), torch.tensor([0, 0, 1, 1, 1])
    statistics = equal_width_statistics(p, y == 1, 2)
    close(statistics.expected_error(), 0.6)
    close(statistics.maximum_error(), 1.0)
    close(statistics.average_error(), 0.75)


def test_statistics_go_through_json():
    p, y = random_case()
    statistics = reliability(p, y)
    again = BinStatistics.from_dict(json.loads(json.dumps(statistics.to_dict())))
    assert (again + statistics).expected_error() == statistics.expected_error()
    with pytest.raises(ValueError, match="'hit_sum' is missing"):
        BinStatistics.from_dict({"count": [1], "confidence_sum": [0.5]})
    with pytest.raises(ValueError, match="three lists of one length"):
        BinStatistics.from_dict({"count": [1], "confidence_sum": [0.5], "hit_sum": [1, 2]})


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), bins=st.integers(1, 30))
def test_brier_parts_add_up(seed, bins):
    p, y = random_case(seed, 80)
    parts = brier_parts(p, y, bins=bins)
    close(
        parts.reliability - parts.resolution + parts.uncertainty + parts.rest, brier(p, y),
        rtol=1e-9,
    )  # fmt: skip
    assert parts.reliability >= 0
    assert parts.resolution >= 0
    shares = np.bincount(y[0], minlength=4) / y.size
    close(parts.uncertainty, (shares * (1 - shares)).sum())


def test_brier_of_probabilities_that_are_few_has_no_rest():
    p = torch.tensor([0.2, 0.2, 0.8, 0.8, 0.8], dtype=torch.float64)
    probs, labels = torch.stack([1 - p, p])[None], torch.tensor([[0, 1, 1, 1, 0]])
    parts = brier_parts(probs, labels, bins=10)
    close(parts.rest, 0.0, atol=1e-12)
    # of class 1, bins of .2 (half are 1) and .8 (two of three); class 0 is its mirror
    close(parts.reliability, 2 * (2 * 0.3**2 + 3 * (0.8 - 2 / 3) ** 2) / 5)


def test_soft_brier_of_its_own_target_is_zero():
    from segcal.neighbourhood import class_proportions

    y = torch.randint(0, 3, (1, 6, 5))
    assert soft_brier(class_proportions(y, 3), y) == 0
    assert np.isnan(soft_brier(torch.full((1, 3, 2, 2), 1 / 3), torch.full((1, 2, 2), 9),
                               ignore_index=9))  # fmt: skip
    with pytest.raises(ValueError, match="expected"):
        soft_brier(torch.zeros(3, 2), torch.zeros(3))


def maps(seed=0, shape=(20, 30), k=4):
    rng = np.random.default_rng(seed)
    return rng.integers(0, k, shape), rng.integers(0, k, shape)


def test_overlap_from_a_confusion_matrix():
    prediction, reference = maps()
    matrix = confusion_matrix(prediction, reference, 5)
    assert matrix.sum() == prediction.size
    assert matrix[1, 2] == ((reference == 1) & (prediction == 2)).sum()
    values = iou(matrix)
    for k in range(4):
        d = dice(prediction, reference, k)
        close(values[k], d / (2 - d))
    assert np.isnan(values[4])
    close(mean_iou(matrix), values[1:4].mean())
    close(mean_dice(matrix), (2 * values[1:4] / (1 + values[1:4])).mean())
    close(mean_iou(matrix, include_background=True), values[:4].mean())
    close(accuracy(matrix), (prediction == reference).mean())
    empty = np.zeros((3, 3), dtype=np.int64)
    assert np.isnan(mean_iou(empty))
    assert np.isnan(mean_dice(empty))
    assert np.isnan(accuracy(empty))


def test_confusion_leaves_out_what_does_not_count():
    prediction, reference = maps()
    reference[:5] = 255
    mask = np.ones(reference.shape, dtype=bool)
    mask[:, :7] = False
    matrix = confusion_matrix(prediction, reference, 4, ignore_index=255, mask=mask)
    close(matrix.sum(), 15 * 23)
    halves = [
        confusion_matrix(p, r, 4, ignore_index=255)
        for p, r in zip(np.split(prediction, 2), np.split(reference, 2), strict=True)
    ]
    whole = confusion_matrix(prediction, reference, 4, ignore_index=255)
    assert (halves[0] + halves[1] == whole).all()
    with pytest.raises(ValueError, match="is an ignore_index missing"):
        confusion_matrix(prediction, reference, 4)
    with pytest.raises(ValueError, match="expected one shape"):
        confusion_matrix(prediction, reference[:3], 4)


def test_volume_difference():
    a, b = np.zeros((4, 4, 4), dtype=bool), np.zeros((4, 4, 4), dtype=bool)
    a[:2], b[0] = True, True
    close(volume_difference(a, b, spacing_mm=(10, 2, 1.5)), 16 * 30 / 1000)
    close(volume_difference(b, a, spacing_mm=(1, 1, 1), relative=True), -0.5)
    assert np.isnan(volume_difference(a, np.zeros_like(a), spacing_mm=(1, 1, 1), relative=True))
    with pytest.raises(ValueError, match="spacing_mm"):
        volume_difference(a, b, spacing_mm=(1, 1))
    with pytest.raises(ValueError, match="bool masks"):
        volume_difference(a.astype(int), b, spacing_mm=(1, 1, 1))


def test_normalised_surface_distance():
    reference, prediction = np.zeros((20, 20), dtype=bool), np.zeros((20, 20), dtype=bool)
    reference[5:10, 5:10], prediction[5:10, 7:12] = True, True  # moved by 2 voxels of 1.5 mm
    inside = {
        t: nsd(prediction, reference, spacing_mm=(1, 1.5), tolerance_mm=t) for t in (0, 1.5, 3)
    }
    assert inside[3] == 1
    assert 0 < inside[0] < inside[1.5] < 1
    # on the other surface: of the 16 of each, 2 x 3 on the rows 5 and 9
    close(inside[0], 12 / 32)
    nothing = np.zeros_like(reference)
    assert nsd(nothing, reference, spacing_mm=(1, 1), tolerance_mm=1) == 0
    assert np.isnan(nsd(nothing, nothing, spacing_mm=(1, 1), tolerance_mm=1))
    with pytest.raises(ValueError, match="tolerance_mm"):
        nsd(prediction, reference, spacing_mm=(1, 1), tolerance_mm=-1)
