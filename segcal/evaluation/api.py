"""Evaluate predictions from Python and notebooks, as ``segcal evaluate`` does."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd

from segcal.arrays import check_choice
from segcal.evaluation.cluster import check_cluster, run_on_cluster
from segcal.evaluation.cohort import Cohort, evaluate_cohort
from segcal.evaluation.compare import Difference, SharedMean, compare, shared_means
from segcal.evaluation.engine import default_jobs, run
from segcal.evaluation.intervals import with_intervals
from segcal.evaluation.job import Job, named, plan
from segcal.evaluation.labels import FoundLabels
from segcal.evaluation.reported import compared_columns, metric_of
from segcal.evaluation.settings import EvaluationSettings
from segcal.evaluation.summary import summarise
from segcal.io.case_patterns import Patterns
from segcal.io.label_sets import LabelSet
from segcal.tally import Tally

__all__ = [
    "Comparison",
    "Report",
    "compare_methods",
    "comparison_of",
    "evaluate",
    "run_job",
    "runner_of",
]

PathLike = str | os.PathLike[str]
Engine = Literal["processes", "dask"]
Runner = Callable[..., Generator[tuple[int, Any]]]
Progress = Callable[[str], None]
RESAMPLES = 2000
"""Default number of bootstrap resamples over cases."""


@dataclass(frozen=True)
class Report:
    """Results of one set of predictions.

    :func:`segcal.reporting.report.write_report` writes its files and its page.

    Attributes:
        job: what was evaluated.
        cohort: results of all cases.
        summary: means, counts, conventions and versions: the content of ``summary.json``.
        bootstrap: number of bootstrap resamples behind the intervals.
    """

    job: Job
    cohort: Cohort
    summary: dict[str, Any]
    bootstrap: int

    @property
    def cases(self) -> pd.DataFrame:
        """A row per case, indexed by its name: the content of ``cases.csv``."""
        return self.cohort.rows

    @property
    def calibration(self) -> dict[str, Tally]:
        """Sums over the voxels of all cases, by scope (selection of voxels); may be empty."""
        return self.cohort.calibration

    @property
    def failed(self) -> dict[str, str]:
        """Why a case could not be evaluated, by its name."""
        return self.cohort.failed

    @property
    def notes(self) -> dict[str, list[str]]:
        """Anything unusual about a case that was evaluated, by its name."""
        return self.cohort.notes


@dataclass(frozen=True)
class Comparison:
    """Results of several sets of predictions, and how they differ from the first.

    :func:`segcal.reporting.report.write_comparison` writes its files and its page.

    Attributes:
        reports: reports by name of the method; the first is the baseline.
        differences: differences in every metric.
        means: means of the metrics that are shown first, over the cases that all methods share.
        asked: keys of the metrics that are shown first; None shows the default metrics.
    """

    reports: dict[str, Report]
    differences: list[Difference]
    means: list[SharedMean]
    asked: Collection[str] | None = None

    @property
    def shown(self) -> list[Difference]:
        """Differences that are shown first, without metrics that have no cases to compare."""
        first = next(iter(self.reports.values())).job
        columns = compared_columns(first.settings.scopes, self.asked)
        return [
            one
            for column in columns
            for one in self.differences
            if one.metric == column and one.mean is not None
        ]

    @property
    def listed(self) -> list[Difference]:
        """Differences in all metrics, except those that are only shown if they are asked for."""
        return [
            one
            for one in self.differences
            if (row := metric_of(one.metric)) is None
            or not row.only_asked
            or row.key in (self.asked or ())
        ]


def evaluate(
    predictions: PathLike,
    labels: PathLike,
    *,
    settings: EvaluationSettings | None = None,
    name: str | None = None,
    dataset_json: PathLike | LabelSet | None = None,
    roi: PathLike | None = None,
    patterns: Patterns | None = None,
    samples: PathLike | None = None,
    bootstrap: int = RESAMPLES,
    processes: int | None = 1,
    engine: Engine = "processes",
    scheduler: str | None = None,
    store: PathLike | None = None,
    progress: Progress = lambda case: None,
) -> Report:
    """Evaluate predictions against reference labels: overlap, surface distances and calibration.

    A case that fails is noted and does not stop the others. After Ctrl-C, the report covers the
    cases that are done.

    Examples:
        >>> from segcal.evaluation.api import evaluate
        >>> from segcal.reporting.report import write_report
        >>> report = evaluate("predictions", "labelsTs")
        >>> dsc = report.cases["dsc"]
        >>> ece = report.summary["metrics"]["ece_fg"]["mean"]
        >>> diagram = report.calibration["fg"].top
        >>> written = write_report(report, "report", formats=["markdown"])

    Args:
        predictions: folder of ``.npz`` (nnU-Net), 4-D volumes, folders with a file per class, or
            label maps; a folder of nnU-Net's results; or one file.
        labels: folder of reference label maps named like the predictions, or one label map. Several
            raters' label maps are named ``CASE_rater1``, ..., or lie in folders ``rater1``, ....
        settings: bins, thresholds and scopes (selections of voxels); None uses the defaults.
        name: name in headings; None uses the name of the folder.
        dataset_json: nnU-Net's ``dataset.json`` with label names and ``ignore``, or a
            :class:`segcal.io.label_sets.LabelSet` (for example from
            :func:`segcal.io.label_sets.parse_labels`); None looks for a file beside or above the
            predictions, then the references, and warns if that file cannot be used.
        roi: folder of masks named like the cases, for the scope ``roi``.
        patterns: where the names of cases stand in the paths; None uses the names of files.
        samples: folder of label maps that were drawn from the model (``CASE_sample1``, ..., or in
            folders ``sample1``, ...), to compare with the label maps of several raters.
        bootstrap: resamplings of the cases for 95 % intervals of the means; 0 leaves them out.
        processes: number of cases evaluated at the same time, each in memory; None uses one
            process per core, if each gets four cases or more. More than one process starts new
            interpreters, so a script needs ``if __name__ == "__main__":`` around the call.
        engine: ``processes`` of this machine, or a ``dask`` cluster; the numbers are the same.
        scheduler: address or scheduler file of a running Dask cluster; None starts a cluster on
            this machine.
        store: folder in which results of cases are kept (in a sub-folder ``.segcal-results``)
            until all cases are done; results are reused while files and settings are unchanged.
            None keeps nothing.
        progress: called with the name of each case that is done.

    Raises:
        ValueError: files do not fit each other, or settings are out of range.
    """
    runner = runner_of(engine, scheduler)
    one = named([Path(predictions)], None if name is None else [name])
    (job,) = _planned(one, labels, settings, dataset_json, roi, patterns, samples)
    folder = None if store is None else Path(store)
    report = run_job(
        job, bootstrap=bootstrap, processes=processes, runner=runner, store=folder,
        progress=progress,
    )  # fmt: skip
    if folder is not None and not report.failed and not report.cohort.interrupted:
        job.store(folder).remove()
    return report


def compare_methods(
    predictions: Mapping[str, PathLike] | Sequence[PathLike],
    labels: PathLike,
    *,
    settings: EvaluationSettings | None = None,
    dataset_json: PathLike | LabelSet | None = None,
    roi: PathLike | None = None,
    patterns: Patterns | None = None,
    bootstrap: int = RESAMPLES,
    processes: int | None = 1,
    engine: Engine = "processes",
    scheduler: str | None = None,
    progress: Progress = lambda case: None,
) -> Comparison:
    """Evaluate several sets of predictions and compare each with the first, case by case.

    Args:
        predictions: folders or files, two or more; by name, or named by their folders. The first
            is the baseline.
        labels: folder of reference label maps named like the predictions, or one label map.
        settings: bins, thresholds and scopes (selections of voxels); None uses the defaults.
        dataset_json: label names and the ignore label; None looks for a ``dataset.json``.
        roi: folder of masks named like the cases, for the scope ``roi``.
        patterns: where the names of cases stand in the paths; None uses the names of files.
        bootstrap: resamplings of the cases for 95 % intervals of the means; 0 leaves them out.
        processes: number of cases evaluated at the same time; None uses one process per core.
        engine: ``processes`` of this machine, or a ``dask`` cluster; the numbers are the same.
        scheduler: address or scheduler file of a running Dask cluster; None starts a cluster on
            this machine.
        progress: called with the name of each case that is done.

    Raises:
        ValueError: as :func:`evaluate`; or there are fewer than two methods, or a method has no
            case that could be evaluated.
        KeyboardInterrupt: on Ctrl-C, since a comparison needs all cases.
    """
    runner = runner_of(engine, scheduler)
    if isinstance(predictions, Mapping):
        given = named([Path(path) for path in predictions.values()], list(predictions))
    else:
        given = named([Path(path) for path in predictions])
    if len(given) < 2:
        raise ValueError(f"predictions: expected at least two methods, got {len(given)}")
    reports = {}
    for job in _planned(given, labels, settings, dataset_json, roi, patterns):
        reports[job.name] = run_job(
            job, bootstrap=bootstrap, processes=processes, runner=runner, progress=progress
        )
        if reports[job.name].cohort.interrupted:
            raise KeyboardInterrupt
    return comparison_of(reports)


def run_job(
    job: Job,
    *,
    bootstrap: int = RESAMPLES,
    processes: int | None = None,
    runner: Runner = run,
    store: Path | None = None,
    progress: Progress = lambda case: None,
) -> Report:
    """Evaluate a job that has been planned.

    Args:
        job: result of :func:`segcal.evaluation.job.plan`.
        bootstrap: resamplings of the cases for 95 % intervals of the means; 0 leaves them out.
        processes: number of cases evaluated at the same time; None uses one process per core.
        runner: result of :func:`runner_of`.
        store: folder in which results of cases are kept, and from which they are reused; they
            stay there afterwards. None keeps nothing.
        progress: called with the name of each case that is done.

    Raises:
        ValueError: numbers are out of range.
    """
    for name, number, least in (("bootstrap", bootstrap, 0), ("processes", processes, 1)):
        if number is not None and number < least:
            raise ValueError(f"{name}: expected {least} or more, got {number}")
    cohort = evaluate_cohort(
        job.pairing,
        label_set=job.label_set,
        reader=job.reader,
        settings=job.settings,
        jobs=processes or default_jobs(len(job.pairing.cases)),
        engine=runner,
        store=None if store is None else job.store(store),
        progress=lambda case: progress(case.name),
    )
    if job.intervals is not None:
        kind, level = job.settings.interval, job.settings.level
        cohort.rows = with_intervals(cohort.rows, job.intervals, kind, level)
    summary = {**job.header(), **summarise(cohort, resamples=bootstrap)}
    return Report(job, cohort, summary, bootstrap)


def comparison_of(
    reports: Mapping[str, Report], asked: Collection[str] | None = None
) -> Comparison:
    """Compare each report with the first one.

    Args:
        reports: reports by name of the method, two or more, with the same references and settings.
        asked: keys of the metrics that are shown first, see
            :func:`segcal.evaluation.reported.find_metrics`; None shows the default metrics.

    Raises:
        ValueError: there are fewer than two reports, or a report has no case.
    """
    if empty := [name for name, report in reports.items() if not len(report.cases)]:
        raise ValueError(f"reports: no case of {', '.join(empty)} could be evaluated")
    tables = {name: report.cases for name, report in reports.items()}
    first = next(iter(reports.values()))
    shown = compared_columns(first.job.settings.scopes, asked)
    return Comparison(
        dict(reports),
        compare(tables, resamples=first.bootstrap),
        shared_means(tables, shown, resamples=first.bootstrap),
        asked,
    )


def runner_of(engine: Engine, scheduler: str | None = None) -> Runner:
    """Function that runs the cases, after a check that it can start.

    Args:
        engine: ``processes`` of this machine, or a ``dask`` cluster.
        scheduler: address or scheduler file of a running Dask cluster; None starts a cluster on
            this machine.

    Raises:
        ValueError: the engine is unknown, Dask is not installed, or no scheduler answers.
    """
    check_choice("engine", engine, get_args(Engine))
    if engine == "processes":
        if scheduler is not None:
            raise ValueError(f"scheduler {scheduler}: needs the engine dask, got processes")
        return run
    check_cluster(scheduler)
    return partial(run_on_cluster, scheduler=scheduler)


def _planned(
    predictions: Mapping[str, Path],
    labels: PathLike,
    settings: EvaluationSettings | None,
    dataset_json: PathLike | LabelSet | None,
    roi: PathLike | None,
    patterns: Patterns | None,
    samples: PathLike | None = None,
) -> list[Job]:
    return plan(
        predictions,
        Path(labels),
        settings=settings,
        dataset_json=dataset_json
        if dataset_json is None or isinstance(dataset_json, LabelSet)
        else Path(dataset_json),
        roi=None if roi is None else Path(roi),
        patterns=patterns,
        samples=None if samples is None else Path(samples),
        found=_warn,
    )


def _warn(labels: FoundLabels) -> None:
    """Warn if a file that was found cannot name the labels, or if its regions are contradictory."""
    if labels.problem:
        warnings.warn(f"going on without label names: {labels.problem}", stacklevel=5)
    if labels.label_set is not None and (why := labels.label_set.contradiction()):
        warnings.warn(why, stacklevel=5)
