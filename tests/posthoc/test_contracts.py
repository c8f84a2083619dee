"""What every post-hoc method owes its users; methods are found by their configs."""

from __future__ import annotations

import json

import pytest
import torch

from segcal.components import build_component
from segcal.posthoc.calibrator import Calibrator
from segcal.recipes import load_component, names
from tests.conftest import close

pytestmark = pytest.mark.parametrize("name", names("posthoc"))


def method(name, **arguments):
    found = build_component(load_component("posthoc", name), **arguments)
    assert isinstance(found, Calibrator)
    return found


def cases(shape=(6, 5), k=3, number=3, dtype=torch.float64):
    """Overconfident logits of several cases, with an ignored voxel in each."""
    generator = torch.Generator().manual_seed(7)
    found = []
    for _ in range(number):
        x = torch.randn((1, k, *shape), generator=generator, dtype=torch.float64)
        p = torch.softmax(x, 1).movedim(1, -1).flatten(0, -2)
        y = torch.multinomial(p, 1, generator=generator).view(1, *shape)
        y.flatten()[0] = 9
        found.append((3 * x.to(dtype), y))
    return found


@pytest.mark.parametrize("shape", [(7,), (6, 5), (3, 4, 5)])
def test_probabilities_that_fit_better(name, shape):
    data = cases(shape)
    calibrator = method(name).fit(data, ignore_index=9)
    facts = calibrator.facts
    assert facts["nll_after"] <= facts["nll_before"]
    assert (facts["num_classes"], facts["cases"]) == (3, 3)
    assert facts["voxels"] == sum(int((y != 9).sum()) for _, y in data)
    p = calibrator.apply(data[0][0])
    assert p.shape == data[0][0].shape
    assert ((p >= 0) & (p <= 1)).all()
    close(p.sum(1), torch.ones_like(p[:, 0]))


def test_one_tensor_or_its_cases_or_an_iterator(name):
    data = cases()
    together = method(name).fit(
        torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]), ignore_index=9
    )
    apart = method(name).fit(data, ignore_index=9)
    once = method(name).fit(iter(data), ignore_index=9)
    for other in (apart, once):
        close(other.apply(data[0][0]), together.apply(data[0][0]), rtol=1e-8)


def test_ignored_voxels_are_irrelevant(name):
    data = cases()
    changed = [(torch.where((y == 9)[:, None], 50 * x.sign(), x), y) for x, y in data]
    probe = data[0][0]
    expected = method(name).fit(data, ignore_index=9).apply(probe)
    assert torch.equal(method(name).fit(changed, ignore_index=9).apply(probe), expected)


def test_state_is_json_and_continues_identically(name):
    data = cases()
    calibrator = method(name).fit(data, ignore_index=9)
    again = type(calibrator).from_state(json.loads(json.dumps(calibrator.state())))
    assert again.facts == calibrator.facts
    assert torch.equal(again.apply(data[1][0]), calibrator.apply(data[1][0]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_in_full_precision_out(name, dtype):
    data = cases(dtype=dtype)
    p = method(name).fit(data, ignore_index=9).apply(data[0][0])
    assert p.dtype == torch.float32
    extreme = (1e3 * data[0][0].sign()).to(dtype)
    assert torch.isfinite(method(name).fit(data, ignore_index=9).apply(extreme)).all()


def test_a_class_that_never_occurs(name):
    data = [(x, torch.where(y == 2, 1, y)) for x, y in cases()]
    assert torch.isfinite(method(name).fit(data, ignore_index=9).apply(data[0][0])).all()


def test_what_does_not_fit_is_refused(name):
    data = cases()
    (x, y), fitted = data[0], method(name).fit(data, ignore_index=9)
    for wrong, message in (
        (lambda: method(name).apply(x), "not fitted"),
        (lambda: fitted.apply(x[:, :2]), r"expected \(N, 3, \*S\)"),
        (lambda: method(name).fit(x), "labels: expected integers"),
        (lambda: method(name).fit(data, y), "expected None"),
        (lambda: method(name).fit(x, torch.full_like(y, 9), 9), "at least one voxel"),
        (lambda: method(name).fit([], ignore_index=9), "at least one voxel"),
        (lambda: method(name).fit(data), "case 0: labels"),
        (lambda: method(name).fit([*data, (x[:, :2], y)], ignore_index=9), "case 3: 2 classes"),
        (lambda: method(name).fit(x * torch.nan, y, 9), "expected finite"),
        (lambda: type(fitted).from_state({**fitted.state(), "method": "Other"}), "'Other'"),
        (lambda: type(fitted).from_state({**fitted.state(), "version": 0}), "version 0"),
        (lambda: type(fitted).from_state(None), "expected a dict"),
        (lambda: type(fitted).from_state({**fitted.state(), "learned": {}}), "damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()
