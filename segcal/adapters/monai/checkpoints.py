"""Checkpoints of the MONAI trainer: what they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segcal.adapters.monai.experiment import Experiment
from segcal.io.yaml import validated
from segcal.training.checkpoints import read_checkpoint

MUST_BE_SAME: Mapping[str, Sequence[str]] = {
    "data": ("cache", "root", "images", "labels"),
    "network": ("summary", "paper"),
    "recipe": (),
    "terms": (),
    "optimizer": (),
    "scheduler": (),
    "inference": (),
    "training": (
        "epochs",
        "early_stop",
        "device",
        "workers",
        "val_batch_size",
        "find_unused_parameters",
    ),
}
"""Parts of an experiment that a resumed training may not change, but for these of their keys."""


def read_training(path: Path) -> dict[str, Any]:
    """Read a checkpoint of a training onto the CPU.

    Raises:
        ValueError: no such file, damaged, or one of something else.
    """
    return read_checkpoint(path, ("experiment", "network", "classes"))


def experiment_of(content: dict[str, Any], path: Path) -> Experiment:
    """The experiment that a checkpoint is of.

    Raises:
        ValueError: it is of another version's schema.
    """
    return validated(content["experiment"], Experiment, str(path))
