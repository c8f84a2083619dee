"""Fits a calibrator to files: validation predictions and their reference labels."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from segcal.components import Component, build_component
from segcal.evaluation.api import Runner
from segcal.evaluation.check import count_channels
from segcal.evaluation.engine import default_jobs, run
from segcal.evaluation.job import Job, named, plan
from segcal.evaluation.labels import FoundLabels
from segcal.evaluation.settings import EvaluationSettings
from segcal.io.case_patterns import Patterns
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case
from segcal.posthoc.calibrator import SampledCalibrator
from segcal.posthoc.decision import Offsets
from segcal.posthoc.rows import Rows
from segcal.recipes import load_component
from segcal.repair.inputs import read_case_logits
from segcal.repair.saved import SavedCalibrator, channel_names, model_of

__all__ = [
    "Collected",
    "build_calibrator",
    "channels_of",
    "collect",
    "fit_calibrator",
    "fit_job",
    "numbered",
    "owners",
    "plan_fit",
]

METHOD = "class_region_case"
"""Default method."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Collected:
    """Voxels that were collected from the cases of a job, and notes on the cases.

    Attributes:
        rows: voxels by channel as from :meth:`SampledCalibrator.collect`, in the order of cases.
        saved: number of cases whose logits had been saved.
        floored: share of voxels with a probability below the floor.
        floor: value that replaces smaller probabilities; None with saved logits.
        notes: notes by case.
    """

    rows: list[Rows]
    saved: int
    floored: float
    floor: float | None
    notes: dict[str, list[str]]


@dataclass(frozen=True)
class _OfCase:
    rows: list[Rows]
    floor: float | None
    floored: float
    notes: list[str]


def plan_fit(
    predictions: Path,
    references: Path,
    *,
    dataset_json: Path | LabelSet | None = None,
    patterns: Patterns | None = None,
    tolerance: float = 1e-2,
    found: Callable[[FoundLabels], None] = lambda labels: None,
) -> Job:
    """Check the files that a calibrator is to be fitted to, before the first case is read.

    If predictions are already calibrated, the calibrator is fitted on top, for example a last
    temperature for a mean of calibrated networks.

    Args:
        predictions: folder of validation predictions, or of a model that nnU-Net trained.
        references: folder of their label maps.
        dataset_json: see :func:`segcal.evaluation.labels.find_labels`.
        patterns: see :func:`segcal.io.pairing.pair`.
        tolerance: how far, in voxels, the geometry of a prediction may deviate from its reference.
        found: called with what the labels mean.

    Raises:
        ValueError: files do not fit each other.
    """
    (job,) = plan(
        named([predictions]), references, settings=EvaluationSettings(tolerance=tolerance),
        dataset_json=dataset_json, patterns=patterns, found=found,
    )  # fmt: skip
    if "calibrator" not in model_of(predictions):
        return job
    # Logits beside calibrated probabilities are those before: fit to what is there to be repaired.
    cases = [replace(case, logits=None) for case in job.pairing.cases]
    return replace(job, pairing=replace(job.pairing, cases=cases))


def build_calibrator(
    method: str, *, regions: bool = False, arguments: Mapping[str, Any] | None = None
) -> SampledCalibrator:
    """Build a post-hoc method that is not fitted yet.

    Args:
        method: name of its config.
        regions: whether the channels are regions, which may overlap.
        arguments: arguments of the method that differ from its config.

    Raises:
        ValueError: the method is unknown, or does not take these arguments.
    """
    component = load_component("posthoc", method)
    changed = Component(target=component.target, args={**component.args, **(arguments or {})})
    found = build_component(changed, per_channel=regions or None)
    if not isinstance(found, SampledCalibrator):
        raise ValueError(f"{method}: {component.target} is not a post-hoc method")
    return found


