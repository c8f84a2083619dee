"""Finding, splitting and checking the files of an experiment."""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from segcal.adapters.monai.experiment import CaseSplit, VolumeData
from segcal.arrays import distinct_labels
from segcal.io.files import is_image, read_json, read_names
from segcal.io.label_sets import read_label_set
from segcal.io.pairing import scan
from segcal.io.volumes import Geometry, read_geometry, read_labels

PADDING = 255
"""Label of padding, where the data set has no ignore label."""


@dataclass(frozen=True)
class CaseFiles:
    """Files of one case.

    Attributes:
        name: without channel and ending.
        images: a file per channel.
        label: label map; None for a case that is only predicted.
    """

    name: str
    images: tuple[Path, ...]
    label: Path | None = None


@dataclass(frozen=True)
class Cases:
    """A data set.

    Attributes:
        train: cases that train.
        val: cases that validate.
        classes: names of the labels 0, 1, ...
        ignore_label: of the data set, or None.
        channels: of every image.
    """

    train: tuple[CaseFiles, ...]
    val: tuple[CaseFiles, ...]
    classes: tuple[str, ...]
    ignore_label: int | None
    channels: int

    @property
    def ignore_index(self) -> int:
        """Label of padding and of ignored voxels, which losses and metrics leave out."""
        return PADDING if self.ignore_label is None else self.ignore_label

    @property
    def known_labels(self) -> set[int]:
        """Values that a label map may hold."""
        ignored = () if self.ignore_label is None else (self.ignore_label,)
        return {*range(len(self.classes)), *ignored}

    @property
    def names(self) -> dict[str, list[str]]:
        """Names of the training and validation cases."""
        return {"train": [c.name for c in self.train], "val": [c.name for c in self.val]}


def find_cases(data: VolumeData) -> Cases:
    """Find the files of an experiment and split them.

    Raises:
        ValueError: something is missing or does not fit; its folder, file or case is named.
    """
    if data.root is not None and not data.root.is_dir():
        raise ValueError(
            f"data.root: {data.root}: no such folder; set data.root to the folder of your data set"
        )
    if data.root is None:
        images, labels, classes = data.images, data.labels, data.classes
        ignore, channels = data.ignore, None
    else:
        images, labels = data.root / "imagesTr", data.root / "labelsTr"
        classes, ignore, channels = read_dataset_json(data.root)
    if images is None or labels is None or classes is None:  # the experiment has been checked
        raise ValueError("data: give root, or images, labels and classes")
    there = find_images(images, channels)
    maps = _scan(labels)
    lists = _listed(data.split)
    if lists is not None:
        named = {name for side in lists for name in side}
        if unknown := sorted(named - (set(there) & set(maps))):
            raise ValueError(
                f"{data.split.train}: no image in {images}, or no label map in {labels}, for "
                f"{_some(unknown)}"
            )
        there = {name: there[name] for name in named}
        maps = {name: maps[name] for name in named}
    if without := sorted(set(maps) - set(there)):
        raise ValueError(f"{labels}: no image in {images} for {_some(without)}")
    if without := sorted(set(there) - set(maps)):
        raise ValueError(f"{images}: no label map in {labels} for {_some(without)}")
    cases = {name: CaseFiles(name, there[name], maps[name]) for name in sorted(maps)}
    if not cases:
        raise ValueError(f"{labels}: holds no volumes (.nii.gz, .nrrd, .mha, ...)")
    train, val = split_names(list(cases), data.split, data.root)
    channels = channels or sum(read_geometry(path)[1] for path in cases[train[0]].images)
    if data.mean is not None and len(data.mean) != channels:
        raise ValueError(
            f"data.mean, data.std: expected a number for each of {channels} channels, got "
            f"{len(data.mean)}"
        )
    return Cases(
        tuple(cases[name] for name in train),
        tuple(cases[name] for name in val),
        classes,
        ignore,
        channels,
    )


