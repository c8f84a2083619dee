"""Reading checkpoints of the MONAI trainer and the experiments in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segcal.adapters.monai.experiment import SegmentationExperiment
from segcal.io.yaml import validated
from segcal.training.checkpoints import read_checkpoint

KEYS = ("classes", "heads", "ignore_label", "channels", "cases")
"""Entries of a checkpoint that describe its data."""


def read_training(path: Path) -> dict[str, Any]:
    """Read a checkpoint of a training onto the CPU.

    Raises:
        ValueError: no such file, a damaged file, or a checkpoint of something else.
    """
    return read_checkpoint(path, ("experiment", "epoch", "network", *KEYS))


def experiment_of(content: dict[str, Any], path: Path) -> SegmentationExperiment:
    """The experiment that a checkpoint belongs to.

    Raises:
        ValueError: another version of segcal wrote it, with other keys.
    """
    return validated(content["experiment"], SegmentationExperiment, str(path))
