"""Preparing the data set of every seed: the split of patients, links, phantoms and cut-outs.

A prepared data set is a folder in nnU-Net's raw layout with ``splits_final.json``. Beside it are
``images/{fit,test}``, ``labels/{fit,test}`` and, for phantoms, ``posterior/{fit,test}``, which
prediction and evaluation read.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from segcal.datasets.phantom import LABELS, PhantomSettings, write_phantom_dataset
from segcal.io.files import read_json, remove_leftovers, write_json
from segcal.io.label_sets import read_label_set
from segcal.io.pairing import scan
from segcal.io.volumes import Geometry, read_labels, read_volume, write_nifti
from segcal.repair.fitting import owners
from segcal.study.plan import DATA, Part, StudyCell, StudySet

__all__ = [
    "PatientSplit", "check_source", "classes_of", "cut_middle", "link", "middle_box", "owner_of",
    "part", "patients_of", "prepare", "split_of",
]  # fmt: skip

SUBSETS = ("Tr", "Ts")
RECORD = "prepared.json"
PARTS: dict[Part, str] = {"fit": "Tr", "test": "Ts"}
"""Subset of the raw layout that holds the cases of a part."""


@dataclass(frozen=True)
class PatientSplit:
    """Training, validation and test cases.

    Attributes:
        train: cases that train.
        val: cases that validate.
        test: cases that only test.
    """

    train: tuple[str, ...]
    val: tuple[str, ...]
    test: tuple[str, ...]


@dataclass(frozen=True)
class CaseOf:
    """Files of a case of a folder in nnU-Net's raw layout.

    Attributes:
        images: a file per channel, with the channel in its name.
        label: label map.
    """

    images: tuple[Path, ...]
    label: Path


def phantom_settings(source: StudySet) -> PhantomSettings:
    """Settings of the phantoms of a set.

    Raises:
        ValueError: unknown arguments, or values out of range.
    """
    given: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in (source.phantom or {}).items()
    }
    try:
        return PhantomSettings(**given)
    except TypeError as error:
        there = ", ".join(PhantomSettings.__dataclass_fields__)
        raise ValueError(f"phantom: {error}; there are {there}") from None


def classes_of(source: StudySet) -> int:
    """Number of classes of a set, background included.

    Raises:
        ValueError: no such folder, or labels that are overlapping regions.
    """
    if source.raw is None:
        return len(LABELS)
    label_set = read_label_set(source.raw / "dataset.json")
    if label_set.regions:
        raise ValueError(f"{source.raw}: defines regions that overlap, which studies cannot train")
    return int(label_set.num_channels)


def files_of(raw: Path) -> dict[str, CaseOf]:
    """Cases of a folder in nnU-Net's raw layout that have a label map, by name.

    Raises:
        ValueError: no such folder, an empty folder, or label maps without an image.
    """
    if not raw.is_dir():
        raise ValueError(f"raw: {raw}: no such folder; set raw to a folder in nnU-Net's raw layout")
    found: dict[str, CaseOf] = {}
    for subset in SUBSETS:
        if not (raw / f"labels{subset}").is_dir() or not (raw / f"images{subset}").is_dir():
            continue
        images: dict[str, dict[str, Path]] = {}
        for name, path in scan(raw / f"images{subset}", arrays=False).items():
            images.setdefault(name[:-5], {})[name[-5:]] = path
        for name, path in scan(raw / f"labels{subset}", arrays=False).items():
            if name not in images:
                raise ValueError(f"{path}: no image {name}_0000 in {raw / f'images{subset}'}")
            if name in found:
                raise ValueError(f"{path}: {found[name].label} is a case with the same name")
            found[name] = CaseOf(tuple(p for _, p in sorted(images[name].items())), path)
    if not found:
        raise ValueError(f"raw: {raw}: expected imagesTr, labelsTr (nnU-Net's raw layout)")
    return dict(sorted(found.items()))


def patients_of(source: StudySet, cases: Iterable[str]) -> dict[str, list[str]]:
    """Cases of every patient, by name.

    Raises:
        ValueError: no patient is found in the name of a case.
    """
    listed = sorted(cases)
    if source.cases_per_patient is not None:
        numbers = [re.search(r"\d+$", case) for case in listed]
        if unfit := [c for c, n in zip(listed, numbers, strict=True) if n is None]:
            raise ValueError(f"cases_per_patient: {unfit[0]!r} does not end with a number")
        owner = [
            str((int(n[0]) - 1) // source.cases_per_patient + 1) for n in numbers if n is not None
        ]
    else:
        owner = owners(listed, source.patient)
    found: dict[str, list[str]] = {}
    for case, patient in zip(listed, owner, strict=True):
        found.setdefault(patient, []).append(case)
    return found


def part(source: StudySet, cases: Iterable[str], seed: int) -> PatientSplit:
    """Split of cases into training, validation and test for a seed.

    Raises:
        ValueError: there are fewer patients than asked for.
    """
    patients = patients_of(source, cases)
    listed, wanted = list(patients), source.patients
    if source.folds is None:
        rest = [listed[i] for i in np.random.default_rng(seed).permutation(len(listed))]
        test = None
    else:
        turn, fold = divmod(seed, source.folds)
        order = [listed[i] for i in np.random.default_rng(turn).permutation(len(listed))]
        test = order[fold :: source.folds]
        rest = [p for p in order if p not in set(test)]
        rest = [rest[i] for i in np.random.default_rng([turn, fold]).permutation(len(rest))]
    needed = (
        (wanted.train or 1) + wanted.validation + (1 if test is None else 0) * (wanted.test or 1)
    )
    if len(rest) < needed or test == []:
        asked = [n or "the rest" for n in (wanted.train, wanted.test)]
        raise ValueError(
            f"patients: there are {len(listed)}, fewer than asked for ({asked[0]} to train, "
            f"{wanted.validation} to validate, {asked[1]} to test)"
        )
    held = wanted.validation if test is not None else wanted.validation + (wanted.test or 0)
    train = rest[: wanted.train if wanted.train is not None else len(rest) - held]
    left = rest[len(train) :]
    validation = left[: wanted.validation]
    if test is None:
        test = left[wanted.validation :][: wanted.test]
    groups = (train, validation, test)
    return PatientSplit(*(tuple(c for p in group for c in patients[p]) for group in groups))


def check_source(source: StudySet, seeds: Iterable[int]) -> None:
    """Check that a set can be prepared for all seeds.

    Raises:
        ValueError: something is missing, or does not fit.
    """
    if source.raw is None:
        phantom_settings(source)
        return
    files = files_of(source.raw)
    classes_of(source)
    for seed in seeds:
        part(source, files, seed)


def record_of(source: StudySet, seed: int) -> dict[str, Any]:
    """Everything that a prepared data set depends on."""
    keys = ("phantom", "raw", "patient", "cases_per_patient", "patients", "folds", "middle_mm")
    content = source.model_dump(mode="json", include=set(keys))
    if source.raw is not None:
        content["raw"] = source.raw.name  # the data may lie elsewhere the next time
    return {"seed": seed, **content}


def prepare(cell: StudyCell) -> None:
    """Write the data set of a cell's seed, completely or not at all; do nothing if it exists.

    Raises:
        ValueError: it exists with other settings, or files do not fit.
    """
    source, root, wanted = cell.source, cell.data, record_of(cell.source, cell.seed)
    if root.exists():
        if read_json(root / RECORD) != wanted:
            raise ValueError(
                f"{root}: was prepared with other settings ({RECORD}); choose another output, or "
                "remove it and what was trained on it"
            )
        return
    temporary = root.parent / f".{root.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    root.parent.mkdir(parents=True, exist_ok=True)
    if source.raw is None:
        split = _generate(source, temporary, cell.seed)
    else:
        split = _draw(source, temporary, cell.seed, cell.output / DATA / cell.set / "middle")
    write_json(
        temporary / "splits_final.json",
        [{"train": list(split.train), "val": list(split.val), "test": list(split.test)}],
    )
    _lay_out(temporary, "fit", split.val)
    _lay_out(temporary, "test", split.test)
    write_json(temporary / RECORD, wanted)
    temporary.rename(root)


def split_of(root: Path) -> PatientSplit:
    """Training, validation and test cases of a prepared data set."""
    (fold,) = read_json(root / "splits_final.json")
    return PatientSplit(*(tuple(fold[key]) for key in ("train", "val", "test")))


def _generate(source: StudySet, root: Path, seed: int) -> PatientSplit:
    wanted = source.patients
    train, test = wanted.train or 0, wanted.test or 0
    write_phantom_dataset(
        root, train=train + wanted.validation, test=test, seed=seed,
        settings=phantom_settings(source),
    )  # fmt: skip
    inside, outside = (sorted(scan(root / f"labels{s}", arrays=False)) for s in SUBSETS)
    return PatientSplit(tuple(inside[:train]), tuple(inside[train:]), tuple(outside))


def _draw(source: StudySet, root: Path, seed: int, middle: Path) -> PatientSplit:
    if source.raw is None:
        raise ValueError("raw: expected a folder")
    files = files_of(source.raw)
    split = part(source, files, seed)
    for subset, cases in (("Tr", (*split.train, *split.val)), ("Ts", split.test)):
        for case in cases:
            one = files[case]
            if source.middle_mm is not None:
                one = _middle(one, middle / f"{source.middle_mm:g}mm", source.middle_mm)
            link(one.images, root / f"images{subset}")
            link([one.label], root / f"labels{subset}")
    content = read_json(source.raw / "dataset.json")
    content["numTraining"] = len(split.train) + len(split.val)
    if source.middle_mm is not None:
        content["file_ending"] = ".nii.gz"
    write_json(root / "dataset.json", content)
    return split


def _lay_out(root: Path, name: Part, cases: Iterable[str]) -> None:
    """Put images, label maps and posteriors of a part into folders of their own."""
    subset, cases = PARTS[name], list(cases)
    labels = scan(root / f"labels{subset}", arrays=False)
    images = scan(root / f"images{subset}", arrays=False)
    content = {"labels": read_json(root / "dataset.json")["labels"], "file_ending": ".nii.gz"}
    folders = {
        "labels": [labels[case] for case in cases],
        "images": [path for file, path in images.items() if file[:-5] in set(cases)],
    }
    if (root / f"posterior{subset}").is_dir():
        folders["posterior"] = [root / f"posterior{subset}" / f"{case}.npz" for case in cases]
    for kind, paths in folders.items():
        within(paths, root / kind / name, root)
        if kind != "images":
            write_json(root / kind / name / "dataset.json", content)


def within(files: Iterable[Path], folder: Path, root: Path) -> None:
    """Link to files of the same tree by relative paths, so that the tree may be moved.

    Args:
        files: files below `root`, or links to files elsewhere, whose targets are then linked.
        folder: folder below `root` that gets the links.
        root: of the tree.
    """
    folder.mkdir(parents=True, exist_ok=True)
    up = Path(*[".."] * len(folder.relative_to(root).parts))
    for file in files:
        target = file.resolve() if file.is_symlink() else up / file.relative_to(root)
        (folder / file.name).symlink_to(target)


def link(files: Iterable[Path], folder: Path) -> None:
    """Make missing links to files in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        place = folder / file.name
        if not place.is_symlink():
            place.symlink_to(file.resolve())