def _listed(split: CaseSplit) -> tuple[list[str], list[str]] | None:
    """Names of the lists of a split; None where it has none."""
    if split.train is None:
        return None
    return read_names(split.train), [] if split.val is None else read_names(split.val)


def read_dataset_json(root: Path) -> tuple[tuple[str, ...], int | None, int]:
    """Names of the classes, ignore label and number of channels of nnU-Net's raw layout.

    Raises:
        ValueError: no such file, or overlapping regions, which would need a sigmoid per channel.
    """
    path = root / "dataset.json"
    label_set = read_label_set(path)
    if label_set.regions:
        raise ValueError(
            f"{path}: defines regions that overlap, for which there are segcal's trainers of "
            "nnU-Net; give labels that exclude each other"
        )
    if label_set.num_channels < 2:
        raise ValueError(f"{path}: expected background and one label or more")
    content = read_json(path)
    channels = content.get("channel_names", content.get("modality"))
    if not isinstance(channels, dict) or not channels:
        raise ValueError(f"{path}: expected 'channel_names': {{'0': name}} of nnU-Net v2")
    return tuple(label_set.names.values()), label_set.ignore_index, len(channels)


def find_images(folder: Path, channels: int | None) -> dict[str, tuple[Path, ...]]:
    """Files of every image of a folder, CASE_0000, CASE_0001, ... or CASE, by case.

    Args:
        folder: holds the images.
        channels: their expected number; None takes the largest number of a case. A single picture
            per case holds all channels.

    Raises:
        ValueError: no such folder, or a case with more or fewer channels.
    """
    files = _scan(folder)
    found: dict[str, dict[int, Path]] = {}
    numbered = bool(files) and all(re.search(r"_\d{4}$", name) for name in files)
    for name, path in files.items():
        case, channel = (name[:-5], int(name[-4:])) if numbered else (name, 0)
        found.setdefault(case, {})[channel] = path
    expected = channels or max((len(c) for c in found.values()), default=1)
    if found and all(len(c) == 1 and all(map(is_image, c.values())) for c in found.values()):
        expected = 1  # its colours are the channels, as of nnU-Net's NaturalImage2DIO
    for case, by_channel in found.items():
        if sorted(by_channel) != list(range(expected)):
            have = ", ".join(path.name for path in by_channel.values())
            raise ValueError(
                f"{folder}: {case}: expected channels 0 to {expected - 1} (CASE_0000, ...), "
                f"got {have}"
            )
    return {c: tuple(by[i] for i in range(expected)) for c, by in found.items()}


def split_names(
    names: Sequence[str], split: CaseSplit, root: Path | None
) -> tuple[list[str], list[str]]:
    """Names of training and validation cases.

    Raises:
        ValueError: a file, fold or pattern that does not fit, a patient on both sides, or no case
            to train or to validate.
    """
    lists = _listed(split)
    if lists is not None and lists[1]:
        train, val = lists
        if both := sorted(set(train) & set(val)):
            raise ValueError(f"{split.train}: {_some(both)} are listed in {split.val}, too")
    elif split.fold is not None:
        path = split.file or (Path() if root is None else root) / "splits_final.json"
        train, val = _of_fold(names, split.fold, path)
    else:
        return _by_patient(names, split)
    if both := sorted(set(_patients(train, split)) & set(_patients(val, split))):
        raise ValueError(
            f"data.split: {_some(both)} of data.split.patient are in both train and val; divide by "
            "patient, or leave data.split.patient out"
        )
    return train, val


