"""Checks that a short ``segcal train`` gives the same results on a GPU as on a CPU."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset
from segcal.gpu.findings import Findings
from segcal.io.files import write_json
from segcal.training.epoch_log import EpochLog

RECIPES = ("crac", "confidence")
EPOCHS = 3
NETWORK = {
    "target": "monai.networks.nets.UNet",
    "args": {"channels": [8, 16, 32], "strides": [2, 2], "num_res_units": 1},
}
TOLERANCE = 0.02
"""Relative tolerance of losses and multipliers after some epochs, which differ by rounding."""


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Train on both devices from the same seed, and compare all epochs."""
    if find_spec("monai") is None or find_spec("ignite") is None:
        findings.skip("MONAI and pytorch-ignite are not installed")
        return
    torch.backends.cudnn.allow_tf32 = False  # which rounds to three digits
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = 32 if tiny else 64
        settings = PhantomSettings(shape=(2 if tiny else 6, size, size))
        write_phantom_dataset(folder / "data", train=4, test=0, seed=0, settings=settings)
        for recipe in RECIPES[: 1 if tiny else None]:
            logs = {
                where: train(folder, recipe, where, size, 1 if tiny else EPOCHS)
                for where in ("cpu", device.type)
            }
            findings.note(recipe, [_numbers(record) for record in logs[device.type]])
            for ours, theirs in zip(logs[device.type], logs["cpu"], strict=True):
                _compare(findings, f"{recipe}, epoch {ours['epoch']}", ours, theirs)


def train(
    folder: Path,
    recipe: str,
    device: str,
    size: int,
    epochs: int,
    *,
    network: Mapping[str, Any] = NETWORK,
    on_device: bool | str = "auto",
) -> list[dict[str, Any]]:
    """The log of a training on the phantoms in ``folder/data``.

    Args:
        folder: that gets the training, too.
        recipe: the loss.
        device: ``cpu`` or ``cuda``.
        size: of slices.
        epochs: how many.
        network: what is trained.
        on_device: see :class:`segcal.adapters.monai.experiment.VolumeData`.
    """
    from segcal.adapters.monai.experiment import load_experiment
    from segcal.adapters.monai.training import SegmentationRun
    from segcal.training.devices import processes

    output = folder / f"{recipe}_{device}_{len(list(folder.iterdir()))}"
    write_json(  # JSON is YAML
        folder / "experiment.yaml",
        {
            "data": {
                "root": str(folder / "data"),
                "size": [size, size],
                "on_device": on_device,
                "split": {"validation": 0.5},
            },
            "network": dict(network),
            "recipe": recipe,
            "optimizer": {"target": "torch.optim.Adam", "args": {"lr": 0.001}},
            "training": {"epochs": epochs, "batch_size": 4, "device": device},
            "output": str(output),
        },
    )
    experiment = load_experiment(folder / "experiment.yaml", [])
    with processes(device) as ranks:
        SegmentationRun(experiment, ranks).run(lambda _: None)
    return EpochLog(output).records()


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Losses, multipliers and the scores of an epoch."""
    return {key: value for key, value in record.items() if key not in ("seconds", "notes")}


def _compare(findings: Findings, where: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    both = zip(_flat(_numbers(ours)), _flat(_numbers(theirs)), strict=True)
    for (name, a), (_, b) in both:
        close = math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE / 4)
        findings.expect(close, f"{where}, {name}: {a:.6g} on the device, {b:.6g} on the CPU")


def _flat(value: Any, name: str = "") -> list[tuple[str, float]]:
    """Numbers of nested dicts and lists, with their places."""
    if isinstance(value, dict):
        return [x for key, v in value.items() for x in _flat(v, f"{name}/{key}")]
    if isinstance(value, list):
        return [x for i, v in enumerate(value) for x in _flat(v, f"{name}/{i}")]
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return [(name, float(value))] if numeric else []
