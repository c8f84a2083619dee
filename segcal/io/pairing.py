"""Which prediction belongs to which reference, and what lies beside them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from segcal.io.files import case_name, is_image, read_json

RECORD_NAME = "segcal_predict.json"
"""File beside predictions that says how they were made."""
LOGITS_FOLDER = "logits"
"""Folder beside predictions for the logits that they are made of."""
PLOT = "progress.png"
"""nnU-Net's plot of a training, which is no case of images."""
SUMMARY = "summary.json"
MEASURED = "metric_per_case"
"""File in which nnU-Net measures a validation when it has ended, and where the cases are in it."""
DECISION_HEAD = "decision head"
"""In the record: what label maps of a network of two heads were decided by."""


@dataclass(frozen=True)
class Case:
    """A prediction and its reference.

    Attributes:
        name: without folder and ending.
        prediction: ``.npz``, 4-D volume, label map, or a folder with a file per class.
        reference: label map.
        label_map: label map that lies beside a ``.npz`` of the same name, or None.
        roi: mask of the region of interest, or None.
        logits: ``.npz`` with the logits that the prediction was made of, or None.
        decision: rule that the label map beside was made by, of ``segcal calibrate apply``.
    """

    name: str
    prediction: Path
    reference: Path
    label_map: Path | None = None
    roi: Path | None = None
    logits: Path | None = None
    decision: str = "argmax"


@dataclass(frozen=True)
class Pairing:
    """Result of matching two folders by file name.

    Attributes:
        cases: matched, by name.
        without_prediction: names of references that nothing was predicted for.
        without_reference: names of predictions that have no reference, with a hint where a name
            is nearly one.
        of_other_folds: names of references that folds of a trained model did not validate on.
    """

    cases: list[Case]
    without_prediction: list[str] = field(default_factory=list)
    without_reference: list[str] = field(default_factory=list)
    of_other_folds: list[str] = field(default_factory=list)


def pair(predictions: Path, references: Path) -> Pairing:
    """Match predictions and references: two folders by file name, or one file each.

    Where there are both, a ``.npz`` is the prediction and a volume of the same name its label map,
    which is what nnU-Net writes. A sub-folder that holds volumes is a case with a file per class.
    Of the folder of a trained nnU-Net the validation cases of all folds are taken, of the folder
    of a fold its own; the references of other cases are not missed.

    Raises:
        ValueError: a path that does not exist, a file paired with a folder, nothing to match, a
            case that is there twice.
    """
    for path in (predictions, references):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if predictions.is_file() != references.is_file():
        raise ValueError(f"{predictions} and {references}: expected two folders, or two files")
    if predictions.is_file():
        name = case_name(references)
        if name is None or references.suffix == ".npz":
            raise ValueError(f"{references}: expected a label map, e.g. .nii.gz")
        predicted = case_name(predictions)
        if predicted is None:
            raise ValueError(f"{predictions}: expected a .npz or a volume, e.g. .nii.gz")
        beside = None
        if predictions.suffix == ".npz":
            beside = scan(predictions.parent, npz=False).get(predicted)
            beside = _label_map(predictions, beside, references)
        logits = find_logits(predictions, predicted)
        case = Case(name, predictions, references, beside, None, logits, _decision(predictions))
        return Pairing([case])
    wanted = scan(references, npz=False)
    if not wanted:
        raise ValueError(f"{references}: holds no volumes (.nii.gz, .nrrd, .mha, .png, ...)")
    found, volumes = find_predictions(predictions, wanted)
    both = sorted(set(found) & set(wanted))
    if not both:
        raise ValueError(
            f"no file name is common to {predictions} ({_some(found, wanted)}) and {references} "
            f"({_some(wanted)}); CASE.npz or CASE.nii.gz is expected beside CASE.nii.gz"
        )
    decisions = {folder: _decision(folder) for folder in {found[name].parent for name in both}}
    missing, own = set(wanted) - set(found), _validated(predictions)
    others = set() if own is None else missing - own
    return Pairing(
        [
            Case(
                name,
                found[name],
                wanted[name],
                _label_map(found[name], volumes.get(name), wanted[name]),
                logits=find_logits(found[name], name),
                decision=decisions[found[name].parent],
            )
            for name in both
        ],
        sorted(missing - others),
        [_hinted(name, wanted) for name in sorted(set(found) - set(wanted))],
        sorted(others),
    )


