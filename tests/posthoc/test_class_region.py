"""A temperature per predicted class and region: the groups, and what is drawn to what."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

from segcal.posthoc import calibrator as port
from segcal.posthoc import class_region as module
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.posthoc.regions import Regions
from segcal.posthoc.rows import sampled
from segcal.posthoc.temperature import Temperature
from tests.conftest import close


def volumes(temperature, number=3, shape=(12, 20, 20), k=3, seed=0):
    """Smooth logits, and labels drawn from ``softmax(l / T)``; T by predicted class and region.

    Args:
        temperature: ``(k, 2)``.
    """
    generator = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        x = np.stack([gaussian_filter(generator.normal(size=shape), 2) for _ in range(k)])
        x = torch.from_numpy(4 * x / x.std())[None]
        predicted = x.argmax(1)
        t = torch.as_tensor(temperature, dtype=torch.float64)[predicted, Regions().of(predicted)]
        p = torch.softmax(x / t[:, None], 1).movedim(1, -1).reshape(-1, k)
        draw = torch.from_numpy(generator.random((len(p), 1)))
        found.append((x, (p.cumsum(1) < draw).sum(1).clamp(max=k - 1).view(predicted.shape)))
    return found


TRUE = [[3.0, 1.0], [0.7, 2.0], [1.5, 4.0]]


def test_recovers_the_temperatures_that_made_the_labels():
    data = volumes(TRUE, number=4, shape=(24, 40, 40))
    fitted = ClassRegionTemperature().fit(data)
    close(fitted.temperatures, TRUE, rtol=0.1)
    assert fitted.chosen_strength <= 1e-3
    assert fitted.facts["nll_after"] < Temperature().fit(data).facts["nll_after"]


def test_without_shrinkage_every_group_has_its_own_temperature():
    data = volumes(TRUE)
    fitted = ClassRegionTemperature(strength=0).fit(data)
    (rows,) = fitted.collect(data)
    for g, value in enumerate(fitted.temperatures.ravel()):
        close(value, Temperature().fit_rows([rows.where(rows.groups == g)]).value, rtol=1e-9)


def test_infinite_shrinkage_is_one_temperature():
    data = volumes(TRUE)
    fitted, one = ClassRegionTemperature(strength=math.inf).fit(data), Temperature().fit(data)
    close(fitted.temperatures, np.full((3, 2), one.value))
    close(fitted.apply(data[0][0]), one.apply(data[0][0]))


def test_shrinkage_lies_between_and_is_the_stated_minimum():
    data = volumes(TRUE)
    one = Temperature().fit(data).value
    own = np.log(ClassRegionTemperature(strength=0).fit(data).temperatures / one)
    before = np.abs(own)
    for strength in (1e-4, 1e-2, 1.0):
        fitted = ClassRegionTemperature(strength=strength).fit(data)
        u = np.log(fitted.temperatures / one)
        assert (np.sign(u) == np.sign(own)).all()
        assert (np.abs(u) < before).all()
        before = np.abs(u)
        log_t = torch.tensor(np.log(fitted.temperatures).ravel(), requires_grad=True)
        (rows,) = fitted.collect(data)
        z = rows.logits / log_t.exp()[rows.groups, None]
        nll = torch.nn.functional.cross_entropy(z, rows.labels)
        (nll + strength * (log_t - math.log(one)).square().sum()).backward()
        assert log_t.grad.abs().max() < 1e-9


def test_a_strength_in_the_arguments_and_an_infinite_one_are_saved():
    data = volumes(TRUE, number=2)
    fitted = ClassRegionTemperature(strength=1e-3, bands=[1, 2.5]).fit(data)
    again = ClassRegionTemperature.from_state(fitted.state())
    assert (again.strength, again.regions.bands) == (1e-3, (1.0, 2.5))
    assert again.temperatures.shape == (3, 3)
    assert torch.equal(again.apply(data[0][0]), fitted.apply(data[0][0]))


def test_the_prediction_stays():
    for seed in range(3):
        data = volumes(TRUE, seed=seed)
        fitted = ClassRegionTemperature().fit(data)
        for x, _ in data:
            assert torch.equal(fitted.apply(x).argmax(1), x.argmax(1))


def test_cross_validation_shrinks_noise_and_not_groups():
    same = volumes([[1.5, 1.5]] * 3, number=6, shape=(4, 12, 12), seed=1)
    fitted = ClassRegionTemperature().fit(same)
    assert fitted.chosen_strength >= 1e-1
    one = Temperature().fit(same).value
    close(fitted.temperatures, np.full((3, 2), one), rtol=0.02)
    apart = volumes(TRUE, number=6, shape=(4, 12, 12), seed=1)
    assert ClassRegionTemperature().fit(apart).chosen_strength <= 1e-2


def test_one_case_alone_has_a_stated_strength():
    assert ClassRegionTemperature().fit(volumes(TRUE, number=1)).chosen_strength == 1e-3


def test_a_class_that_is_never_predicted_has_the_temperature_of_all():
    x, y = volumes(TRUE, number=1)[0]
    x[:, 2] -= 100
    y[y == 2] = 1
    fitted = ClassRegionTemperature(strength=0).fit(x, y)
    close(fitted.temperatures[2], [fitted.global_temperature] * 2)


@pytest.mark.parametrize("spacing", [None, (3.0, 1.0, 0.5)])
def test_bands_are_distances_to_another_predicted_class(spacing):
    x, _ = volumes(TRUE, number=1, shape=(5, 7, 9))[0]
    predicted = x.argmax(1)
    bands = (1.0, 1.6, 3.2)
    points = np.stack(np.indices((5, 7, 9)), -1).reshape(-1, 3) * (spacing or (1, 1, 1))
    label = predicted.numpy().ravel()
    far = np.sqrt(((points[:, None] - points[None]) ** 2).sum(-1))
    far[label[:, None] == label[None]] = np.inf
    expected = np.searchsorted(bands, far.min(1) - 1e-12)
    assert len(np.unique(expected)) > 2
    found = Regions(bands).of(predicted, spacing)
    assert np.array_equal(found.numpy().ravel(), expected)


def test_regions_are_mixed_patches_by_default_and_one_without_axes():
    predicted = torch.tensor([[0, 0, 0, 1, 1, 1]])
    assert Regions().of(predicted).tolist() == [[0, 0, 1, 1, 0, 0]]
    assert Regions((1.0,)).of(torch.zeros(1, 4, dtype=torch.long)).tolist() == [[1] * 4]
    assert Regions((1.0,)).of(torch.tensor([0, 1])).tolist() == [0, 0]


def test_spacing_decides_the_group_when_applied():
    data = volumes(TRUE, number=2)
    fitted = ClassRegionTemperature(bands=[1.5], strength=0).fit(
        [port.HeldOut(x, y, (3.0, 1.0, 1.0)) for x, y in data]
    )
    x = data[0][0]
    predicted = x.argmax(1)
    for spacing in ((3.0, 1.0, 1.0), (1.0, 1.0, 1.0)):
        region = Regions((1.5,)).of(predicted, spacing)
        t = torch.from_numpy(fitted.temperatures)[predicted, region]
        close(fitted.apply(x, spacing_mm=spacing), torch.softmax(x / t[:, None], 1))


@pytest.mark.parametrize("strength", [1e-4, 1e-2])
def test_biases_are_the_minimum_and_better_than_none(strength):
    data = volumes(TRUE)
    fitted = ClassRegionTemperature(biases=True, strength=strength).fit(data)
    without = ClassRegionTemperature(strength=strength).fit(data)
    assert fitted.facts["nll_after"] <= without.facts["nll_after"]
    (rows,) = fitted.collect(data)
    log_s = torch.tensor(-np.log(fitted.temperatures).ravel(), requires_grad=True)
    b = torch.tensor(fitted.state()["learned"]["biases"], dtype=torch.float64, requires_grad=True)
    z = rows.logits * log_s.exp()[rows.groups, None] + b[rows.groups]
    away = log_s + math.log(fitted.global_temperature)
    penalty = strength * (away.square().sum() + b.square().sum())
    (torch.nn.functional.cross_entropy(z, rows.labels) + penalty).backward()
    assert log_s.grad.abs().max() < 1e-6
    assert b.grad.abs().max() < 1e-6


def test_a_sample_keeps_small_groups_whole_and_is_unbiased():
    groups = torch.tensor([0] * 9000 + [1] * 900 + [2] * 30)
    values = torch.arange(len(groups)).double()
    means = []
    for seed in range(50):
        kept, weights = sampled(groups, 1000, seed)
        assert 900 < len(kept) < 1100
        assert (kept[1:] > kept[:-1]).all()
        assert int((groups[kept] == 2).sum()) == 30
        assert (weights[groups[kept] == 2] == 1).all()
        for g, size in enumerate((9000, 900, 30)):
            close(weights[groups[kept] == g].sum(), size)
        means.append(float(values[kept] @ weights / len(groups)))
    error = np.std(means) / math.sqrt(len(means))
    assert abs(np.mean(means) - float(values.mean())) < 3 * error
    first, _ = sampled(groups, 1000, 0)
    assert torch.equal(first, sampled(groups, 1000, 0)[0])
    assert not torch.equal(first[:100], sampled(groups, 1000, 1)[0][:100])


@pytest.mark.parametrize("method", [Temperature, ClassRegionTemperature])
def test_a_fit_to_a_sample_is_near_that_to_all(method, monkeypatch):
    data = volumes(TRUE, number=2, shape=(20, 40, 40))
    whole = method().fit(data)
    monkeypatch.setattr(port, "MOST_VOXELS", 12_000)
    part = method().fit(data)
    facts = part.facts
    assert facts["voxels"] == whole.facts["voxels"] == 2 * 32_000
    assert 11_000 < facts["sampled"] < 13_000
    assert whole.facts["nll_error"] == 0 < facts["nll_error"] < 0.02
    away = abs(facts["nll_before"] - whole.facts["nll_before"])
    assert away < 3 * facts["nll_error"]
    monkeypatch.undo()
    (rows,) = whole.collect(data)
    assert whole.nll(rows) <= part.nll(rows) + 1e-9 < whole.nll(rows) + facts["nll_error"]


def test_cases_and_a_batch_of_them_are_sampled_alike(monkeypatch):
    data = volumes(TRUE, number=3)
    monkeypatch.setattr(port, "MOST_VOXELS", 6000)
    listed = ClassRegionTemperature().fit(data)
    batch = ClassRegionTemperature().fit(*(torch.cat(parts) for parts in zip(*data, strict=True)))
    assert batch.facts == listed.facts
    assert 5500 < batch.facts["sampled"] < 6500
    assert np.array_equal(batch.temperatures, listed.temperatures)


def test_many_classes_keep_fewer_voxels_of_each_of_many_cases(monkeypatch):
    monkeypatch.setattr(port, "MOST_NUMBERS", 3 * 4000)
    (rows,) = Temperature().collect(volumes(TRUE, number=2))
    assert 3600 < len(rows) < 4400


def test_damaged_states_are_refused():
    state = ClassRegionTemperature(biases=True).fit(volumes(TRUE, number=1)).state()
    learned = state["learned"]
    for wrong, message in (
        ({"temperatures": [1.0, 2.0]}, "expected temperatures"),
        ({"temperatures": [[1.0], [2.0]]}, "expected temperatures"),
        ({"temperatures": [[1.0, 0.0], [1.0, 1.0]]}, "positive temperatures"),
        ({"temperatures": [[1.0, 1.0]]}, "temperatures of 3 classes, got 1"),
        ({"biases": [[0.0]]}, "expected biases"),
    ):
        with pytest.raises(ValueError, match=message):
            ClassRegionTemperature.from_state({**state, "learned": {**learned, **wrong}})
    with pytest.raises(ValueError, match="strength: expected 0 or more"):
        ClassRegionTemperature(strength=-1)
    for bands in ([], [2, 1], [0, 1], [-1]):
        with pytest.raises(ValueError, match="bands: expected positive"):
            ClassRegionTemperature(bands=bands)
    with pytest.raises(ValueError, match="voxel size for 3 axes"):
        Regions().of(torch.zeros(1, 2, 2, 2, dtype=torch.long), (1.0, 1.0))


def doubt_of(x):
    """Of one case ``(1, K, *S)``, by its definition."""
    p = x.double().softmax(1)
    predicted = p.argmax(1)
    near = (predicted > 0) | (Regions().of(predicted) == 1)
    return float(torch.log((1 - p.amax(1))[near].mean()))


def cases_of_doubt(slope, number=10, seed=0, shape=(6, 16, 16)):
    """Cases of different doubt, whose labels come of temperatures that follow it.

    Returns:
        cases; their doubts; the centre.
    """
    generator = np.random.default_rng(seed)
    spread = np.exp(generator.normal(0, 0.4, number))
    logits = [
        float(factor) * volumes(TRUE, number=1, shape=shape, seed=seed * 100 + i)[0][0]
        for i, factor in enumerate(spread)
    ]
    doubts = np.array([doubt_of(x) for x in logits])
    data = []
    for x, doubt in zip(logits, doubts, strict=True):
        predicted = x.argmax(1)
        t = torch.tensor(TRUE, dtype=torch.float64)[predicted, Regions().of(predicted)]
        t = t * math.exp(slope * (doubt - doubts.mean()))
        p = torch.softmax(x / t[:, None], 1).movedim(1, -1).reshape(-1, 3)
        draw = torch.from_numpy(generator.random((len(p), 1)))
        data.append((x, (p.cumsum(1) < draw).sum(1).clamp(max=2).view(predicted.shape)))
    return data, doubts


@pytest.mark.parametrize("slope", [-0.75, 0.0, 0.75])
def test_recovers_how_temperatures_follow_the_doubt(slope):
    data, _ = cases_of_doubt(slope)
    fitted = ClassRegionTemperature(per_case=True).fit(data)
    assert abs(fitted.slope - slope) <= 0.25
    alike = ClassRegionTemperature().fit(data)
    assert (fitted.facts["nll_after"] < alike.facts["nll_after"] - 1e-4) == (slope != 0)
    new, _ = cases_of_doubt(slope, seed=7)
    losses = [
        np.mean([float(-p.apply(x).log().gather(1, y[:, None]).mean()) for x, y in new])
        for p in (fitted, alike)
    ]
    assert losses[0] < losses[1] + (2e-3 if slope == 0 else -1e-3)


def test_a_case_has_the_stated_temperatures():
    data, doubts = cases_of_doubt(0.75)
    fitted = ClassRegionTemperature(per_case=True, strength=1e-4).fit(data)
    assert fitted.slope > 0
    sure, unsure, nothing = 9 * data[0][0], 0.1 * data[0][0], data[0][0].clone()
    nothing[:, 0] += 100
    assert not doubts.min() < doubt_of(sure) < doubts.max()
    expected = [*doubts, doubts.min(), doubts.max(), doubts.mean()]
    for x, doubt in zip([*(x for x, _ in data), sure, unsure, nothing], expected, strict=True):
        predicted = x.argmax(1)
        t = torch.from_numpy(fitted.temperatures)[predicted, Regions().of(predicted)]
        t = t * math.exp(fitted.slope * (doubt - doubts.mean()))
        close(fitted.apply(x), torch.softmax(x / t[:, None], 1), rtol=1e-9)
        close(fitted.apply(x.float()), torch.softmax(x / t[:, None], 1), rtol=1e-4, atol=1e-6)
        assert torch.equal(fitted.apply(x).argmax(1), predicted)
    both = torch.cat([data[0][0], data[1][0]])
    close(fitted.apply(both)[1:], fitted.apply(data[1][0]))


def test_a_doubt_is_exact_where_the_network_is_sure(monkeypatch):
    """1 - max p below the rounding of 1, in chunks, without the predicted background's inside."""
    monkeypatch.setattr("segcal.posthoc.rows.CHUNK", 7)
    x = torch.zeros(2, 30)
    x[1, :10], x[0, 10:20], x[0, 20:] = 30.0, 40.0, 1.0
    groups = torch.tensor([2] * 10 + [1] * 10 + [0] * 10)
    fitted = ClassRegionTemperature(per_case=True)
    fitted._doubt = module._Doubt(-1.0, 0.0, -100.0, 0.0)
    wrong = 10 * math.exp(-30) + 10 * math.exp(-40)
    close(fitted._scale_of(x, groups), wrong / 20, rtol=1e-6)
    of_bands = ClassRegionTemperature(per_case=True, bands=[1, 2])  # the inside is region 2
    of_bands._doubt = fitted._doubt
    close(of_bands._scale_of(x, torch.where(groups == 0, 2, groups + 2)), wrong / 20, rtol=1e-6)


