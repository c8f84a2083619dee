"""Times steps of nnU-Net's default network with its stock loss and with segcal's recipes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from segcal.gpu.cases import batch
from segcal.gpu.findings import Findings

RECIPES = ("crac", "confidence")
CLASSES = 4
PATCH, STAGES, ROUNDS = (2, 1, 128, 128, 128), 6, 15
COMPILE_SECONDS = 60.0
"""Least time that must be left to try ``torch.compile``."""


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Time steps with AMP, then with ``torch.compile`` beside it, as nnU-Net does by default."""
    if find_spec("nnunetv2") is None:
        findings.skip("nnunetv2 is not installed")
        return
    from segcal.adapters.nnunet import steps

    patch, stages, rounds = ((2, 1, 16, 16, 16), 3, 2) if tiny else (PATCH, STAGES, ROUNDS)
    images = torch.randn(patch, device=device)
    labels = batch((patch[0], CLASSES, *patch[2:]), device)[1].unsqueeze(1)
    losses = steps.losses(CLASSES, RECIPES, device)
    for compiled in (False, True):
        name = "amp and torch.compile" if compiled else "amp"
        if compiled and (findings.left < COMPILE_SECONDS or device.type != "cuda"):
            findings.note(name, "left out: no GPU, or no time")
            continue
        torch.manual_seed(0)
        network: nn.Module = steps.network(patch[1], CLASSES, stages).to(device)
        called = torch.compile(network) if compiled else network
        work = _step(called, images, labels)
        rows = _time(losses, work, rounds, device)
        stock = rows[steps.STOCK]["step_ms"]
        for loss in RECIPES:
            rows[loss]["share_beyond_stock"] = 1 - stock / rows[loss]["step_ms"]
        findings.note(name, rows)
        right = all(row["last_loss"] == row["last_loss"] for row in rows.values())
        findings.expect(right, f"{name}: a loss is NaN")


def _step(
    network: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor
) -> Callable[[nn.Module], Tensor]:
    """Return a function that makes one step of nnU-Net's trainer with a loss."""
    module: Any = getattr(network, "_orig_mod", network)
    optimiser = torch.optim.SGD(module.parameters(), 1e-3, momentum=0.99, nesterov=True)
    scaler = torch.amp.GradScaler(images.device.type, enabled=images.is_cuda)

    def step(loss: nn.Module) -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, enabled=images.is_cuda):
            value: Tensor = loss(network(images), labels)
        scaler.scale(value).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimiser)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 12)
        scaler.step(optimiser)
        scaler.update()
        return value.detach()

    return step


def _time(
    losses: dict[str, nn.Module],
    work: Callable[[nn.Module], Tensor],
    rounds: int,
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """Median milliseconds of a step with every loss, in interleaved rounds, and its last value."""
    times: dict[str, list[float]] = {name: [] for name in losses}
    last = {}
    for i in range(rounds + 2):  # the first two compile and warm up
        for name, loss in losses.items():
            _wait(device)
            start = time.perf_counter()
            last[name] = work(loss)
            _wait(device)
            if i > 1:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: {"step_ms": statistics.median(times[name]), "last_loss": float(last[name])}
        for name in losses
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
