"""Run nnU-Net's own training and prediction with segcal's trainers.

nnU-Net reads environment variables when it is imported. Since some are set here, everything that
imports nnU-Net is imported inside the functions.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from segcal.adapters.nnunet.discovery import ensure_env, require_paths
from segcal.adapters.nnunet.patching import Aggregation, replaced
from segcal.adapters.nnunet.settings import WITHOUT_DICE
from segcal.io.files import check_writable, read_json
from segcal.io.pairing import RECORD_NAME
from segcal.recipes import load_recipe, names

RANK_STRIDE = 1_000_003
"""Distance between the seeds of processes that train together."""


@dataclass(frozen=True)
class Budget:
    """Settings without an option on nnU-Net's command line; None leaves nnU-Net's value.

    Attributes:
        epochs: number of epochs (nnU-Net: 1000).
        iterations: training iterations per epoch (250).
        val_iterations: validation iterations per epoch (50).
        save_every: epochs between two writings of ``checkpoint_latest`` (50).
        seed: seed everything at the start and, by epoch and rank, at the start of every epoch, and
            load data in the training's own process. A resumed training then repeats an
            uninterrupted training exactly.
        calibrate: post-hoc method that is fitted to the fold's validation at the end; None fits
            none.
        patients: regular expression that finds the patient in the name of a case, for that method's
            cross-validation; None counts every case as a patient.
        must_calibrate: whether a fit that fails is an error, or only a warning in the log.
        validate: whether to predict the validation cases at the end of the training, as nnU-Net
            does.
    """

    epochs: int | None = None
    iterations: int | None = None
    val_iterations: int | None = None
    save_every: int | None = None
    seed: int | None = None
    calibrate: str | None = None
    patients: str | None = None
    must_calibrate: bool = True
    validate: bool = True

    def apply(self, trainer: Any) -> None:
        """Set the budget on an nnU-Net trainer that has not been initialised.

        Raises:
            AttributeError: nnU-Net has renamed an attribute that is set here.
            RefusedError: `patients` does not find a patient in the name of every case.
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
                seed_everything(seed + 1 + trainer.current_epoch + RANK_STRIDE * trainer.local_rank)
                host_epoch_start()

            trainer.on_epoch_start = on_epoch_start
        if not self.validate:
            trainer.perform_actual_validation = lambda save_probabilities=False: None
        elif self.calibrate is not None:
            from segcal.adapters.nnunet.fold_calibration import fit_after_validation

            fit_after_validation(
                trainer, self.calibrate, patients=self.patients, required=self.must_calibrate
            )


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
        ValueError: nnU-Net's path variables are not set, or nothing can be written into its
            results; a post-hoc method would be fitted to unsuitable predictions.
    """
    if _asks_for_help(arguments):
        return
    require_paths("nnUNet_preprocessed", "nnUNet_results")
    check_writable(Path(os.environ["nnUNet_results"]))
    method = None if budget is None else budget.calibrate
    if method is None:
        return
    if "all" in arguments:
        raise ValueError(
            "--calibrate: with fold 'all' the network is trained on the cases it validates on, "
            "on which it is too confident; calibrate on cases that it has not seen "
            "(segcal calibrate)"
        )
    if any(argument.startswith("--val_") for argument in arguments):
        raise ValueError("--calibrate: uses the final checkpoint; leave out --val_best")


def calibrator_of_recipe(arguments: Sequence[str]) -> str | None:
    """The post-hoc method that the recipe of a training's trainer names; None if there is none.

    Where there would be nothing to fit it to, that is with fold ``all``, or where the final
    checkpoint is not validated, it is None as well.

    Args:
        arguments: of ``nnUNetv2_train``.
    """
    if _asks_for_help(arguments) or "all" in arguments:
        return None
    if any(argument.startswith("--val_") for argument in arguments):
        return None
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-tr", default="")
    known, _ = parser.parse_known_args([str(a) for a in arguments])
    # not by the trainers' classes: nnU-Net, which they import, then reads variables still to be set
    of_trainers = {f"nnUNetTrainer{one.trainer}": one for one in map(load_recipe, names("recipes"))}
    recipe = of_trainers.get(known.tr.removesuffix(WITHOUT_DICE))
    return None if recipe is None or not recipe.trainer else recipe.calibrator


def check_predict(
    arguments: Sequence[str],
    aggregation: Aggregation | None = None,
    *,
    from_modelfolder: bool = False,
) -> None:
    """Check what can be checked before nnU-Net starts.

    Raises:
        ValueError: nnU-Net's path variables are not set, or nothing can be written into the output;
            a prediction to continue was started with another average or checkpoint.
    """
    if _asks_for_help(arguments):
        return
    if not from_modelfolder:
        require_paths("nnUNet_results")
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-o", type=Path)
    parser.add_argument("--continue_prediction", "--c", action="store_true")
    parser.add_argument("-chk", default="checkpoint_final.pth")
    if not from_modelfolder:
        parser.add_argument("-c")  # which would pass for the beginning of -chk
    known, _ = parser.parse_known_args([str(a) for a in arguments])
    if known.o is not None:
        check_writable(known.o)
    if not known.continue_prediction or known.o is None or not (known.o / RECORD_NAME).exists():
        return
    before = read_json(known.o / RECORD_NAME)
    now = {"average": (aggregation or Aggregation()).average, "checkpoint": known.chk}
    for (key, value), option in zip(now.items(), ("--average", "-chk"), strict=True):
        if before.get(key) != value:
            raise ValueError(
                f"{known.o}: was predicted with {option} {before.get(key)}, not {value}; "
                "continue with that, or predict into another folder"
            )


def _asks_for_help(arguments: Sequence[str]) -> bool:
    return "-h" in arguments or "--help" in arguments


def train(arguments: Sequence[str], budget: Budget | None = None) -> None:
    """Run ``nnUNetv2_train`` with `arguments` in this process.

    Raises:
        ValueError: see :func:`check_train`.
        RefusedError: a damaged checkpoint to start or continue from; a checkpoint or plans that
            could run code.
    """
    budget = budget or Budget()
    check_train(arguments, budget)
    with (
        _prepared(budget) as host,
        replaced(host, "run_ddp", partial(train_rank, budget)),
    ):
        _call("nnUNetv2_train", host.run_training_entry, arguments)


def train_rank(budget: Budget, rank: int, *arguments: Any) -> None:
    """Run nnU-Net's ``run_ddp`` in one of the processes that ``-num_gpus`` starts."""
    with _prepared(budget) as host:
        host.run_ddp(rank, *arguments)


