"""The batches of all processes of a training as one, and their parts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_batches"]


def gather_batches(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets of all processes, in the order of their ranks.

    A loss of the result is the same number in every process. Its gradient goes to the own logits
    alone, times the number of processes: the mean over processes, by which
    ``DistributedDataParallel`` brings gradients together, is that of one process with all samples.

    Args:
        logits: floating ``(B, T)``, of this process.
        targets: ``(B, T)``, of one dtype in all.

    Returns:
        both with the samples of all; what was given where there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return logits, targets
    ranks = dist.get_world_size()
    size = torch.tensor(len(logits), device=logits.device)
    sizes = [torch.zeros_like(size) for _ in range(ranks)]
    dist.all_gather(sizes, size)
    counts = [int(n) for n in sizes]
    scores, labels = (_gathered(t, counts) for t in (logits.detach(), targets))
    # the value of the logits, exactly, and their gradient as often as there are processes
    scores[dist.get_rank()] = logits.detach() + ranks * (logits - logits.detach())
    return torch.cat(scores), torch.cat(labels)


def _gathered(own: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Rows of every process; only equally many can be exchanged."""
    filled = torch.cat([own, own.new_zeros((max(counts) - len(own), *own.shape[1:]))])
    found = [torch.empty_like(filled) for _ in counts]
    dist.all_gather(found, filled)
    return [rows[:n] for rows, n in zip(found, counts, strict=True)]
