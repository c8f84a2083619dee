"""Checkpoints of the MONAI trainer: tensors and plain values, whole or not there."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from segcal import __version__
from segcal.adapters.monai.experiment import Experiment, differences
from segcal.io.config import validated
from segcal.io.files import whole_file

BEST_NAME = "checkpoint_best.pt"
LAST_NAME = "checkpoint_last.pt"
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


def write_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Write tensors and plain values; a killed process leaves the file before."""
    with whole_file(path) as temporary:
        torch.save({"segcal": __version__, **content}, temporary)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU.

    Raises:
        ValueError: no such file, damaged, or one that holds more than tensors and plain values.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path}: not a whole checkpoint of segcal train ({reason})") from None
    if not isinstance(content, dict) or {"segcal", "experiment", "network"} - content.keys():
        raise ValueError(f"{path}: not a checkpoint of segcal train")
    return content


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
