"""The kernel for GPUs: what it computes, by an interpreter; that it compiles; and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.objective import Objective
from segcal.penalties.cals import CALS
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import Margin
from segcal.penalties.nacl import NACL
from segcal.sweep import cpu, fused
from segcal.sweep.fused import _run, sweep
from segcal.sweep.terms import ConfidenceTerm, CrossEntropyTerm, Residual, Together
from tests.conftest import close

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
triton = pytest.importorskip("triton", reason="Triton is not installed")
from triton.backends.compiler import GPUTarget  # noqa: E402 - where there is one
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(600)  # the interpreter takes half a minute of a free core
def test_interpreted_kernel_equals_the_loops_for_cpus():
    """In a process of its own: the interpreter has to be chosen before Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "interpreted_cuda.py"],
        cwd=HERE,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 100
    assert "skipped" not in done.stdout


def felt(penalty):
    """Give a penalty multipliers that are not 0."""
    draw = torch.Generator().manual_seed(5)
    penalty.lam.copy_(0.3 * torch.rand(penalty.lam.shape, generator=draw, dtype=torch.float64))
    return penalty


class Recorder:
    """Stands for a kernel and keeps what it is launched with."""

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **options):
        self.arguments, self.options = arguments, options


def compiled(kernel, arguments, options, architecture):
    """Compile a kernel for an architecture as launching it with these arguments would."""
    signature, constants, attributes = specialised(kernel, arguments, options)
    launch = {name: value for name, value in options.items() if name not in kernel.arg_names}
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options=launch,
    )


def specialised(kernel, arguments, options):
    """What a kernel is compiled for when it is launched with these arguments."""
    pointers = {
        torch.float32: "*fp32", torch.float64: "*fp64", torch.uint8: "*u8", torch.int64: "*i64",
    }  # fmt: skip
    fixed = {p.name for p in kernel.params if not p.do_not_specialize}
    of_type = {p.name: p.annotation_type for p in kernel.params}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    given.update((name, options[name]) for name in kernel.arg_names[len(arguments) :])
    signature, constants, attributes = {}, {}, {}
    for place, (name, value) in enumerate(given.items()):
        aligned = isinstance(value, torch.Tensor)
        if isinstance(value, torch.Tensor):
            signature[name] = pointers[value.dtype]
        elif name in options or value is None or (value == 1 and name in fixed):
            signature[name], constants[name] = "constexpr", value
        elif of_type[name]:
            signature[name] = of_type[name]
        else:
            signature[name] = "i32"
            aligned = name in fixed and value % 16 == 0
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


@pytest.mark.parametrize("observe", [False, True], ids=["train", "observe"])
@pytest.mark.parametrize(
    ("penalty", "shape", "regions", "patch", "k", "space", "dtype", "architecture"),
    [
        ("phr", "abs", 1, (3, "replicate"), 4, (8, 16, 16), torch.float32, 80),
        ("p2", "upper", 2, (3, "replicate"), 20, (8, 15, 17), torch.float32, 90),
        ("p3", "lower", 2, ((1, 3, 3), "zeros"), 4, (8, 16, 16), torch.float32, 80),
        ("phr", "abs", 2, (3, "zeros"), 4, (16, 16), torch.float64, 90),
        ("relu", "abs", 1, None, 4, (16, 16), torch.float32, 90),
        ("phr", "upper", 1, None, 3, (15,), torch.float64, 80),
        ("p2", "abs", 2, (3, "replicate"), 2, (1, 1, 1), torch.float32, 90),
    ],
)
def test_kernel_compiles_to_machine_code(
    monkeypatch, tmp_path, penalty, shape, regions, patch, k, space, dtype, architecture, observe
):
    """Without a GPU. No atomics; in float32, nothing but the addition of sums is in float64."""
    cuda = pytest.importorskip("segcal.sweep.cuda")
    kernel, recorder = cuda._sweep, Recorder()
    monkeypatch.setattr(cuda, "_sweep", recorder)
    monkeypatch.setattr(cpu, "run", cuda.run)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ones = torch.ones(regions, k)
    term = Residual(ones, ones, penalty, shape, (1.0,) * regions, patch=patch)
    logits = torch.zeros(2, k, *space, dtype=dtype)
    labels = torch.zeros(2, *space, dtype=torch.int64)
    ce = None if observe else CrossEntropyTerm(k)
    terms, factors = Together(term, ce), fused.Weights()
    _run(logits, labels, terms, factors, gradient=not observe, statistics=observe)
    check_code(kernel, recorder, architecture, dtype)


