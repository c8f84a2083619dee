"""The fast path has what the readable version has; methods are found by their configs."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from segcal.components import accepted_arguments, target
from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.losses.ml1_ace import ML1ACE
from segcal.objective import Objective
from segcal.penalties.cals import CALS, CALSHR
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import Margin, margin
from segcal.penalties.nacl import NACL, nacl
from segcal.recipes import build, load_component, names
from segcal.sweep import cpu, fused, vector_math
from segcal.sweep.sharing import take
from segcal.sweep.terms import NOTHING, ConfidenceTerm, CrossEntropyTerm, Residual, Together
from tests.conftest import close
from tests.test_contracts import data, method

FUSED = [
    name
    for name in names("penalties")
    if "fused" in accepted_arguments(target(load_component("penalties", name)))
    and method("penalties", name).swept() is not None  # crac_bands has no fast path
]
pytestmark = pytest.mark.filterwarnings("ignore:function (p3|relu)")


def test_there_are_some():
    assert {"nacl", "crac", "margin", "cals", "cals_hr", "confidence"} <= set(FUSED)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", [(70,), (9, 21), (4, 5, 33), (2, 3, 1100)])
@pytest.mark.parametrize("name", FUSED)
def test_fused_equals_readable(name, shape, dtype):
    """Where there is a fast path, it has the readable version's value, gradient and multipliers."""
    logits, labels = data(shape, k=4, dtype=dtype, scale=12.0)
    labels.flatten()[::7] = 9
    found = []
    for fast in (True, False):
        term = method("penalties", name, k=4, ignore_index=9, fused=fast)
        x = logits.clone().requires_grad_()
        value = term(x, labels)
        (slope,) = torch.autograd.grad(value, x)
        term.observe(logits, labels)
        term.dual_step()
        buffers = [b.double() for _, b in term.named_buffers()]
        found.append([value.detach().double(), slope.double(), *buffers])
    exact = dtype == torch.float64
    for a, b in zip(*found, strict=True):
        close(a, b, rtol=1e-10 if exact else 2e-5, atol=1e-12 if exact else 1e-8)


