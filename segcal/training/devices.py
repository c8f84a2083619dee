"""Chooses the device of a training, and joins the processes that share the work."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["Ranks", "choose_device", "processes"]

DEVICES = r"auto|cpu|cuda(:\d+)?"
"""Pattern of the names of supported devices."""


def choose_device(name: str) -> torch.device:
    """The device that a name means: ``auto``, ``cpu``, ``cuda`` or ``cuda:0``.

    Raises:
        ValueError: the name is unknown, or there is no such device.
    """
    if name.startswith("mps"):
        raise ValueError(
            "device: mps has no float64, in which multipliers and metrics are kept; use cpu, or "
            "cuda on a machine with an NVIDIA GPU"
        )
    if not re.fullmatch(DEVICES, name):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:0, got {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: {name} was asked for, but torch finds no GPU; use cpu")
    return torch.device(name)


@dataclass(frozen=True)
class Ranks:
    """This process among the processes that train together.

    Attributes:
        rank: number of this process, from 0.
        size: number of processes.
        device: device of this process.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0


@contextmanager
def processes(device: str) -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` has started, if it has.

    Do not keep a training run beyond the block: with several processes, a network that outlives
    their group can abort the process when Python ends.

    Args:
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:0``; with several processes on GPUs, each
            process uses the GPU of its local rank.

    Raises:
        ValueError: there is no such device.
    """
    chosen = choose_device(device)
    if "WORLD_SIZE" not in os.environ:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), chosen)
    finally:
        gc.collect()  # what still holds the group would abort the process at its end
        dist.destroy_process_group()
