"""Trainings that SIGKILL themselves before one of their writes, and then go on.

A program, so that nnU-Net is imported once, by a process that trains nothing: every training is a
fork of it. ``python -m tests.adapters.nnunet_deaths ROOT CONFIGURATION EPOCHS`` trains on the data
of :class:`tests.adapters.nnunet_data.Tiny` under ROOT, and writes ::

    moments.json     what an uninterrupted training writes, in its order
    whole/           the fold of that training
    N/killed/        the fold of a training that was killed before its Nth write
    N/resumed/       the same, when it has gone on to its end
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from tests.adapters.nnunet_data import NAME, trainer

TRAINER = "nnUNetTrainerCRaC"


def moment_of(event, arguments):
    """What a training is about to do to a file that it leaves behind, in words; or None."""
    if event == "os.rename" and not str(arguments[1]).endswith(".pyc"):
        return f"put {Path(arguments[1]).name} in its place"
    if event == "os.remove" and Path(arguments[0]).name.startswith("checkpoint"):
        return f"remove {Path(arguments[0]).name}"
    if event == "open" and arguments[1] == "a" and str(arguments[0]).endswith(".jsonl"):
        return f"append to {Path(arguments[0]).name}"
    return None


class Watch:
    """Python's audit hook: counts moments, dies at one."""

    def __init__(self, dies_at=None):
        self.dies_at = dies_at
        self.moments = []

    def __call__(self, event, arguments):
        if moment := moment_of(event, arguments):
            if len(self.moments) == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.moments.append(moment)


def train(root, configuration, epochs, watch, *, resume=False):
    from nnunetv2.run.run_training import maybe_load_checkpoint

    os.environ["nnUNet_results"] = str(root / "results")
    found = trainer(TRAINER, configuration, epochs=epochs, resume=resume)
    maybe_load_checkpoint(found, resume, False)
    sys.addaudithook(watch)
    found.run_training()


def in_a_fork(work):
    """Run `work()` in a process of its own; return how it ended, as :func:`os.waitpid` says."""
    if (pid := os.fork()) == 0:
        with (Path(os.environ["nnUNet_results"]) / "log.txt").open("a") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        code = 1
        try:
            work()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(root, configuration, epochs):
    import torch
    from nnunetv2.training.logging.nnunet_logger import LocalLogger
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    from segcal.adapters.nnunet import trainers

    torch.set_num_threads(1)
    LocalLogger.plot_progress_png = lambda self, folder: None
    nnUNetTrainer.plot_network_architecture = lambda self: None
    trainers.plot_progress = lambda records, names: Figure(figsize=(1, 1))

    start = partial(train, root, configuration, epochs)
    fold = root / "results" / NAME / f"{TRAINER}__nnUNetPlans__{configuration}" / "fold_0"

    def uninterrupted():
        watch = Watch()
        start(watch)
        (root / "moments.json").write_text(json.dumps(watch.moments))

    assert in_a_fork(uninterrupted) == 0
    fold.rename(root / "whole")
    moments = json.loads((root / "moments.json").read_text())
    for n in range(len(moments)):
        assert in_a_fork(partial(start, Watch(n))) == -signal.SIGKILL
        shutil.copytree(fold, root / str(n) / "killed")
        assert in_a_fork(partial(start, Watch(), resume=True)) == 0
        fold.rename(root / str(n) / "resumed")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
