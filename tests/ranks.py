"""Two processes that train together, as ``torchrun`` or nnU-Net would start them.

They are forks of a process that has imported what they need and has done nothing else: starting
one takes milliseconds, where an interpreter of its own would spend seconds on the same imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PRELOADED = [
    "ignite.distributed",
    "nnunetv2.run.run_training",
    "segcal.adapters.monai.training",
    "segcal.adapters.nnunet.trainers",
]
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"


def in_two_processes(function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function(rank, *arguments)`` in two processes of one thread each.

    They have the variables of ``torchrun``, and meet in a store that this process keeps: a port
    that is only found free may be another program's when it is used.

    Args:
        function: of a module that can be imported.
        arguments: can be pickled.

    Raises:
        torch.multiprocessing.ProcessRaisedException: it failed in one of them.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.get_context("forkserver").set_forkserver_preload(PRELOADED)  # heeded at the first start
    mp.start_processes(
        _member, (store.port, function, arguments), nprocs=2, start_method="forkserver"
    )


def _member(
    rank: int, port: int, function: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    os.environ[ATTEMPT] = "0"
    function(rank, *arguments)


def meet_again() -> None:
    """Let a member join another group, after it has left its first."""
    os.environ[ATTEMPT] = str(int(os.environ[ATTEMPT]) + 1)
