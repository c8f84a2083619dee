"""Which prediction belongs to which reference, and which other files lie beside them.

A reference is the ground truth of a case: a label map that a person drew. A rater is one of
several people who drew label maps of the same case.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from segcal.io.case_patterns import (
    CASE,
    RATER,
    Patterns,
    find_cases,
    find_several,
    first_names,
    guess_affixes,
    suggest_patterns,
)
from segcal.io.files import VOLUME_ENDINGS, case_name, is_array, is_image, legible, read_json

RECORD_NAME = "segcal_predict.json"
"""File beside predictions that says how they were made."""
LOGITS_FOLDER = "logits"
"""Folder beside predictions for the logits that they are made of."""
PLOT = "progress.png"
"""nnU-Net's plot of a training, which is no case of images."""
SUMMARY = "summary.json"
MEASURED = "metric_per_case"
"""The file that nnU-Net writes at the end of a validation, and the key of its list of cases."""
DECISION_HEAD = "decision head"
"""Entry of the record if a decision head of the network made the label maps."""


@dataclass(frozen=True)
class Case:
    """A prediction and its reference.

    Attributes:
        name: file name without folder and ending, or the part of the path that a pattern selects.
        prediction: array file, volume, or a folder with a file per class.
        reference: label map, or a folder with a mask per class; without a reference, a file on
            the same voxel grid as the prediction.
        label_map: label map that lies beside an array file of the same name, or None.
        roi: mask of the region of interest, or None.
        logits: ``.npz`` with the logits that the prediction was computed from, or None.
        decision: rule by which ``segcal calibrate apply`` made the label map.
        raters: label maps of several raters, of which the first is the reference; empty if there
            is only one rater.
        samples: label maps that were drawn from the model; may be empty.
    """

    name: str
    prediction: Path
    reference: Path
    label_map: Path | None = None
    roi: Path | None = None
    logits: Path | None = None
    decision: str = "argmax"
    raters: tuple[Path, ...] = ()
    samples: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Pairing:
    """Result of matching two folders by file name.

    Attributes:
        cases: matched cases, sorted by name.
        without_prediction: names of references that have no prediction.
        without_reference: names of predictions that have no reference, with a hint where a
            reference has nearly the same name.
        of_other_folds: names of references that the folds of a trained model did not validate on.
        note: how the names of cases were derived, if they are not simply the names of files.
    """

    cases: list[Case]
    without_prediction: list[str] = field(default_factory=list)
    without_reference: list[str] = field(default_factory=list)
    of_other_folds: list[str] = field(default_factory=list)
    note: str = ""


def pair(predictions: Path, references: Path, patterns: Patterns | None = None) -> Pairing:
    """Match predictions and references: two folders by the names of cases, or one file each.

    If an array file and a volume have the same name, as nnU-Net writes them, the array file is the
    prediction and the volume is its label map. A sub-folder that holds volumes is a case with a
    file per class. If its only file is named like the sub-folder (MONAI's ``SaveImage``), that file
    is the prediction. From the folder of a trained nnU-Net, the validation cases of all folds are
    used, and from the folder of one fold, the validation cases of that fold; references of other
    cases do not count as missing a prediction. If the folders share no file name, usual words
    around the names are left out (``img0035``, ``label0035``). References by several raters are
    named ``CASE_rater1``, ``CASE_rater2``, or lie in folders ``rater1``, ``rater2``.

    Args:
        predictions: folder or file.
        references: folder or file.
        patterns: where names of cases stand in the paths; None uses the names of files.

    Raises:
        ValueError: a path does not exist, a file is paired with a folder, there is nothing to
            match, or a case occurs twice.
    """
    patterns = patterns or Patterns()
    for path in (predictions, references):
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if predictions.is_file() != references.is_file():
        raise ValueError(f"{predictions} and {references}: expected two folders, or two files")
    if predictions.is_file():
        return Pairing([_one_case(predictions, references)])
    raters = find_raters(references, patterns.reference)
    wanted = find_references(references, patterns.reference, raters)
    if not wanted:
        raise ValueError(
            f"{references}: holds no volumes (.nii.gz, .nrrd, .mha, .png, ...)"
            + _advice(predictions, references)
        )
    found, volumes = find_predictions(predictions, wanted, patterns.prediction)
    maps = {path: volumes[name] for name, path in found.items() if name in volumes}
    note = ""
    if not found.keys() & wanted.keys() and (guess := guess_affixes(found, wanted)):
        found, wanted, around = guess
        note = f"Paired as {around.prediction} and {around.reference}"
    both = sorted(found.keys() & wanted.keys())
    if not both:
        raise ValueError(
            f"no file name is common to {predictions} ({_some(found, wanted)}) and {references} "
            f"({_some(wanted)}); CASE.npz or CASE.nii.gz is expected beside CASE.nii.gz"
            + _advice(predictions, references)
        )
    decisions = {folder: _decision(folder) for folder in {found[name].parent for name in both}}
    drawn = {paths[0]: paths for paths in raters.values() if len(paths) > 1}
    missing, own = set(wanted) - set(found), _validated(predictions)
    others = set() if own is None else missing - own
    return Pairing(
        [
            Case(
                name,
                path := found[name],
                wanted[name],
                _label_map(path, maps.get(path), wanted[name]),
                logits=find_logits(path, case_name(path) or path.name),
                decision=decisions[path.parent],
                raters=drawn.get(wanted[name], ()),
            )
            for name in both
        ],
        sorted(missing - others),
        [_hinted(name, wanted) for name in sorted(found.keys() - wanted.keys())],
        sorted(others),
        note,
    )


