"""Ending nnU-Net's data-loading workers when their training is gone."""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

from batchgenerators.dataloading import nondet_multi_threaded_augmenter as host

from segcal.adapters.nnunet.patching import replaced

SECONDS = 1.0
"""Seconds between two checks of the parent."""
_produce = host.producer


def workers_end_with_us() -> AbstractContextManager[None]:
    """In this block, start workers that do not outlive their training.

    A training that is killed cannot stop its workers. Workers of batchgenerators, with which
    nnU-Net loads its data, would wait for ever and keep their memory.
    """
    return replaced(host, "producer", produce)


def produce(*arguments: Any) -> None:
    """Work as batchgenerators' worker does, until the parent is gone."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    _produce(*arguments)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:  # an orphan gets another
        time.sleep(SECONDS)
    os._exit(1)