def fit_calibrator(
    predictions: Path,
    references: Path,
    *,
    method: str = METHOD,
    arguments: Mapping[str, Any] | None = None,
    offsets: bool = False,
    patients: str | None = None,
    dataset_json: Path | None = None,
    processes: int | None = None,
    progress: Progress = lambda name: None,
) -> SavedCalibrator:
    """Fit a calibrator to validation predictions and their labels.

    Args:
        predictions: folder of validation predictions, or of a model that nnU-Net trained.
        references: folder of their label maps.
        method: name of its config.
        arguments: arguments of the method that differ from its config.
        offsets: whether to choose an offset of the decision for every structure, too, see
            :class:`segcal.posthoc.decision.Offsets`; the cases are then read a second time.
        patients: regular expression that finds the patient in the name of a case, see
            :func:`owners`; methods that cross-validate do so over patients.
        dataset_json: ``dataset.json`` with the names of the labels; None looks for one.
        processes: number of cases read at the same time; None uses one process per core.
        progress: called with the name of each case that was read.

    Raises:
        ValueError: names the file: it cannot be read, or its labels do not fit; or the method or
            an argument is unknown.
    """
    job = plan_fit(predictions, references, dataset_json=dataset_json)
    return fit_job(
        job, method=method, arguments=arguments, offsets=offsets, patients=patients,
        processes=processes, progress=progress,
    )  # fmt: skip


def fit_job(
    job: Job,
    *,
    method: str = METHOD,
    arguments: Mapping[str, Any] | None = None,
    offsets: bool = False,
    patients: str | None = None,
    processes: int | None = None,
    runner: Runner = run,
    progress: Progress = lambda name: None,
) -> SavedCalibrator:
    """Fit a calibrator to a job that has been planned.

    Args:
        job: result of :func:`plan_fit`.
        method: name of its config.
        arguments: arguments of the method that differ from its config.
        offsets: whether to choose an offset of the decision for every structure, too.
        patients: regular expression that finds the patient in the name of a case, see
            :func:`owners`.
        processes: number of cases read at the same time; None uses one process per core.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        progress: called with the name of each case that was read.

    Raises:
        ValueError: as :func:`fit_calibrator`.
    """
    regions = job.label_set is not None and bool(job.label_set.regions)
    calibrator = build_calibrator(method, regions=regions, arguments=arguments)
    if (channels := channels_of(job)) is not None:
        calibrator.check_classes(channels)
    model = model_of(job.predictions)
    owner = numbered(owners([case.name for case in job.pairing.cases], patients))
    collected = collect(job, calibrator, processes=processes, runner=runner, progress=progress)
    calibrator.fit_rows([rows.of_patients(owner) for rows in collected.rows])
    saved = SavedCalibrator(
        method,
        calibrator,
        channel_names(job.label_set, calibrator.facts["num_classes"]),
        regions,
        () if job.label_set is None else job.label_set.class_order,
        model,
        facts_of(job, collected),
    )
    if not offsets:
        return saved
    return with_offsets(saved, job, owner)


def channels_of(job: Job) -> int | None:
    """Number of classes of each softmax of a job, from its labels or the header of its first case.

    A region has two classes, inside and outside. None means that neither source states a number.
    """
    if job.label_set is None:
        return count_channels(job.pairing.cases[0])
    return 2 if job.label_set.regions else job.label_set.num_channels


