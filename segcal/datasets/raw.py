"""Writes data sets in nnU-Net's raw layout, after checking their files.

A :class:`Plan` says which source becomes which case, and :func:`write_dataset` carries it out. A
case is written if all of its files are good, and ``dataset.json`` when all cases are done.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from segcal.arrays import distinct_labels
from segcal.io.files import check_writable, read_json, remove_leftovers, whole_file, write_json
from segcal.io.sources import Source
from segcal.io.volumes import (
    SKEWED,
    Array,
    Geometry,
    Volume,
    put_on,
    read_volume,
    reads_alike,
    to_labels,
    write_nifti,
)

__all__ = [
    "Conversion",
    "Output",
    "Plan",
    "RawCase",
    "Skipped",
    "check_apart",
    "check_case",
    "deal",
    "one_fold",
    "present_splits",
    "raw_folder",
    "write_dataset",
]

FORMAT = 1
"""Version of the files that are written for a case."""
ENDING = ".nii.gz"
RECORD = "conversion.json"
DATASET = "dataset.json"
SPLITS = "splits_final.json"
SAME = 1e-4
"""Grids that differ by less, in voxels, are the same to all readers."""
STRAIGHT = 1e-5
"""Largest cosine between two axes that all readers accept as a right angle."""


@dataclass(frozen=True)
class RawCase:
    """Sources of one case.

    Attributes:
        name: name without folder, channel and ending.
        subset: ``Tr`` (training) or ``Ts`` (test).
        images: one source per channel, or one source that holds all channels.
        label: source of the label map; None for a test case without labels.
    """

    name: str
    subset: str
    images: tuple[str, ...]
    label: str | None

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of all sources."""
        return (*self.images, *([] if self.label is None else [self.label]))

    def targets(self, channels: int) -> list[str]:
        """Names of its files in the data set: first the channels, then the label map."""
        images = [f"images{self.subset}/{self.name}_{c:04d}{ENDING}" for c in range(channels)]
        return (
            images if self.label is None else [*images, f"labels{self.subset}/{self.name}{ENDING}"]
        )


@dataclass(frozen=True)
class Skipped:
    """A case that should be converted, but is not, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """Plan of a data set.

    Attributes:
        converter: name of the converter, e.g. ``acdc``.
        cases: cases to check and write.
        dataset: content of ``dataset.json`` without ``numTraining``.
        skipped: cases that lack a part.
        counts: numbers of other files that were found, e.g. images without labels, by kind.
        splits: splits of the training cases in nnU-Net's format; empty if there are none.
        settings: settings of the converter.
    """

    converter: str
    cases: tuple[RawCase, ...]
    dataset: Mapping[str, Any]
    skipped: tuple[Skipped, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    splits: tuple[dict[str, list[str]], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        """Number of channels of every image."""
        return len(self.dataset["channel_names"])

    @property
    def labels(self) -> frozenset[int]:
        """Values that a label map may hold."""
        return frozenset(self.dataset["labels"].values())

    @property
    def targets(self) -> list[str]:
        """Names of all files of cases."""
        return [name for case in self.cases for name in case.targets(self.channels)]


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    Attributes:
        training: number of training cases in the data set.
        test: number of test cases in the data set.
        unchanged: number of these cases that an earlier run had written.
        rewritten: number of these cases whose files are not bit-for-bit copies.
        skipped: cases that were not converted, and why.
        splits: number of folds written.
    """

    training: int
    test: int
    unchanged: int
    rewritten: int
    skipped: tuple[Skipped, ...]
    splits: int


@dataclass(frozen=True)
class Output:
    """A checked file: a source to copy, or a volume to write instead.

    Attributes:
        content: path of the source, or array and grid.
        change: how it differs from the source; empty for a copy.
    """

    content: Path | Volume
    change: str = ""


