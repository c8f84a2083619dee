"""The kernel for GPUs, run by Triton's interpreter: it computes what the loops for CPUs compute.

``test_cuda.py`` runs this file in a process of its own, since the interpreter has to be chosen
before Triton is imported: ``TRITON_INTERPRET=1 pytest tests/sweep/interpreted_cuda.py``.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from torch.utils._python_dispatch import TorchDispatchMode

from segcal import late_checks, tensors
from segcal.sweep import cpu, cuda, fused
from segcal.sweep.fused import _run
from segcal.sweep.terms import NOTHING, ConfidenceTerm, CrossEntropyTerm, Residual, Together
from tests.conftest import close

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in unused lanes
FUNCTIONS = ("phr", "p2", "p3", "relu")
SHAPES = ("abs", "upper", "lower")
PADDINGS = ("replicate", "background", "renormalize", "zeros")
CPU = {"run": cpu.run, "run_confidence": cpu.run_confidence}


def residual(k, *, function="phr", shape="abs", regions=1, seed=5, **arguments):
    r = regions
    draw = torch.Generator().manual_seed(seed)
    lam, rho = (torch.rand(r, k, generator=draw, dtype=torch.float64) for _ in range(2))
    margins = tuple(0.5 + 0.7 * i for i in range(r))
    arguments = {"patch": (3, "replicate"), "clip": (0.1, 1.5), **arguments}
    return Residual(lam, 2 * rho, function, shape, margins, **arguments)


def data(space, k=3, n=2, dtype=torch.float64, ignore=False):
    draw = torch.Generator().manual_seed(len(space) + k)
    logits = 4 * torch.randn(n, k, *space, generator=draw, dtype=torch.float64)
    logits[..., ::5] = logits[..., ::5].round()  # ties, and residuals that are 0
    coarse = torch.randint(0, k, (n, *(s // 2 + 1 for s in space)), generator=draw)
    for axis in range(1, len(space) + 1):
        coarse = coarse.repeat_interleave(2, axis)
    labels = coarse[(slice(None), *(slice(s) for s in space))].clone()
    if ignore:
        labels.flatten()[::7] = 99
    return logits.to(dtype), labels


def compare(monkeypatch, logits, labels, term, ce=None, gradient=True, statistics=True):
    """Run both on the arguments that the differentiable function makes; return the values."""
    found = []
    name = "run_confidence" if isinstance(term, ConfidenceTerm) else "run"

    def both(*arguments):
        found.extend(run(*arguments) for run in (getattr(cuda, name), CPU[name]))
        return found[0]

    monkeypatch.setattr(cpu, name, both)
    _run(
        logits,
        labels,
        Together(term, ce),
        fused.Weights(1.3, 0.7),
        gradient=gradient,
        statistics=statistics,
    )
    exact = logits.dtype == torch.float64
    rtol = 1e-10 if exact else 2e-5
    for a, b in zip(*found, strict=True):
        if b is None:
            assert a is None
            continue
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        atol = 1e-12 if exact else 2e-7 * max(float(b.abs().max()), 1e-3)
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, equal_nan=True)
    return found[0]


@pytest.mark.parametrize("regions", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_penalty(monkeypatch, function, shape, regions):
    """On proportions and on distances, with and without cross-entropy and ignored voxels."""
    for ignore, from_largest in itertools.product((True, False), repeat=2):
        logits, labels = data((5, 7), n=1, ignore=ignore)
        ignored = {"ignore_index": 99} if ignore else {}
        term = residual(3, function=function, shape=shape, regions=regions, **ignored)
        if from_largest:
            if regions == 2:
                continue
            term = replace(term, patch=None, scale=1.5)
        ce = CrossEntropyTerm(3, class_weight=torch.tensor([0.2, 1.0, 3.0]), **ignored)
        compare(monkeypatch, logits, labels, term, ce if ignore == from_largest else None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("space", [(37,), (6, 11), (3, 4, 5)])
@pytest.mark.parametrize("size", [3, (1, 3, 5)])
def test_patches(monkeypatch, size, space, padding, dtype):
    size = size if isinstance(size, int) else size[-len(space) :]
    logits, labels = data(space, k=4, dtype=dtype, ignore=True)
    term = residual(
        4, function="p2", regions=2, patch=(size, padding), ignore_index=99, divisor=2.0
    )
    compare(monkeypatch, logits, labels, term, CrossEntropyTerm(4, ignore_index=99))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("k", "size", "space"),
    [
        (2, 3, (3, 4, 5)),
        (4, 1, (6, 11)),
        (13, 3, (3, 4, 5)),
        (20, 3, (3, 4, 5)),
        (5, 13, (9, 9)),
        (70, 9, (40,)),
    ],
)
@pytest.mark.parametrize("from_largest", [False, True])
def test_any_number_of_classes_and_neighbours(monkeypatch, k, size, space, dtype, from_largest):
    """Counts that fit 32 bits, 64 bits, and that need several rounds."""
    logits, labels = data(space, k=k, n=1, dtype=dtype)
    term = residual(k, regions=2, patch=(size, "zeros"))
    if from_largest:
        term = replace(residual(k), patch=None)
    compare(monkeypatch, logits, labels, term, CrossEntropyTerm(k))


@pytest.mark.parametrize("from_largest", [False, True])
def test_programs_take_several_blocks(monkeypatch, from_largest):
    logits, labels = data((7, 13), n=3)
    term = residual(3, patch=None) if from_largest else residual(3, regions=2)
    expected = compare(monkeypatch, logits, labels, term, CrossEntropyTerm(3))
    monkeypatch.setattr(cuda, "BLOCK", 32)  # 3 for each image
    monkeypatch.setattr(cuda, "PROGRAMS", 4)
    found = compare(monkeypatch, logits, labels, term, CrossEntropyTerm(3))
    for a, b in zip(found, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("ce", [None, CrossEntropyTerm(3)])
def test_only_what_is_wanted(monkeypatch, ce, gradient, statistics):
    logits, labels = data((5, 7))
    values, found, grad = compare(
        monkeypatch, logits, labels, residual(3), ce, gradient=gradient, statistics=statistics
    )
    assert (values[0] == 0) == (ce is None)
    assert bool(found.any()) == statistics
    assert (grad is None) != gradient


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits(monkeypatch, dtype):
    """Values far outside the range of the exponential, and constraints beyond the linear bound."""
    logits, labels = data((5, 7), dtype=dtype)
    logits[0, 0] *= 1e4
    logits[1] *= 1e6
    for function in ("phr", "p2", "relu"):
        compare(monkeypatch, logits, labels, residual(3, function=function), CrossEntropyTerm(3))


def test_all_voxels_ignored(monkeypatch):
    logits, labels = data((5, 7))
    labels[:] = 99
    term = residual(3, regions=2, ignore_index=99)
    values, found, grad = compare(
        monkeypatch, logits, labels, term, CrossEntropyTerm(3, ignore_index=99)
    )
    assert not values.any()
    assert not found.any()
    assert not grad.any()


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("from_largest", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_nan_is_not_hidden(monkeypatch, function, from_largest, k):
    logits, labels = data((5, 7), dtype=torch.float32)
    logits[1, k, 2, 3] = torch.nan
    term = residual(3, function=function, **({"patch": None} if from_largest else {}))
    monkeypatch.setattr(cpu, "run", cuda.run)
    values, found, _ = _run(
        logits,
        labels,
        Together(term, CrossEntropyTerm(3)),
        fused.Weights(),
        gradient=True,
        statistics=True,
    )
    assert values[:2].isnan().all()
    assert found[1, 0, k].isnan()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("from_largest", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_is_not_finite_is_that_of_the_loops_for_cpus(monkeypatch, function, from_largest, bad):
    for shape, k in itertools.product(SHAPES, range(2)):
        logits, labels = data((5, 7), n=1)
        logits[0, k, 2, 3] = bad
        term = residual(3, function=function, shape=shape)
        if from_largest:
            term = replace(term, patch=None, scale=1.5)
        compare(monkeypatch, logits, labels, term, CrossEntropyTerm(3))
        logits[0, :, 2, 3] = bad
        compare(monkeypatch, logits, labels, term, CrossEntropyTerm(3))
    compare(monkeypatch, logits, labels, confidence(3), CrossEntropyTerm(3))


@pytest.fixture
def on_gpu(monkeypatch):
    """Let all of the sweep be that for GPUs, from labels to the gradient."""
    monkeypatch.setattr(fused, "_backend", lambda _: cuda)
    monkeypatch.setattr(tensors, "LATE_DEVICES", {"cpu"})
    monkeypatch.setattr(late_checks, "_WATCHES", {})


@pytest.mark.parametrize("ignore_index", [None, 99, -1, 0])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int64])
def test_labels_are_read_as_on_the_cpu(monkeypatch, dtype, ignore_index):
    monkeypatch.setattr(cuda, "BLOCK", 32)
    monkeypatch.setattr(cuda, "PROGRAMS", 4)
    _, labels = data((7, 13), n=3)
    if ignore_index is not None:
        labels.flatten()[::7] = ignore_index % 256 if dtype == torch.uint8 else ignore_index
        if dtype == torch.uint8:
            ignore_index %= 256
    weight = torch.tensor([0.2, 1.0, 3.0])
    for class_weight in (None, weight, weight.double()):
        terms = Together(None, CrossEntropyTerm(3, ignore_index, class_weight))
        for some in (labels, torch.full_like(labels, ignore_index or 0), labels.mT):
            found, expected = (one.encode(some.to(dtype), 3, terms) for one in (cuda, cpu))
            assert torch.equal(found[0], expected[0])
            for a, b in zip(found[1:], expected[1:], strict=True):
                assert a.dtype == torch.float64
                if (expected[0] != NOTHING).any():
                    torch.testing.assert_close(a, b.expand_as(a), rtol=1e-12, atol=0)


def test_wrong_labels_do_not_count_and_are_told_by_a_later_call(on_gpu):
    logits, labels = data((5, 7))
    right = labels.clone()
    labels[0, 0, :2], labels[1, 2, 3] = 300, -4
    left_out = torch.where((labels < 0) | (labels > 2), 99, labels)
    found = [
        fused.sweep(logits, y, Together(residual(3, ignore_index=i), CrossEntropyTerm(3, i)))
        for y, i in ((labels, None), (left_out, 99))
    ]
    for a, b in zip(*found, strict=True):
        close(a, b)
    term = residual(3)
    with pytest.raises(ValueError, match="expected 0 to 2, got values from -4 to 300 in 3 voxels"):
        fused.sweep(logits, right, Together(term))
    fused.sweep(logits, right, Together(term))
    fused.sweep(logits, labels, Together(term))
    with pytest.raises(ValueError, match="in 3 voxels"):
        late_checks.raise_wrong_labels()


@pytest.mark.parametrize("factor", [1.0, 65536.0])
def test_gradient_is_scaled_where_it_lies(on_gpu, monkeypatch, factor):
    logits, labels = data((5, 7), dtype=torch.float32)
    x = logits.clone().requires_grad_()
    total = fused.sweep(x, labels, Together(residual(3), CrossEntropyTerm(3)))[0]
    kept = total.grad_fn.saved_tensors[0].data_ptr()
    found = [torch.autograd.grad(factor * total, x, retain_graph=True)[0] for _ in range(3)]
    assert found[0].data_ptr() == kept
    monkeypatch.undo()
    x = logits.clone().requires_grad_()
    total = fused.sweep(x, labels, Together(residual(3), CrossEntropyTerm(3)))[0]
    (expected,) = torch.autograd.grad(total, x)
    for one in found:
        torch.testing.assert_close(one, factor * expected, rtol=1e-5, atol=1e-9 * factor)


class Operations(TorchDispatchMode):
    """Counts operations that a GPU would launch; none may ask for a value."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "unique_dim"}
        if not function.is_view and "empty" not in name and name not in {"detach", "_unsafe_view"}:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("term", ["residual", "confidence"])
