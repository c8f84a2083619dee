"""Tiny classifiers that tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml

from segcal.classify.readers.archives import write_npz
from segcal.classify.readers.samples import Samples

MLP = {"target": "segcal.classify.networks.MLP", "args": {"hidden": [8], "dropout": 0.1}}


def write_classes(path: Path, n: int = 120, classes: int = 3, seed: int = 0) -> Path:
    """Write features that tell classes apart: one cloud each."""
    rng = np.random.default_rng(seed)
    targets = np.arange(n) % classes
    inputs = rng.normal(size=(n, 4)) + 3 * np.eye(classes, 4)[targets]
    names = tuple(f"class {k}" for k in range(classes))
    write_npz(path, Samples(inputs.astype(np.float32), targets, names))
    return path


def write_labels(path: Path, n: int = 120, seed: int = 0) -> Path:
    """Write features and three labels, the last of them rare."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(n, 4))
    targets = (inputs[:, :3] + 0.5 * rng.normal(size=(n, 3)) > [0, 0.3, 1]).astype(np.int8)
    write_npz(path, Samples(inputs.astype(np.float32), targets, ("a", "b", "c")))
    return path


def write_config(folder: Path, samples: Path, **parts) -> Path:
    """Write an experiment that trains in a second; `parts` are put into it."""
    content = {
        "data": {"source": "npz", "args": {"path": str(samples)}},
        "network": MLP,
        "recipe": "cals",
        "optimizer": {"target": "torch.optim.Adam", "args": {"lr": 0.02}},
        "training": {"epochs": 4, "batch_size": 32, "device": "cpu"},
        "output": str(folder / "run"),
    }
    for key, value in parts.items():
        merged = isinstance(value, dict) and key in ("data", "training")
        content[key] = {**content[key], **value} if merged else value
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    return path