def unpaired(predictions: Path, images: Path | None = None, pattern: str | None = None) -> Pairing:
    """Find predictions that have no references: a folder of predictions, or one file.

    A file on the same voxel grid takes the place of the reference: the volume itself, the label
    map beside an array file, or the image of the case.

    Args:
        predictions: folder, as for :func:`pair`, or file.
        images: folder of the images, or None.
        pattern: see :class:`segcal.io.case_patterns.Patterns`.

    Raises:
        ValueError: a path does not exist, there are no predictions, or no file gives the voxel
            size and position of an array file.
    """
    if not predictions.exists():
        raise ValueError(f"{predictions}: no such file or folder")
    if predictions.is_file():
        name = case_name(predictions)
        if name is None:
            raise ValueError(f"{predictions}: expected a .npz or a volume, e.g. .nii.gz")
        found = {legible(name, predictions): predictions}
        volumes = scan(predictions.parent, arrays=False)
    else:
        found, volumes = find_predictions(predictions, pattern=pattern)
    if not found:
        raise ValueError(f"{predictions}: holds no predictions (.npz, .nii.gz, ...)")
    cases = []
    for name, path in sorted(found.items()):
        beside = volumes.get(name)
        label_map = beside if is_array(path) and beside and not is_image(beside) else None
        frame = _frame(path, label_map) or (images and find_image(images, name))
        if not frame:
            raise ValueError(
                f"{path}: its voxel size and position are unknown, since no label map "
                f"{name}.nii.gz lies beside it"
                + (f" and {images} holds no image of it" if images else "")
                + "; keep the label map that nnU-Net writes, or name the folder of the images "
                "(--images)"
            )
        logits = find_logits(path, case_name(path) or path.name)
        cases.append(
            Case(name, path, frame, label_map, logits=logits, decision=_decision(path.parent))
        )
    return Pairing(cases)


def _frame(prediction: Path, label_map: Path | None) -> Path | None:
    """File on the grid of a prediction: its own volume, or the label map beside it."""
    if prediction.is_dir():
        return next(iter(scan(prediction, arrays=False).values()))
    return label_map if is_array(prediction) else prediction


def find_image(folder: Path, name: str) -> Path | None:
    """Image of a case, its first channel, or None."""
    paths = (folder / f"{name}{end}{e}" for end in ("_0000", "") for e in VOLUME_ENDINGS)
    return next((path for path in paths if path.is_file()), None)


def _one_case(prediction: Path, reference: Path) -> Case:
    name, predicted = case_name(reference), case_name(prediction)
    if name is None or is_array(reference):
        raise ValueError(f"{reference}: expected a label map, e.g. .nii.gz")
    if predicted is None:
        raise ValueError(f"{prediction}: expected a .npz or a volume, e.g. .nii.gz")
    legible(name, reference)
    beside = None
    if is_array(prediction):
        beside = scan(prediction.parent, arrays=False).get(predicted)
        beside = _label_map(prediction, beside, reference)
    logits = find_logits(prediction, predicted)
    return Case(name, prediction, reference, beside, None, logits, _decision(prediction))


def find_raters(folder: Path, pattern: str | None = None) -> dict[str, tuple[Path, ...]]:
    """Label maps that raters drew, by case: ``CASE_rater1``, or ``rater1/CASE``.

    Args:
        folder: folder of the references.
        pattern: see :class:`segcal.io.case_patterns.Patterns`; a pattern without ``{rater}`` finds
            no raters.

    Raises:
        ValueError: two label maps belong to the same case and rater.
    """
    return _several(folder, "rater") if pattern is None else _of_raters(folder, pattern)


def _several(folder: Path, word: str) -> dict[str, tuple[Path, ...]]:
    """Volumes by case: ``CASE_word1`` in a folder, else ``word1/CASE``."""
    patterns = (f"{CASE}_{word}{RATER}", f"{word}{RATER}/{CASE}")
    return next(filter(None, (_of_raters(folder, one) for one in patterns)), {})


