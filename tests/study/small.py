"""A study that trains in seconds, and data sets for it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import yaml

from segcal.io.volumes import Geometry, write_nifti

NETWORK = {
    "target": "monai.networks.nets.UNet",
    "args": {"channels": [4, 8], "strides": [2], "num_res_units": 1},
}
SCHEDULER = {"target": "torch.optim.lr_scheduler.CosineAnnealingLR", "args": {"T_max": "epochs"}}


def content_of(folder: Path, **parts) -> dict:
    """What the file of a study says; `parts` replace its keys."""
    return {
        "kind": "segmentation",
        "summary": "two recipes on phantoms",
        "cost": {"cpu_hours": 0.01, "gpu_minutes": 1},
        "sets": {
            "hearts": {
                "phantom": {"shape": [2, 32, 32]},
                "patients": {"train": 2, "validation": 2, "test": 2},
                "data": {"size": [32, 32]},
                "epochs": 2,
            }
        },
        "networks": {"unet": NETWORK},
        "recipes": ["dice_ce", "crac"],
        "seeds": [0],
        "scheduler": SCHEDULER,
        "training": {"batch_size": 2, "device": "cpu"},
        "output": str(folder / "study"),
        **parts,
    }


def write_study(folder: Path, **parts) -> Path:
    """Write such a file."""
    path = folder / "study.yaml"
    path.write_text(yaml.safe_dump(content_of(folder, **parts)))
    return path


def write_raw(folder: Path, train, test=(), *, shape=(2, 12, 10), spacing=(8.0, 2.0, 1.0)) -> Path:
    """A data set of squares in nnU-Net's raw layout; every voxel of an image tells its column."""
    label = np.zeros(shape, np.uint8)
    label[:, 4:8, 4:8] = 1
    image = np.broadcast_to(np.arange(shape[2], dtype=np.float32), shape)
    geometry = Geometry(shape, spacing, (0.0, 0.0, 0.0), np.eye(3))
    for subset, names in (("Tr", train), ("Ts", test)):
        for name in names:
            write_nifti(folder / f"images{subset}" / f"{name}_0000.nii.gz", image, geometry)
            write_nifti(folder / f"labels{subset}" / f"{name}.nii.gz", label, geometry)
    dataset = {
        "channel_names": {"0": "MRI"}, "labels": {"background": 0, "square": 1},
        "numTraining": len(train), "file_ending": ".nii.gz",
    }  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps(dataset))
    return folder
