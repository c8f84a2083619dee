"""The batches of all processes of a training, joined to one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["gather_batches"]


def gather_batches(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and targets of all processes, in the order of their ranks.

    A loss of the result is the same number in every process. In every process its gradient goes to
    the logits of that process alone, multiplied by the number of processes.
    ``DistributedDataParallel`` takes the mean of the gradients over processes, which is then the
    gradient of one process with all samples.

    Args:
        logits: floating ``(B, T)``, of this process.
        targets: ``(B, T)``, of the same dtype in all processes.

    Returns:
        logits and targets of all processes; the arguments themselves without a process group.
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
    """Rows of every process; filled up with zeros, as only equally many rows can be exchanged."""
    filled = torch.cat([own, own.new_zeros((max(counts) - len(own), *own.shape[1:]))])
    found = [torch.empty_like(filled) for _ in counts]
    dist.all_gather(found, filled)
    return [rows[:n] for rows, n in zip(found, counts, strict=True)]