def _of_raters(folder: Path, pattern: str) -> dict[str, tuple[Path, ...]]:
    if RATER not in pattern:
        return {}
    return {name: tuple(of.values()) for name, of in find_several(folder, pattern).items()}


def find_references(
    folder: Path,
    pattern: str | None = None,
    raters: Mapping[str, tuple[Path, ...]] | None = None,
) -> dict[str, Path]:
    """Label maps of a folder by case; if it has none, its sub-folders with a mask per class.

    Args:
        folder: folder of the references.
        pattern: see :class:`segcal.io.case_patterns.Patterns`.
        raters: result of :func:`find_raters`; the first rater of a case draws its reference.

    Raises:
        ValueError: a case occurs twice.
    """
    if raters:
        first = {name: paths[0] for name, paths in raters.items()}
        theirs = {path for paths in raters.values() for path in paths}
        others = {} if pattern is not None else scan(folder, arrays=False)
        return {**{k: v for k, v in others.items() if v not in theirs}, **first}
    if pattern is None:
        return scan(folder, arrays=False) or _scan_folders(folder)
    return _once((name, path) for name, path in find_cases(folder, pattern) if not is_array(path))


def find_predictions(
    predictions: Path, wanted: Collection[str] = (), pattern: str | None = None
) -> tuple[dict[str, Path], dict[str, Path]]:
    """Find predictions in a folder, as :func:`pair` does.

    Args:
        predictions: folder; in nnU-Net's results, the validation cases are found.
        wanted: names of cases; where the folder also holds files, a sub-folder counts as a case
            only if it has one of these names.
        pattern: see :class:`segcal.io.case_patterns.Patterns`.

    Returns:
        the file or folder that holds the prediction of each case, and the volumes among the
        files, both by case.

    Raises:
        ValueError: a case occurs twice.
    """
    if pattern is not None:
        return _of_pattern(predictions, pattern)
    found: dict[str, Path] = {}
    volumes: dict[str, Path] = {}
    for folder in _prediction_folders(predictions):
        maps, arrays = scan(folder, arrays=False), scan(folder, arrays=True)
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


def _of_pattern(folder: Path, pattern: str) -> tuple[dict[str, Path], dict[str, Path]]:
    """Predictions whose paths match a pattern, and the volumes beside the array files."""
    cases = find_cases(folder, pattern)
    arrays = _once((name, path) for name, path in cases if is_array(path))
    found = _once((name, path) for name, path in cases if not is_array(path)) | arrays
    beside = {folder: scan(folder, arrays=False) for folder in {p.parent for p in arrays.values()}}
    maps = {name: beside[path.parent].get(case_name(path) or "") for name, path in arrays.items()}
    return found, {name: path for name, path in maps.items() if path is not None}


def _once(cases: Iterable[tuple[str, Path]]) -> dict[str, Path]:
    """Cases by name; a name that occurs twice is an error."""
    found: dict[str, Path] = {}
    for name, path in cases:
        if name in found:
            raise ValueError(f"{found[name]} and {path.name} are one case twice: {name}")
        found[name] = path
    return found


def with_cases(pairing: Pairing, names: Collection[str]) -> Pairing:
    """Keep the named cases only, as if there were no others.

    Raises:
        ValueError: a name occurs in neither folder.
    """
    chosen = set(names)
    there = {case.name for case in pairing.cases}.union(
        pairing.without_prediction, pairing.without_reference, pairing.of_other_folds
    )
    if unknown := sorted(chosen - there):
        raise ValueError(
            f"cases: there is neither a prediction nor a reference of {', '.join(unknown[:3])}"
        )
    return replace(
        pairing,
        cases=[case for case in pairing.cases if case.name in chosen],
        without_prediction=[name for name in pairing.without_prediction if name in chosen],
        without_reference=[name for name in pairing.without_reference if name in chosen],
        of_other_folds=[name for name in pairing.of_other_folds if name in chosen],
    )


def with_rois(pairing: Pairing, folder: Path) -> Pairing:
    """Give every case the mask with its name, or with the name of its reference's file.

    Raises:
        ValueError: a case has no mask.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    masks = scan(folder, arrays=False)
    rois = [masks.get(c.name, masks.get(case_name(c.reference) or "")) for c in pairing.cases]
    if missing := [c.name for c, roi in zip(pairing.cases, rois, strict=True) if roi is None]:
        raise ValueError(
            f"{folder}: holds no mask for {len(missing)} cases, e.g. {', '.join(missing[:3])}"
        )
    both = zip(pairing.cases, rois, strict=True)
    return replace(pairing, cases=[replace(case, roi=roi) for case, roi in both])


def with_samples(pairing: Pairing, folder: Path) -> Pairing:
    """Give every case the label maps that were drawn from the model for it.

    They are named like label maps of raters: ``CASE_sample1``, ``CASE_sample2``, or
    ``sample1/CASE``.

    Raises:
        ValueError: a case has fewer than two samples.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    found = _several(folder, "sample")
    if few := [case.name for case in pairing.cases if len(found.get(case.name, ())) < 2]:
        raise ValueError(
            f"{folder}: expected two samples or more of every case ({few[0]}_sample1.nii.gz, or "
            f"sample1/{few[0]}.nii.gz), got fewer for {len(few)} cases, e.g. {', '.join(few[:3])}"
        )
    cases = [replace(case, samples=found[case.name]) for case in pairing.cases]
    return replace(pairing, cases=cases)