def test_a_step_asks_for_no_value_and_launches_little(on_gpu, monkeypatch, term):
    """Kernels are left out of the count: they are four."""
    made = {"residual": residual(3), "confidence": ConfidenceTerm(torch.ones(2, 3).double(), 8.0)}
    logits, labels = data((5, 7), dtype=torch.float32)
    x = logits.requires_grad_()
    for name in ("_sweep", "sweep_confidence", "encode_labels", "weigh_labels", "scale_gradient"):
        monkeypatch.setattr(cuda, name, Idle())
    with Operations() as seen:
        total = fused.sweep(x, labels, Together(made[term], CrossEntropyTerm(3)))[0]
        torch.autograd.grad(total, x)
    assert len(seen.names) <= {"residual": 28, "confidence": 40}[term], seen.names


class Idle:
    """Stands for a kernel, whose interpreter copies what a GPU would not."""

    def __getitem__(self, grid):
        return lambda *arguments, **options: None


def confidence(k, **arguments):
    draw = torch.Generator().manual_seed(5)
    lam = torch.rand(2, k, generator=draw, dtype=torch.float64) - 0.1
    return ConfidenceTerm(lam, **{"clip": 8.0, **arguments})  # which some voxels are beyond


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("k", [2, 4, 20])
@pytest.mark.parametrize("space", [(37,), (6, 11), (3, 4, 5)])
def test_log_odds(monkeypatch, space, k, dtype):
    """With and without cross-entropy and ignored voxels; of tied logits the first is predicted."""
    for ignore in (True, False):
        logits, labels = data(space, k=k, dtype=dtype, ignore=ignore)
        ignored = {"ignore_index": 99} if ignore else {}
        weight = torch.rand(k, generator=torch.Generator().manual_seed(3))
        for ce in (None, CrossEntropyTerm(k, class_weight=weight, **ignored)):
            compare(monkeypatch, logits, labels, confidence(k, **ignored), ce)
        flat = logits.flatten(2)
        assert torch.equal(cuda.largest_class(flat), cpu.largest_class(flat))


