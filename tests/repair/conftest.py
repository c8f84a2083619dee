"""Folders of predictions that promise too much, with the labels that were drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from scipy import ndimage

from segcal.io.files import write_json
from segcal.io.volumes import Geometry, write_nifti

SHAPE = (6, 20, 18)
CLASSES = ("background", "organ", "tumour")
SHARPENED = 3.0
"""Factor of the logits, so the temperature that repairs them."""


@dataclass
class Folders:
    """What :func:`cohort` wrote.

    Attributes:
        root: of all of it.
        predictions: ``CASE.npz`` with ``CASE.nii.gz`` beside.
        labels: reference label maps.
        logits: ``(K, z, y, x)`` by case.
        reference: ``(z, y, x)`` by case.
    """

    root: Path
    predictions: Path
    labels: Path
    logits: dict[str, np.ndarray]
    reference: dict[str, np.ndarray]

    def stored(self, name: str) -> np.ndarray:
        with np.load(self.predictions / f"{name}.npz") as file:
            return file["probabilities"]


def geometry(shape=SHAPE, spacing=(3.0, 1.0, 1.0)):
    return Geometry(shape, spacing, (0.0, 0.0, 0.0), np.diag([-1.0, -1.0, 1.0]))


def softmax(x):
    e = np.exp(x - x.max(0))
    return e / e.sum(0)


def smooth_logits(rng, channels=3, shape=SHAPE):
    """Logits of a posterior, smooth in space, with a background that prevails."""
    noise = rng.normal(size=(channels, *shape))
    x = np.stack([ndimage.gaussian_filter(one, 1.5) for one in noise])
    x *= 2 / x.std()
    x[0] += 1
    return x


def drawn(rng, p):
    return (p.cumsum(0) < rng.random(p.shape[1:])).sum(0).clip(0, len(p) - 1)


def cohort(root: Path, cases=6, sharpened=SHARPENED, dtype=np.float32, seed=0, first=0) -> Folders:
    """Labels drawn from a posterior, and predictions that sharpen it."""
    rng = np.random.default_rng(seed)
    done = Folders(root, root / "predictions", root / "labels", {}, {})
    done.predictions.mkdir(parents=True)
    write_json(
        done.predictions / "dataset.json",
        {"labels": {name: k for k, name in enumerate(CLASSES)}, "file_ending": ".nii.gz"},
    )
    for i in range(first, first + cases):
        name = f"case_{i:02d}"
        x = smooth_logits(rng)
        y = drawn(rng, softmax(x))
        x = x * sharpened
        done.logits[name], done.reference[name] = x, y
        write_nifti(done.labels / f"{name}.nii.gz", y.astype(np.uint8), geometry())
        p = softmax(x).astype(dtype)
        write_nifti(done.predictions / f"{name}.nii.gz", p.argmax(0).astype(np.uint8), geometry())
        np.savez_compressed(done.predictions / f"{name}.npz", probabilities=p)
    return done


@pytest.fixture
def folders(tmp_path):
    return cohort(tmp_path)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A cohort that no test changes."""
    return cohort(tmp_path_factory.mktemp("cohort"))


def record(folder: Path, **content) -> None:
    (folder / "segcal_predict.json").write_text(json.dumps(content))
