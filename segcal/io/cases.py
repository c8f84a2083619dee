"""Which prediction belongs to which reference, and what the folders say about them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segcal.io.files import case_name, read_json


@dataclass(frozen=True)
class Case:
    """A prediction and its reference.

    Attributes:
        name: without folder and ending.
        prediction: ``.npz``, 4-D volume, or label map.
        reference: label map.
    """

    name: str
    prediction: Path
    reference: Path


@dataclass(frozen=True)
class Pairing:
    """Result of matching two folders by file name.

    Attributes:
        cases: matched, by name.
        without_prediction: names of references that nothing was predicted for.
        without_reference: names of predictions that have no reference.
    """

    cases: list[Case]
    without_prediction: list[str] = field(default_factory=list)
    without_reference: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class LabelSet:
    """What the labels mean.

    Attributes:
        names: by value, background (0) included; consecutive from 0.
        ignore_index: label to leave out of everything, or None.
        source: where this was read.
    """

    names: dict[int, str]
    ignore_index: int | None
    source: str

    @property
    def foreground(self) -> dict[int, str]:
        """Names by value without background."""
        return {k: v for k, v in self.names.items() if k != 0}


def pair(predictions: Path, references: Path) -> Pairing:
    """Match predictions and references: two folders by file name, or one file each.

    A ``.npz`` wins over a volume of the same name, which is what nnU-Net writes beside it.

    Raises:
        ValueError: a path that does not exist, a file paired with a folder, nothing to match.
    """
    for path in (predictions, references):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if predictions.is_file() != references.is_file():
        raise ValueError(f"{predictions} and {references}: expected two folders, or two files")
    if predictions.is_file():
        name = case_name(references)
        if name is None:
            raise ValueError(f"{references}: expected a volume, e.g. .nii.gz")
        if case_name(predictions) is None:
            raise ValueError(f"{predictions}: expected a .npz or a volume, e.g. .nii.gz")
        return Pairing([Case(name, predictions, references)])
    found, wanted = _scan(predictions, prefer_npz=True), _scan(references, prefer_npz=False)
    if not wanted:
        raise ValueError(f"{references}: holds no volumes (.nii.gz, .nrrd, .mha, ...)")
    both = sorted(set(found) & set(wanted))
    if not both:
        raise ValueError(
            f"no file name is common to {predictions} ({_some(found)}) and {references} "
            f"({_some(wanted)}); CASE.npz or CASE.nii.gz is expected beside CASE.nii.gz"
        )
    return Pairing(
        [Case(name, found[name], wanted[name]) for name in both],
        sorted(set(wanted) - set(found)),
        sorted(set(found) - set(wanted)),
    )


def find_label_set(
    dataset_json: Path | None, predictions: Path, references: Path
) -> LabelSet | None:
    """Read label names and ignore label from ``dataset.json``.

    Args:
        dataset_json: the user's; None looks beside the predictions, above them, and above the
            references.
        predictions: folder or file.
        references: folder or file.

    Returns:
        None when no file was given or found.

    Raises:
        ValueError: a file that is no nnU-Net ``dataset.json``, or has region-based labels.
    """
    path = dataset_json or _beside("dataset.json", predictions, references)
    return None if path is None else read_label_set(path)


def read_label_set(path: Path) -> LabelSet:
    """Read ``labels`` of an nnU-Net ``dataset.json``; see :func:`find_label_set`."""
    content = read_json(path)
    labels: Any = content.get("labels") if isinstance(content, dict) else None
    if not isinstance(labels, dict) or not labels:
        raise ValueError(f"{path}: expected 'labels': {{name: value}} of nnU-Net v2")
    names: dict[int, str] = {}
    ignore = None
    for name, value in labels.items():
        if isinstance(value, (list, tuple)) and len(value) != 1:
            raise ValueError(
                f"{path}: label {name!r} is a region {value}; region-based labels are not "
                "supported by this evaluation"
            )
        number = value[0] if isinstance(value, (list, tuple)) else value
        if not isinstance(number, int) or isinstance(number, bool):
            raise ValueError(
                f"{path}: label {name!r} has value {value!r}, expected an integer "
                "(nnU-Net v2 maps names to values)"
            )
        if name == "ignore":
            ignore = number
        elif number in names:
            raise ValueError(f"{path}: {name!r} and {names[number]!r} share the value {number}")
        else:
            names[number] = name
    if sorted(names) != list(range(len(names))):
        raise ValueError(f"{path}: label values {sorted(names)} are not 0 to {len(names) - 1}")
    return LabelSet(dict(sorted(names.items())), ignore, str(path))


def is_reoriented(predictions: Path) -> bool:
    """Whether the plans beside or above the predictions name a reader that reorients to RAS."""
    path = _beside("plans.json", predictions)
    if path is None:
        return False
    content = read_json(path)
    reader = content.get("image_reader_writer", "") if isinstance(content, dict) else ""
    return str(reader).endswith("WithReorient")


def _beside(name: str, *places: Path) -> Path | None:
    for place in places:
        folder = place if place.is_dir() else place.parent
        for above in (folder, folder.resolve().parent, folder.resolve().parent.parent):
            if (above / name).is_file():
                return above / name
    return None


def _scan(folder: Path, *, prefer_npz: bool) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        name = case_name(path) if path.is_file() else None
        if name is None or (path.suffix == ".npz" and not prefer_npz):
            continue
        if name in files and not prefer_npz:
            raise ValueError(f"{folder}: {files[name].name} and {path.name} are one case twice")
        if name not in files or path.suffix == ".npz":
            files[name] = path
    return files


def _some(names: dict[str, Path]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return f"{len(names)} cases: {shown}{', ...' if len(names) > 3 else ''}" if names else "empty"