def test_log_odds_over_several_blocks(monkeypatch):
    logits, labels = data((7, 13), n=3)
    expected = compare(monkeypatch, logits, labels, confidence(3), CrossEntropyTerm(3))
    monkeypatch.setattr(cuda, "BLOCK", 32)
    monkeypatch.setattr(cuda, "PROGRAMS", 4)
    found = compare(monkeypatch, logits, labels, confidence(3), CrossEntropyTerm(3))
    for a, b in zip(found, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("statistics", [False, True])
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_odds_of_extreme_logits(monkeypatch, dtype, gradient, statistics):
    logits, labels = data((5, 7), dtype=dtype)
    logits[0, 0] *= 1e4
    logits[1] *= 1e6
    labels[0, 0] = 99
    values, found, grad = compare(
        monkeypatch, logits, labels, confidence(3, clip=30.0, ignore_index=99), None,
        gradient=gradient, statistics=statistics,
    )  # fmt: skip
    assert values.isfinite().all()
    assert bool(found.any()) == statistics
    assert (grad is None) != gradient


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_what_is_not_finite_is_not_hidden_in_log_odds(monkeypatch, k, bad):
    logits, labels = data((5, 7), dtype=torch.float32)
    logits[1, k, 2, 3] = bad
    for backend in (cuda, cpu):
        monkeypatch.setattr(
            cpu, "run_confidence", {cuda: cuda.run_confidence}.get(backend, CPU["run_confidence"])
        )
        values, found, _ = _run(
            logits, labels, Together(confidence(3), CrossEntropyTerm(3)), fused.Weights(),
            gradient=True, statistics=True,
        )  # fmt: skip
        assert values[:2].isnan().all()
        assert found[0].isnan().any()