def find_predictions(
    predictions: Path, wanted: Collection[str] = ()
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Find predictions in a folder, as :func:`pair` does.

    Args:
        predictions: folder; of nnU-Net's results, the validation cases are found.
        wanted: names of cases; a sub-folder of one of them is a case, too, where the folder also
            holds files.

    Returns:
        what holds the prediction of each case, and the volumes among the files, by case.

    Raises:
        ValueError: a case that is there twice.
    """
    found: dict[str, Path] = {}
    volumes: dict[str, Path] = {}
    for folder in _prediction_folders(predictions):
        maps, arrays = scan(folder, npz=False), scan(folder, npz=True)
        files = {**maps, **arrays}
        folders = {k: v for k, v in _scan_folders(folder).items() if k in wanted or not files}
        for name in sorted(folders.keys() & files.keys()):
            raise ValueError(f"{folder}: folder {name} and {files[name].name} are one case twice")
        here = {**files, **folders}
        for name in sorted(found.keys() & here.keys()):
            raise ValueError(
                f"{predictions}: {found[name]} and {here[name]} are one case twice; give the "
                "folder of one fold, or keep one of the two"
            )
        found.update(here)
        volumes.update(maps)
    return found, volumes


def with_rois(pairing: Pairing, folder: Path) -> Pairing:
    """Give every case the mask of its name.

    Raises:
        ValueError: a case without one.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    masks = scan(folder, npz=False)
    if missing := [case.name for case in pairing.cases if case.name not in masks]:
        raise ValueError(
            f"{folder}: holds no mask for {len(missing)} cases, e.g. {', '.join(missing[:3])}"
        )
    return replace(pairing, cases=[replace(c, roi=masks[c.name]) for c in pairing.cases])


def find_logits(prediction: Path, name: str) -> Path | None:
    """Return the ``.npz`` of the logits of a prediction, which lies in a folder beside it."""
    path = prediction.parent / LOGITS_FOLDER / f"{name}.npz"
    return path if path.is_file() else None


def find_dataset_json(predictions: Path, references: Path) -> Path | None:
    """Look for ``dataset.json`` beside or above the predictions, then the references."""
    return _beside("dataset.json", predictions, references)


def find_record(predictions: Path) -> dict[str, Any]:
    """What the record beside predictions says about their making; empty without one.

    Raises:
        ValueError: a record that is not a JSON object.
    """
    folder = predictions if predictions.is_dir() else predictions.parent
    path = folder / RECORD_NAME
    if not path.is_file():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def _label_map(prediction: Path, volume: Path | None, reference: Path) -> Path | None:
    """The volume beside an ``.npz``, unless it is a picture of one."""
    picture = volume is not None and is_image(volume) and not is_image(reference)
    return None if prediction.suffix != ".npz" or picture else volume


def _decision(predictions: Path) -> str:
    return str(find_record(predictions).get("decision", "argmax"))


def find_plans(predictions: Path) -> Path | None:
    """Look for nnU-Net's ``plans.json`` beside or above the predictions."""
    return _beside("plans.json", predictions)


def find_reader(predictions: Path) -> str | None:
    """Name of nnU-Net's reader in the ``plans.json`` beside or above the predictions, if any."""
    path = find_plans(predictions)
    if path is None:
        return None
    content = read_json(path)
    reader = content.get("image_reader_writer") if isinstance(content, dict) else None
    return None if reader is None else str(reader)


def _beside(name: str, *places: Path) -> Path | None:
    for place in places:
        folder = place if place.is_dir() else place.parent
        for above in (folder, folder.resolve().parent, folder.resolve().parent.parent):
            if (above / name).is_file():
                return above / name
    return None


def _prediction_folders(predictions: Path) -> list[Path]:
    """Folders that hold the cases: of nnU-Net's results, those of validation."""
    files = (path for path in predictions.iterdir() if path.is_file())
    if any(case_name(path) for path in files if path.name != PLOT):
        return [predictions]
    folds = [predictions] if predictions.name.startswith("fold_") else []
    folds = folds or sorted(path for path in predictions.glob("fold_*") if path.is_dir())
    validated = [fold / "validation" for fold in folds if (fold / "validation").is_dir()]
    if folds and not validated and not _scan_folders(predictions):
        raise ValueError(
            f"{predictions}: no fold holds a folder 'validation'; nnU-Net writes it at the end of "
            "a training, or when it validates again"
        )
    return validated or [predictions]


def _validated(predictions: Path) -> set[str] | None:
    """Cases that folds of a trained nnU-Net validated on; None where they do not tell of all."""
    own: set[str] = set()
    for folder in _prediction_folders(predictions):
        of_fold = folder.resolve()
        summary = folder / SUMMARY
        if not (of_fold.name == "validation" and of_fold.parent.name.startswith("fold_")):
            return None
        if not summary.is_file():  # the validation has not ended
            return None
        try:
            measured = [Path(one["prediction_file"]) for one in read_json(summary)[MEASURED]]
        except (KeyError, TypeError, ValueError):
            return None
        own |= {name for name in map(case_name, measured) if name}
    return own


def _scan_folders(folder: Path) -> dict[str, Path]:
    """Sub-folders that hold volumes, by name."""
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_dir()
        and not path.name.startswith((".", "fold_"))
        and path.name != LOGITS_FOLDER
        and any(map(case_name, path.iterdir()))
    }


def scan(folder: Path, *, npz: bool) -> dict[str, Path]:
    """Files of a folder by case, either the ``.npz`` or the volumes.

    Images are cases where there are no other volumes; beside those they are pictures of them.

    Raises:
        ValueError: two of one case.
    """
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != PLOT]
    paths = [path for path in paths if case_name(path) and (path.suffix == ".npz") == npz]
    volumes = [path for path in paths if not is_image(path)]
    files: dict[str, Path] = {}
    for path in volumes or paths:
        name = str(case_name(path))
        if name in files:
            raise ValueError(f"{folder}: {files[name].name} and {path.name} are one case twice")
        files[name] = path
    return files


def _hinted(name: str, wanted: Mapping[str, Path]) -> str:
    """Name of a prediction without a reference, with what it may have been meant to be."""
    case = re.sub(r"_[0-9]{4}$", "", name)
    if case == name or case not in wanted:
        return name
    return f"{name} (named like a channel of an image; rename it to {case} if it is predicted)"


def _some(names: Mapping[str, Path], wanted: Mapping[str, Path] | None = None) -> str:
    shown = ", ".join(_hinted(name, wanted or {}) for name in sorted(names)[:3])
    return f"{len(names)} cases: {shown}{', ...' if len(names) > 3 else ''}" if names else "empty"
