"""MONAI networks in a study, trained and predicted like ``segcal train`` and ``segcal predict``."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from segcal.adapters.monai.building import build_network
from segcal.adapters.monai.experiment import SegmentationExperiment
from segcal.adapters.monai.inference import Predictor, predict_cases
from segcal.adapters.monai.training import SegmentationRun
from segcal.io.files import read_json
from segcal.io.yaml import merged, validated
from segcal.recipes import build
from segcal.study.plan import Part, StudyCell, TrainedCell
from segcal.training.beginning import RUN_NAME
from segcal.training.epoch_log import EpochLog
from segcal.training.time_limit import NEVER

__all__ = ["MonaiHost"]

TRAINING = "training"
"""Folder of the training within the folder of a cell (one training of a study)."""
EPOCHS = "epochs"
"""Placeholder for the number of epochs among the arguments of a scheduler."""


class MonaiHost:
    """Trains and predicts as the commands do, see :class:`segcal.study.plan.Host`."""

    def resolve(self, cell: StudyCell, classes: int) -> SegmentationExperiment:
        """The experiment that ``segcal train`` would read from a file.

        Args:
            cell: what is trained.
            classes: of its data set.

        Raises:
            ValueError: keys or arguments that do not fit, or a recipe's terms that do not.
        """
        experiment = _experiment(cell)
        terms: dict[str, Any] = experiment.terms
        objective = build(experiment.recipe, classes, **terms)
        build_network(experiment, 1, objective.num_heads * classes)
        return experiment

    def train(self, cell: StudyCell, until: float = NEVER) -> TrainedCell:
        """Train to the end, starting from the last checkpoint if there is one.

        Args:
            cell: what is trained.
            until: time, as of ``time.time``, after which no epoch but the first begins.

        Raises:
            OutOfTimeError: that time has come before the end.
        """
        run = SegmentationRun(_experiment(cell), resume=True)
        done = run.run(until=until)
        records = EpochLog(done.folder).records()
        runs = read_json(done.folder / RUN_NAME)["runs"]
        return TrainedCell(
            epochs=done.epochs,
            best_epoch=done.best_epoch,
            parameters=sum(p.numel() for p in run.network.parameters()),
            seconds=sum(record["seconds"] for record in records),
            versions={"monai": version("monai"), **runs[-1]["versions"]},
        )

    def predict(self, cell: StudyCell, part: Part) -> None:
        """Predict with the last epoch."""
        predictor = Predictor(_experiment(cell), "last")
        cases = predictor.cases(None, validation=part == "fit")
        predict_cases(predictor, cases, cell.predictions(part), "npz")

    def log(self, cell: StudyCell) -> Path:
        """Folder of the training."""
        return cell.folder / TRAINING


def _experiment(cell: StudyCell) -> SegmentationExperiment:
    settings = cell.settings
    content: dict[str, Any] = {
        "summary": f"{cell.set}, {cell.network}, {cell.recipe}",
        "recipe": cell.variant.recipe,
        "terms": cell.variant.terms,
        "data": {**settings["data"], "root": cell.data, "split": {"fold": 0}},
        "network": settings["network"],
        "optimizer": settings["optimizer"],
        "scheduler": _scheduler(settings["scheduler"], settings["epochs"]),
        "training": {**settings["training"], "epochs": settings["epochs"], "seed": cell.seed},
        "output": str(cell.folder / TRAINING),
    }
    content = merged(content, cell.variant.changes)
    return validated(content, SegmentationExperiment, cell.name)


def _scheduler(scheduler: Mapping[str, Any] | None, epochs: int) -> dict[str, Any] | None:
    if scheduler is None:
        return None
    arguments = {k: epochs if v == EPOCHS else v for k, v in scheduler.get("args", {}).items()}
    return {**scheduler, "args": arguments}
