"""nnU-Net in a study: planning once for each set and seed, then training and prediction."""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from pydantic import Field

from segcal.adapters.nnunet.apart import run_apart
from segcal.adapters.nnunet.checkpoints import read_checkpoint
from segcal.adapters.nnunet.plans import small_configuration
from segcal.adapters.nnunet.settings import PLANS_KEY, WITHOUT_DICE
from segcal.io.files import read_json, write_json
from segcal.io.yaml import Strict, merged, validated
from segcal.recipes import build, load_objective
from segcal.study.plan import Part, StudyCell, TrainedCell
from segcal.training.beginning import versions_of
from segcal.training.devices import DEVICES, choose_device
from segcal.training.time_limit import NEVER

__all__ = ["NnunetExperiment", "NnunetHost"]

NUMBER = 900
PLANS = "nnUNetPlans"
FINAL = "checkpoint_final.pth"
LATEST = "checkpoint_latest.pth"
SAID = "nnunet.log"
READY = "ready.json"
CONFIGURATION = "study"
"""Name of the configuration that a cell (one training of the study) adds to the plans."""
SAVE_EVERY = 5
"""Epochs between checkpoints, from which a killed training continues."""


class NnunetExperiment(Strict):
    """A training of nnU-Net in a study.

    Attributes:
        configuration: of nnU-Net's plans: ``2d``, ``3d_fullres``, ...
        patch: size of the patches; None takes the plans'.
        batch: number of patches in a batch; None takes the plans'.
        features: number of features for every stage of the network; None takes the plans'.
        iterations: training iterations per epoch.
        val_iterations: validation iterations per epoch.
        dice: whether nnU-Net's Dice is part of the loss.
        mirroring: whether predictions are averaged over mirrored images.
        trainer: name of the recipe's trainer.
        terms: arguments of the recipe's terms.
        epochs: number of epochs.
        seed: of all random numbers.
        device: ``auto`` takes a GPU if there is one.
    """

    configuration: str
    patch: tuple[int, ...] | None = None
    batch: int | None = Field(default=None, ge=1)
    features: tuple[int, ...] | None = None
    iterations: int = Field(default=250, ge=1)
    val_iterations: int = Field(default=50, ge=1)
    dice: bool = True
    mirroring: bool = True
    trainer: str
    terms: dict[str, dict[str, Any]] = Field(default={})
    epochs: int = Field(ge=1)
    seed: int
    device: str = Field(default="auto", pattern=f"^({DEVICES})$")


class NnunetHost:
    """Plans, trains and predicts by nnU-Net's commands, see :class:`segcal.study.plan.Host`."""

    def resolve(self, cell: StudyCell, classes: int) -> NnunetExperiment:
        """Check a training and return all of its settings.

        Args:
            cell: what is trained.
            classes: of its data set.

        Raises:
            ValueError: keys or arguments that do not fit, or a recipe without a trainer.
        """
        experiment = _experiment(cell)
        terms: dict[str, Any] = cell.variant.terms
        build(cell.variant.recipe, classes, **terms)
        return experiment

    def train(self, cell: StudyCell, until: float = NEVER) -> TrainedCell:
        """Train to the end from the last checkpoint; the seconds count from this start.

        Args:
            cell: what is trained.
            until: time, as of ``time.time``, at which the training is ended wherever it is.

        Raises:
            OutOfTimeError: that time has come before the end.
        """
        experiment, fold = _experiment(cell), self.log(cell)
        _plan(cell, experiment)
        started = perf_counter()
        if not (fold / FINAL).is_file():
            _view(cell, experiment)
            device = choose_device(experiment.device).type
            goes_on = ["--c"] if (fold / LATEST).is_file() else []
            run_apart(
                "train",
                [str(NUMBER), CONFIGURATION, "0", "-tr", experiment.trainer, "-device", device,
                 *goes_on],
                folders=_folders(cell), log=cell.folder / SAID, threads=torch.get_num_threads(),
                until=until,
                budget={
                    "epochs": experiment.epochs, "iterations": experiment.iterations,
                    "val_iterations": experiment.val_iterations, "seed": experiment.seed,
                    "validate": False, "save_every": SAVE_EVERY,
                },
            )  # fmt: skip
        content = read_checkpoint(fold / FINAL)
        weights = {
            t.data_ptr(): t.numel() for t in content["network_weights"].values()
        }  # once each
        return TrainedCell(
            epochs=int(content["current_epoch"]),
            best_epoch=None,
            parameters=sum(weights.values()),
            seconds=perf_counter() - started,
            versions=versions_of(("segcal", "torch", "nnunetv2", "numpy")),
        )

    def predict(self, cell: StudyCell, part: Part) -> None:
        """Predict with the last epoch."""
        experiment, output = _experiment(cell), cell.predictions(part)
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir(parents=True)
        run_apart(
            "predict",
            ["-i", str(cell.images(part)), "-o", str(output), "-d", str(NUMBER), "-c",
             CONFIGURATION, "-f", "0", "-tr", experiment.trainer, "-chk", FINAL, "-npp", "0",
             "-nps", "0", "-device", choose_device(experiment.device).type,
             *([] if experiment.mirroring else ["--disable_tta"])],
            folders=_folders(cell), log=cell.folder / SAID, threads=torch.get_num_threads(),
        )  # fmt: skip

    def log(self, cell: StudyCell) -> Path:
        """Folder of nnU-Net's training."""
        trainer = _experiment(cell).trainer
        run = f"{trainer}__{PLANS}__{CONFIGURATION}"
        return _folders(cell)["results"] / _dataset(cell) / run / "fold_0"


