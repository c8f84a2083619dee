"""Checks that multipliers learned on two processes equal those of one.

Multipliers are the weights that penalties learn for their constraints.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from segcal.gpu.cases import batch, penalised
from segcal.gpu.findings import Findings
from segcal.term import sum_over_ranks

LEARNED = ("CALS", "CRaC", "confidence")
BATCHES, PASSES, RANKS = 4, 3, 2
SHAPE = (2, 4, 33, 40)


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Compare the multipliers; two GPUs use NCCL with a process each, else Gloo is used."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    findings.note("backend", "nccl" if gpus >= RANKS else "gloo")
    alone = _learn(device, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_of_rank, (device.type, gpus, folder), nprocs=RANKS)  # type: ignore[no-untyped-call]
        together = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(RANKS)]
    for name in LEARNED:
        findings.note(name, alone[name].tolist())
        for rank, found in enumerate(together):
            error = float((found[name] - alone[name]).abs().max())
            findings.expect(error < 1e-9, f"{name}: process {rank} differs by {error:.1e}")


def _of_rank(rank: int, kind: str, gpus: int, folder: str) -> None:
    device = torch.device(kind, rank % gpus) if gpus else torch.device(kind)
    if gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if gpus >= RANKS else "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=RANKS,
    )
    torch.save(_learn(device, rank, RANKS), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _learn(device: torch.device, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """Multipliers after some validation passes, of which each rank sees its share."""
    found = {}
    for name in LEARNED:
        objective = penalised(name, SHAPE[1], device)
        for _ in range(PASSES):
            objective.start_pass()
            for i in range(rank, BATCHES, ranks):
                logits, labels = batch((*SHAPE[:2], SHAPE[2] + i, SHAPE[3]), device)
                objective.observe(logits, labels)
            objective.dual_step(sum_over_ranks)
        found[name] = objective.get_buffer("terms.penalty.lam").cpu()
    return found
