"""Writes maps of a prediction's confidence as volumes, to be laid over the image."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.api import Progress, Runner
from segcal.evaluation.case import CaseResult
from segcal.evaluation.cohort import Cohort, run_cases
from segcal.evaluation.engine import default_jobs, run
from segcal.evaluation.job import STORE
from segcal.evaluation.labels import FoundLabels, find_labels
from segcal.evaluation.reading import PredictionArrays, read_prediction
from segcal.evaluation.store import Store
from segcal.io.case_patterns import Patterns
from segcal.io.files import check_writable, read_json, remove_leftovers, write_json
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case, Pairing, find_reader, unpaired
from segcal.io.volumes import write_share_map
from segcal.metrics.uncertainty import confidence_map, entropy_map

__all__ = ["MapsJob", "plan_maps", "write_maps"]

RECORD = "maps.json"
"""File beside the maps that says which predictions they show and what their values mean."""
FILES = ("*/entropy.nii.gz", "*/confidence.nii.gz", "*/probability_*.nii.gz")
UNFIT = re.compile(r'[\x00-\x1f/\\:*?"<>|%]')
"""Characters of a label that a file name cannot have; they are written as in URLs, ``%2F``."""
MEANINGS = {
    "CASE/entropy.nii.gz": "entropy of the classes as a share of the largest possible, log K: 0 if "
    "one class is certain, 1 if all are equally likely; for regions, the mean of their binary "
    "entropies in bits",
    "CASE/confidence.nii.gz": "probability of the most likely class, 1 / K to 1; for regions, the "
    "probability of the least sure decision, 0.5 to 1",
    "CASE/probability_LABEL.nii.gz": "probability of a label or region, 0 to 1",
    "values": "uint8 with the scale 1/255 in the header (scl_slope), which readers apply: 0 to 1 "
    "in steps of 0.0039",
    "geometry": "voxel size, position and orientation are those of the image",
}
"""Content of the files, in words."""


@dataclass(frozen=True)
class MapsJob:
    """Predictions that maps are made of, checked.

    Attributes:
        predictions: folder or file.
        output: folder for the maps.
        pairing: the cases.
        labels: what the labels mean.
        reader: nnU-Net's reader that the predictions were made with, or None.
        tolerance: how far, in voxels, the geometry of probabilities may deviate from their label
            map or image.
    """

    predictions: Path
    output: Path
    pairing: Pairing
    labels: FoundLabels
    reader: str | None
    tolerance: float

    @property
    def store(self) -> Store:
        """Store that remembers the cases whose maps are written, until all are."""
        labels = None if self.labels.label_set is None else vars(self.labels.label_set)
        making = ["maps", labels, self.reader, self.tolerance, version("segcal")]
        return Store(self.output / STORE, json.dumps(making, default=str))


def plan_maps(
    predictions: Path,
    output: Path,
    *,
    images: Path | None = None,
    dataset_json: Path | LabelSet | None = None,
    prediction_pattern: str | None = None,
    tolerance: float = 1e-2,
    found: Callable[[FoundLabels], None] = lambda labels: None,
) -> MapsJob:
    """Check everything that is given, before the first case is read.

    Args:
        predictions: folder or file that ``segcal evaluate`` reads.
        output: another folder, for the maps.
        images: folder of the images, which give the voxel size and position of array files that
            have no label map beside them.
        dataset_json: see :func:`segcal.evaluation.labels.find_labels`.
        prediction_pattern: see :class:`segcal.io.case_patterns.Patterns`.
        tolerance: how far, in voxels, the geometry of probabilities may deviate from their label
            map or image.
        found: called with what the labels mean.

    Raises:
        ValueError: files are missing, a voxel size is unknown, or the output folder holds the
            input or files that segcal maps did not write.
    """
    if images is not None and not images.is_dir():
        raise ValueError(f"images: {images}: no such folder")
    pairing = unpaired(predictions, images, Patterns(prediction_pattern).prediction)
    inputs = [predictions if predictions.is_dir() else predictions.parent, images]
    if output.resolve() in [path.resolve() for path in inputs if path is not None]:
        raise ValueError(f"{output}: holds the input; name another folder for the maps")
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file; the maps need a folder")
    check_writable(output)
    for path in () if _is_ours(output) else _maps(output):
        raise ValueError(
            f"{path}: was not written by segcal maps and would be overwritten; name another folder"
        )
    labels = find_labels(dataset_json, predictions, predictions)
    found(labels)
    return MapsJob(predictions, output, pairing, labels, find_reader(predictions), tolerance)


def write_maps(
    job: MapsJob,
    *,
    resume: bool = False,
    processes: int | None = None,
    runner: Runner = run,
    progress: Progress = lambda case: None,
) -> Cohort:
    """Write the maps of every case; a case that fails is noted and does not stop the others.

    Args:
        job: result of :func:`plan_maps`.
        resume: whether to keep maps that an interrupted run has written from unchanged files.
        processes: number of cases at the same time; None uses one process per core, if each gets
            four cases or more.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        progress: called with the name of each case that is done.

    Returns:
        a row for every case with its number of ``maps``, the failures, and the notes.
    """
    if not resume:
        job.store.remove()
        for path in _maps(job.output):
            path.unlink()
    write_json(job.output / RECORD, _record(job))
    cohort = run_cases(
        job.pairing,
        partial(
            _write, output=job.output, label_set=job.labels.label_set, reader=job.reader,
            tolerance=job.tolerance,
        ),
        jobs=processes or default_jobs(len(job.pairing.cases)),
        engine=runner,
        store=job.store,
        progress=lambda case: progress(case.name),
    )  # fmt: skip
    if not cohort.failed and not cohort.interrupted:
        job.store.remove()
    return cohort


def _is_ours(output: Path) -> bool:
    path = output / RECORD
    record = read_json(path) if path.is_file() else None
    return isinstance(record, dict) and "maps" in record


def _maps(output: Path) -> Iterator[Path]:
    return (path for pattern in FILES for path in output.glob(pattern))


def _record(job: MapsJob) -> dict[str, Any]:
    label_set = job.labels.label_set
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "segcal": version("segcal"),
        "predictions": str(job.predictions.resolve()),
        "labels": None if label_set is None else label_set.source,
        "maps": MEANINGS,
    }


def _write(
    case: Case,
    *,
    output: Path,
    label_set: LabelSet | None,
    reader: str | None,
    tolerance: float,
    note: Callable[[str], None],
) -> CaseResult:
    arrays = read_prediction(case, label_set, tolerance=tolerance, reader=reader, note=note)
    folder = output / case.name
    if folder.is_dir():
        remove_leftovers(folder)
    number = 0
    for name, values in maps_of(arrays):
        write_share_map(folder / f"{name}.nii.gz", values, arrays.geometry)
        number += 1
    return CaseResult({"maps": float(number)})


def maps_of(arrays: PredictionArrays) -> Iterator[tuple[str, NDArray[np.floating[Any]]]]:
    """Name and values, 0 to 1, of every map of a case, one at a time.

    Args:
        arrays: arrays of the case.
    """
    p, regions = arrays.probabilities, arrays.regions
    yield "entropy", entropy_map(p, regions=regions)
    yield "confidence", confidence_map(p, regions=regions)
    for one in arrays.structures:
        name = UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", one.name)
        yield f"probability_{name}", p[one.channel]