def raw_folder(destination: Path, dataset_id: int | None, default_id: int, name: str) -> Path:
    """Folder of a data set: `destination` if it is named ``DatasetNNN_...``, else a folder in it.

    Raises:
        ValueError: the number differs from the folder's name, is not between 1 and 999, or belongs
            to another data set beside it.
    """
    named = re.fullmatch(r"Dataset(\d{3})_.+", destination.name)
    if named and dataset_id is not None and dataset_id != int(named[1]):
        raise ValueError(f"dataset_id {dataset_id}: {destination} is the folder of {named[1]}")
    number = default_id if dataset_id is None else dataset_id
    if not 1 <= number <= 999:
        raise ValueError(f"dataset_id: expected 1 to 999, got {number}")
    folder = destination if named else destination / f"Dataset{number:03d}_{name}"
    prefix = folder.name[: len("Dataset000_")]
    for other in sorted(folder.parent.glob(f"{prefix}*")):
        if other.name != folder.name:
            raise ValueError(
                f"dataset_id: {other} has the number of {folder.name}; nnU-Net needs a different "
                "number for every data set, so choose another"
            )
    return folder


def check_apart(source: Path, folder: Path) -> None:
    """Check that neither of two folders lies in the other.

    Raises:
        ValueError: one lies in the other.
    """
    a, b = source.resolve(), folder.resolve()
    if a == b or a in b.parents or b in a.parents:
        raise ValueError(
            f"{folder}: lies in {source}, or the other way round, so the output would be read as "
            "input; choose another folder"
        )


def deal(groups: Mapping[str, str], parts: int, seed: int) -> list[list[str]]:
    """Deal names into parts of similar size, with similar shares of every group.

    Names of a group are ordered by a checksum of seed and name, so the order is the same with every
    version of every library, and one name more or less hardly changes it.

    Args:
        groups: group of each name.
        parts: number of parts; their sizes differ by at most 1, overall and within a group.
        seed: random seed of the order.
    """

    def place(name: str) -> tuple[str, str]:
        return groups[name], hashlib.sha256(f"{seed} {name}".encode()).hexdigest()

    order = sorted(groups, key=place)
    return [sorted(order[part::parts]) for part in range(parts)]


def one_fold(
    cases: Iterable[RawCase], validation: Collection[str]
) -> tuple[dict[str, list[str]], ...]:
    """One fold that holds out the validation cases; empty if none is a training case.

    Args:
        cases: cases of the data set.
        validation: names of the validation cases.
    """
    training = [case.name for case in cases if case.subset == "Tr"]
    if not any(name in validation for name in training):
        return ()
    return (
        {
            "train": [name for name in training if name not in validation],
            "val": [name for name in training if name in validation],
        },
    )


def check_case(
    images: Sequence[Path], label: Path | None, *, channels: int, labels: frozenset[int]
) -> list[Output]:
    """Check the files of a case; return what to write, in the order of its targets.

    Raises:
        ValueError: a file cannot be read, intensities are not finite, the number of channels is
            wrong, the label map lies on another grid or has unknown values, or the axes are so far
            from right angles that nnU-Net's readers refuse them.
    """
    found = [(path, volume) for path in images for volume in _channels(path)]
    if len(found) != channels:
        raise ValueError(f"{images[0]}: expected {channels} channels, got {len(found)}")
    grid = found[0][1].geometry
    if grid.skew > SKEWED:
        raise ValueError(
            f"{images[0]}: its axes are not at right angles, which nnU-Net cannot read; resample it"
        )
    target = grid.squared() if grid.skew > STRAIGHT else grid
    outputs = []
    for path, volume in found:
        _check_intensities(path, volume.array)
        outputs.append(_output(path, volume, volume.array, grid, target))
    if label is not None:
        volume = read_volume(label)
        values = to_labels(label, volume)
        if unknown := sorted(set(distinct_labels(values.array).tolist()) - labels):
            raise ValueError(
                f"{label}: holds the unknown label {', '.join(map(str, unknown[:9]))}; expected "
                f"{', '.join(map(str, sorted(labels)))}"
            )
        outputs.append(_output(label, volume, values.array, grid, target))
    return outputs


