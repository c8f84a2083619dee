"""Volumes that stand for those of a data set."""

from __future__ import annotations

import zipfile
from pathlib import Path

import nibabel as nib
import numpy as np

SHAPE = (6, 5, 4)
AFFINE = np.array([[-1.5, 0, 0, 10], [0, -1.25, 0, -20], [0, 0, 8.0, 30], [0, 0, 0, 1]])


def save(path, array, affine=AFFINE, change=lambda image: None):
    """Write (x, y, z) with nibabel."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(array, affine)
    image.header.set_xyzt_units("mm")
    change(image)
    nib.save(image, path)
    return path


def image(seed, shape=SHAPE, dtype=np.int16):
    return np.random.default_rng(seed).integers(0, 1000, shape).astype(dtype)


def labels(classes, seed=0, shape=SHAPE):
    values = np.random.default_rng(seed).integers(0, classes, shape).astype(np.uint8)
    values.reshape(-1)[:classes] = range(classes)
    return values


def lie(image):
    """As in ACDC: the affine says 1 mm, the voxel size is elsewhere."""
    image.set_qform(None, 0)
    image.set_sform(np.diag([-1.0, -1.0, 1.0, 1.0]), 2)


def write_acdc(root, groups, *, testing=0, ending=".nii.gz", place="{patient}/{file}"):
    """Patients with frames 1 and 7 (and one more for the first), labels, Info.cfg and 4-D cine."""
    for number in range(1, len(groups) + testing + 1):
        subset = "training" if number <= len(groups) else "testing"
        patient = f"patient{number:03d}"
        group = f"Group: {groups[number - 1]}\n" if number <= len(groups) else ""
        info = root / subset / patient / "Info.cfg"
        info.parent.mkdir(parents=True, exist_ok=True)
        info.write_text(f"ED: 1\nES: 7\n{group}Height: 180.0\n")
        frames = (1, 7, 9) if number == 1 else (1, 7)
        for frame in frames:
            for kind, array in (("", image(number)), ("_gt", labels(4, number))):
                file = f"{patient}_frame{frame:02d}{kind}{ending}"
                save(root / subset / place.format(patient=patient, file=file), array, change=lie)
        save(root / subset / patient / f"{patient}_4d{ending}", image(number, (*SHAPE, 3)))
    return root


def pack(path, folder):
    """Zip a folder, itself included."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder.parent))
    return path


def files(folder):
    return sorted(p.relative_to(folder).as_posix() for p in Path(folder).rglob("*") if p.is_file())