@pytest.mark.parametrize("name", FUSED)
def test_fused_is_the_same_bits_on_any_number_of_threads(name):
    logits, labels = data((40, 64), n=9, dtype=torch.float32)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            x = logits.clone().requires_grad_()
            value = method("penalties", name)(x, labels)
            found.append((value.detach(), *torch.autograd.grad(value, x)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", FUSED)
def test_second_derivatives_of_fused_terms_are_refused_clearly(name):
    logits, labels = data()
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match="fused=False"):
        torch.autograd.grad(method("penalties", name)(logits, labels), logits, create_graph=True)
    value = method("penalties", name, fused=False)(logits, labels)
    torch.autograd.grad(value, logits, create_graph=True)


@pytest.mark.parametrize("constraint", ["abs", "signed"])
@pytest.mark.parametrize("penalty", ["phr", "p2", "p3", "relu"])
@pytest.mark.parametrize("padding", ["replicate", "background", "renormalize", "zeros"])
def test_every_option_of_crac(constraint, penalty, padding):
    """Value, gradient and multipliers of the sweep are those of the readable version."""
    logits, labels = data((3, 8, 6), k=4, scale=4.0)
    labels[:, 0, :2] = 9
    results = []
    for fast in (True, False):
        crac = CRaC(
            4, constraint=constraint, padding=padding, kernel_size=(1, 3, 5), ignore_index=9,
            clamp_elementwise=True, lambda_bounds=(1e-6, 2.0), rho0=1.0, rho_period=1, fused=fast,
            function=penalty,
        )  # fmt: skip
        crac.lam.copy_(torch.rand(2, 4, generator=torch.Generator().manual_seed(2)))
        for _ in range(2):
            crac.observe(logits, labels)
            crac.dual_step()
        x = logits.clone().requires_grad_()
        value = crac(x, labels)
        results.append((value.detach(), *torch.autograd.grad(value, x), crac.lam, crac.rho))
    for a, b in zip(*results, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("class_weight", [None, [0.2, 1.0, 3.0, 0.7]])
@pytest.mark.parametrize("name", FUSED)
def test_cross_entropy_and_a_penalty_share_a_sweep(name, class_weight, dtype):
    """Weighted sum, both values and the gradient are those of the two on their own."""
    logits, labels = data((5, 8, 33), k=4, dtype=dtype, scale=6.0)
    labels.flatten()[::7] = 9
    logits[0, 2, 1] += 40  # sure
    found = []
    for fast in (True, False):
        ce = CrossEntropy(4, class_weight=class_weight, ignore_index=9)
        penalty = method("penalties", name, k=4, ignore_index=9, fused=fast)
        objective = Objective({"ce": ce, "penalty": penalty}, {"ce": 0.7, "penalty": 1.3})
        assert objective.shares_sweep(logits) == fast
        x = logits.clone().requires_grad_()
        total, values = objective.loss_and_terms(x, labels)
        found.append([total.detach(), *values.values(), *torch.autograd.grad(total, x)])
    exact = dtype == torch.float64
    for a, b in zip(*found, strict=True):
        close(a, b, rtol=1e-10 if exact else 2e-5, atol=1e-12 if exact else 1e-8)


@pytest.mark.parametrize(
    ("margins", "patch"), [((), None), ((1.0, 2.0), None), ((1.0,) * 3, (3, "zeros"))]
)
def test_regions_are_those_of_a_patch(margins, patch):
    ones = torch.ones(len(margins), 3)
    with pytest.raises(ValueError, match="margins: expected 1"):
        Residual(ones, ones, "phr", "abs", margins, patch=patch)


@pytest.mark.parametrize("arguments", [{"distance": "l2"}, {"class_reduction": "sum"}])
def test_options_of_nacl(arguments):
    logits, labels = data((8, 6))
    close(NACL(3, **arguments)(logits, labels), NACL(3, fused=False, **arguments)(logits, labels))
    close(NACL(3, **arguments)(logits, labels), 0.1 * nacl(logits, labels, **arguments))


@pytest.mark.parametrize(
    "arguments",
    [{"power": 2}, {"power": 2, "two_sided": True}, {"class_reduction": "sum", "margin": 0.5}],
)
def test_options_of_margin(arguments):
    logits, labels = data((8, 6))
    x = logits.requires_grad_()
    values = [Margin(3, fused=fast, **arguments)(x, labels) for fast in (True, False)]
    close(values[0].detach(), values[1].detach())
    close(torch.autograd.grad(values[0], x)[0], torch.autograd.grad(values[1], x)[0])
    close(values[0].detach(), 0.1 * margin(x, labels, **arguments).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0, 1, 2])
def test_a_nan_is_seen_in_every_value(k, dtype):
    logits, labels = data((8, 6), dtype=dtype)
    logits[1, k, 2, 3] = float("nan")
    for term in (CRaC(3), CALS(3), NACL(3), Margin(3), Confidence(3)):
        objective = Objective({"ce": CrossEntropy(3), "penalty": term})
        total, values = objective.loss_and_terms(logits, labels)
        assert torch.isnan(torch.stack([total, *values.values()])).all()


def test_tied_logits_share_the_gradient():
    labels = torch.zeros(1, 2, dtype=torch.int64)
    logits = torch.zeros(1, 3, 2, dtype=torch.float64)
    logits[0, 2] = -8
    x = logits.requires_grad_()
    slopes = [
        torch.autograd.grad(CALS(3, margin=2.0, lambda0=0.3, fused=fast)(x, labels), x)[0]
        for fast in (True, False)
    ]
    close(slopes[0], slopes[1])
    assert (slopes[0][0, :2] > 0).all()


def test_many_classes_and_long_rows():
    logits, labels = data((2, 1300), k=150, dtype=torch.float32)
    for name in ("crac", "nacl", "margin", "confidence"):
        results = []
        for fast in (True, False):
            x = logits.clone().requires_grad_()
            value = method("penalties", name, k=150, fused=fast)(x, labels)
            results.append((value.detach(), *torch.autograd.grad(value, x)))
        for a, b in zip(*results, strict=True):
            close(a, b, rtol=1e-5, atol=1e-9)


def test_what_the_sweep_cannot_take_goes_to_the_readable_version(monkeypatch):
    """More classes than a byte has codes, larger patches, other kernels: the same interface."""
    monkeypatch.setattr("segcal.penalties.nacl.sweep", None)
    logits, labels = data((3, 3), k=260)
    assert NACL(260)(logits, labels) > 0
    logits, labels = data((3, 20))
    for arguments in ({"kernel_size": 17}, {"kernel": "svls"}, {"space": "softmax"}):
        assert NACL(3, **arguments)(logits, labels) > 0


@pytest.mark.parametrize("padding", ["replicate", "background"])
def test_any_layout_of_the_labels(padding):
    """Transposed, channels last, of any integer type."""
    logits, labels = data((6, 8), k=4)
    crac = [CRaC(4, padding=padding, lambda0=0.3, fused=fast) for fast in (True, False)]
    other = labels.transpose(1, 2).contiguous().transpose(1, 2)
    expected = crac[1](logits, labels)
    for y in (other, labels.to(torch.uint8), other.to(torch.int16)):
        close(crac[0](logits, y), expected)
        crac[0].observe(logits, y)
        crac[1].observe(logits, labels)
        crac[0].dual_step()
        crac[1].dual_step()
        close(crac[0].lam, crac[1].lam)
        expected = crac[1](logits, labels)


@pytest.mark.parametrize("ignore_index", [None, 0, 77])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_labels_of_several_blocks_are_counted(dtype, ignore_index):
    labels = torch.randint(0, 5, (3, 50_000), generator=torch.Generator().manual_seed(0))
    labels[labels == 3] = 2  # a class that does not occur
    labels[:, 1000:2000] = 0 if ignore_index is None else ignore_index
    weight = torch.tensor([0.1, 0.5, 2.0, 7.0, 0.3])
    valid = labels != ignore_index if ignore_index is not None else torch.ones_like(labels) > 0
    for class_weight in (None, weight):
        terms = Together(None, CrossEntropyTerm(5, ignore_index, class_weight))
        codes, per_voxel, of_classes = cpu.encode(labels.to(dtype), 5, terms)
        assert torch.equal(codes.long(), torch.where(valid, labels, NOTHING))
        assert per_voxel == 1 / valid.sum().double()
        each = torch.ones(5).double() if class_weight is None else weight.double()
        close(of_classes, each / each[labels[valid]].sum(), rtol=1e-14, atol=0)
    wrong = 2**40 + 1 if dtype == torch.int64 else 5  # its last byte alone would be a class
    labels[-1, -1] = wrong
    with pytest.raises(ValueError, match=rf"got \[{wrong}\] in 1 voxels"):
        cpu.encode(labels.to(dtype), 5, terms)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_half_precision(name, dtype):
    """Rounded logits often lie exactly on a margin."""
    logits, labels = data((9, 21), k=4, dtype=torch.float32, scale=20.0)
    results = []
    for fast in (True, False):
        term = method("penalties", name, k=4, fused=fast)
        x = logits.to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = term(x, labels)
            term.observe(x.detach(), labels)
        term.dual_step()
        slope = torch.autograd.grad(value, x)[0]
        assert value.dtype == torch.float32
        assert slope.dtype == dtype
        results.append([value.detach(), slope, *(b.double() for b in term.buffers())])
    for a, b in zip(*results, strict=True):
        close(a, b, rtol=5e-3 if a.dtype == dtype else 2e-5, atol=1e-7)


def test_on_the_margin_the_slope_is_that_of_the_readable_version():
    labels = torch.zeros(1, 1, dtype=torch.long)
    for term in (Margin, CALSHR, CALS):
        slopes = []
        for fast in (True, False):
            x = torch.tensor([[[0.0], [-3.0]]], requires_grad=True)
            slopes.append(torch.autograd.grad(term(2, margin=3.0, fused=fast)(x, labels), x)[0])
        assert torch.equal(*slopes)


def test_any_layout_of_the_logits():
    logits, labels = data((5, 8, 6), dtype=torch.float32)
    expected = CRaC(3)(logits, labels)
    last = logits.to(memory_format=torch.channels_last_3d).requires_grad_()
    value = CRaC(3)(last, labels)
    assert torch.equal(value, expected)
    (slope,) = torch.autograd.grad(value, last)
    assert slope.shape == logits.shape
    padded = torch.zeros(2, 3, 5, 8, 9)
    padded[..., :6] = logits
    assert torch.equal(CRaC(3)(padded[..., :6], labels), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", FUSED)
def test_what_is_not_finite_is_as_in_the_readable_version(name, bad):
    logits, labels = data((9, 21), k=4)
    logits[0, 1, 3, 4] = bad
    values = [method("penalties", name, k=4, fused=fast)(logits, labels) for fast in (True, False)]
    if name == "confidence" and bad == torch.inf:  # odds that the readable version clips
        assert values[0].isnan()
        return
    torch.testing.assert_close(*values, equal_nan=True)
    if bad != -torch.inf:
        assert not values[0].isfinite()


@pytest.mark.parametrize("name", FUSED)
def test_nan_is_no_error(name):
    """Also where it is the first logit, and so the largest, which no logit equals."""
    logits, labels = data((9, 21), k=4)
    logits[0, 0, 3, 4] = torch.nan
    x = logits.requires_grad_()
    value = method("penalties", name, k=4)(x, labels)
    value.backward()
    assert value.isnan()
    x.grad[0, :, 3, 4] = 0
    assert x.grad.isfinite().all()


def test_scaled_and_repeated_backward():
    logits, labels = data((8, 6))
    x = logits.requires_grad_()
    value = CRaC(3, lambda0=0.5)(x, labels)
    (once,) = torch.autograd.grad(value, x, retain_graph=True)
    kept = once.clone()
    (scaled,) = torch.autograd.grad(8 * value, x, retain_graph=True)
    close(scaled, 8 * kept)
    (again,) = torch.autograd.grad(value, x)
    assert torch.equal(again, kept)
    assert torch.equal(once, kept)


def test_without_gradient_none_is_made(monkeypatch):
    asked = []
    run = cpu.run

    def spy(logits, codes, plan):
        asked.append(plan.gradient)
        return run(logits, codes, plan)

    monkeypatch.setattr(cpu, "run", spy)
    logits, labels = data((8, 6))
    CRaC(3)(logits, labels)
    with torch.no_grad():
        CRaC(3)(logits.requires_grad_(), labels)
    assert asked == [False, False]


@pytest.fixture
def own_threads(monkeypatch):
    """As on Windows and macOS, where OpenMP cannot be reached."""
    monkeypatch.setattr(cpu, "_openmp", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def beside_cross_entropy(**terms):
    return Objective({"ce": CrossEntropy(3), **terms})


SWEPT = {
    "penalty": lambda: beside_cross_entropy(penalty=CRaC(3)),
    "log odds": lambda: Objective(
        {"ce": CrossEntropy(3), "penalty": method("penalties", "confidence")}
    ),
    "dice": lambda: beside_cross_entropy(dice=SoftDiceLoss(3)),
    "bins": lambda: ML1ACE(3, binning="soft"),
}


@pytest.mark.parametrize("name", SWEPT)
def test_threads_of_our_own_where_openmp_cannot_be_reached(request, name):
    logits, labels = data((40, 64), n=9, dtype=torch.float32)
    found = []
    for own in (False, True):
        if own:
            request.getfixturevalue("own_threads")
        x = logits.clone().requires_grad_()
        value = SWEPT[name]()(x, labels)
        found.append((value.detach(), *torch.autograd.grad(value, x)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@njit(nogil=True)
def draw(counter, end, drawn):
    block = take(counter)
    while block < end:
        drawn[block] += 1
        block = take(counter)


@pytest.mark.parametrize("own", [False, True])
def test_every_block_is_drawn_once(own, request, monkeypatch):
    if own:
        request.getfixturevalue("own_threads")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    end, rows, together = 200_000, iter(range(4)), threading.Barrier(4, timeout=30)
    drawn = np.zeros((4, end), np.int64)
    draw(np.ones(1, np.int64), 1, drawn[0])  # compiled

    def loop(counter):
        row = drawn[next(rows)]
        together.wait()  # unless four threads work, it breaks
        draw(counter, end, row)

    cpu._in_parallel(loop, end)
    assert (drawn.sum(0) == 1).all()


def test_what_a_thread_of_our_own_raises_arrives(own_threads):
    calls = iter(range(9))

    def loop(counter):
        if next(calls) == 3:
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        cpu._in_parallel(loop, 100)


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_where_openmp_is_looked_for(monkeypatch, error):
    """macOS has no such function, Windows no way to look for it among all libraries."""

    def load(name):
        raise error("CDLL")

    monkeypatch.setattr(cpu.ctypes, "CDLL", load)
    assert cpu._openmp.__wrapped__() is None


def test_where_nothing_compiles_the_readable_version_is_used_and_that_is_said(monkeypatch):
    def fails(*_):
        raise RuntimeError("no C compiler")

    logits, labels = data((8, 6))
    expected = CRaC(3, fused=False)(logits, labels)
    monkeypatch.setattr(fused, "_WORK", set())
    monkeypatch.setattr(fused, "_FAILED", Counter())
    monkeypatch.setattr(cpu, "run", fails)
    with pytest.warns(UserWarning, match=r"cannot be compiled for cpu \(RuntimeError: no C"):
        value = CRaC(3)(logits, labels)
    assert torch.equal(value, expected)
    assert torch.equal(CRaC(3)(logits, labels), expected)  # said once


@pytest.fixture
def nothing_tried(monkeypatch):
    monkeypatch.setattr(fused, "_WORK", set())
    monkeypatch.setattr(fused, "_FAILED", Counter())


class OnGPU:
    """Stands for logits on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, *shape, dtype=torch.float32):
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def numel(self):
        return math.prod(self.shape)


RESIDUAL = Residual(torch.ones(1, 4), torch.ones(1, 4), "phr", "abs", (1.0,), patch=(3, "zeros"))


def test_variants_of_a_gpu_are_tried_apart_and_given_up_after_a_few(monkeypatch, nothing_tried):
    """What fails once may work later: a compiler that finds no room on disk."""
    tried = []

    def run(variant):
        tried.append(variant)
        if variant.dtype == torch.float64 or (variant.statistics and len(tried) < 4):
            raise OSError("no room")

    monkeypatch.setattr(fused._Variant, "run", run)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert fused.supports(OnGPU(2, 4, 9, 9), RESIDUAL)
    assert fused.supports(OnGPU(1, 4, 5, 7), RESIDUAL)
    assert len(tried) == 1  # of all sizes
    assert tried[0].residual == ("phr", "abs", 1, (3, "zeros"))
    with pytest.warns(UserWarning, match=r"cannot be compiled for cuda:0 \(OSError: no room"):
        assert not fused.supports(OnGPU(2, 4, 9, 9), RESIDUAL, statistics=True)
    assert not fused.supports(OnGPU(2, 4, 9, 9), RESIDUAL, statistics=True)
    assert fused.supports(OnGPU(2, 4, 9, 9), RESIDUAL, statistics=True)
    double = OnGPU(2, 4, 9, 9, dtype=torch.float64)
    with pytest.warns(UserWarning, match="cannot be compiled"):
        assert not fused.supports(double, RESIDUAL)
    assert not any(fused.supports(double, RESIDUAL) for _ in range(5))
    assert len(tried) == 4 + fused.TRIES
    for other in (OnGPU(2, 3, 9, 9), OnGPU(2, 4, 81), OnGPU(2, 4, 8, 8)):
        assert fused.supports(other, RESIDUAL)
    assert fused.supports(OnGPU(2, 4, 9, 9), ConfidenceTerm(torch.ones(2, 4), 8.0))
    assert len(set(tried)) == len(tried) - 1 - fused.TRIES


def test_out_of_memory_is_no_reason_to_go_slower(monkeypatch, nothing_tried):
    def full(_):
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(fused._Variant, "run", full)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        fused.supports(OnGPU(2, 4, 9, 9), RESIDUAL)
    assert not fused._FAILED


def test_nothing_is_compiled_while_a_graph_is_captured(monkeypatch, nothing_tried):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="Call the loss once before"):
        assert not fused.supports(OnGPU(2, 4, 9, 9), RESIDUAL)
    fused._WORK.add(fused._Variant.of(OnGPU(2, 4, 9, 9), RESIDUAL, None, False))
    assert fused.supports(OnGPU(2, 4, 9, 9), RESIDUAL)


def test_images_that_a_kernel_cannot_count_are_left_to_the_readable_version(monkeypatch):
    monkeypatch.setattr(fused, "_compiles", lambda _: True)
    for space, fits in (
        ((2**31 - 2**14,), True),
        ((2**31 - 100,), False),
        ((1288, 1288, 1288), True),
        ((1024, 1024, 2048), False),
        ((2, 1024, 1024, 1023), False),  # four axes
        ((1290, 1290, 1290), False),  # but for its padding it would do
        ((1, 1, 2**30), False),  # likewise
    ):
        assert fused.supports(OnGPU(1, 4, *space), RESIDUAL) == fits, space
    assert fused.supports(OnGPU(1, 4, 1, 1, 2**30), ConfidenceTerm(torch.ones(2, 4), 8.0))


def test_a_gpu_has_no_loops_for_losses_of_sums(monkeypatch):
    tried = []
    monkeypatch.setattr(fused, "_compiles", lambda variant: tried.append(variant) or True)
    for loss in (SoftDiceLoss(4), ML1ACE(4)):
        assert not fused.supports(OnGPU(1, 4, 5, 7), loss.swept())
    assert fused.supports(OnGPU(1, 4, 5, 7), CrossEntropyTerm(4))
    assert not tried  # a cross-entropy has no kernel without a penalty
    objective = beside_cross_entropy(dice=SoftDiceLoss(3), penalty=NACL(3))
    assert set(objective._shared(OnGPU(1, 3, 5, 7))) == {"cross_entropy", "penalty"}
    assert [variant.residual[0] for variant in tried] == ["relu"]


def test_the_variant_of_a_gpu_is_what_it_says(monkeypatch):
    """It is run on the CPU here, whose loops take all that a GPU's do."""
    seen = []
    run = fused._run

    def watched(logits, labels, terms, *arguments, **wanted):
        seen.append((logits, terms, wanted))
        return run(logits, labels, terms, *arguments, **wanted)

    monkeypatch.setattr(fused, "_run", watched)
    term = replace(RESIDUAL, patch=([1, 3, 3], "replicate"), function="p2", shape="upper")
    for statistics, penalty in itertools.product(
        (False, True), (term, ConfidenceTerm(torch.ones(2, 4), 8.0))
    ):
        variant = fused._Variant.of(
            OnGPU(2, 4, 4, 4, 4, dtype=torch.float16), penalty, None, statistics
        )
        hash(variant)
        variant._replace(device=torch.device("cpu")).run()
        logits, terms, wanted = seen.pop()
        assert logits.shape == (1, 4, 1, 1, 16)
        assert logits.dtype == torch.float32
        assert wanted == {"gradient": not statistics, "statistics": statistics}
        assert (terms.cross_entropy is None) == statistics
        assert type(terms.penalty) is type(penalty)
        if penalty is term:
            assert terms.penalty.patch == ((1, 3, 3), "replicate")
            assert (terms.penalty.function, terms.penalty.shape) == ("p2", "upper")


def test_an_interrupt_that_no_one_saw_arrives(monkeypatch):
    """A signal may come after OpenMP has called us and before our first line."""

    def parallel(*_):
        pass  # as if the callback had been left at once

    monkeypatch.setattr(cpu, "_openmp", lambda: parallel)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(KeyboardInterrupt):
        cpu._in_parallel(lambda counter: None, 9)


def test_errors_in_a_thread_arrive(monkeypatch):
    def fails(counter):
        raise KeyboardInterrupt

    for openmp in (cpu._openmp, lambda: None):
        monkeypatch.setattr(cpu, "_openmp", openmp)
        with pytest.raises(KeyboardInterrupt):
            cpu._in_parallel(fails, 9)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-87, 0, width=32), min_size=1, max_size=40))
def test_vector_exponential(values):
    x = np.array(values, dtype=np.float32)
    got = np.array([vector_math.exp32(v) for v in x], dtype=np.float64)
    np.testing.assert_allclose(got, np.exp(x.astype(np.float64)), rtol=3e-7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(1, 256, width=32), min_size=1, max_size=40))
def test_vector_logarithm(values):
    x = np.array(values, dtype=np.float32)
    got = np.array([vector_math.log32(v) for v in x], dtype=np.float64)
    np.testing.assert_allclose(got, np.log(x.astype(np.float64)), rtol=3e-7, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's compiler about itself
def test_under_torch_compile_the_readable_version_is_compiled():
    objective = build("crac", 3)
    logits, labels = data((8, 6), dtype=torch.float32)
    x = logits.requires_grad_()
    results = []
    for function in (objective, torch.compile(objective)):
        value = function(x, labels)
        results.append((value.detach(), *torch.autograd.grad(value, x)))
    for a, b in zip(*results, strict=True):
        close(a, b, rtol=1e-5, atol=1e-8)