def test_a_doubt_is_that_of_the_whole_case():
    """Whichever voxels have a label, or a softmax, or belong to the sample."""
    data, doubts = cases_of_doubt(0.75, number=11)
    calibrator = ClassRegionTemperature(per_case=True)
    for among in (None, 4000):  # so many cases that two of three voxels are kept
        (rows,) = calibrator.collect(data, among=among)
        close(rows.doubts, doubts)
    assert len(rows) < 0.7 * sum(y.numel() for _, y in data)
    few = [(x.clone(), torch.full_like(y, 9)) for x, y in data]
    for (x, y), (_, whole) in zip(few, data, strict=True):
        y[:, 2, 4:12, 4:12] = whole[:, 2, 4:12, 4:12]
        x[:, :, -1, -1, -1] = torch.nan  # a voxel without a label
    (rows,) = calibrator.collect(few, 9)
    close(rows.doubts, doubts, rtol=0.01)
    few[0][0][:] *= 9  # far more certain than the others
    few[0][1][:] = 9
    fitted = calibrator.fit(few, ignore_index=9)  # a case without labels is no case of the fit
    close(fitted.state()["learned"]["doubt"]["centre"], doubts[1:].mean(), rtol=0.01)


def test_the_slope_is_the_best_in_cross_validation():
    """Against refits to the patients of each fold, without splines."""
    data, doubts = cases_of_doubt(0.75)
    away = doubts - doubts.mean()
    fitted = ClassRegionTemperature(per_case=True, strength=1e-3).fit(data)

    def left_out(slope):
        moved = [(x * math.exp(-slope * a), y) for (x, y), a in zip(data, away, strict=True)]
        total = 0.0
        for fold in range(5):
            inside = [one for i, one in enumerate(moved) if i % 5 != fold]
            one = ClassRegionTemperature(strength=1e-3).fit(inside)
            for i in range(fold, len(moved), 5):
                x, y = moved[i]
                total -= float(one.apply(x).log().gather(1, y[:, None]).sum())
        return total

    values = {slope: left_out(slope) for slope in np.arange(-2, 9) / 8}
    assert fitted.slope == min(values, key=values.get)