def find_logits(prediction: Path, name: str) -> Path | None:
    """Return the ``.npz`` of the logits of a prediction, which lies in a folder beside it."""
    path = prediction.parent / LOGITS_FOLDER / f"{name}.npz"
    return path if path.is_file() else None


def find_dataset_json(predictions: Path, references: Path) -> Path | None:
    """Look for ``dataset.json`` beside or above the predictions, then the references.

    Two folders above, it is taken only in nnU-Net's own results: ``fold_0/validation``.
    """
    return _beside("dataset.json", predictions, references)


def far_dataset_json(predictions: Path, references: Path) -> Path | None:
    """A ``dataset.json`` two folders above, which may belong to other data."""
    for place in (predictions, references):
        path = _folder(place).resolve().parent.parent / "dataset.json"
        if path.is_file():
            return path
    return None


def find_record(predictions: Path) -> dict[str, Any]:
    """Content of the record that says how predictions were made; empty without a record.

    Raises:
        ValueError: the record is not a JSON object.
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
    """The volume beside an array file, unless it is only a picture (PNG, ...) of the case."""
    picture = volume is not None and is_image(volume) and not is_image(reference)
    return volume if is_array(prediction) and not picture else None


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
        folder = _folder(place)
        near = [folder, folder.resolve().parent]
        if near[1].name.startswith("fold_"):
            near.append(near[1].parent)
        for above in near:
            if (above / name).is_file():
                return above / name
    return None


def _folder(place: Path) -> Path:
    return place if place.is_dir() else place.parent


def _prediction_folders(predictions: Path) -> list[Path]:
    """Folders that hold the cases; in nnU-Net's results, the validation folders."""
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
    """Cases that folds of a trained nnU-Net validated on; None if a fold does not list them."""
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
    """Sub-folders that hold volumes, by name; or their only file, if it has the folder's name."""
    found = {}
    for path in sorted(folder.iterdir()):
        ours = path.is_dir() and not path.name.startswith((".", "fold_"))
        if not ours or path.name == LOGITS_FOLDER:
            continue
        files = [one for one in sorted(path.iterdir()) if case_name(one)]
        if files:
            named = re.compile(rf"{re.escape(path.name)}(?![^\W_])")  # and no longer word
            alone = len(files) == 1 and named.match(files[0].name)
            found[legible(path.name, path)] = files[0] if alone else path
    return found


def scan(folder: Path, *, arrays: bool) -> dict[str, Path]:
    """Files of a folder by case, either the array files or the volumes.

    Images (PNG, ...) are cases only where there are no other volumes; beside other volumes, they
    are pictures of the cases.

    Raises:
        ValueError: two files belong to one case.
    """
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != PLOT]
    paths = [path for path in paths if case_name(path) and is_array(path) == arrays]
    volumes = [path for path in paths if not is_image(path)]
    files: dict[str, Path] = {}
    for path in volumes or paths:
        name = str(case_name(path))
        if name in files:
            raise ValueError(f"{folder}: {files[name].name} and {path.name} are one case twice")
        files[legible(name, path)] = path
    return files


def _advice(predictions: Path, references: Path) -> str:
    """What to do if no name is common: example names of both sides, and patterns that fit them."""
    found = suggest_patterns(predictions, references)
    shown = found or Patterns("{case}_seg", "{case}")
    what = "would pair them" if found else "for example, says where the names of cases stand"
    return (
        f". Files there are: {first_names(predictions)}; and {first_names(references)}. "
        f"--prediction-pattern '{shown.prediction}' --reference-pattern '{shown.reference}' {what}"
    )


def _hinted(name: str, wanted: Mapping[str, Path]) -> str:
    """Name of a prediction without a reference, with the case that it may belong to."""
    case = re.sub(r"_[0-9]{4}$", "", name)
    if case == name or case not in wanted:
        return name
    return f"{name} (named like a channel of an image; rename it to {case} if it is predicted)"


def _some(names: Mapping[str, Path], wanted: Mapping[str, Path] | None = None) -> str:
    shown = ", ".join(_hinted(name, wanted or {}) for name in sorted(names)[:3])
    return f"{len(names)} cases: {shown}{', ...' if len(names) > 3 else ''}" if names else "empty"
