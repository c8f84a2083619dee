"""Losses and data that the parts of the check share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segcal.losses.cross_entropy import CrossEntropy
from segcal.objective import Objective
from segcal.penalties.cals import CALS
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from segcal.penalties.margin import Margin
from segcal.penalties.nacl import NACL

IGNORED = 255
PENALTIES = {"NACL": NACL, "MbLS": Margin, "CALS": CALS, "CRaC": CRaC, "confidence": Confidence}


def penalised(
    name: str, num_classes: int, device: torch.device, *, fused: bool = True, ignore: bool = False
) -> Objective:
    """Cross-entropy and a penalty, with multipliers (weights of constraints) that are not 0."""
    ignored = IGNORED if ignore else None
    term: nn.Module = PENALTIES[name](num_classes, fused=fused, ignore_index=ignored)
    draw = torch.Generator().manual_seed(5)
    for key, buffer in term.named_buffers():
        if key == "lam":
            buffer.copy_(0.1 + 0.2 * torch.rand(buffer.shape, generator=draw, dtype=buffer.dtype))
    objective = Objective({"ce": CrossEntropy(num_classes, ignore_index=ignored), "penalty": term})
    return objective.to(device)


def batch(
    shape: tuple[int, ...], device: torch.device, *, ignore: bool = False, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits ``(N, K, *S)`` and labels in blobs.

    Args:
        shape: shape of the logits.
        device: device of the result.
        ignore: whether an eighth of the labels is ignored.
        offset: numbers before the logits in their memory, so that they are not aligned.
    """
    n, k, *space = shape
    draw = torch.Generator().manual_seed(sum(shape))
    size = n * k
    for s in space:
        size *= s
    logits = (3 * torch.randn(size + offset, generator=draw)).to(device)[offset:].view(shape)
    coarse = torch.randint(0, k, (n, *(-(-s // 8) for s in space)), generator=draw)
    for axis in range(1, coarse.ndim):
        coarse = coarse.repeat_interleave(8, axis)
    whole = (slice(None), *(slice(s) for s in space))
    labels = coarse[whole].clone()
    if ignore:
        labels.flatten()[::8] = IGNORED
    return logits, labels.to(device)
