"""Measures the cost of losses: time, launches and memory, beside torch's cross-entropy."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segcal.gpu.cases import IGNORED, PENALTIES, batch, penalised
from segcal.gpu.findings import Findings

Work = Callable[[], Any]
SHAPES = ((8, 4, 192, 192), (2, 4, 128, 128, 128), (2, 20, 64, 64, 64), (2, 118, 64, 64, 64))
ROUNDS = 30
REFERENCE = "torch CE"


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Time everything in interleaved rounds, by the GPU's clock and by the host's."""
    shapes = ((1, 4, 16, 16), (1, 4, 8, 8, 8)) if tiny else SHAPES
    bandwidth = _bandwidth(device, 2**20 if tiny else 2**28)
    findings.note("copy_gb_per_s", bandwidth / 1e9)
    for shape in shapes:
        for ignore in (False, True):
            if findings.left < 10:
                findings.note("stopped_before", f"{shape}, ignore {ignore}")
                return
            rows = _time_shape(shape, ignore, device, bandwidth, 3 if tiny else ROUNDS)
            findings.note(f"{shape}, ignore {ignore}", rows)


def _time_shape(
    shape: tuple[int, ...], ignore: bool, device: torch.device, bandwidth: float, rounds: int
) -> dict[str, dict[str, float]]:
    logits, labels = batch(shape, device, ignore=ignore)
    works = _works(logits.requires_grad_(), labels, ignore)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for work in works.values():  # compile, warm up
        work()
    order, shuffle = list(works), random.Random(0)  # noqa: S311 - an order
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            times[name].append(_time(works[name], device))
    moved = 2 * logits.numel() * logits.element_size() + labels.numel() * labels.element_size()
    limit = moved / bandwidth  # logits and labels are read, the gradient is written
    rows = {}
    reference = statistics.median(own for own, _ in times[REFERENCE])
    for name, work in works.items():
        own, wall = (statistics.median(column) for column in zip(*times[name], strict=True))
        rows[name] = {
            "event_ms": 1e3 * own,
            "wall_ms": 1e3 * wall,
            "ratio_to_ce": own / reference,
            "ratio_to_bandwidth_limit": own / limit,
            "launches": _launches(work, device),
            "peak_in_logits": _peak(work, device) / (logits.numel() * logits.element_size()),
        }
    return rows


def _works(logits: Tensor, labels: Tensor, ignore: bool) -> dict[str, Work]:
    """Everything that is timed: steps of losses, and batches of validation."""
    k = logits.shape[1]

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Work:
        return lambda: torch.autograd.grad(loss(logits, labels), logits)

    works = {REFERENCE: step(lambda x, y: F.cross_entropy(x, y, ignore_index=IGNORED))}
    for name in PENALTIES:
        objective = penalised(name, k, logits.device, ignore=ignore)
        works[f"CE + {name}"] = step(objective)
        if hasattr(objective.terms["penalty"], "lam"):
            term: Any = objective.terms["penalty"]
            works[f"observe {name}"] = partial(term.observe, logits.detach(), labels)
    with suppress(ImportError, AttributeError):
        if not ignore:
            monai = resolve_name("monai.losses:NACLLoss")(classes=k, dim=logits.ndim - 2)
            works["MONAI NACLLoss"] = step(monai.to(logits.device))
    return works


def _time(work: Work, device: torch.device) -> tuple[float, float]:
    """Seconds by the GPU's clock and by the host's clock; on a CPU, the host's time twice."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        wall = time.perf_counter() - start
        return wall, wall
    event: Any = torch.cuda.Event  # which is untyped
    begin, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1e3, time.perf_counter() - start


def _launches(work: Work, device: torch.device) -> int:
    """Number of kernels and copies on the GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profiler.events() or ())


def _peak(work: Work, device: torch.device) -> float:
    """Largest number of bytes held in addition to those before; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _bandwidth(device: torch.device, numbers: int) -> float:
    """Bytes per second that a copy reads and writes."""
    source = torch.zeros(numbers, device=device)
    target = torch.empty_like(source)
    seconds = min(_time(lambda: target.copy_(source), device)[0] for _ in range(10))
    return 2 * source.numel() * source.element_size() / seconds
