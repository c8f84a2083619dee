"""Local temperatures where they are known, and on volumes of every kind."""

from __future__ import annotations

import base64
import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from segcal.posthoc import local
from segcal.posthoc.calibrator import HeldOut
from segcal.posthoc.local import LocalTemperature
from segcal.posthoc.temperature import Temperature
from tests.conftest import close


def halves(shape=(32, 36), number=6, k=3, seed=0, image=True):
    """Logits that are as they should be on the left, and three times too large on the right."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        right = torch.zeros(shape)
        right[..., shape[-1] // 2 :] = 1
        x = 2 * torch.randn((1, k, *shape), generator=generator)
        flat = torch.softmax(x, 1).movedim(1, -1).reshape(-1, k)
        y = torch.multinomial(flat, 1, generator=generator).view(1, *shape)
        picture = 5 + 100 * right[None, None] if image else None
        found.append(HeldOut(x * (1 + 2 * right), y, image=picture))
    return found


def nll(calibrator, cases):
    parts = [
        F.nll_loss(calibrator.apply(case.logits, image=case.image).log(), case.labels)
        for case in cases
    ]
    return float(sum(parts) / len(parts))


def true_nll(cases):
    """Of logits as they were before the right halves were made too large."""
    parts = []
    for case in cases:
        temperature = 1 + 2 * (case.image - 5) / 100
        parts.append(F.cross_entropy(case.logits / temperature, case.labels))
    return float(sum(parts) / len(parts))


@pytest.fixture(scope="module")
def fitted():
    return LocalTemperature().fit(halves())


def test_finds_temperatures_that_the_image_tells(fitted):
    others = halves(seed=1)
    best, one = true_nll(others), nll(Temperature().fit(halves()), others)
    assert nll(fitted, others) - best < 0.3 * (one - best)
    assert fitted.facts["nll_after"] < fitted.facts["nll_before"]
    assert fitted.facts["sampled"] == fitted.facts["voxels"] == 6 * 32 * 36


def test_finds_temperatures_that_the_logits_tell():
    shape = (48, 48)
    cases, others = halves(shape, image=False), halves(shape, seed=1, image=False)
    one = Temperature().fit(cases)
    assert nll(LocalTemperature().fit(cases), others) < nll(one, others) - 0.01


@pytest.mark.parametrize("shape", [(40,), (9, 12), (6, 7, 8), (3, 4, 5), (1, 2, 1)])
def test_the_prediction_stays_and_seeds_repeat(shape):
    cases = halves(shape, max(4, 600 // math.prod(shape)), image=len(shape) != 1)
    x, image = cases[0].logits, cases[0].image
    fits = [LocalTemperature(steps=60, seed=seed).fit(cases) for seed in (3, 3, 4)]
    p, again, other = (c.apply(x, image=image) for c in fits)
    assert torch.equal(p, again)
    assert not torch.equal(p, other)
    assert torch.equal(p.argmax(1), x.argmax(1))
    assert p.dtype == torch.float32
    assert fits[0].apply(x.double(), image=image).dtype == torch.float64


@pytest.mark.parametrize(("shape", "edge"), [((40,), 11), ((13, 9), 5), ((6, 7, 8), 3)])
def test_rows_whole_volumes_and_tiles_agree(monkeypatch, shape, edge):
    cases = halves(shape, 3)
    found = LocalTemperature(steps=50).fit(cases)
    x, image = cases[1].logits, cases[1].image
    whole = found.apply(x, image=image)
    assert found.facts["nll_after"] == pytest.approx(nll(found, cases), rel=1e-5)
    monkeypatch.setitem(local.TILE, len(shape), edge)
    close(found.apply(x, image=image), whole, rtol=1e-5)


def test_weights_of_zero_are_a_temperature_of_one(fitted):
    (case,) = halves(number=1, seed=2)
    state = fitted.state()
    count = len(base64.b64decode(state["learned"]["weight"])) // 4
    state["learned"]["weight"] = base64.b64encode(bytes(4 * count)).decode()
    state["learned"]["bias"] = [0.0] * 9
    p = LocalTemperature.from_state(state).apply(case.logits, image=case.image)
    close(p, torch.softmax(case.logits, 1), rtol=1e-5)


def test_json_round_trip(fitted):
    (case,) = halves(number=1, seed=2)
    again = LocalTemperature.from_state(json.loads(json.dumps(fitted.state())))
    assert again.state() == fitted.state()
    expected = fitted.apply(case.logits, image=case.image)
    assert torch.equal(again.apply(case.logits, image=case.image), expected)


def test_a_shift_of_the_logits_is_irrelevant(fitted):
    (case,) = halves(number=1, seed=2)
    expected = fitted.apply(case.logits, image=case.image)
    close(fitted.apply(case.logits + 50, image=case.image), expected, rtol=1e-3)


def test_the_image_is_needed_where_the_fit_had_one(fitted):
    cases = halves()
    x, y, _, image = cases[0]
    for wrong, message in (
        (lambda: fitted.apply(x), r"image: expected \(N, 1, \*S\) .* got None"),
        (lambda: fitted.apply(x, image=image[:, [0, 0]]), r"expected \(N, 1, \*S\)"),
        (lambda: fitted.apply(x, image=image[..., :-1]), r"\(N, C, \*S\) of logits"),
        (lambda: fitted.apply(x[..., 0], image=image[..., 0]), "expected 2 spatial axes"),
        (lambda: LocalTemperature().fit([*cases, (x, y)]), "image: expected .* got None"),
        (lambda: LocalTemperature().fit([*cases, (x[..., 0], y[..., 0])]), "2 spatial axes"),
        (lambda: LocalTemperature().fit(x[:, :, 0, 0], y[:, 0, 0]), "1 to 3 spatial axes"),
        (lambda: LocalTemperature(steps=0), "steps: expected 1 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
    blind = LocalTemperature(steps=25).fit([(x, y), *cases])
    assert torch.equal(blind.apply(x, image=image), blind.apply(x))


def test_one_case_stops_early_and_says_so():
    with pytest.warns(UserWarning, match="one case"):
        found = LocalTemperature().fit(halves(number=1))
    assert found.facts["nll_after"] < found.facts["nll_before"]
    assert "100 steps" in found.facts["notes"][0]


def test_what_does_not_help_the_cases_held_back_is_not_taken():
    cases = halves((8, 8), 5)
    held = local._parted(torch.arange(5), torch.Generator().manual_seed(0))[1]
    for i, case in enumerate(cases):
        right = case._replace(labels=case.logits.argmax(1))
        cases[i] = right if i in held else case._replace(logits=4 * case.logits)
    with pytest.warns(UserWarning, match="held back"):
        found = LocalTemperature(steps=25).fit(cases)
    x = cases[0].logits
    assert not found.improved
    assert found.facts["nll_after"] == found.facts["nll_before"]
    assert torch.equal(found.apply(x), torch.softmax(x, 1))
    assert torch.equal(LocalTemperature.from_state(found.state()).apply(x), found.apply(x))


def test_per_channel():
    cases = [
        case._replace(labels=F.one_hot(case.labels, 3).movedim(-1, 1))
        for case in halves((20, 24), 4)
    ]
    found = LocalTemperature(per_channel=True, steps=100).fit(cases)
    assert len(found.channels) == found.facts["num_classes"] == 3
    assert found.facts["nll_after"] < found.facts["nll_before"]
    x, image = cases[0].logits, cases[0].image
    p = found.apply(x, image=image)
    assert torch.equal(p > 0.5, x > 0)
    again = LocalTemperature.from_state(json.loads(json.dumps(found.state())))
    assert torch.equal(again.apply(x, image=image), p)


def test_a_sample_of_a_large_case_is_as_large_as_said(monkeypatch):
    monkeypatch.setattr(local, "MOST_NUMBERS", 4 * 400 * 25 * 4)  # 400 voxels of each of 4 cases
    found = LocalTemperature(steps=50).fit(halves((64, 64), 4))
    assert found.facts["voxels"] == 4 * 64 * 64
    assert 4 * 300 < found.facts["sampled"] < 4 * 450
    assert found.facts["nll_error"] > 0


def test_a_damaged_state_is_refused(fitted):
    state = fitted.state()
    learned = state["learned"]
    for change, message in (
        ({"weight": "AAAA!"}, "weights as base64"),
        ({"weight": "AAAA" * 4}, "weights, got"),
        ({"axes": 4}, "1 to 3 axes"),
        ({"mean": [0.0]}, "as mean"),
        ({"std": [0.0] * 4}, "positive"),
        ({"bias": [float("nan")] * 9}, "as bias"),
        ({"weight": base64.b64encode(np.full(900, np.nan, "<f4").tobytes())}, "finite"),
    ):
        with pytest.raises(ValueError, match=f"state: .*{message}"):
            LocalTemperature.from_state({**state, "learned": {**learned, **change}})


def test_values_of_the_image_that_are_unknown_are_as_the_mean():
    cases = halves((12, 12), 4)
    blank = [case._replace(image=torch.full_like(case.image, torch.nan)) for case in cases]
    found = LocalTemperature(steps=40).fit(blank)
    x, image = cases[0].logits, blank[0].image
    assert torch.equal(found.apply(x, image=image), found.apply(x, image=torch.zeros_like(image)))
    assert LocalTemperature.from_state(found.state()).state() == found.state()


def test_fits_where_no_gradients_are_wanted():
    expected = LocalTemperature(steps=40).fit(halves((12, 12), 4)).state()
    with torch.inference_mode():
        assert LocalTemperature(steps=40).fit(halves((12, 12), 4)).state() == expected