def check_code(kernel, recorder, architecture, dtype):
    """There is machine code, and it does what its header says."""
    code = compiled(kernel, recorder.arguments, recorder.options, architecture).asm
    assert len(code["cubin"]) > 0
    assert not re.findall(r"\b(?:atom|red)\.", code["ptx"])
    if dtype == torch.float32:
        assert not re.findall(r"\b(?:mul|fma|div|sqrt|neg)\.\S*f64", code["ptx"])


@pytest.mark.parametrize("observe", [False, True], ids=["train", "observe"])
@pytest.mark.parametrize(
    ("k", "space", "dtype", "architecture"),
    [
        (4, (8, 16, 16), torch.float32, 80),
        (20, (15, 17), torch.float32, 90),
        (2, (1,), torch.float64, 80),
    ],
)
def test_kernel_of_log_odds_compiles_to_machine_code(
    monkeypatch, tmp_path, k, space, dtype, architecture, observe
):
    cuda = pytest.importorskip("segcal.sweep.cuda")
    kernel, recorder = cuda.sweep_confidence, Recorder()
    monkeypatch.setattr(cuda, "sweep_confidence", recorder)
    monkeypatch.setattr(cpu, "run_confidence", cuda.run_confidence)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    term = ConfidenceTerm(torch.ones(2, k), 30.0)
    logits = torch.zeros(2, k, *space, dtype=dtype)
    labels = torch.zeros(2, *space, dtype=torch.int64)
    ce = None if observe else CrossEntropyTerm(k)
    terms, factors = Together(term, ce), fused.Weights()
    _run(logits, labels, terms, factors, gradient=not observe, statistics=observe)
    check_code(kernel, recorder, architecture, dtype)


@pytest.mark.parametrize("class_weight", [None, torch.ones(20)])
@pytest.mark.parametrize("architecture", [80, 90])
def test_small_kernels_compile_to_machine_code(monkeypatch, tmp_path, architecture, class_weight):
    cuda = pytest.importorskip("segcal.sweep.cuda")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = {n: getattr(cuda, n) for n in ("encode_labels", "weigh_labels", "scale_gradient")}
    recorders = {name: Recorder() for name in kernels}
    for name, recorder in recorders.items():
        monkeypatch.setattr(cuda, name, recorder)
    labels = torch.zeros(2, 15, 17, dtype=torch.int64)
    cuda.encode(labels, 20, Together(None, CrossEntropyTerm(20, 255, class_weight)))
    cuda.scale(torch.zeros(7, 5), torch.ones(()))
    for name, kernel in kernels.items():
        code = compiled(kernel, recorders[name].arguments, recorders[name].options, architecture)
        assert len(code.asm["cubin"]) > 0
        assert not re.findall(r"\b(?:atom|red)\.", code.asm["ptx"])


