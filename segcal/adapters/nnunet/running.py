"""Run nnU-Net's own training and prediction with segcal's trainers at hand."""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from segcal.adapters.nnunet.discovery import ensure_env, register, require_paths


@dataclass(frozen=True)
class Budget:
    """What nnU-Net's command line has no option for; None leaves nnU-Net's value.

    Attributes:
        epochs: number of epochs (nnU-Net: 1000).
        iterations: training iterations an epoch (250).
        val_iterations: validation iterations an epoch (50).
        save_every: epochs between ``checkpoint_latest`` (50).
        seed: seed everything at the start and, plus the epoch, at the start of every epoch, with
            single-process data loading: a resumed training then repeats an uninterrupted one.
    """

    epochs: int | None = None
    iterations: int | None = None
    val_iterations: int | None = None
    save_every: int | None = None
    seed: int | None = None

    def apply(self, trainer: Any) -> None:
        """Set the budget on an nnU-Net trainer that has not been initialised.

        Raises:
            AttributeError: nnU-Net has renamed what we set.
        """
        for attribute, value in (
            ("num_epochs", self.epochs),
            ("num_iterations_per_epoch", self.iterations),
            ("num_val_iterations_per_epoch", self.val_iterations),
            ("save_every", self.save_every),
        ):
            if value is not None:
                if not hasattr(trainer, attribute):
                    raise AttributeError(f"nnU-Net's trainer has no {attribute} any more")
                setattr(trainer, attribute, value)
        if self.seed is not None:
            seed = self.seed
            seed_everything(seed)
            host_epoch_start = trainer.on_epoch_start

            def on_epoch_start() -> None:
                seed_everything(seed + 1 + trainer.current_epoch)
                host_epoch_start()

            trainer.on_epoch_start = on_epoch_start


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - nnU-Net draws from the global generator
    torch.manual_seed(seed)


def check_train(arguments: Sequence[str], budget: Budget | None = None) -> None:
    """Check what can be checked before nnU-Net starts.

    Raises:
        ValueError: nnU-Net's path variables are not set; a budget with several GPUs, whose
            processes it would not reach.
    """
    if _asks_for_help(arguments):
        return
    require_paths("nnUNet_preprocessed", "nnUNet_results")
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-num_gpus", type=int, default=1)
    known, _ = parser.parse_known_args([str(a) for a in arguments])
    if known.num_gpus > 1 and budget not in (None, Budget()):
        raise ValueError(
            "-num_gpus: --epochs, --iterations, --val-iterations, --save-every and --seed only "
            "reach a training in one process; leave them out, or train on one GPU"
        )


def check_predict(arguments: Sequence[str]) -> None:
    """Check what can be checked before nnU-Net starts.

    Raises:
        ValueError: nnU-Net's path variables are not set.
    """
    if not _asks_for_help(arguments):
        require_paths("nnUNet_results")


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def train(arguments: Sequence[str], budget: Budget | None = None) -> None:
    """Run ``nnUNetv2_train`` with `arguments` in this process.

    Raises:
        ValueError: see :func:`check_train`.
    """
    check_train(arguments, budget)
    budget = budget or Budget()
    if budget.seed is not None:
        os.environ["nnUNet_n_proc_DA"] = "0"  # read when nnU-Net is imported
    ensure_env()
    from nnunetv2.run import run_training

    register()
    find_trainer = run_training.get_trainer_from_args

    def with_budget(*args: Any, **kwargs: Any) -> Any:
        trainer = find_trainer(*args, **kwargs)
        budget.apply(trainer)
        return trainer

    run_training.get_trainer_from_args = with_budget
    try:
        _call("nnUNetv2_train", run_training.run_training_entry, arguments)
    finally:
        run_training.get_trainer_from_args = find_trainer


def predict(arguments: Sequence[str]) -> None:
    """Run ``nnUNetv2_predict`` with `arguments`, always saving probabilities.

    Raises:
        ValueError: see :func:`check_predict`.
    """
    check_predict(arguments)
    ensure_env()
    from nnunetv2.inference.predict_from_raw_data import predict_entry_point

    register()
    flag = "--save_probabilities"
    arguments = [*arguments] if flag in arguments else [*arguments, flag]
    _call("nnUNetv2_predict", predict_entry_point, arguments)


def _call(name: str, entry_point: Callable[[], Any], arguments: Sequence[str]) -> None:
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        entry_point()
    except EOFError as error:  # which a command line would report as "Aborted."
        raise RuntimeError(f"{name}: a file that it read ended early, see above") from error
    finally:
        sys.argv = before
