"""Begins a training in a folder of its own, or continues it from its last checkpoint."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

from segcal.io.files import read_json, remove_leftovers, write_json
from segcal.io.yaml import validated
from segcal.training.checkpoints import LAST_NAME, read_checkpoint
from segcal.training.devices import Ranks
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import Experiment, check_same, write_resolved

RUN_NAME = "run.json"


class OutputInUseError(ValueError):
    """The folder of the results holds a training already."""


def check_unused(experiment: Experiment) -> None:
    """Check that no training is overwritten.

    Raises:
        OutputInUseError: the folder of the results holds a training.
    """
    folder = experiment.folder
    if (folder / LAST_NAME).exists() or EpochLog(folder).path.exists():
        raise OutputInUseError(f"{folder}: holds a training; resume it, or choose another output")


def last_checkpoint(experiment: Experiment, keys: Collection[str]) -> dict[str, Any] | None:
    """The checkpoint that an experiment continues from; None if there is none yet.

    Args:
        experiment: experiment to train.
        keys: keys that the checkpoint must have.

    Raises:
        ValueError: the checkpoint is damaged, of another experiment, or of more epochs.
    """
    path = experiment.folder / LAST_NAME
    if not path.exists():
        return None
    checkpoint = read_checkpoint(path, keys)
    before = validated(checkpoint["experiment"], type(experiment), str(path))
    check_same(before, experiment, path)
    if checkpoint["epoch"] > experiment.training.epochs:
        raise ValueError(
            f"{path}: has been trained for {checkpoint['epoch']} epochs, more than "
            f"training.epochs {experiment.training.epochs}; choose another output"
        )
    return checkpoint


def begin(
    experiment: Experiment,
    ranks: Ranks,
    *,
    epoch: int,
    libraries: Sequence[str],
    facts: Mapping[str, Any],
) -> None:
    """Make the folder of the results, and write the experiment and the versions used into it.

    Args:
        experiment: experiment to train.
        ranks: the processes that train.
        epoch: first epoch of this run; lines of the log from this epoch on are removed.
        libraries: distributions whose versions are written.
        facts: further content of ``run.json``.
    """
    folder = experiment.folder
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    EpochLog(folder).forget_from(epoch)
    write_resolved(experiment, folder)
    path = folder / RUN_NAME
    before = read_json(path)["runs"] if epoch > 0 and path.exists() else []
    run = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "first_epoch": epoch,
        "seed": experiment.training.seed,
        "device": str(ranks.device),
        "processes": ranks.size,
        "versions": versions_of(libraries),
    }
    write_json(path, {"runs": [*before, run], **facts})


def versions_of(libraries: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of distributions, and the commit of segcal if it is known."""
    commit = source_commit()
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in libraries},
        **({"commit": commit} if commit else {}),
    }


def source_commit() -> str | None:
    """The commit of the checkout that segcal runs from, with ``-dirty`` if files were changed.

    Returns:
        the commit, or None if segcal is installed as a package or there is no git.
    """
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(  # noqa: S603 - nothing in it is a user's
            command, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
