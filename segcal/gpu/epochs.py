"""Seconds of an epoch of the published U-Net, its slices in the GPU's memory or not."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset
from segcal.gpu.findings import Findings
from segcal.gpu.training import NETWORK, train
from segcal.io.yaml import config_root, read_yaml

EPOCHS = 4
"""Of which the first compiles and warms up."""
PUBLISHED = 75 * 1330
"""Slices that are trained on in 75 epochs of ACDC, of whose patients 70 train."""
VOLUMES = 20
"""Half of which validate, more than in the papers."""


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Train both ways; the losses are the same, and the times tell what it is worth."""
    if find_spec("monai") is None or find_spec("ignite") is None:
        findings.skip("MONAI and pytorch-ignite are not installed")
        return
    size, depth, epochs = (32, 2, 2) if tiny else (192, 10, EPOCHS)
    config = read_yaml(config_root() / "experiments" / "acdc" / "unet.yaml")
    network = NETWORK if tiny else config["network"]
    losses = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = PhantomSettings(shape=(depth, size, size))
        write_phantom_dataset(folder / "data", train=VOLUMES, test=0, seed=0, settings=settings)
        for where, on_device in (("in the GPU's memory", True), ("in the host's memory", False)):
            records = train(
                folder, "crac", device.type, size, epochs, network=network, on_device=on_device
            )
            seconds = min(record["seconds"] for record in records[1:])
            losses[where] = [record["train"] for record in records]
            per_slice = seconds / (VOLUMES // 2 * depth)
            findings.note(where, {"epoch_s": seconds, "acdc_minutes": PUBLISHED * per_slice / 60})
    one, other = losses.values()
    findings.expect(one == other, f"losses differ: {one} and {other}")