def write_dataset(
    sources: Mapping[str, Source],
    plan: Plan,
    folder: Path,
    *,
    force: bool = False,
    progress: Callable[[str], None] = lambda name: None,
) -> Conversion:
    """Write a data set in nnU-Net's raw layout; continue where an earlier run stopped.

    A case that was written from the same sources is left as it is. ``conversion.json`` records
    every case. ``dataset.json`` is written last, and only if there is a training case.

    Args:
        sources: files by name.
        plan: which file becomes which case.
        folder: folder of the data set.
        force: whether to write every case again, and to remove cases of an earlier conversion that
            `plan` lacks.
        progress: called with each case's name after it is done.

    Raises:
        ValueError: `folder` holds something else, or cannot be written into.
    """
    if not folder.is_file():  # which is something else
        check_writable(folder)
    record = _take_over(folder, plan, force)
    (folder / DATASET).unlink(missing_ok=True)
    skipped, unchanged = list(plan.skipped), 0
    for case in plan.cases:
        key = _key(case, plan, sources)
        targets = case.targets(plan.channels)
        if not force and _is_there(record["cases"].get(case.name), key, folder, targets):
            unchanged += 1
            progress(case.name)
            continue
        record["cases"].pop(case.name, None)
        try:
            done = _convert(case, plan, sources, folder)
        except ValueError as error:
            skipped.append(Skipped(case.name, str(error)))
            for name in targets:
                (folder / name).unlink(missing_ok=True)
        else:
            record["cases"][case.name] = {"key": key, **done}
        write_json(folder / RECORD, record)
        progress(case.name)
    there = {case.name: case.subset for case in plan.cases if case.name in record["cases"]}
    training = sum(subset == "Tr" for subset in there.values())
    splits = present_splits(plan.splits, there)
    record["skipped"] = [asdict(one) for one in skipped]
    write_json(folder / RECORD, record)
    (folder / SPLITS).unlink(missing_ok=True)
    if training:
        if splits:
            write_json(folder / SPLITS, splits)
        write_json(folder / DATASET, {**plan.dataset, "numTraining": training})
    return Conversion(
        training=training,
        test=len(there) - training,
        unchanged=unchanged,
        rewritten=sum(bool(record["cases"][name]["changes"]) for name in there),
        skipped=tuple(skipped),
        splits=len(splits) if training else 0,
    )


def present_splits(
    splits: Sequence[Mapping[str, list[str]]], there: Mapping[str, str]
) -> list[dict[str, list[str]]]:
    """Folds without missing cases; a fold is dropped if its training or validation set is empty."""
    left = [{side: [n for n in fold[side] if n in there] for side in fold} for fold in splits]
    return [fold for fold in left if all(fold.values())]


def _channels(path: Path) -> list[Volume]:
    """The channels of an image, each with the image's geometry."""
    volume = read_volume(path)
    if volume.array.ndim == 3:
        return [volume]
    note = "; ".join(filter(None, (volume.note, "a channel of a 4-D file")))
    return [Volume(channel, volume.geometry, note) for channel in volume.array]


def _check_intensities(path: Path, array: Array) -> None:
    if array.dtype.kind not in "iufb":
        raise ValueError(f"{path}: expected intensities, got values of type {array.dtype}")
    if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
        raise ValueError(f"{path}: {np.count_nonzero(~finite)} voxels are NaN or infinite")


def _output(path: Path, volume: Volume, array: Array, grid: Geometry, target: Geometry) -> Output:
    """File to write for `array`, the values of a volume on `grid`, so that it lies on `target`."""
    placed, turned = put_on(path, Volume(array, volume.geometry), grid)
    reasons = [volume.note, turned]
    if volume.array.dtype != array.dtype and not np.array_equal(volume.array, array):
        reasons.append("labels rounded to integers")
    if target is not grid:
        reasons.append("axes brought to right angles")
    elif not turned and volume.geometry.differences(target, SAME):
        reasons.append("put on exactly the grid of the image")
    if not path.name.endswith(ENDING):
        sized = ", a pixel as 1 mm" if volume.geometry.unit == "px" else ""
        reasons.append(f"written as {ENDING}{sized}")
    if not any(reasons) and not reads_alike(path):
        reasons.append("header rewritten so that all readers agree on it")
    change = "; ".join(reason for reason in reasons if reason)
    return Output(Volume(placed, target), change) if change else Output(path)


