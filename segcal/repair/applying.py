"""Applies a calibrator to a folder of predictions: same files, with calibrated probabilities."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from segcal import __version__
from segcal.evaluation.api import Runner
from segcal.evaluation.engine import default_jobs, run
from segcal.evaluation.labels import find_labels
from segcal.evaluation.reading import check_label_map
from segcal.io.archives import save_arrays
from segcal.io.case_patterns import Patterns
from segcal.io.class_files import find_class_files, read_class_files
from segcal.io.files import (
    case_name,
    check_writable,
    ending_of,
    is_array,
    is_image,
    read_json,
    remove_leftovers,
    whole_file,
    write_json,
)
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import (
    RECORD_NAME,
    find_dataset_json,
    find_logits,
    find_plans,
    find_predictions,
    find_reader,
    scan,
)
from segcal.io.probabilities import (
    LOGITS_KEY,
    StoredProbabilities,
    check_probabilities,
    holds_probabilities,
    of_foreground,
    read_foreground,
    read_stored,
)
from segcal.io.volumes import (
    Geometry,
    read_geometry,
    read_labels,
    read_volume,
    value_type,
    write_volume,
)
from segcal.posthoc.decision import Offsets, Rule, decide
from segcal.posthoc.links import logits_of, normalised
from segcal.repair.inputs import check_same
from segcal.repair.saved import SavedCalibrator, model_of

__all__ = ["Applied", "ApplyJob", "apply_job", "plan_apply"]

Decision = Literal["argmax", "dice", "offsets"]
Precision = Literal["same", "float16", "float32"]
WRITTEN_NAME = "segcal_calibrate.json"
"""File beside calibrated predictions that says what was done to each case."""


@dataclass(frozen=True)
class ToCalibrate:
    """Files of the prediction of one case.

    Attributes:
        name: name of the case.
        members: probabilities of the networks that are averaged; usually one file.
        label_map: label map beside the probabilities, or None.
        logits: saved logits of the prediction, or None.
        decision: rule by which the label map was made.
    """

    name: str
    members: tuple[Path, ...]
    label_map: Path | None = None
    logits: Path | None = None
    decision: str = "argmax"

    @property
    def ending(self) -> str:
        """Ending of the volumes that are written: an image's if the input is one, else NIfTI's."""
        given = self.label_map or self.members[0]
        return ending_of(given.name) if is_image(given) else ".nii.gz"


@dataclass(frozen=True)
class ApplyJob:
    """Predictions that a calibrator is applied to, checked.

    Attributes:
        predictions: folder of the predictions.
        output: folder for the calibrated predictions.
        saved: the calibrator.
        sources: files of each case.
        label_set: what the labels mean, or None.
        reader: nnU-Net's reader that the predictions were made with, or None.
        decide: rule by which the label map is made.
        precision: type of the numbers that are written.
        record: record of the predictions that are written.
        notes: remarks on anything unusual that does not prevent the work.
    """

    predictions: Path
    output: Path
    saved: SavedCalibrator
    sources: list[ToCalibrate]
    label_set: LabelSet | None
    reader: str | None
    decide: Decision
    precision: Precision
    record: dict[str, Any]
    notes: list[str]


@dataclass(frozen=True)
class Applied:
    """Outcome of a case.

    Attributes:
        changed: number of voxels whose label has changed; None without a label map.
        notes: anything unusual about the case.
        failed: why nothing was written; empty on success.
    """

    changed: int | None = None
    notes: list[str] = field(default_factory=list)
    failed: str = ""


def plan_apply(
    predictions: Path,
    saved: SavedCalibrator,
    output: Path,
    *,
    decide: Decision = "argmax",
    precision: Precision = "same",
    dataset_json: Path | LabelSet | None = None,
    prediction_pattern: str | None = None,
    any_model: bool = False,
) -> ApplyJob:
    """Check everything that is given, before the first case is read.

    Args:
        predictions: folder that ``segcal evaluate`` reads. If it has a sub-folder with the
            predictions of each fold (``segcal nnunet predict --per-fold``) and the calibrator is
            for single networks, the folds are calibrated first and then averaged.
        saved: the calibrator.
        output: another folder, for the calibrated predictions.
        decide: ``argmax`` changes a label map only where calibration changes the argmax, so a
            label map that a decision head made is otherwise kept; ``dice`` makes the mask with the
            largest expected Dice; ``offsets`` uses the offsets that were fitted with the
            calibrator.
        precision: type of the numbers that are written; ``same`` keeps the type of the file.
        dataset_json: see :func:`segcal.evaluation.labels.find_labels`.
        prediction_pattern: see :class:`segcal.io.case_patterns.Patterns`.
        any_model: whether to accept predictions of another model, too.

    Raises:
        ValueError: there are no predictions; labels or model differ from the calibrator's; the
            output folder holds the predictions or other files; or the calibrator has no offsets.
    """
    if not predictions.is_dir():
        raise ValueError(f"{predictions}: no such folder")
    if output.resolve() in (predictions.resolve(), *predictions.resolve().parents):
        raise ValueError(f"{output}: holds the predictions; name another folder for the output")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file; calibrated predictions need a folder")
    check_writable(output)
    _check_own(output)
    if decide == "offsets":
        _offsets(saved)
    record = model_of(predictions)
    sources, members = _sources(predictions, saved.members, prediction_pattern)
    decided = str(record.get("decision", "argmax"))
    sources = [replace(source, decision=decided) for source in sources]
    if "calibrator" in record:  # logits beside it are those before
        sources = [replace(source, logits=None) for source in sources]
    if members > 1:
        record = {**record, "members": 1}
    notes = []
    if any_model:
        notes.append("applied without checking which model made the predictions (--any-model)")
    else:
        notes += saved.check_model(record, str(predictions))
    if "calibrator" in record:
        notes.append(f"{predictions}: was calibrated before ({record['calibrator']['method']})")
    if saved.fitted_on.get("predictions") == str(predictions.resolve()):
        notes.append(
            f"{predictions}: the calibrator was fitted on these predictions, so their calibration "
            "will look better than that of new cases"
        )
    labels = find_labels(dataset_json, predictions, predictions)
    label_set = labels.label_set
    if labels.problem:
        notes.append(f"going on without label names: {labels.problem}")
    if label_set is not None:
        saved.check_labels(label_set, label_set.num_channels, str(predictions))
        notes += filter(None, [label_set.contradiction()])
    return ApplyJob(
        predictions,
        output,
        saved,
        sources,
        label_set,
        find_reader(predictions),
        decide,
        precision,
        {
            **record,
            **({"members": members} if members > 1 else {}),
            "segcal": __version__,
            "calibrator": saved.summary(),
            "decision": decided if decide == "argmax" else decide,
            "precision": precision,
        },
        notes,
    )


def _offsets(saved: SavedCalibrator) -> Offsets:
    if saved.offsets is None:
        raise ValueError(
            "decide offsets: the calibrator was fitted without offsets; fit it with --offsets"
        )
    return Offsets.from_state(saved.offsets)


def _check_own(output: Path) -> None:
    """Refuse a folder with cases or a dataset.json that no calibration wrote, such as labels."""
    if not output.is_dir() or (output / WRITTEN_NAME).is_file():
        return
    for path in sorted(output.iterdir()):
        if case_name(path) is not None or path.name == "dataset.json":
            raise ValueError(
                f"{output}: holds {path.name}, which calibrate apply did not write and might "
                "overwrite; name another folder"
            )


def _sources(
    predictions: Path, fitted_members: int, pattern: str | None
) -> tuple[list[ToCalibrate], int]:
    """Predictions by case, and how many networks are averaged after calibration."""
    found, maps = find_predictions(predictions, pattern=Patterns(pattern).prediction)
    found = {k: p for k, p in found.items() if _may_hold_probabilities(p)}
    if not found:
        raise ValueError(
            f"{predictions}: holds no probabilities; nnU-Net writes them with --save_probabilities"
        )
    folds = [path for path in sorted(predictions.glob("fold_*")) if path.is_dir()]
    of_folds = [scan(fold, arrays=True) for fold in folds]
    apart = pattern is None and fitted_members == 1 and len(folds) > 1 and all(of_folds)
    sources = []
    for name, path in sorted(found.items()):
        members: tuple[Path, ...] = (path,)
        if apart:
            if missing := [f.name for f, of in zip(folds, of_folds, strict=True) if name not in of]:
                raise ValueError(f"{predictions / missing[0]}: holds no {name}.npz")
            members = tuple(of[name] for of in of_folds)
        stem = case_name(path) if is_array(path) else None
        logits = find_logits(path, stem) if stem and not apart else None
        sources.append(ToCalibrate(name, members, maps.get(name) if stem else None, logits))
    return sources, len(folds) if apart else 1


def _may_hold_probabilities(path: Path) -> bool:
    """Whether a prediction has several channels, or floating values (one map of foreground)."""
    if path.is_dir() or holds_probabilities(path):
        return True
    dtype = value_type(path)
    return dtype is not None and dtype.kind == "f"


def apply_job(
    job: ApplyJob,
    *,
    resume: bool = False,
    processes: int | None = None,
    runner: Runner = run,
    progress: Callable[[str], None] = lambda name: None,
) -> dict[str, Applied]:
    """Write calibrated predictions of every case; a case that fails does not stop the others.

    Args:
        job: result of :func:`plan_apply`.
        resume: whether to keep cases that an interrupted run with the same calibrator has written.
        processes: number of cases at the same time; None uses one process per core, if each gets
            four cases or more.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        progress: called with the name of each case that is done.

    Returns:
        outcome of every case, those of the interrupted run included.

    Raises:
        ValueError: `resume` was asked for, but the output was made with other settings.
    """
    done = _begin(job, resume)
    todo = [source for source in job.sources if source.name not in done]
    for name in done:
        progress(name)
    one = partial(_apply_safely, job=job)
    jobs = processes or default_jobs(len(todo) or 1)
    for index, outcome in runner(one, todo, lost=_lost, jobs=jobs):
        done[todo[index].name] = outcome
        _write_state(job, done)
        progress(todo[index].name)
    return {source.name: done[source.name] for source in job.sources if source.name in done}


def _begin(job: ApplyJob, resume: bool) -> dict[str, Applied]:
    """Prepare the output folder; return the cases that it already holds."""
    job.output.mkdir(parents=True, exist_ok=True)
    remove_leftovers(job.output)
    done: dict[str, Applied] = {}
    if resume and (job.output / WRITTEN_NAME).is_file():
        done = _done_before(job)
    for source in job.sources:  # what an earlier run wrote must not be taken for this one's
        if source.name not in done:
            for ending in (".npz", ".nii.gz", source.ending):
                (job.output / f"{source.name}{ending}").unlink(missing_ok=True)
    for found in (find_dataset_json(job.predictions, job.predictions), find_plans(job.predictions)):
        if found is not None:
            with whole_file(job.output / found.name) as temporary:
                shutil.copyfile(found, temporary)
    write_json(job.output / RECORD_NAME, job.record)
    _write_state(job, done)
    return done


def _done_before(job: ApplyJob) -> dict[str, Applied]:
    """Cases that the output already holds, made from the same files by the same calibrator."""
    path = job.output / WRITTEN_NAME
    before = read_json(path)
    if not isinstance(before, dict) or before.get("made_of") != _made_of(job):
        raise ValueError(
            f"{path}: written with another calibrator, decision or type of numbers, or from other "
            "predictions; leave --resume out to start again"
        )
    done = {}
    for source in job.sources:
        of = before["cases"].get(source.name)
        there = [job.output / f"{source.name}{e}" for e in (".npz", source.ending, "")]
        if of and of["files"] == _stamp(source) and any(path.exists() for path in there):
            done[source.name] = Applied(of["changed"], of["notes"])
    return done


def _stamp(source: ToCalibrate) -> list[list[int]]:
    """Sizes and times of the files of a case."""
    given = [*source.members, source.label_map, source.logits]
    stats = [path.stat() for path in given if path is not None]
    return [[stat.st_size, stat.st_mtime_ns] for stat in stats]


def _made_of(job: ApplyJob) -> str:
    """Checksum of everything that calibrated files depend on."""
    content = {
        "predictions": str(job.predictions.resolve()),
        "state": job.saved.calibrator.state(),
        "offsets": job.saved.offsets,
        "decision": job.decide,
        "precision": job.precision,
        "segcal": __version__,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_state(job: ApplyJob, done: dict[str, Applied]) -> None:
    cases = {
        source.name: {"changed": one.changed, "notes": one.notes, "files": _stamp(source)}
        for source in job.sources
        if (one := done.get(source.name)) is not None and not one.failed
    }
    write_json(job.output / WRITTEN_NAME, {"made_of": _made_of(job), "cases": cases})


def _lost(source: ToCalibrate, why: str) -> Applied:
    return Applied(failed=f"{source.members[0]}: {why}")


def _apply_safely(source: ToCalibrate, *, job: ApplyJob) -> Applied:
    try:
        return _apply(source, job)
    except (ValueError, OSError) as error:
        text = str(error)
        return Applied(failed=text if source.name in text else f"{source.members[0]}: {text}")


@dataclass(frozen=True)
class _Read:
    """A prediction with its axes as they were stored.

    Attributes:
        array: probabilities, or logits, ``(K, z, y, x)``.
        logits: whether the array holds logits.
        geometry: geometry of the array; None if unknown.
        stored: stored array, if the file is an ``.npz``.
        foreground: whether the file holds the probability of foreground alone.
    """

    array: NDArray[Any]
    logits: bool
    geometry: Geometry | None
    stored: StoredProbabilities | None = None
    foreground: bool = False


def _apply(source: ToCalibrate, job: ApplyJob) -> Applied:
    notes: list[str] = []
    first = _read(source.members[0], source, job, notes)
    before, after = _probabilities(first, job.saved.regions), _calibrated(first, source, job)
    for path in source.members[1:]:  # one after the other: folds need not all be in memory
        read = _read(path, source, job, notes)
        if read.array.shape != first.array.shape:
            raise ValueError(
                f"{path}: has shape {read.array.shape}, but another fold has {first.array.shape}"
            )
        before = before.astype(np.float32) + _probabilities(read, job.saved.regions)
        after = after + _calibrated(read, source, job)
    before, after = (x / len(source.members) if source.members[1:] else x for x in (before, after))
    dtype = first.array.dtype if job.precision == "same" else np.dtype(job.precision)
    after = after.astype(dtype, copy=False)  # a volume of many classes is large
    labels, changed = _label_map(source, first, before, after, job, notes)
    _write(source, first, after, labels, job, notes)
    return Applied(changed, notes)


def _read(path: Path, source: ToCalibrate, job: ApplyJob, notes: list[str]) -> _Read:
    regions = job.saved.regions
    if path.is_dir():
        files = sorted(scan(path, arrays=False).values())
        geometry, _ = read_geometry(files[0])
        array = read_class_files(path, geometry, job.label_set, note=notes.append)
        if array.ndim != 4:
            raise ValueError(f"{path}: holds masks, not probabilities, which calibration needs")
        read = _Read(array, False, geometry)
    elif is_array(path):
        stored = read_stored(path)
        geometry = None
        if source.label_map is not None:
            geometry = stored.frame(read_geometry(source.label_map)[0], reader=job.reader)
        array, logits, alone = stored.array, stored.key == LOGITS_KEY, stored.array.ndim == 3
        if alone and not logits:
            array = array[None] if regions else of_foreground(array)
        read = _Read(array, logits, geometry, stored, alone)
    else:
        volume = read_volume(path)
        one = read_foreground(path, volume, volume.geometry, regions=regions, note=notes.append)
        if one is None and volume.array.ndim == 3:
            raise ValueError(f"{path}: holds labels, not probabilities, which calibration needs")
        array = volume.array if one is None else one
        read = _Read(array, False, volume.geometry, foreground=one is not None)
    if not read.logits:
        check_probabilities(read.array, str(path), regions=regions, note=notes.append)
    elif not np.isfinite(read.array).all():
        raise ValueError(f"{path}: some logits are NaN or infinite")
    job.saved.check_labels(None, len(read.array), str(path))
    return read


def _probabilities(read: _Read, regions: bool) -> NDArray[Any]:
    if not read.logits:
        return read.array
    logits = torch.from_numpy(read.array).float()
    return (torch.sigmoid(logits) if regions else torch.softmax(logits, 0)).numpy()


def _calibrated(read: _Read, source: ToCalibrate, job: ApplyJob) -> NDArray[Any]:
    regions = job.saved.regions
    array = read.array if read.logits else None
    if source.logits is not None and not read.logits:
        array = read_stored(source.logits).array
        check_same(source.logits, array, source.members[0], read.array, regions=regions)
    if array is None:
        logits = logits_of(torch.from_numpy(read.array), regions=regions)
    else:
        logits = normalised(torch.from_numpy(array), regions=regions)
    spacing = None if read.geometry is None else read.geometry.spacing_mm
    return job.saved.calibrator.apply(logits[None], spacing_mm=spacing)[0].numpy()


def _label_map(
    source: ToCalibrate,
    read: _Read,
    before: NDArray[Any],
    after: NDArray[Any],
    job: ApplyJob,
    notes: list[str],
) -> tuple[NDArray[Any] | None, int | None]:
    """The label map of the calibrated case, and how many of its voxels have changed.

    If calibration does not change the decision in a voxel, it keeps its label from the label map
    beside the probabilities, which may have been post-processed.
    """
    order = job.saved.class_order if job.saved.regions else None
    rule: Rule | Offsets
    if job.decide == "offsets":
        rule = _offsets(job.saved)
    else:
        rule = job.decide
    was, now = decide(before, "argmax", class_order=order), decide(after, rule, class_order=order)
    if source.label_map is None:
        if read.stored is None:
            return now, int(np.count_nonzero(was != now))
        notes.append("no label map lies beside it, so none is written")
        return None, None
    beside = read_labels(source.label_map)
    if read.stored is not None:
        of = read.stored
        was, now = (
            replace(of, array=x[None]).placed(beside.geometry, regions=True, reader=job.reader)[0]
            for x in (was, now)
        )
    if source.decision == "argmax" and len(source.members) == 1:
        check_label_map(source.members[0], was, source.label_map, beside.array)
    labels = np.where(was == now, beside.array, now)
    return labels, int(np.count_nonzero(labels != beside.array))


def _write(
    source: ToCalibrate,
    read: _Read,
    after: NDArray[Any],
    labels: NDArray[Any] | None,
    job: ApplyJob,
    notes: list[str],
) -> None:
    """Write a case, its probabilities last, so that a case that has them is complete."""
    into = job.output / source.name
    volume = job.output / f"{source.name}{source.ending}"
    beside = source.label_map
    if read.foreground:
        after = after[-1]
    if read.stored is None and job.decide == "argmax":  # evaluation decides likewise
        _write_volumes(source, read, after, job)
        given = source.members[0]
        if given.is_file() and not given.name.endswith((".nii", ".nii.gz", source.ending)):
            notes.append(f"{given.name} is written as NIfTI")
        return
    if labels is not None and read.geometry is not None:
        if beside is not None and np.array_equal(labels, read_labels(beside).array):
            with whole_file(job.output / beside.name) as temporary:
                shutil.copyfile(beside, temporary)
        else:
            geometry = read.geometry if beside is None else read_geometry(beside)[0]
            write_volume(volume, labels, geometry)
    if read.stored is None:
        notes.append("written as .npz, since its label map needs the name of the volume")
    key = read.stored.key if read.stored is not None and not read.logits else "probabilities"
    if read.stored is not None and (crop := read.stored.path.with_suffix(".pkl")).is_file():
        with whole_file(into.with_name(f"{source.name}.pkl")) as temporary:
            shutil.copyfile(crop, temporary)  # of nnU-Net v1: where its crop lies
    with whole_file(into.with_name(f"{source.name}.npz")) as temporary:
        save_arrays(temporary, {key: after})


def _write_volumes(source: ToCalibrate, read: _Read, after: NDArray[Any], job: ApplyJob) -> None:
    """Write one volume, or one file per class, as the input has it."""
    if read.geometry is None:
        raise ValueError(f"{source.members[0]}: its voxel size and position are unknown")
    after = after.astype(np.float32, copy=False)  # NIfTI has no float16
    path = source.members[0]
    if not path.is_dir() or job.label_set is None:
        write_volume(job.output / f"{source.name}{source.ending}", after, read.geometry)
        return
    for k, file in find_class_files(path, job.label_set).items():
        name = job.label_set.names[k] + (ending_of(file.name) if is_image(file) else ".nii.gz")
        write_volume(job.output / source.name / name, after[k], read.geometry)