@pytest.mark.parametrize("name", ["_sweep", "sweep_confidence", "encode_labels", "scale_gradient"])
def test_sizes_are_not_compiled_in(monkeypatch, name):
    """Ten shapes of volumes take two compilations: for voxels in multiples of 16, and others."""
    cuda = pytest.importorskip("segcal.sweep.cuda")
    kernel, recorder = getattr(cuda, name), Recorder()
    others = {"_sweep", "sweep_confidence", "encode_labels", "weigh_labels", "scale_gradient"}
    for other in others:
        monkeypatch.setattr(cuda, other, recorder if other == name else Recorder())
    monkeypatch.setattr(fused, "_backend", lambda _: cuda)
    ones = torch.ones(2, 4).double()
    term: Any = Residual(ones, ones, "p2", "abs", (1.0, 2.0), patch=(3, "replicate"))
    if name == "sweep_confidence":
        term = ConfidenceTerm(ones, 8.0)
    backend = triton.compiler.make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    seen = set()
    for size in range(1, 11):
        logits = torch.zeros(1, 4, size, 3 * size, 16 + size, requires_grad=True)
        total = sweep(logits, logits[:, 0].long(), Together(term, CrossEntropyTerm(4)))[0]
        torch.autograd.grad(total, logits)
        options = {k: v for k, v in recorder.options.items() if k in kernel.arg_names}
        _, specialization, _ = bind(*recorder.arguments, **options)
        seen.add((str(specialization), str(sorted(options.items()))))
    assert len(seen) == (2 if "sweep" in name else 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:function (p3|relu)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("space", [(70,), (65, 33), (17, 30, 41), (48, 64, 64)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: NACL(4, ignore_index=9),
        lambda: Margin(4, margin=3.0, ignore_index=9),
        lambda: CALS(4, margin=3.0, ignore_index=9, lambda0=0.3),
        lambda: CRaC(4, ignore_index=9, lambda0=0.3),
        lambda: CRaC(4, function="phr", padding="zeros", kernel_size=5, ignore_index=9),
        lambda: felt(Confidence(4, ignore_index=9)),
    ],
    ids=["nacl", "margin", "cals", "crac", "crac-phr", "confidence"],
)
def test_gpu_equals_cpu(make, space, dtype):
    """Value, gradient and multipliers; the same bits twice."""
    draw = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(2, 4, *space, generator=draw, dtype=dtype)
    labels = torch.randint(0, 4, (2, *space), generator=draw)
    labels.flatten()[::7] = 9
    found = []
    for device in ("cpu", "cuda", "cuda"):
        term = make().to(device)
        x = logits.to(device).requires_grad_()
        value = term(x, labels.to(device))
        (slope,) = torch.autograd.grad(value, x)
        term.observe(x.detach(), labels.to(device))
        term.dual_step()
        found.append([t.detach().cpu() for t in (value, slope, *term.buffers())])
    rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (2e-5, 1e-8)
    for a, b, again in zip(*found, strict=True):
        close(b, a, rtol=rtol, atol=atol)
        assert torch.equal(b, again)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("k", [2, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cross_entropy_on_the_gpu(k, dtype):
    draw = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(2, k, 17, 30, 41, generator=draw, dtype=dtype)
    labels = torch.randint(0, k, (2, 17, 30, 41), generator=draw)
    weight = torch.rand(k, generator=draw)
    found = []
    for device in ("cpu", "cuda"):
        ones = torch.ones(2, k, device=device)
        term = Residual(ones, ones, "p2", "abs", (1.0, 2.0), patch=(3, "replicate"))
        ce = CrossEntropyTerm(k, class_weight=weight.to(device))
        x = logits.to(device).requires_grad_()
        total, values = sweep(x, labels.to(device), Together(term, ce), fused.Weights(0.1))
        found.append([t.detach().cpu() for t in (*values, *torch.autograd.grad(total, x))])
    rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (2e-5, 1e-9)
    for a, b in zip(*found, strict=True):
        close(b, a, rtol=rtol, atol=atol)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", [CRaC, Confidence])
def test_the_host_does_not_wait_for_the_gpu(make):
    """In a whole step of the default recipe, soft Dice in its readable version included."""
    logits = torch.randn(2, 4, 33, 40, device="cuda", requires_grad=True)
    labels = torch.randint(0, 4, (2, 33, 40), device="cuda")
    terms = {"dice": SoftDiceLoss(4), "ce": CrossEntropy(4), "penalty": make(4)}
    objective = Objective(terms).to("cuda")
    for mode in ("default", "error"):  # the first compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            objective(logits, labels).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("make", [CRaC, Confidence])
def test_a_step_can_be_captured_in_a_graph(make):
    """What is replayed belongs to the logits and labels that lie there then."""
    draw = torch.Generator("cuda").manual_seed(1)
    logits = torch.randn(2, 4, 33, 40, device="cuda", generator=draw, requires_grad=True)
    labels = torch.randint(0, 4, (2, 33, 40), device="cuda", generator=draw)
    objective = Objective({"ce": CrossEntropy(4), "penalty": make(4)}).to("cuda")

    def step():
        (gradient,) = torch.autograd.grad(objective(logits, labels), logits)
        return gradient

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    for _ in range(3):
        with torch.no_grad():
            logits.normal_(generator=draw)
        labels.random_(0, 4, generator=draw)
        graph.replay()
        assert torch.equal(replayed, step())