def _of_fold(names: Sequence[str], fold: int, path: Path) -> tuple[list[str], list[str]]:
    """Names of the cases of a fold of nnU-Net's ``splits_final.json``."""
    folds = read_json(path)
    if not isinstance(folds, list) or not all(
        isinstance(one, dict) and {"train", "val"} <= one.keys() for one in folds
    ):
        raise ValueError(f"{path}: expected a list of {{'train': [...], 'val': [...]}}")
    if fold >= len(folds):
        raise ValueError(f"{path}: has no fold {fold}, there are {len(folds)}")
    train, val = ([str(name) for name in folds[fold][side]] for side in ("train", "val"))
    for side in (train, val):
        if unknown := sorted(set(side) - set(names)):
            raise ValueError(f"{path}: no files for {_some(unknown)} of fold {fold}")
    if both := sorted(set(train) & set(val)):
        raise ValueError(f"{path}: {_some(both)} are in both train and val of fold {fold}")
    if not train or not val:
        raise ValueError(f"{path}: fold {fold} needs cases to train and to validate")
    return train, val


def _by_patient(names: Sequence[str], split: CaseSplit) -> tuple[list[str], list[str]]:
    patients = _patients(names, split)
    if len(patients) < 2:
        raise ValueError(f"data.split: expected two patients or more, got {_some(list(patients))}")
    order = sorted(patients, key=lambda p: hashlib.sha256(f"{split.seed} {p}".encode()).hexdigest())
    number = min(max(round(split.validation * len(order)), 1), len(order) - 1)
    chosen = {name for patient in order[:number] for name in patients[patient]}
    return [n for n in names if n not in chosen], [n for n in names if n in chosen]


def _patients(names: Sequence[str], split: CaseSplit) -> dict[str, list[str]]:
    """Cases of every patient."""
    patients: dict[str, list[str]] = {}
    for name in names:
        match = re.match(split.patient, name) if split.patient else None
        if split.patient and match is None:
            raise ValueError(f"data.split.patient: {split.patient!r} does not match {name!r}")
        patients.setdefault(match[0] if match else name, []).append(name)
    return patients


def check_cases(cases: Sequence[CaseFiles], channels: int, labels: set[int]) -> list[Geometry]:
    """Check that files exist, lie on one grid and hold known labels; return the grids of the cases.

    Args:
        cases: to check.
        channels: of every image.
        labels: that label maps may hold.

    Raises:
        ValueError: naming the file, and what is wrong with it.
    """
    geometries = []
    for case in cases:
        geometry = check_images(case, channels)
        if case.label is not None:
            stored, axes = read_geometry(case.label)
            if axes != 1 and not is_image(case.label):  # whose grey values may lie in all colours
                raise ValueError(f"{case.label}: expected a 3-D label map, got {axes} channels")
            _same(case.label, stored, geometry, case.images[0])
            values = set(distinct_labels(read_labels(case.label).array).tolist())
            if unknown := sorted(values - labels):
                raise ValueError(
                    f"{case.label}: holds label {', '.join(map(str, unknown[:9]))}; known are "
                    f"{', '.join(map(str, sorted(labels)))}"
                )
        geometries.append(geometry)
    return geometries


def check_images(case: CaseFiles, channels: int) -> Geometry:
    """Grid of an image, which all its channels must share.

    Args:
        case: of the image.
        channels: their expected number; a picture may hold several.

    Raises:
        ValueError: naming the file.
    """
    geometry, _ = read_geometry(case.images[0])
    found = 0
    for path in case.images:
        stored, axes = read_geometry(path)
        if axes != 1 and not is_image(path):
            raise ValueError(f"{path}: expected one channel a file, got {axes}")
        _same(path, stored, geometry, case.images[0])
        found += axes
    if found != channels:
        raise ValueError(
            f"{case.images[0]}: expected {channels} channels, got {found}; save all pictures "
            "alike, all as grey or all as colours (RGB) without opacity"
        )
    return geometry


def _same(path: Path, stored: Geometry, geometry: Geometry, other: Path) -> None:
    if stored.conflict:
        warnings.warn(f"{path}: {stored.conflict}", stacklevel=2)
    if found := stored.differences(geometry):
        raise ValueError(f"{path}: does not lie on the grid of {other.name}: {'; '.join(found)}")


def _scan(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    return scan(folder, arrays=False)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
