"""Checkpoints of the MONAI trainer: what they are of."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from segcal.adapters.monai.experiment import Experiment
from segcal.io.checkpoints import read_checkpoint
from segcal.io.config import validated
from segcal.io.experiments import differences

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


def check_same(
    content: dict[str, Any],
    experiment: Experiment,
    path: Path,
    parts: Collection[str] = tuple(MUST_BE_SAME),
) -> None:
    """See to it that a checkpoint is of an experiment.

    Args:
        content: of the checkpoint.
        experiment: what it should be of.
        path: of the checkpoint.
        parts: of the experiment that count.

    Raises:
        ValueError: what differs.
    """
    compared = {part: MUST_BE_SAME[part] for part in parts}
    if found := differences(experiment_of(content, path), experiment, compared):
        raise ValueError(
            f"{path}: was trained with {'; '.join(found)}. Give the settings it was trained with "
            "(config.yaml beside it), or choose another output"
        )
