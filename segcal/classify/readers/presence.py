"""Slices of a segmentation data set, with the labels that each slice shows as targets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate

from segcal.classify.readers.samples import UNSAID, Samples
from segcal.io.label_sets import LabelSet, read_label_set
from segcal.io.pairing import scan
from segcal.io.volumes import put_on, read_labels, read_volume

AXES = ("z", "y", "x")
PERCENTILES = (0.5, 99.5)
"""Percentiles of a volume's intensities that become black and white if no window is given."""
SIDES = {"Tr": UNSAID, "Ts": 2}
"""Endings of the folders, with the part of their cases."""


@dataclass(frozen=True)
class SliceCase:
    """A case whose slices are taken.

    Attributes:
        name: of the case.
        image: its first channel.
        label: its label map.
        group: number of the patient.
        part: of its slices; -1 if the data set does not say.
    """

    name: str
    image: Path
    label: Path
    group: int
    part: int


def find_slice_cases(root: Path, patient: str | None = None) -> list[SliceCase]:
    """Find the cases of a data set in nnU-Net's raw layout; cases in ``imagesTs`` are test cases.

    Args:
        root: folder of ``imagesTr``, ``labelsTr``, and optionally ``imagesTs``, ``labelsTs``.
        patient: regular expression whose match at the beginning of a case's name is its patient;
            None treats every case as a patient of its own.

    Raises:
        ValueError: the folder, which is named, is empty, or a label map has no image.
    """
    found: list[tuple[str, Path, Path, int]] = []
    for side, part in SIDES.items():
        images, labels = root / f"images{side}", root / f"labels{side}"
        if not (images.is_dir() and labels.is_dir()):
            continue
        there = scan(images, arrays=False)
        for name, label in scan(labels, arrays=False).items():
            image = there.get(f"{name}_0000", there.get(name))
            if image is None:
                raise ValueError(f"{images}: holds no {name}_0000 for {label}")
            found.append((name, image, label, part))
    if not found:
        raise ValueError(f"{root}: expected imagesTr and labelsTr with volumes (nnU-Net's layout)")
    patients = [_patient(name, patient) for name, *_ in found]
    numbers = {p: i for i, p in enumerate(dict.fromkeys(patients))}
    return [
        SliceCase(name, image, label, numbers[who], part)
        for (name, image, label, part), who in zip(found, patients, strict=True)
    ]


def _patient(name: str, pattern: str | None) -> str:
    if pattern is None:
        return name
    try:
        match = re.match(pattern, name)
    except re.error as error:
        raise ValueError(f"patient: {pattern!r} is no regular expression ({error})") from None
    if match is None:
        raise ValueError(f"patient: {pattern!r} does not match the beginning of {name!r}")
    return match.group()


def presence_of_labels(
    root: Path,
    *,
    size: int = 64,
    axis: str = "z",
    min_voxels: int = 1,
    window: tuple[float, float] | None = None,
    patient: str | None = None,
    progress: Callable[[str], None] = lambda case: None,
) -> Samples:
    """Cut the volumes of a data set into slices, each with the labels that it shows.

    Slices of a patient form a group. If there are no test cases, no parts are given.

    Args:
        root: see :func:`find_slice_cases`, with ``dataset.json``.
        size: height and width to which slices are resized; oblong slices are stretched to a square.
        axis: along which slices follow each other, as the file stores them: z is the last.
        min_voxels: number of voxels of a label that a slice must have to show it. With fewer, but
            not none, the label is unknown, as in slices with the ignore label that do not show it.
        window: intensities that become black and white; None derives them from each volume.
        patient: see :func:`find_slice_cases`.
        progress: called with the name of every finished case.

    Raises:
        ValueError: a file, which is named, does not fit.
    """
    if axis not in AXES or size < 1 or min_voxels < 1:
        raise ValueError(
            f"axis, size, min_voxels: expected one of {', '.join(AXES)} and numbers from 1, got "
            f"{axis!r}, {size}, {min_voxels}"
        )
    if window is not None and not window[0] < window[1]:
        raise ValueError(f"window: expected low < high, got {window}")
    label_set = read_label_set(root / "dataset.json")
    names = tuple(label_set.foreground)
    images, targets, groups, parts = [], [], [], []
    for case in find_slice_cases(root, patient):
        image, label = _read(case, axis)
        images.append(_small(image, size, window))
        targets.append(_shown(case, label, label_set, min_voxels))
        groups.append(np.full(len(image), case.group))
        parts.append(np.full(len(image), case.part))
        progress(case.name)
    part = np.concatenate(parts)
    return Samples(
        np.concatenate(images)[:, None],
        np.concatenate(targets),
        names,
        None if (part == UNSAID).all() else part,
        np.concatenate(groups),
    ).check(str(root))


def _read(case: SliceCase, axis: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Image and labels with the slices first."""
    label = read_labels(case.label)
    image, _ = put_on(case.image, read_volume(case.image), label.geometry)
    if image.ndim != 3 or image.dtype.kind not in "biuf" or not np.isfinite(image).all():
        raise ValueError(f"{case.image}: expected one channel of finite intensities")
    number = AXES.index(axis)
    return np.moveaxis(image, number, 0), np.moveaxis(label.array, number, 0)


def _small(image: NDArray[Any], size: int, window: tuple[float, float] | None) -> NDArray[np.uint8]:
    low, high = np.percentile(image, PERCENTILES) if window is None else window
    grey = np.clip((image - low) / max(high - low, 1e-12), 0, 1).astype(np.float32)
    small = interpolate(
        torch.from_numpy(grey)[:, None], (size, size), mode="bilinear", antialias=True
    )
    return (small[:, 0].clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def _shown(
    case: SliceCase, label: NDArray[Any], label_set: LabelSet, min_voxels: int
) -> NDArray[np.int8]:
    ignored = label_set.ignore_index
    known = label_set.values | ({ignored} if ignored is not None else set())
    if unknown := sorted(set(np.unique(label).tolist()) - known):
        raise ValueError(f"{case.label}: holds labels {unknown}, which dataset.json does not name")
    counts = np.stack(list(_counts(label, label_set)), 1)
    shown = np.where(counts >= min_voxels, 1, np.where(counts > 0, -1, 0))
    if ignored is not None:
        hidden = (label == ignored).any((1, 2))[:, None]
        shown = np.where(hidden & (shown != 1), -1, shown)
    return shown.astype(np.int8)


def _counts(label: NDArray[Any], label_set: LabelSet) -> Iterator[NDArray[np.int64]]:
    for values in label_set.foreground.values():
        yield np.isin(label, values).sum((1, 2))
