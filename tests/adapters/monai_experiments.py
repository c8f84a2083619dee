"""Tiny experiments that the tests of the MONAI trainer share."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from segcal.adapters.monai.experiment import load_experiment
from segcal.adapters.monai.training import SegmentationRun
from segcal.training.devices import processes
from tests.ranks import meet_again

NETWORK = {
    "target": "monai.networks.nets.UNet",
    "args": {"channels": [4, 8], "strides": [2], "num_res_units": 1},
}


def write_config(folder: Path, root: Path | None, **parts) -> Path:
    """Write an experiment that trains in seconds; `parts` are merged into it."""
    content = {
        "data": {"root": str(root), "size": [32, 32], "split": {"validation": 0.34}},
        "network": NETWORK,
        "recipe": "crac",
        "optimizer": {"target": "torch.optim.Adam", "args": {"lr": 0.01}},
        "training": {"epochs": 2, "batch_size": 4, "device": "cpu"},
        "output": str(folder / "run"),
    }
    for key, value in parts.items():
        merged = isinstance(value, dict) and key != "network"
        content[key] = {**content.get(key, {}), **value} if merged else value
    if root is None:
        del content["data"]["root"]
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def run(path: Path, *settings: str, resume: bool = False, advance=lambda state: None, said=None):
    """Train in this process."""
    experiment = load_experiment(path, settings)
    with processes(experiment.training.device) as ranks:
        say = (lambda text: None) if said is None else said.append
        return SegmentationRun(experiment, ranks, resume=resume, say=say).run(advance)


def rank_main(rank: int, jobs: list[tuple[Path, list[str]]]) -> None:
    """What ``torchrun`` would start: one of two processes that train.

    Args:
        rank: its number.
        jobs: config and settings of the trainings, one after the other.
    """
    for path, settings in jobs:
        run(path, *settings)
        meet_again()


def apart_main(rank: int, path: Path, outputs: list[str]) -> None:
    """One of two processes that go on, each from an output of its own."""
    with pytest.raises(ValueError, match="file system that all machines share"):
        run(path, f"output={outputs[rank]}", resume=True)