def _convert(
    case: RawCase, plan: Plan, sources: Mapping[str, Source], folder: Path
) -> dict[str, Any]:
    """Check and write a case; return what the record says about it."""
    targets = case.targets(plan.channels)
    with ExitStack() as stack:
        paths = {name: stack.enter_context(sources[name].opened()) for name in case.sources}
        outputs = check_case(
            [paths[name] for name in case.images],
            None if case.label is None else paths[case.label],
            channels=plan.channels,
            labels=plan.labels,
        )
        for name, output in zip(targets, outputs, strict=True):
            if isinstance(output.content, Volume):
                write_nifti(folder / name, output.content.array, output.content.geometry)
            else:
                with whole_file(folder / name) as temporary:
                    shutil.copyfile(output.content, temporary)
    return {
        "sources": list(case.sources),
        "files": {name: (folder / name).stat().st_size for name in targets},
        "changes": {
            name: output.change
            for name, output in zip(targets, outputs, strict=True)
            if output.change
        },
    }


def _key(case: RawCase, plan: Plan, sources: Mapping[str, Source]) -> str:
    """Checksum of everything that a written case depends on."""
    stamps = [sources[name].stamp for name in case.sources]
    text = json.dumps([FORMAT, asdict(case), plan.channels, sorted(plan.labels), stamps])
    return hashlib.sha256(text.encode()).hexdigest()


def _is_there(
    entry: Mapping[str, Any] | None, key: str, folder: Path, targets: Sequence[str]
) -> bool:
    """Whether an entry of the record is of exactly this case, and its files exist."""
    if entry is None or entry.get("key") != key:
        return False
    sizes = entry["files"]
    paths = [(folder / name, sizes.get(name)) for name in targets]
    return all(path.is_file() and path.stat().st_size == size for path, size in paths)


def _take_over(folder: Path, plan: Plan, force: bool) -> dict[str, Any]:
    """Check that a folder holds nothing but this conversion; return its record.

    Raises:
        ValueError: it holds something else.
    """
    for place in (folder, *(path for path in folder.glob("*") if path.is_dir())):
        remove_leftovers(place)
    present = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir()}
    header = {
        "converter": plan.converter,
        "settings": dict(plan.settings),
        "left_out": dict(plan.counts),
        "cases": {},
        "skipped": [],
    }
    if not present and (folder.is_dir() or not folder.exists()):
        write_json(folder / RECORD, header)
        return header
    before = read_json(folder / RECORD) if RECORD in present else None
    if not isinstance(before, dict) or before.get("converter") != plan.converter:
        raise ValueError(
            f"{folder}: holds something other than a conversion of {plan.converter}; choose "
            "another folder, or empty it"
        )
    cases = {
        name: entry
        for name, entry in dict(before.get("cases", {})).items()
        if isinstance(entry, dict) and isinstance(entry.get("files"), dict)
    }
    made = {name for entry in cases.values() for name in entry["files"]}
    others = sorted(present - {RECORD, DATASET, SPLITS, *plan.targets})
    if foreign := [name for name in others if name not in made]:
        raise ValueError(
            f"{folder}: holds {', '.join(foreign[:3])}, which no conversion wrote; move it away"
        )
    if others and not force:
        raise ValueError(
            f"force: {folder} holds {', '.join(others[:3])} from an earlier conversion, which this "
            "conversion would not write; choose another folder, or force their removal"
        )
    for name in others:
        (folder / name).unlink()
    known = {case.name for case in plan.cases}
    header["cases"] = {name: entry for name, entry in cases.items() if name in known}
    write_json(folder / RECORD, header)
    return header
