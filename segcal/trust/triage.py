"""Sorts predictions without references, the least sure first, so that they can be checked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from segcal.evaluation.api import Progress, Runner
from segcal.evaluation.case import CaseResult
from segcal.evaluation.cohort import Cohort, run_cases
from segcal.evaluation.confidence import confidence_row
from segcal.evaluation.engine import default_jobs, run
from segcal.evaluation.intervals import VolumeIntervals, with_intervals
from segcal.evaluation.job import STORE, unit_of, versions
from segcal.evaluation.labels import FoundLabels, find_labels
from segcal.evaluation.reading import read_prediction
from segcal.evaluation.store import Store
from segcal.evaluation.summary import counts
from segcal.io.files import finite
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case, Pairing, find_reader, unpaired
from segcal.metrics import table
from segcal.trust.fitting import check_intervals
from segcal.trust.settings import TrustSettings

__all__ = ["Triage", "TrustJob", "least_sure_first", "plan_trust", "run_trust", "trust"]

FLAG = "volume"
"""Flag of a structure whose volume is undecided."""


@dataclass(frozen=True)
class TrustJob:
    """Predictions to be sorted, whose files have been checked.

    Attributes:
        predictions: folder or file.
        settings: settings of the triage.
        pairing: the cases.
        labels: what the labels mean.
        reader: nnU-Net's reader that the predictions were made with, or None.
        images: folder of the images, or None.
        intervals: intervals of volumes that were fitted to validation cases, or None.
    """

    predictions: Path
    settings: TrustSettings
    pairing: Pairing
    labels: FoundLabels
    reader: str | None
    images: Path | None = None
    intervals: VolumeIntervals | None = None

    @property
    def label_set(self) -> LabelSet | None:
        """Names of labels, or None."""
        return self.labels.label_set

    @property
    def unit(self) -> str:
        """Unit of the lengths: ``mm``, or ``px`` for images."""
        return unit_of(self.pairing)

    def store(self, folder: Path) -> Store:
        """Store that keeps results of cases until all cases are done.

        Args:
            folder: folder in which they get a sub-folder of their own.
        """
        labels = None if self.label_set is None else vars(self.label_set)
        making = ["trust", vars(self.settings), labels, self.reader, version("segcal")]
        return Store(folder / STORE, json.dumps(making, default=str))

    def header(self) -> dict[str, Any]:
        """Part of the summary that says how it was made."""
        intervals = self.intervals
        return {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "predictions": str(self.predictions.resolve()),
            "references": None,
            "labels": None if self.label_set is None else self.label_set.source,
            "reader": self.reader,
            "settings": vars(self.settings),
            "versions": versions(),
            "unit": self.unit,
            "intervals": None if intervals is None else intervals.fitted_on,
            "conventions": self.settings.conventions(self.unit, fitted=intervals is not None),
        }


@dataclass(frozen=True)
class Triage:
    """What can be said about predictions without a reference.

    :func:`segcal.reporting.trust.write_trust` writes its files and its page.

    Attributes:
        job: predictions that were judged.
        cohort: results of all cases.
        rows: a row for every case and label, the least sure first: the content of ``trust.csv``.
        summary: the content of ``trust.json``.
    """

    job: TrustJob
    cohort: Cohort
    rows: pd.DataFrame
    summary: dict[str, Any]

    @property
    def order(self) -> list[str]:
        """Cases in the order of their least sure structure."""
        return list(dict.fromkeys(self.rows["case"]))


def plan_trust(
    predictions: Path,
    *,
    settings: TrustSettings | None = None,
    images: Path | None = None,
    intervals: VolumeIntervals | None = None,
    dataset_json: Path | LabelSet | None = None,
    prediction_pattern: str | None = None,
    any_model: bool = False,
    found: Callable[[FoundLabels], None] = lambda labels: None,
) -> TrustJob:
    """Check everything that is given, before the first case is read.

    Args:
        predictions: folder or file that ``segcal evaluate`` reads.
        settings: settings of the triage; None uses the defaults.
        images: folder of the images, which are shown in the pictures, and which give the voxel size
            and position of array files that have no label map beside them.
        intervals: intervals of volumes that were fitted to validation cases.
        dataset_json: see :func:`segcal.evaluation.labels.find_labels`.
        prediction_pattern: see :class:`segcal.io.case_patterns.Patterns`.
        any_model: whether to accept intervals of another model, too.
        found: called with what the labels mean.

    Raises:
        ValueError: files are missing, a voxel size is unknown, or intervals belong to another
            model.
    """
    if images is not None and not images.is_dir():
        raise ValueError(f"images: {images}: no such folder")
    pairing = unpaired(predictions, images, prediction_pattern)
    labels = find_labels(dataset_json, predictions, predictions)
    found(labels)
    if intervals is not None:
        check_intervals(intervals, predictions, labels.label_set, any_model=any_model)
    return TrustJob(
        predictions, settings or TrustSettings(), pairing, labels, find_reader(predictions), images,
        intervals,
    )  # fmt: skip


def run_trust(
    job: TrustJob,
    *,
    processes: int | None = None,
    runner: Runner = run,
    store: Path | None = None,
    progress: Progress = lambda case: None,
) -> Triage:
    """Judge the predictions of a planned job; a case that fails does not stop the others.

    Args:
        job: result of :func:`plan_trust`.
        processes: number of cases at the same time; None uses one process per core, if each gets
            four cases or more.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        store: folder in which results of cases are kept, and from which they are reused; they stay
            there afterwards. None keeps nothing.
        progress: called with the name of each case that is done.

    Raises:
        ValueError: no interval was fitted for a structure.
    """
    cohort = run_cases(
        job.pairing,
        partial(_measure, label_set=job.label_set, reader=job.reader, settings=job.settings),
        jobs=processes or default_jobs(len(job.pairing.cases)),
        engine=runner,
        store=None if store is None else job.store(store),
        progress=lambda case: progress(case.name),
    )
    if job.intervals is not None:
        kind, level = job.settings.interval, job.settings.level
        cohort.rows = with_intervals(cohort.rows, job.intervals, kind, level)
    rows = least_sure_first(cohort.rows, job.settings.swing)
    summary = {
        **job.header(),
        "cases": counts(cohort),
        "flagged": int((rows["flag"] != "").sum()),
        "rows": [{k: finite(v) for k, v in one.items()} for one in rows.to_dict("records")],
    }
    return Triage(job, cohort, rows, summary)


def trust(
    predictions: str | Path,
    *,
    settings: TrustSettings | None = None,
    images: str | Path | None = None,
    intervals: VolumeIntervals | None = None,
    dataset_json: Path | LabelSet | None = None,
    processes: int | None = 1,
) -> Triage:
    """Say which predictions to check first, and how large structures are, with intervals.

    Examples:
        >>> from segcal.trust.triage import trust
        >>> from segcal.reporting.trust import write_trust
        >>> triage = trust("predictions")
        >>> first = triage.rows.iloc[0]
        >>> written = write_trust(triage, "triage")

    Args:
        predictions: folder or file that ``segcal evaluate`` reads.
        settings: settings of the triage; None uses the defaults.
        images: folder of the images, which are shown in the pictures, and which give the voxel size
            and position of array files that have no label map beside them.
        intervals: intervals of volumes from :func:`segcal.trust.fitting.fit_intervals`, or None.
        dataset_json: label names, see :func:`segcal.evaluation.labels.find_labels`; None looks for
            a ``dataset.json``.
        processes: number of cases at the same time; None uses one process per core, if each gets
            four cases or more.

    Raises:
        ValueError: as :func:`plan_trust`.
    """
    job = plan_trust(
        Path(predictions), settings=settings, images=None if images is None else Path(images),
        intervals=intervals, dataset_json=dataset_json,
    )  # fmt: skip
    return run_trust(job, processes=processes)


def least_sure_first(rows: pd.DataFrame, swing: float) -> pd.DataFrame:
    """Turn a row per case into a row per case and label, the least sure first.

    Args:
        rows: rows of a :class:`segcal.evaluation.cohort.Cohort`, with columns ``metric/label``.
        swing: see :class:`segcal.trust.settings.TrustSettings`.
    """
    keys = [metric.key for metric in table.CONFIDENCE]
    first = f"{keys[0]}/"
    names = [str(c).removeprefix(first) for c in rows.columns if str(c).startswith(first)]
    long = pd.DataFrame(
        [
            {"case": case, "label": name, **{key: row[f"{key}/{name}"] for key in keys}}
            for case, row in rows.iterrows()
            for name in names
        ],
        columns=["case", "label", *keys],
    )
    long = long[long["volume_ml"].notna()]  # a folder of a file per class may lack one
    long["flag"] = np.where(long["volume_swing"] > swing, FLAG, "")
    sure = long["soft_dice_confidence"].where(
        long["mask_volume_ml"] > 0, 1 - long["largest_probability"]
    )
    order = sure.to_frame("sure").join(long[["case", "label"]]).sort_values(["sure", "case"]).index
    return long.loc[order].reset_index(drop=True)


def _measure(
    case: Case,
    *,
    label_set: LabelSet | None,
    reader: str | None,
    settings: TrustSettings,
    note: Callable[[str], None],
) -> CaseResult:
    arrays = read_prediction(
        case, label_set, tolerance=settings.tolerance, reader=reader, note=note
    )
    return CaseResult(
        confidence_row(
            arrays.probabilities, arrays.prediction, structures=arrays.structures,
            spacing_mm=arrays.geometry.spacing_mm, regions=arrays.regions, level=settings.level,
        )
    )  # fmt: skip
