"""Two processes that train together, as ``torchrun`` or nnU-Net would start them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.forks import forks

PORTS = "MASTER_PORTS_TO_COME"


def in_two_processes(function: Callable[..., None], *arguments: Any, groups: int = 1) -> None:
    """Run ``function(rank, *arguments)`` in two processes of one thread each.

    They have the variables of ``torchrun``, and meet in a store that this process keeps: a port
    that is only found free may be another program's when it is used.

    Args:
        function: of a module that can be imported.
        arguments: can be pickled.
        groups: how many they join, one after the other; see :func:`meet_again`.

    Raises:
        torch.multiprocessing.ProcessRaisedException: it failed in one of them.
    """
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(groups)
    ]
    ports = [str(store.port) for store in stores]
    method = forks().get_start_method()
    started = mp.start_processes(
        _member, (ports, function, arguments), nprocs=2, join=False, start_method=method
    )
    try:
        while not started.join():
            pass
    finally:
        for process in started.processes:
            process.kill()  # one that waits for another would keep us from our end


def _member(
    rank: int, ports: list[str], function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0",
    )  # fmt: skip
    os.environ[PORTS] = ",".join(ports)
    meet_again()
    function(rank, *arguments)


def meet_again() -> None:
    """Let a member join the next group, after it has left the one before."""
    os.environ["MASTER_PORT"], _, os.environ[PORTS] = os.environ[PORTS].partition(",")
