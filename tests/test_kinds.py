"""Probabilities of the wrong kind: masks, a softmax twice or in place of logits, other sums."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from segcal.adapters.monai.metrics import ClasswiseECEMetric, ECEMetric, TACEMetric
from segcal.arrays import applied_twice
from segcal.io.probabilities import check_probabilities
from segcal.metrics.aece import aece
from segcal.metrics.brier import brier
from segcal.metrics.calibration_error import calibration_error
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.ece import ece
from segcal.metrics.nll import nll
from segcal.metrics.tace import tace
from segcal.recipes import build
from tests.conftest import close

METRICS = (ece, aece, tace, classwise_ece, calibration_error, brier, nll)


def volume(k=4, scale=3.0, size=12):
    """Softmax of logits that vary, and labels that follow it: calibrated."""
    rng = np.random.default_rng(k)
    logits = torch.from_numpy(rng.normal(size=(1, k, size, size, size))) * scale
    p = torch.softmax(logits, 1)
    drawn = torch.from_numpy(rng.random((1, 1, size, size, size)))
    return p, (p.cumsum(1) < drawn).sum(1).clamp(max=k - 1)


def one_hot(p):
    return torch.nn.functional.one_hot(p.argmax(1), p.shape[1]).movedim(-1, 1).to(p.dtype)


def test_masks_are_no_probabilities_for_monai():
    p, y = volume()
    target = y[:, None]
    metric = ECEMetric()
    metric(p, target)
    close(metric.aggregate(), ece(p, y))
    mask = one_hot(p)
    for metric in (ECEMetric(), TACEMetric(), ClasswiseECEMetric(), ECEMetric(pooled=True)):
        for x in (mask, mask.half()):
            with pytest.raises(ValueError, match=r"a one-hot mask .* before AsDiscrete"):
                metric(x, target)
    alone = torch.zeros(1, 2, 4, 4, dtype=torch.float64)  # sure of one class wherever it looks
    alone[:, 0] = 1
    metric = ECEMetric()
    metric(alone, torch.zeros(1, 1, 4, 4))
    assert metric.aggregate() == 0


@pytest.mark.parametrize("metric", METRICS)
def test_masks_are_said_in_the_metrics_of_arrays(metric):
    p, y = volume()
    metric(p, y)
    with pytest.warns(UserWarning, match="0 and 1 alone, a mask in place of probabilities"):
        metric(one_hot(p), y)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize(("factor", "sums"), [(0.97, r"0\.97 to 0\.97"), (0.5, r"0\.5 to 0\.5")])
def test_columns_sum_to_one(metric, factor, sums):
    p, y = volume()
    with pytest.raises(ValueError, match=f"expected classes that sum to 1 .*got sums of {sums}"):
        metric(factor * p, y)
    metric(p.half(), y)  # but for rounding


@pytest.mark.parametrize("k", [2, 4, 14])
def test_a_softmax_that_was_applied_twice(k):
    p, y = volume(k)
    twice = torch.softmax(p, 1)
    most = np.e / (np.e + k - 1)
    assert twice.max() <= most
    with pytest.warns(UserWarning, match=f"and {most:.4f}, as if the softmax were applied twice"):
        ece(twice, y)
    with pytest.warns(UserWarning, match="softmax were applied twice"):
        ECEMetric()(twice, y[:, None])
    notes = []
    for array in (p, twice, torch.softmax(p.half().float(), 1).half()):
        check_probabilities(array[0].numpy(), "x/a.npz", note=notes.append)
    assert len(notes) == 2
    assert all(n.startswith("a.npz: all") and "softmax were applied twice" in n for n in notes)


def test_a_sigmoid_that_was_applied_twice():
    p = torch.sigmoid(3 * torch.randn(3, 12, 12, 12, generator=torch.Generator().manual_seed(0)))
    twice, notes = torch.sigmoid(p), []
    for array in (p, twice):
        check_probabilities(array.numpy(), "x/a.npz", regions=True, note=notes.append)
    (note,) = notes
    assert "between 0.5000 and 0.7311, as if the sigmoid were applied twice" in note
    target = (p > 0.5).float()
    ClasswiseECEMetric()(p[None], target[None])
    with pytest.warns(UserWarning, match="sigmoid were applied twice"):
        ClasswiseECEMetric()(twice[None], target[None])


def test_what_one_softmax_gives_is_not_suspected():
    for k in (2, 3, 14):
        assert not applied_twice(0.0, 1.0, k)
        assert not applied_twice(1 / k, 1.0, k)
        assert not applied_twice(1 / k, 1 / k, k)  # of a network that has learned nothing yet
        surest = torch.tensor([0.8, *[0.2 / (k - 1)] * (k - 1)])
        twice = torch.softmax(surest, 0)
        assert applied_twice(float(twice.min()), float(twice.max()), k)


def test_a_file_of_masks_is_noted():
    p, _ = volume()
    notes = []
    check_probabilities(one_hot(p)[0].numpy(), "x/a.npz", note=notes.append)
    assert notes == [
        "a.npz: holds only 0 and 1, so these are masks and not probabilities; their ECE is 1 - "
        "accuracy"
    ]


def test_a_softmax_beside_regions_is_refused():
    p, _ = volume(3)
    with pytest.raises(ValueError, match=r"x/a\.npz: the 3 channels sum to 1 in every voxel"):
        check_probabilities(p[0].numpy(), "x/a.npz", 3, regions=True)
    p[0, :, 5, 5, 5] = 0
    check_probabilities(p[0].numpy(), "x/a.npz", 3, regions=True)


@pytest.mark.parametrize("name", ["ce", "crac", "confidence"])
def test_a_softmax_in_place_of_logits(name):
    p, y = volume(3, size=6)
    given = torch.cat([p, p], 1) if build(name, 3).num_heads == 2 else p
    for x in (given, given.bfloat16()):
        with pytest.raises(ValueError, match=r"channels that sum to 1.*take the softmax out"):
            build(name, 3)(x, y)
    objective = build(name, 3)
    objective(given.log(), y)
    objective(given, y)  # looked at once: the host does not wait for a GPU in every step


def test_a_sigmoid_in_place_of_logits_is_warned_of():
    logits = 3 * torch.randn(1, 3, 8, 8, 8, generator=torch.Generator().manual_seed(0))
    y = (logits > 0).long()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build("nacl", 3, per_channel=True)(logits, y)
    with pytest.warns(UserWarning, match="as if a sigmoid were applied in the network"):
        build("nacl", 3, per_channel=True)(logits.sigmoid(), y)
