"""Fits intervals of volumes to validation predictions and their references."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd

from segcal.evaluation.api import Progress, Runner
from segcal.evaluation.case import CaseResult, Structure
from segcal.evaluation.cohort import run_cases
from segcal.evaluation.confidence import confidence_row
from segcal.evaluation.engine import default_jobs, run
from segcal.evaluation.intervals import StructureIntervals, VolumeIntervals
from segcal.evaluation.job import Job
from segcal.evaluation.reading import CaseArrays, read_case
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case
from segcal.metrics.volume_interval import conformal_scores, variance_inflation

__all__ = ["check_intervals", "fit_intervals", "fit_rows"]


def fit_intervals(
    job: Job,
    *,
    processes: int | None = None,
    runner: Runner = run,
    progress: Progress = lambda case: None,
) -> VolumeIntervals:
    """Fit intervals to the cases of a planned job.

    Args:
        job: result of :func:`segcal.repair.fitting.plan_fit`.
        processes: number of cases at the same time; None uses one process per core, if each gets
            four cases or more.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        progress: called with the name of each case that was read.

    Raises:
        ValueError: a case cannot be read (the others alone would give other intervals), or the
            probabilities of a structure are only 0 and 1, and its volume is wrong.
        KeyboardInterrupt: on Ctrl-C.
    """
    from segcal.repair.saved import model_of  # here, since triage without intervals needs no torch

    cohort = run_cases(
        job.pairing,
        partial(_measure, job=job),
        jobs=processes or default_jobs(len(job.pairing.cases)),
        engine=runner,
        progress=lambda case: progress(case.name),
    )
    if cohort.interrupted:
        raise KeyboardInterrupt
    if cohort.failed:
        raise ValueError(next(iter(cohort.failed.values())))
    return VolumeIntervals(
        fit_rows(cohort.rows),
        model_of(job.predictions),
        {
            "predictions": str(job.predictions.resolve()),
            "references": str(job.references.resolve()),
            "cases": [case.name for case in job.pairing.cases],
        },
    )


def fit_rows(rows: pd.DataFrame) -> dict[str, StructureIntervals]:
    """Intervals of every structure from a table of cases.

    Args:
        rows: one row per case with ``voxel_ml``, and for every label ``true_volume_ml/label``,
            ``volume_ml/label`` and ``volume_sd_ml/label``; an undefined case is left out.

    Raises:
        ValueError: as :func:`fit_intervals`.
    """
    key = "true_volume_ml/"
    names = [c.removeprefix(key) for c in map(str, rows.columns) if c.startswith(key)]
    return {name: _of_structure(rows, name) for name in names}


def check_intervals(
    intervals: VolumeIntervals,
    predictions: Path,
    label_set: LabelSet | None,
    *,
    any_model: bool = False,
) -> None:
    """Refuse intervals that were fitted for other labels, another model or another calibration.

    Args:
        intervals: result of :func:`fit_intervals`.
        predictions: predictions that the intervals are to be used for.
        label_set: labels of these predictions, or None.
        any_model: whether to accept intervals of another model or calibration.

    Raises:
        ValueError: something differs; the message says what.
    """
    from segcal.repair.saved import model_of, other_model

    names = () if label_set is None else label_set.foreground
    if unknown := [name for name in names if name not in intervals.structures]:
        raise ValueError(intervals.not_fitted(unknown))
    ours, theirs = intervals.model, model_of(predictions)
    other = other_model(ours, theirs)
    if ours.get("calibrator") != theirs.get("calibrator"):
        other = other or (_calibration(ours), _calibration(theirs))
    if other and not any_model:
        raise ValueError(
            f"{predictions}: {other[1]}, but the intervals were fitted to {other[0]}; fit them to "
            "validation cases of this model, or add --any-model if you know that they fit"
        )


def _calibration(record: dict[str, object]) -> str:
    """Describe the calibration of predictions in words."""
    found = record.get("calibrator")
    if not isinstance(found, dict):
        return "uncalibrated probabilities"
    return f"probabilities calibrated by {found.get('method')} fitted on {found.get('fitted_on')}"


def _of_structure(rows: pd.DataFrame, name: str) -> StructureIntervals:
    of = rows[[f"{key}/{name}" for key in ("true_volume_ml", "volume_ml", "volume_sd_ml")]].dropna()
    truth, expected, sd = of.to_numpy(dtype=np.float64).T
    scores = conformal_scores(truth, expected, sd**2)
    if not np.isfinite(scores).all():
        case = of.index[~np.isfinite(scores)][0]
        raise ValueError(
            f"{case}: {name}: the probabilities are only 0 and 1, and their volume differs from "
            "the reference's; no interval can be fitted to masks"
        )
    inflation = variance_inflation(truth, expected, sd**2)
    voxel_ml = rows.loc[of.index, "voxel_ml"].to_numpy(dtype=np.float64)
    coins = float(np.mean(4 * (sd / voxel_ml) ** 2))
    effective = coins / inflation if inflation > 0 else coins
    return StructureIntervals(inflation, effective, tuple(scores.tolist()))


def _measure(case: Case, *, job: Job, note: Callable[[str], None]) -> CaseResult:
    arrays = read_case(
        case, job.label_set, tolerance=job.settings.tolerance, reader=job.reader, note=note
    )
    if arrays.probabilities is None:
        raise ValueError(
            f"{case.prediction}: holds no probabilities, from which intervals are computed; "
            "nnU-Net writes them with --save_probabilities, and in validation with --npz"
        )
    spacing = arrays.reference.geometry.spacing_mm
    reference = arrays.reference.array
    valid = None if arrays.ignore_index is None else reference != arrays.ignore_index
    row = confidence_row(
        arrays.probabilities, arrays.prediction, structures=arrays.structures,
        spacing_mm=spacing, regions=arrays.regions, valid=valid,
    )  # fmt: skip
    voxel_ml = float(np.prod(spacing)) / 1000
    truth = {
        f"true_volume_ml/{one.name}": _voxels(arrays, one) * voxel_ml for one in arrays.structures
    }
    return CaseResult({**row, **truth, "voxel_ml": voxel_ml})


def _voxels(arrays: CaseArrays, structure: Structure) -> int:
    return int(np.count_nonzero(np.isin(arrays.reference.array, structure.labels)))
