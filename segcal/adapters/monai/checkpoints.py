"""Checkpoints of the MONAI trainer: read, and what experiment they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segcal.adapters.monai.experiment import SegmentationExperiment
from segcal.io.yaml import validated
from segcal.training.checkpoints import read_checkpoint

KEYS = ("classes", "heads", "ignore_label", "channels", "cases")
"""What a checkpoint of this trainer tells of its data."""


def read_training(path: Path) -> dict[str, Any]:
    """Read a checkpoint of a training onto the CPU.

    Raises:
        ValueError: no such file, damaged, or one of something else.
    """
    return read_checkpoint(path, ("experiment", "epoch", "network", *KEYS))


def experiment_of(content: dict[str, Any], path: Path) -> SegmentationExperiment:
    """The experiment that a checkpoint is of.

    Raises:
        ValueError: it is of another version's schema.
    """
    return validated(content["experiment"], SegmentationExperiment, str(path))