@contextmanager
def _prepared(budget: Budget) -> Iterator[Any]:
    """Yield nnU-Net's training module, which now finds segcal's trainers and sets their budget.

    Checkpoints that a training starts or continues from run no code, nor do its plans.
    """
    if budget.seed is not None:
        os.environ["nnUNet_n_proc_DA"] = "0"  # read when nnU-Net is imported
    ensure_env()
    from nnunetv2.run import run_training

    from segcal.adapters.nnunet.foreign_code import no_foreign_code
    from segcal.adapters.nnunet.registration import register
    from segcal.adapters.nnunet.trainers import CalibratedTrainer, warn_of_labels
    from segcal.adapters.nnunet.workers import workers_end_with_us

    register()
    find_trainer = run_training.get_trainer_from_args
    plainly = no_foreign_code()

    def with_budget(*args: Any, **kwargs: Any) -> Any:
        trainer = find_trainer(*args, **kwargs)
        budget.apply(trainer)
        if not isinstance(trainer, CalibratedTrainer):  # which says it when it starts
            warn_of_labels(trainer)
        trainer.initialize = plainly(trainer.initialize)
        trainer.load_checkpoint = plainly(trainer.load_checkpoint)
        return trainer

    pretrained = plainly(run_training.load_pretrained_weights)
    with (
        replaced(run_training, "get_trainer_from_args", with_budget),
        replaced(run_training, "load_pretrained_weights", pretrained),
        workers_end_with_us(),
    ):
        yield run_training


def predict(
    arguments: Sequence[str],
    aggregation: Aggregation | None = None,
    *,
    from_modelfolder: bool = False,
) -> None:
    """Run ``nnUNetv2_predict`` with `arguments`, always saving probabilities.

    Args:
        arguments: nnU-Net's.
        aggregation: what is averaged, and what is written.
        from_modelfolder: run ``nnUNetv2_predict_from_modelfolder``.

    Raises:
        ValueError: see :func:`check_predict`.
        RefusedError: a damaged checkpoint, a checkpoint or plans that could run code, or a
            calibrator of another model; raised before the first case.
    """
    aggregation = aggregation or Aggregation()
    check_predict(arguments, aggregation, from_modelfolder=from_modelfolder)
    ensure_env()
    from nnunetv2.inference import predict_from_raw_data as host

    from segcal.adapters.nnunet.prediction import AveragingPredictor
    from segcal.adapters.nnunet.registration import register

    register()
    flag = "--save_probabilities"
    arguments = [*arguments] if flag in arguments else [*arguments, flag]
    name, entry_point = "nnUNetv2_predict", host.predict_entry_point
    if from_modelfolder:
        name, entry_point = f"{name}_from_modelfolder", host.predict_entry_point_modelfolder
    with replaced(host, "nnUNetPredictor", partial(AveragingPredictor, aggregation)):
        _call(name, entry_point, arguments)


def _call(name: str, entry_point: Callable[[], Any], arguments: Sequence[str]) -> None:
    before = sys.argv
    sys.argv = [name, *arguments]
    try:
        entry_point()
    except EOFError as error:  # which a command line would report as "Aborted."
        raise RuntimeError(f"{name}: a file that it read ended early, see above") from error
    finally:
        sys.argv = before