def _experiment(cell: StudyCell) -> NnunetExperiment:
    content: dict[str, Any] = {
        **cell.settings["network"],
        "terms": cell.variant.terms,
        "epochs": cell.settings["epochs"],
        "seed": cell.seed,
        "device": cell.settings["training"].get("device", "auto"),
    }
    content = merged(content, cell.variant.changes)
    trainer = load_objective(cell.variant.recipe).trainer
    if not trainer:
        raise ValueError(f"recipe {cell.variant.recipe}: has no nnU-Net trainer")
    suffix = "" if content.get("dice", True) else WITHOUT_DICE
    content["trainer"] = f"nnUNetTrainer{trainer}{suffix}"
    return validated(content, NnunetExperiment, cell.name)


def _dataset(cell: StudyCell) -> str:
    return f"Dataset{NUMBER}_{re.sub('[^A-Za-z0-9]', '', cell.set) or 'Cells'}"


def _folders(cell: StudyCell) -> dict[str, Path]:
    """nnU-Net's folders; the cell has its own results and its own view of the preprocessed data."""
    own = cell.folder / "training"
    return {
        "raw": cell.data / "nnunet" / "raw",
        "preprocessed": own / "preprocessed",
        "results": own / "results",
    }


def _plan(cell: StudyCell, experiment: NnunetExperiment) -> None:
    """Plan and preprocess the data of a set and seed, once, in the cell that comes first."""
    base, root = experiment.configuration, cell.data / "nnunet"
    with _alone(root):
        done = root / READY
        ready = read_json(done) if done.is_file() else []
        if base in ready:
            return
        raw = root / "raw" / _dataset(cell)
        raw.mkdir(parents=True, exist_ok=True)
        for name in ("imagesTr", "labelsTr", "dataset.json"):
            if not (raw / name).is_symlink():
                (raw / name).symlink_to(Path("../../..") / name)
        run_apart(
            "plan",
            ["-d", str(NUMBER), "-c", base, "-np", "1", "-npfp", "1", "--verify_dataset_integrity"],
            folders={
                "raw": root / "raw", "preprocessed": root / "preprocessed",
                "results": root / "results",
            },
            log=root / SAID,
        )  # fmt: skip
        plans = read_json(root / "preprocessed" / _dataset(cell) / f"{PLANS}.json")
        small_configuration(plans, base)  # raises ValueError where nnU-Net has planned no such
        write_json(done, [*ready, base])


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process plans in this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _view(cell: StudyCell, experiment: NnunetExperiment) -> None:
    """Link the preprocessed data, and write the cell's own plans and split."""
    source = cell.data / "nnunet" / "preprocessed" / _dataset(cell)
    view = _folders(cell)["preprocessed"] / _dataset(cell)
    view.mkdir(parents=True, exist_ok=True)
    _folders(cell)["results"].mkdir(parents=True, exist_ok=True)
    own = (f"{PLANS}.json", "splits_final.json")
    for path in source.iterdir():
        if path.name not in own and not (view / path.name).is_symlink():
            (view / path.name).symlink_to(path.resolve())
    plans = read_json(source / f"{PLANS}.json")
    configuration = small_configuration(
        plans, experiment.configuration, patch=experiment.patch, batch=experiment.batch,
        features=experiment.features,
    )  # fmt: skip
    if experiment.terms:
        configuration[PLANS_KEY] = experiment.terms
    plans["configurations"][CONFIGURATION] = configuration
    write_json(view / f"{PLANS}.json", plans)
    (fold,) = read_json(cell.data / "splits_final.json")
    write_json(view / "splits_final.json", [{key: fold[key] for key in ("train", "val")}])
