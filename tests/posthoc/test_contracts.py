"""What every post-hoc method owes its users; methods are found by their configs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from segcal.components import build_component
from segcal.posthoc.calibrator import Calibrator, PointwiseCalibrator, two_classes
from segcal.posthoc.rows import Rows
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
        (lambda: method(name).fit(x.softmax(1), y, 9), "expected logits, got values from 0 to 1"),
        (lambda: type(fitted).from_state({**fitted.state(), "method": "Other"}), "'Other'"),
        (lambda: type(fitted).from_state({**fitted.state(), "version": 0}), "version 0"),
        (lambda: type(fitted).from_state(None), "expected a dict"),
        (lambda: type(fitted).from_state({**fitted.state(), "learned": {}}), "damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


@pytest.fixture
def pointwise(name):
    """Skip methods that look at more than one voxel at a time."""
    if not isinstance(method(name), PointwiseCalibrator):
        pytest.skip("not pointwise")


def channels(shape=(6, 5), k=3, number=3):
    """Cases with overlapping labels per channel, and a voxel of one channel to be ignored."""
    generator = torch.Generator().manual_seed(8)
    found = []
    for _ in range(number):
        x = torch.randn((1, k, *shape), generator=generator, dtype=torch.float64)
        y = (torch.rand(x.shape, generator=generator, dtype=x.dtype) < x.sigmoid()).long()
        y[0, 1].flatten()[0] = 9
        found.append((3 * x, y))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_channels_are_two_classes_each(name):
    data = channels()
    calibrator = method(name, per_channel=True).fit(data, ignore_index=9)
    again = type(calibrator).from_state(json.loads(json.dumps(calibrator.state())))
    probe = data[0][0]
    p = calibrator.apply(probe)
    assert torch.equal(again.apply(probe), p)
    assert again.facts == calibrator.facts
    assert calibrator.facts["num_classes"] == 3
    for c in range(3):
        pairs = [(two_classes(x[:, c]), y[:, c]) for x, y in data]
        one = method(name).fit(pairs, ignore_index=9)
        close(p[:, c], one.apply(two_classes(probe[:, c]))[:, 1])
        close(p[:, c], 1 - one.apply(two_classes(probe[:, c]))[:, 0], rtol=1e-6)
    with pytest.raises(ValueError, match="like logits"):
        method(name, per_channel=True).fit(probe, data[0][1][:, 0])


@pytest.mark.usefixtures("pointwise")
def test_samples_without_spatial_axes(name):
    x, y = cases((300,), number=1)[0]
    samples = x[0].T.contiguous()
    calibrator = method(name).fit(samples, y[0], ignore_index=9)
    assert calibrator.facts["cases"] == calibrator.facts["voxels"] == 299
    p = calibrator.apply(samples)
    assert p.shape == samples.shape
    close(p.sum(1), torch.ones(300))


@pytest.mark.usefixtures("pointwise")
def test_rows_of_some_cases_are_these_cases(name):
    data = cases(number=5)
    calibrator = method(name)
    rows = calibrator.collect(data, 9)
    calibrator.fit_rows([one.of_cases([1, 3, 4]) for one in rows])
    expected = method(name).fit([data[i] for i in (1, 3, 4)], ignore_index=9)
    assert calibrator.facts == expected.facts
    assert torch.equal(calibrator.apply(data[0][0]), expected.apply(data[0][0]))


@pytest.mark.usefixtures("pointwise")
def test_the_order_of_classes_is_irrelevant(name):
    order = torch.tensor([2, 0, 1])
    data = cases()
    moved = [(x[:, order], torch.where(y == 9, 9, order.argsort()[y % 9])) for x, y in data]
    p = method(name).fit(data, ignore_index=9).apply(data[0][0])
    q = method(name).fit(moved, ignore_index=9).apply(moved[0][0])
    close(q, p[:, order], rtol=1e-6)


@pytest.mark.usefixtures("pointwise")
def test_a_weight_is_so_many_rows(name):
    calibrator = method(name)
    (rows,) = calibrator.collect(cases((40,)), 9)
    times = torch.arange(len(rows)) % 3 + 1
    weighted = replace(rows, weights=times.double())
    index = torch.arange(len(rows)).repeat_interleave(times)
    repeated = Rows(
        rows.logits[index], rows.labels[index], torch.ones(len(index), dtype=torch.float64),
        rows.groups[index], rows.cases[index], rows.num_cases, rows.num_regions,
        rows.doubts,
    )  # fmt: skip
    probe = cases((40,))[0][0]
    p, q = (method(name).fit_rows([one]).apply(probe) for one in (weighted, repeated))
    close(p, q, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_one_case(name):
    data = cases(number=1)
    calibrator = method(name).fit(data, ignore_index=9)
    assert calibrator.facts["cases"] == 1
    assert torch.isfinite(calibrator.apply(data[0][0])).all()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("size", [2.0, 30.0, 60_000.0])
def test_a_perfect_model(name, size):
    _, y = cases(number=1)[0]
    y = torch.where(y == 9, 0, y)
    x = size * torch.nn.functional.one_hot(y, 3).movedim(-1, 1).double()
    calibrator = method(name).fit(x, y)
    facts = calibrator.facts
    assert 0 <= facts["nll_after"] <= facts["nll_before"]
    p = calibrator.apply(x)
    assert torch.isfinite(p).all()
    assert torch.equal(p.argmax(1), y)
    assert facts["notes"] or facts["nll_before"] < 1e-9


@pytest.mark.usefixtures("pointwise")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_117_classes(name):
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.randn((2, 117, 6, 6, 6), generator=generator)
    y = torch.randint(0, 100, (2, 6, 6, 6), generator=generator)  # the others never occur
    y = torch.where(torch.rand(y.shape, generator=generator) < 0.7, x.argmax(1), y)
    calibrator = method(name)
    if name in ("matrix", "dirichlet"):
        with pytest.raises(ValueError, match=r"no more than 30 classes.*vector"):
            calibrator.fit(x, y)
        return
    p = calibrator.fit(x, y).apply(x)
    assert p.shape == x.shape
    assert torch.isfinite(p).all()
    close(p.sum(1), torch.ones_like(p[:, 0]), rtol=1e-5)
    assert len(json.dumps(calibrator.state())) < 1_000_000


@pytest.mark.usefixtures("pointwise")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
def test_the_likelihood_is_never_worse_and_what_is_said(name, factor):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn((1, 3, 12), generator=generator, dtype=torch.float64)
        p = torch.softmax(x[0].T, 1)
        y = torch.multinomial(p, 1, generator=generator).T
        calibrator = method(name).fit(factor * x, y)
        facts = calibrator.facts
        assert facts["nll_after"] <= facts["nll_before"]
        after = calibrator.apply(factor * x).gather(1, y[:, None]).log()
        close(facts["nll_after"], -after.mean(), rtol=1e-9)
        close(facts["nll_before"], torch.nn.functional.cross_entropy(factor * x, y))
        assert facts["nll_error"] == 0