def collect(
    job: Job,
    calibrator: SampledCalibrator,
    *,
    processes: int | None = None,
    runner: Runner = run,
    progress: Progress = lambda name: None,
) -> Collected:
    """Read every case once, and keep voxels of each.

    Args:
        job: result of :func:`plan_fit`.
        calibrator: calibrator that the voxels are for, not fitted yet.
        processes: number of cases read at the same time; None uses one process per core.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        progress: called with the name of each case that was read.

    Raises:
        ValueError: a case cannot be read; the others alone would give another calibrator.
    """
    cases = job.pairing.cases
    regions = job.label_set is not None and bool(job.label_set.regions)
    one = partial(_rows_of, job=job, form=calibrator, among=len(cases))
    jobs = processes or default_jobs(len(cases))
    found: list[_OfCase] = []
    for index, outcome in runner(one, cases, lost=_lost, jobs=jobs):
        if isinstance(outcome, str):
            raise ValueError(outcome)
        found.append(outcome)
        if (k := len(outcome.rows)) != len(found[0].rows) or (
            outcome.rows[0].num_classes != found[0].rows[0].num_classes
        ):
            raise ValueError(
                f"{cases[index].prediction}: {k if regions else outcome.rows[0].num_classes} "
                "channels, unlike the cases before it"
            )
        progress(cases[index].name)
    rows = [Rows.joined(of) for of in zip(*(c.rows for c in found), strict=True)]
    if not all(map(len, rows)):
        raise ValueError(f"{job.references}: all voxels are ignored, so nothing can be fitted")
    sizes = [float(c.rows[0].weights.sum()) for c in found]
    return Collected(
        rows,
        sum(c.floor is None for c in found),
        float(np.average([c.floored for c in found], weights=np.maximum(sizes, 1))),
        max((c.floor for c in found if c.floor is not None), default=None),
        {case.name: c.notes for case, c in zip(cases, found, strict=True) if c.notes},
    )


def _rows_of(case: Case, *, job: Job, form: SampledCalibrator, among: int) -> _OfCase | str:
    """Voxels of a case, or the reason why there are none."""
    notes: list[str] = []
    try:
        read = read_case_logits(case, job, note=notes.append)
        held_out = read.held_out
        seed = zlib.crc32(case.name.encode())  # cases must not share a draw
        rows = form.collect([held_out], read.ignore_index, among=among, seed=seed)
    except ValueError as error:
        text = str(error)
        return text if str(case.prediction.parent) in text else f"{case.prediction}: {text}"
    return _OfCase(rows, read.floor, read.floored, notes)


def _lost(case: Case, why: str) -> str:
    return f"{case.prediction}: {why}"


def owners(cases: Sequence[str], pattern: str | None) -> list[str]:
    """Patient of every case.

    Args:
        cases: names of the cases.
        pattern: regular expression that finds the patient in a name (its first group, or the whole
            match); None counts every case as a patient.

    Raises:
        ValueError: the pattern is no regular expression, or does not find a patient in every name.
    """
    if pattern is None:
        return list(cases)
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"patients: {pattern!r} is no regular expression ({error})") from None
    found = [compiled.search(case) for case in cases]
    if missing := [case for case, one in zip(cases, found, strict=True) if one is None]:
        raise ValueError(f"patients: {pattern!r} finds nothing in {', '.join(missing[:3])}")
    return [one[1] if compiled.groups else one[0] for one in found if one is not None]


def numbered(names: Sequence[str]) -> list[int]:
    """Number of every name in alphabetical order, from 0."""
    order = {name: i for i, name in enumerate(sorted(set(names)))}
    return [order[name] for name in names]


def facts_of(job: Job, collected: Collected) -> dict[str, Any]:
    """What a calibrator records about the files it was fitted on."""
    return {
        "predictions": str(job.predictions.resolve()),
        "references": str(job.references.resolve()),
        "cases": [case.name for case in job.pairing.cases],
        "saved_logits": collected.saved,
        "floor": collected.floor,
        "floored_share": collected.floored,
        "notes": collected.notes,
    }


def with_offsets(saved: SavedCalibrator, job: Job, owner: Sequence[int]) -> SavedCalibrator:
    """Add an offset of the decision for every structure, chosen on the cases of a job.

    Args:
        saved: calibrator that was fitted to these cases.
        job: result of :func:`plan_fit`.
        owner: number of the patient of every case.
    """
    cases = job.pairing.cases
    ignored = read_case_logits(cases[0], job).ignore_index

    def calibrated() -> Iterator[tuple[Tensor, Tensor]]:
        for case in cases:
            read = read_case_logits(case, job)
            probs = saved.calibrator.apply(read.logits, spacing_mm=read.spacing_mm)
            yield probs[0], read.held_out.labels[0]

    offsets = Offsets(per_channel=saved.regions).fit(calibrated(), ignored, owners=owner)
    return replace(saved, offsets=offsets.state())
