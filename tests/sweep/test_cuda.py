"""The kernel for GPUs: what it computes, by an interpreter; that it compiles; and on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from segcal.penalties.cals import CALS
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import Margin
from segcal.penalties.nacl import NACL
from segcal.sweep import cpu
from segcal.sweep.fused import _run, sweep
from segcal.sweep.terms import ConfidenceTerm, CrossEntropyTerm, Residual, Together
from tests.conftest import close

HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
triton = pytest.importorskip("triton", reason="Triton is not installed")


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
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = {torch.float32: "*fp32", torch.float64: "*fp64", torch.uint8: "*u8"}
    given = dict(zip(kernel.arg_names, arguments, strict=False))
    given.update((name, options[name]) for name in kernel.arg_names[len(arguments) :])
    signature, constants, attributes = {}, {}, {}
    for place, (name, value) in enumerate(given.items()):
        aligned = isinstance(value, torch.Tensor)
        if isinstance(value, torch.Tensor):
            signature[name] = pointers[value.dtype]
        elif name in options or value is None or value == 1:
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "i32"
            aligned = value % 16 == 0
        if aligned:
            attributes[(place,)] = [["tt.divisibility", 16]]
    launch = {name: value for name, value in options.items() if name not in given}
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", architecture, 32),
        options=launch,
    )


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
    terms, factors = Together(term, ce), (1.0, 1.0, 0.0)
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
    terms, factors = Together(term, ce), (1.0, 1.0, 0.0)
    _run(logits, labels, terms, factors, gradient=not observe, statistics=observe)
    check_code(kernel, recorder, architecture, dtype)


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
        total, *values = sweep(x, labels.to(device), term, weight=0.1, cross_entropy=ce)
        found.append([t.detach().cpu() for t in (*values, *torch.autograd.grad(total, x))])
    rtol, atol = (1e-10, 1e-12) if dtype == torch.float64 else (2e-5, 1e-9)
    for a, b in zip(*found, strict=True):
        close(b, a, rtol=rtol, atol=atol)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("make", "name"), [(CRaC, "run"), (Confidence, "run_confidence")])
def test_the_host_does_not_wait_for_the_gpu(monkeypatch, make, name):
    from segcal.sweep import cuda

    run = getattr(cuda, name)

    def strict(*arguments):
        run(*arguments)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(cuda, name, strict)
    logits = torch.randn(2, 4, 33, 40, device="cuda", requires_grad=True)
    labels = torch.randint(0, 4, (2, 33, 40), device="cuda")
    make(4).to("cuda")(logits, labels).backward()