def test_few_patients_or_samples_have_no_slope():
    data, _ = cases_of_doubt(0.75, number=12)
    for cases in (data[:9], [(x[0].flatten(1).T, y.flatten()) for x, y in data]):
        fitted = ClassRegionTemperature(per_case=True).fit(cases)
        alike = ClassRegionTemperature().fit(cases)
        assert fitted.slope == 0
        assert np.array_equal(fitted.temperatures, alike.temperatures)
        assert torch.equal(fitted.apply(cases[0][0]), alike.apply(cases[0][0]))
    twelve = ClassRegionTemperature(per_case=True)
    (rows,) = twelve.collect(data)
    assert twelve.fit_rows([rows.of_patients([0, 0, 1, 1, 2, 2, *range(3, 9)])]).slope == 0
    assert twelve.fit_rows([rows.of_patients([0, 0, 1, 1, *range(2, 10)])]).slope > 0


def test_a_slope_is_saved_and_a_damaged_one_refused():
    data, _ = cases_of_doubt(0.75)
    fitted = ClassRegionTemperature(per_case=True).fit(data)
    again = ClassRegionTemperature.from_state(fitted.state())
    assert again.slope == fitted.slope > 0
    assert torch.equal(again.apply(data[0][0]), fitted.apply(data[0][0]))
    state = fitted.state()
    learned = {**state["learned"], "doubt": {**state["learned"]["doubt"], "low": math.nan}}
    with pytest.raises(ValueError, match="finite numbers of the doubt"):
        ClassRegionTemperature.from_state({**state, "learned": learned})
    with pytest.raises(ValueError, match="damaged"):
        ClassRegionTemperature.from_state({**state, "learned": {**learned, "doubt": {"a": 1}}})