def _middle(case: CaseOf, folder: Path, side_mm: float) -> CaseOf:
    images = tuple(folder / "images" / f"{path.name.split('.')[0]}.nii.gz" for path in case.images)
    label = folder / "labels" / f"{case.label.name.split('.')[0]}.nii.gz"
    for source, target in zip((*case.images, case.label), (*images, label), strict=True):
        cut_middle(source, target, side_mm, label=target is label)
    return CaseOf(images, label)


def cut_middle(source: Path, target: Path, side_mm: float, *, label: bool) -> None:
    """Write the middle of every slice of a volume; do nothing if the file exists.

    Args:
        source: a volume.
        target: NIfTI file.
        side_mm: of the middle.
        label: whether it is a label map.
    """
    if target.exists():
        return
    remove_leftovers(target.parent)
    volume = read_labels(source) if label else read_volume(source)
    box, geometry = middle_box(volume.geometry, side_mm)
    write_nifti(target, volume.array[box], geometry)


def middle_box(geometry: Geometry, side_mm: float) -> tuple[tuple[slice, ...], Geometry]:
    """Box ``(z, y, x)`` of the middle of every slice, and the grid of its content.

    Args:
        geometry: grid of the volume.
        side_mm: of the middle; a smaller volume keeps its size.
    """
    size = [
        min(n, round(side_mm / mm))
        for n, mm in zip(geometry.shape[1:], geometry.spacing_mm[1:], strict=True)
    ]
    start = [(n - m) // 2 for n, m in zip(geometry.shape[1:], size, strict=True)]
    corner = geometry.affine @ np.array([start[1], start[0], 0, 1])
    box = (slice(None), *(slice(a, a + m) for a, m in zip(start, size, strict=True)))
    shape = (geometry.shape[0], *size)
    return box, replace(geometry, shape=shape, origin_mm=tuple(corner[:3].tolist()))


def owner_of(cell: StudyCell, cases: Iterable[str]) -> Mapping[str, str]:
    """Patient of every case; for phantoms with the seed, since every seed has its own phantoms."""
    listed = list(cases)
    if cell.source.raw is None:
        return {case: f"s{cell.seed} {case}" for case in listed}
    return {c: patient for patient, of in patients_of(cell.source, listed).items() for c in of}
