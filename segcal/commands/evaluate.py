"""``segcal evaluate``: compare predictions with reference labels, in numbers."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from segcal.commands.console import (
    calibration_table,
    class_table,
    comparison_table,
    number,
    open_console,
    say,
)
from segcal.commands.errors import user_errors
from segcal.commands.interval_options import OPTIONS as OF_INTERVALS
from segcal.commands.interval_options import AnyModel, Interval, IntervalKind, Intervals, Level
from segcal.commands.reading_options import OPTIONS as OF_READING
from segcal.commands.reading_options import (
    READING,
    DatasetJson,
    Labels,
    PredictionPattern,
    ReferencePattern,
    known_labels,
    source_of,
)
from segcal.commands.running_options import OPTIONS as OF_RUNNING
from segcal.commands.running_options import Engine, Processes, Resume, RunsOn, Scheduler

if TYPE_CHECKING:  # torch is imported when there is work to do
    from collections.abc import Collection

    from segcal.evaluation.api import Report, Runner
    from segcal.evaluation.cohort import Cohort
    from segcal.evaluation.job import Job
    from segcal.evaluation.labels import FoundLabels


class Compat(str, Enum):
    """Published evaluations whose numbers can be added."""

    marginloss = "marginloss"
    curvas = "curvas"


NUMBERS, REPORT = "Numbers", "Report"
"""Groups of options in the help."""
DEFAULT_SCOPES = ("fg", "union", "dilated", "all")
MAX_NOTES = 5
OPTIONS = {
    "cases": "--cases", "chosen": "--scopes", "compat": "--compat", "images": "--images",
    "names": "--names", "metrics": "--metrics", "nsd_tolerance_mm": "--nsd-tolerance",
    "roi": "--roi", "samples": "--samples", "threshold": "--threshold",
    **OF_INTERVALS,
    **OF_READING,
    **OF_RUNNING,
}  # fmt: skip
"""Options by the arguments they become."""


def evaluate(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREDICTIONS... REFERENCES",
            help="Folders of predictions: .npz (nnU-Net with --save_probabilities), 4-D volumes "
            "(class last), a folder per case with one file per class, label maps, or the folder of "
            "a model or fold that nnU-Net trained; or single files. The last path is the folder of "
            "reference label maps, or a single label map.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder of the report: HTML, CSV, JSON, PNG."),
    ],
    names: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=REPORT,
            help="Names of several predictions, separated by commas, the baseline first; "
            "default: the names of their folders.",
        ),
    ] = None,
    bootstrap: Annotated[
        int,
        typer.Option(
            rich_help_panel=NUMBERS,
            min=0,
            help="Number of resamplings of the cases for 95 % intervals of the means; 0: none.",
        ),
    ] = 2000,
    processes: Processes = None,
    engine: RunsOn = Engine.processes,
    scheduler: Scheduler = None,
    dataset_json: DatasetJson = None,
    labels: Labels = None,
    prediction_pattern: PredictionPattern = None,
    reference_pattern: ReferencePattern = None,
    bins: Annotated[
        int,
        typer.Option(
            rich_help_panel=NUMBERS, min=1, max=10_000, help="Number of bins of calibration errors."
        ),
    ] = 15,
    tace_threshold: Annotated[
        float,
        typer.Option(
            rich_help_panel=NUMBERS,
            min=0,
            max=1,
            help="TACE leaves out probabilities up to this value.",
        ),
    ] = 1e-3,
    dilation: Annotated[
        int,
        typer.Option(
            rich_help_panel=NUMBERS,
            min=1,
            max=100,
            help="Voxels by which the scope dilated reaches beyond the foreground.",
        ),
    ] = 5,
    scopes: Annotated[
        str,
        typer.Option(
            rich_help_panel=NUMBERS,
            help="Scopes (sets of voxels that calibration is reported for), separated by commas: "
            "fg (labelled foreground), union (labelled or predicted foreground), dilated (near the "
            "labelled foreground), crop (where a foreground probability is not 0: nnU-Net's crop), "
            "roi (masks given by --roi), all.",
        ),
    ] = ",".join(DEFAULT_SCOPES),
    roi: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=READING, help="Folder of masks named like the cases, for the scope roi."
        ),
    ] = None,
    cases: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=READING,
            help="Text file with the names of the cases to evaluate, one per line; default: all.",
        ),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=READING,
            help="Folder of label maps drawn from the model (CASE_sample1, ..., or sample1/CASE), "
            "to compare their spread with the spread of several raters.",
        ),
    ] = None,
    nsd_tolerance: Annotated[
        float,
        typer.Option(
            rich_help_panel=NUMBERS,
            min=0,
            help="Tolerance of the normalised surface distance, in mm.",
        ),
    ] = 2.0,
    threshold: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=READING,
            help="Make the mask of the foreground, or of each region, where its probability is "
            "above this (0.5), even if a label map lies beside it. Several thresholds (0.3,0.5) "
            "get a folder each, and are compared. Classes that exclude each other have none.",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            rich_help_panel=READING,
            min=0,
            help="How far a prediction may lie off its reference, in voxels.",
        ),
    ] = 1e-2,
    intervals: Intervals = None,
    interval: IntervalKind = Interval.conformal,
    level: Level = 0.95,
    any_model: AnyModel = False,
    compat: Annotated[
        Compat | None,
        typer.Option(
            rich_help_panel=NUMBERS,
            help="Add columns with numbers by published rules, to compare with published tables. "
            "marginloss: the evaluation of the MarginLoss and CRaC papers (a missed organ has HD "
            "0, ...); curvas: the CURVAS challenge, for references by several raters.",
        ),
    ] = None,
    resume: Resume = False,
    images: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=REPORT,
            help="Folder of the images (CASE_0000.nii.gz or CASE.nii.gz), over which the worst "
            "cases are drawn.",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            rich_help_panel=REPORT,
            help="Also write the tables as markdown (tables.md) or latex (tables.tex), or both: "
            "markdown,latex.",
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=REPORT,
            help="Metrics in the tables on screen and of --format, separated by commas: "
            "dsc,hd95,ece. The page and the files of numbers always have all metrics.",
        ),
    ] = None,
) -> None:
    """Measure overlap, surface distances and calibration of predictions, per case and in summary.

    Examples: segcal evaluate predictions labelsTs -o report

    segcal evaluate stock nacl crac labelsTs -o report --names stock,NACL,CRaC

    Files are matched by name (CASE.npz or CASE.nii.gz with CASE.nii.gz). The output folder gets
    index.html (to look at, in one file), cases.csv (one row per case), summary.json (means, counts,
    conventions, versions), reliability.png, reliability_classes.png, confidence.png, worst/ (a
    picture of each of the cases with the lowest DSC), and predicted_dsc.png, risk_coverage.png and
    volumes.png, which show how well the statements of segcal trust hold. Calibration is reported
    for several scopes (sets of voxels): by default fg (foreground-labelled voxels, as published),
    union (labelled or predicted), dilated (near the foreground) and all. Distances are in mm, or in
    pixels for pictures (PNG, BMP, TIF).

    With several predictions, each gets a folder, and comparison.json, .csv and .png have their
    differences from the first over the cases that they share, with 95 % bootstrap intervals and
    Wilcoxon's signed-rank test.

    If several raters drew the references (CASE_rater1.nii.gz, ..., or folders rater1, ...), overlap
    is measured against their majority vote, calibration against all of them, and volumes against
    all their volumes (CRPS); confidence is also reported where raters disagree.

    Exit code 0: all evaluated. 1: some case failed or had no prediction, the rest is there. 2:
    wrong usage.
    """
    from segcal.evaluation.api import comparison_of, runner_of
    from segcal.evaluation.intervals import read_intervals
    from segcal.evaluation.job import named, plan, with_thresholds
    from segcal.evaluation.reported import find_metrics
    from segcal.evaluation.settings import EvaluationSettings
    from segcal.io.case_patterns import Patterns
    from segcal.io.files import read_names
    from segcal.reporting import report as reporting
    from segcal.reporting.folder import ReportFolder
    from segcal.trust.fitting import check_intervals

    console = open_console()
    with user_errors(OPTIONS):
        settings = EvaluationSettings(
            bins=bins,
            tace_threshold=tace_threshold,
            dilation=dilation,
            nsd_tolerance_mm=nsd_tolerance,
            tolerance=tolerance,
            chosen=tuple(scope.strip() for scope in scopes.split(",")),
            compat=None if compat is None else compat.value,
            level=level,
            interval=interval.value,
        )
        fitted = None if intervals is None else read_intervals(intervals)
        forms = table_forms(formats or [])
        asked = None if metrics is None else find_metrics(metrics.split(","))
        if images is not None and not images.is_dir():
            raise ValueError(f"images: {images}: no such folder")
        *predictions, references = paths
        runner = runner_of(engine.value, scheduler)
        jobs = plan(
            named(predictions, names.split(",") if names else None),
            references,
            settings=settings,
            dataset_json=known_labels(dataset_json, labels),
            roi=roi,
            patterns=Patterns(prediction_pattern, reference_pattern),
            samples=samples,
            cases=() if cases is None else read_names(cases),
            found=lambda found: say_labels(console, found),
        )
        if fitted is not None:
            for job in jobs:
                check_intervals(fitted, job.predictions, job.label_set, any_model=any_model)
            jobs = [replace(job, intervals=fitted) for job in jobs]
        if threshold is not None:
            jobs = with_thresholds(jobs, _numbers(threshold))
        folders = {job.name: output / job.name if len(jobs) > 1 else output for job in jobs}
        for folder in {*folders.values(), output}:
            reporting.check_output(folder, paths)
        for job in jobs:
            folders[job.name].mkdir(parents=True, exist_ok=True)
            if not resume:
                job.store(folders[job.name]).remove()
    reports = {}
    for job in jobs:
        folder = folders[job.name]
        if len(jobs) > 1:
            say(console, f"{job.name}: {job.predictions}", "bold")
        if job.pairing.note:
            say(console, job.pairing.note)
        report = reports[job.name] = _run(job, folder, bootstrap, processes, runner)
        _say_report(console, report, asked)  # before the figures, which take seconds
        with user_errors(OPTIONS):
            written = reporting.write_report(
                report, folder, images=images, formats=forms, asked=asked
            )
        for note in written.notes:
            say(console, note, "yellow")
        say(console, f"Written to {folder}: {', '.join(written.files)}")
        if report.cohort.interrupted:
            say(console, "Interrupted: the report covers the cases that were done.", "red")
            say(console, "The same command with --resume goes on from there.")
            raise typer.Exit(130)
    with user_errors(OPTIONS):
        if len(jobs) > 1 and not all(len(report.cases) for report in reports.values()):
            ReportFolder(output).close()  # no comparison: that of an earlier run is not of these
        elif len(jobs) > 1:
            comparison = comparison_of(reports, asked)
            written = reporting.write_comparison(comparison, output, formats=forms)
            console.print(comparison_table(list(reports), comparison.shown, jobs[0].unit))
            say(console, f"Written to {output}: {', '.join(written.files)}")
    if not any(report.failed for report in reports.values()):
        for job in jobs:  # not before: --resume would start from the first method again
            job.store(folders[job.name]).remove()
    if any(r.failed or r.job.pairing.without_prediction for r in reports.values()):
        raise typer.Exit(1)


def _run(job: Job, folder: Path, bootstrap: int, processes: int | None, runner: Runner) -> Report:
    """Evaluate with a bar, keeping results of cases beside the report until it is there."""
    from segcal.commands.progress import progress_bar
    from segcal.evaluation.api import run_job

    with progress_bar("Evaluating", len(job.pairing.cases)) as advance:
        return run_job(
            job, bootstrap=bootstrap, processes=processes, runner=runner, store=folder,
            progress=advance,
        )  # fmt: skip


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"threshold: expected numbers separated by commas, got {text!r}") from None


def _say_report(console: Console, report: Report, asked: Collection[str] | None) -> None:
    from segcal.evaluation.agreement import in_words

    if len(report.cases):
        console.print(class_table(report.summary, asked))
    if report.calibration:
        console.print(calibration_table(report.summary, report.job.settings.scopes, asked))
    if report.job.unit == "px" and len(report.cases):  # as sets of pictures are judged
        mean = number(report.summary["pooled_iou"]["mean"], 4)
        say(console, f"Mean IoU of the labels, over the pixels of all cases together: {mean}")
    for numbers in list(report.summary.get("predicted_dsc", {}).values())[-1:]:
        say(console, in_words(numbers))
    _say_problems(console, report.cohort, report.job.labels)


def table_forms(formats: list[str]) -> list[str]:
    """Check which files of tables are asked for.

    Raises:
        ValueError: an unknown format.
    """
    from segcal.reporting.markup import FILES

    asked = [part.strip() for given in formats for part in given.split(",")]
    if unknown := [form for form in asked if form not in FILES]:
        raise ValueError(
            f"--format: expected {' or '.join(FILES)}, got {', '.join(map(repr, unknown))}"
        )
    return list(dict.fromkeys(asked))


def say_labels(console: Console, labels: FoundLabels) -> None:
    """Say which file names the labels, or why it does not, and what it contradicts itself in."""
    if labels.problem:
        say(console, f"Going on without label names: {labels.problem}", "yellow")
    elif labels.file is not None and labels.label_set is not None:
        ignored = labels.label_set.ignore_index
        left_out = "" if ignored is None else f"; {ignored} is left out (ignore)"
        say(console, f"Labels from {labels.file}{left_out}")
    if labels.label_set is not None and (why := labels.label_set.contradiction()):
        say(console, why, "yellow")


def _say_problems(console: Console, cohort: Cohort, labels: FoundLabels) -> None:
    for name, why in cohort.failed.items():
        say(console, f"FAILED {name}: {why}{source_of(labels.label_set, why)}", "red")
    for name, texts in list(cohort.notes.items())[:MAX_NOTES]:
        say(console, f"Note on {name}: {'; '.join(texts)}", "yellow")
    if len(cohort.notes) > MAX_NOTES:
        say(console, f"Notes on {len(cohort.notes) - MAX_NOTES} more cases are in summary.json")
    for names, what in (
        (cohort.pairing.without_prediction, "references without a prediction, not in the means"),
        (cohort.pairing.without_reference, "predictions without a reference, left out"),
    ):
        if names:
            say(console, f"{len(names)} {what}: {', '.join(names)}", "yellow")
    if others := len(cohort.pairing.of_other_folds):
        say(console, f"{others} references left out: other folds validate on their cases")
