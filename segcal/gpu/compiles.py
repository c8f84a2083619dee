"""Counts how often kernels are compiled over volumes of ten shapes, and times the first call."""

from __future__ import annotations

import time
from pkgutil import resolve_name
from typing import Any

import torch

from segcal.gpu.cases import PENALTIES, batch, penalised
from segcal.gpu.findings import Findings

MOST = 2
"""Most compilations of a kernel: one for voxels in multiples of 16, and one for others."""


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Call every loss on ten shapes, and count the compilations between the first and the last."""
    step = 1 if tiny else 7
    for name in PENALTIES:
        objective = penalised(name, 4, device)
        before, seconds = _compiled(device), []
        for i in range(1, 11):
            logits, labels = batch((1, 4, i, 3 + i * step, 15 + i), device)
            start = time.perf_counter()
            torch.autograd.grad(objective(logits.requires_grad_(), labels), logits)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        after = _compiled(device)
        new = {kernel: after[kernel] - before[kernel] for kernel in after}
        findings.note(name, {"compiled": new, "first_call_s": seconds[0], "last_s": seconds[-1]})
        for kernel, times in new.items():
            findings.expect(times <= MOST, f"{name}: {kernel} is compiled {times} times")


def _compiled(device: torch.device) -> dict[str, int]:
    """Number of compiled variants of every kernel in this process; empty on a CPU."""
    if device.type != "cuda":
        return {}
    kernels: dict[str, Any] = {
        name: resolve_name(f"segcal.sweep.cuda:{name}")
        for name in ("_sweep", "sweep_confidence", "encode_labels", "scale_gradient")
    }
    return {
        name: sum(len(cache[0]) for cache in kernel.device_caches.values())
        for name, kernel in kernels.items()
    }
