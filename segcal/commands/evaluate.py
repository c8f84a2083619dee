"""``segcal evaluate``: numbers of predictions against reference labels."""

from __future__ import annotations

from collections.abc import Callable, Generator
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from segcal.commands.console import calibration_table, class_table, comparison_table, say
from segcal.commands.errors import user_errors

if TYPE_CHECKING:  # torch is imported when there is work to do
    from segcal.evaluation.case import Settings
    from segcal.evaluation.cohort import Cohort
    from segcal.evaluation.job import Job
    from segcal.evaluation.store import Outcome
    from segcal.io.label_sets import LabelSet

    Runner = Callable[..., Generator[tuple[int, Outcome]]]


class Compat(str, Enum):
    """Published evaluations whose numbers can be had, too."""

    marginloss = "marginloss"


READING, NUMBERS, REPORT, RUNNING = "What is read", "Numbers", "Report", "Running"
"""Groups of options in the help."""
DEFAULT_SCOPES = ("fg", "union", "dilated", "all")
MAX_NOTES = 5


class Engine(str, Enum):
    """What runs the cases."""

    processes = "processes"
    dask = "dask"


def evaluate(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PREDICTIONS... REFERENCES",
            help="Folders of predictions: .npz (nnU-Net, --save_probabilities), 4-D volumes "
            "(class last), a folder a case with one file per class, or label maps; a folder of "
            "nnU-Net's results; or one file each. Last, the folder of reference label maps, or one "
            "label map.",
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
            help="Names of several predictions, with commas, the baseline first; default: those "
            "of their folders.",
        ),
    ] = None,
    bootstrap: Annotated[
        int,
        typer.Option(
            rich_help_panel=NUMBERS,
            min=0,
            help="Resamplings of the cases for 95 % intervals of the means; 0: none.",
        ),
    ] = 2000,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            "-p",
            rich_help_panel=RUNNING,
            min=1,
            help="Cases evaluated at the same time; default: one a core, of four cases or more "
            "each. Each holds one case in memory.",
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(
            rich_help_panel=RUNNING,
            help="What runs the cases: processes of this machine, or a Dask cluster (needs "
            'pip install "segcal[dask]"). The numbers are the same.',
        ),
    ] = Engine.processes,
    scheduler: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=RUNNING,
            help="With --engine dask: tcp://HOST:PORT of a running scheduler, or its scheduler "
            "file; its workers see the files under the same paths. Default: a cluster of "
            "--processes on this machine. Connect to none that you do not trust.",
        ),
    ] = None,
    dataset_json: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=READING,
            help="nnU-Net dataset.json with label names and 'ignore'; default: looked for beside "
            "the predictions and above the references.",
        ),
    ] = None,
    bins: Annotated[
        int,
        typer.Option(
            rich_help_panel=NUMBERS, min=1, max=10_000, help="Bins of the calibration errors."
        ),
    ] = 15,
    tace_threshold: Annotated[
        float,
        typer.Option(
            rich_help_panel=NUMBERS, min=0, max=1, help="TACE leaves out probabilities up to this."
        ),
    ] = 1e-3,
    dilation: Annotated[
        int,
        typer.Option(
            rich_help_panel=NUMBERS,
            min=1,
            max=100,
            help="Reach in voxels of the scope near the foreground.",
        ),
    ] = 5,
    scopes: Annotated[
        str,
        typer.Option(
            rich_help_panel=NUMBERS,
            help="Voxels that calibration is reported for, with commas: fg (labelled foreground), "
            "union (or predicted), dilated (near it), crop (where a foreground probability is not "
            "0: nnU-Net's crop), roi, all.",
        ),
    ] = ",".join(DEFAULT_SCOPES),
    roi: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=READING, help="Folder of masks named like the cases, for the scope roi."
        ),
    ] = None,
    nsd_tolerance: Annotated[
        float,
        typer.Option(
            rich_help_panel=NUMBERS, min=0, help="Of the normalised surface distance, in mm."
        ),
    ] = 2.0,
    tolerance: Annotated[
        float,
        typer.Option(
            rich_help_panel=READING,
            min=0,
            help="How far, in voxels, a prediction may lie off its reference.",
        ),
    ] = 1e-2,
    compat: Annotated[
        Compat | None,
        typer.Option(
            rich_help_panel=NUMBERS,
            help="Add columns marginloss_*: the numbers by the rules of the published evaluation "
            "of MarginLoss and CRaC (a missed organ has HD 0, ...), to compare with its tables.",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            rich_help_panel=RUNNING,
            help="Take up a run into the same folder that was interrupted, or in which some case "
            "failed: results of files that have not changed are kept.",
        ),
    ] = False,
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
            help="Write the tables as markdown (tables.md) or latex (tables.tex), too; give it "
            "twice, or with a comma, for both.",
        ),
    ] = None,
) -> None:
    """Overlap, surface distances and calibration of predictions, per case and in summary.

    Examples: segcal evaluate predictions labelsTs -o report

    segcal evaluate stock nacl crac labelsTs -o report --names stock,NACL,CRaC

    Files are matched by name (CASE.npz or CASE.nii.gz with CASE.nii.gz). The output folder gets
    index.html (to look at, in one file), cases.csv (one row a case), summary.json (means, counts,
    conventions, versions), reliability.png, reliability_classes.png, confidence.png and worst/ with
    a picture of each of the cases with the lowest DSC. Calibration is reported for the --scopes
    fg (foreground-labelled voxels, as published), union (labelled or predicted), dilated (near the
    foreground) and all. Distances are in mm.

    Several predictions get a folder each, and comparison.json, .csv and .png: differences to the
    first over the cases they share, with 95 % bootstrap intervals and Wilcoxon's signed-rank test.

    Exit code 0: all evaluated. 1: some case failed or had no prediction, the rest is there. 2:
    wrong usage.
    """
    from segcal.evaluation.case import Settings
    from segcal.reporting.folder import ReportFolder
    from segcal.reporting.report import write_comparison, write_report

    console = Console()
    if not console.is_terminal:  # a pipe or a log has no width
        console = Console(width=100)
    with user_errors():
        chosen = [s.strip() for s in scopes.split(",")]
        settings = Settings(
            bins=bins,
            tace_threshold=tace_threshold,
            dilation=dilation,
            nsd_tolerance_mm=nsd_tolerance,
            tolerance=tolerance,
            chosen=tuple(chosen if roi is None or "roi" in chosen else [*chosen, "roi"]),
            compat=None if compat is None else compat.value,
        )
        forms = table_forms(formats or [])
        if images is not None and not images.is_dir():
            raise ValueError(f"--images: {images}: no such folder")
        *predictions, references = paths
        runner = _runner(engine, scheduler)
        jobs = _jobs(console, predictions, references, names, output, dataset_json, roi)
        if "roi" in settings.chosen and roi is None:
            raise ValueError("--scopes roi: give the folder of the masks with --roi")
        for job in jobs:
            job.check(settings)
        for job in jobs:
            job.output.mkdir(parents=True, exist_ok=True)
            if not resume:
                job.store(settings).remove()
    cohorts = {}
    for job in jobs:
        if len(jobs) > 1:
            say(console, f"{job.name}: {job.predictions}", "bold")
        cohort = cohorts[job.name] = _evaluate(job, settings, processes, runner)
        with user_errors():
            report = write_report(
                job, cohort, settings, bootstrap=bootstrap, images=images, forms=forms
            )
        if len(cohort.rows):
            console.print(class_table(report.summary))
        if cohort.calibration:
            console.print(calibration_table(report.summary, settings.scopes))
        for note in report.notes:
            say(console, note, "yellow")
        _say_problems(console, cohort)
        say(console, f"Written to {job.output}: {', '.join(report.files)}")
        if cohort.interrupted:
            say(console, "Interrupted: the report is of the cases before.", "red")
            say(console, "The same command with --resume goes on from there.")
            raise typer.Exit(130)
    with user_errors():
        if len(jobs) > 1 and not all(len(cohort.rows) for cohort in cohorts.values()):
            ReportFolder(output).close()  # no comparison: that of an earlier run is not of these
        elif len(jobs) > 1:
            comparison = write_comparison(jobs, cohorts, settings, bootstrap=bootstrap, forms=forms)
            console.print(comparison_table(list(cohorts), comparison.differences))
            say(console, f"Written to {output}: {', '.join(comparison.files)}")
    if not any(cohort.failed for cohort in cohorts.values()):
        for job in jobs:  # not before: --resume would start from the first method again
            job.store(settings).remove()
    if any(cohort.failed or cohort.pairing.without_prediction for cohort in cohorts.values()):
        raise typer.Exit(1)


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


def _jobs(
    console: Console,
    predictions: list[Path],
    references: Path,
    names: str | None,
    output: Path,
    dataset_json: Path | None,
    roi: Path | None,
) -> list[Job]:
    """Check all that is given before the first case is read."""
    from segcal.evaluation.job import Job
    from segcal.io.pairing import find_reader, pair, with_rois

    if not predictions:
        raise ValueError("give at least one folder of predictions, then the references")
    several = len(predictions) > 1
    stems = [p.resolve().name if p.is_dir() else p.stem for p in predictions]
    chosen = [n.strip() for n in names.split(",")] if names else stems
    if len(chosen) != len(predictions) or len(set(chosen)) != len(chosen) or "" in chosen:
        raise ValueError(
            f"--names: expected {len(predictions)} different names, got {', '.join(chosen)}"
        )
    if unfit := [n for n in chosen if several and (Path(n).name != n or n in (".", ".."))]:
        raise ValueError(f"--names: {', '.join(unfit)} cannot name a folder")
    jobs = []
    for name, one in zip(chosen, predictions, strict=True):
        folder = output / name if several else output
        pairing = pair(one, references)
        if roi is not None:
            pairing = with_rois(pairing, roi)
        label_set = find_label_set(console, dataset_json, one, references)
        _check_output(folder, [*predictions, references])
        if several:
            _check_output(output, [*predictions, references])
        jobs.append(Job(name, one, references, folder, pairing, label_set, find_reader(one)))
    return jobs


def _check_output(output: Path, given: list[Path]) -> None:
    """Refuse a folder in which somebody else's file would be overwritten."""
    from segcal.reporting.folder import ReportFolder
    from segcal.reporting.report import FILES

    inputs = [path if path.is_dir() else path.parent for path in given]
    if output.resolve() in [path.resolve() for path in inputs]:
        raise ValueError(f"{output}: holds what is evaluated; name another folder for the report")
    ReportFolder(output).check(FILES)


def _runner(engine: Engine, scheduler: str | None) -> Runner:
    """Check that the engine can start."""
    from segcal.evaluation.cluster import check_cluster, run_on_cluster
    from segcal.evaluation.engine import run

    if engine is Engine.processes:
        if scheduler is not None:
            raise ValueError(f"--scheduler {scheduler}: is for --engine dask, got no such option")
        return run
    check_cluster(scheduler)

    return partial(run_on_cluster, scheduler=scheduler)


def _evaluate(job: Job, settings: Settings, processes: int | None, runner: Runner) -> Cohort:
    from segcal.commands.progress import progress_bar
    from segcal.evaluation.cohort import evaluate_cohort
    from segcal.evaluation.engine import default_jobs

    store = job.store(settings)
    with progress_bar("Evaluating", len(job.pairing.cases)) as advance:
        return evaluate_cohort(
            job.pairing,
            label_set=job.label_set,
            reader=job.reader,
            settings=settings,
            jobs=processes or default_jobs(len(job.pairing.cases)),
            engine=runner,
            store=store,
            progress=lambda case: advance(case.name),
        )


def find_label_set(
    console: Console, dataset_json: Path | None, predictions: Path, references: Path
) -> LabelSet | None:
    """Read what the labels mean, from what is given or found; None if there is nothing.

    Raises:
        ValueError: a file that is given, or one with an ignore label, cannot be understood.
    """
    from segcal.io.files import read_json
    from segcal.io.label_sets import read_label_set
    from segcal.io.pairing import find_dataset_json

    if dataset_json is not None:
        return read_label_set(dataset_json)
    found = find_dataset_json(predictions, references)
    if found is None:
        return None
    try:
        label_set = read_label_set(found)
    except ValueError as error:  # nobody asked for this file
        content = read_json(found)
        labels = content.get("labels") if isinstance(content, dict) else None
        if isinstance(labels, dict) and "ignore" in labels:
            raise ValueError(
                f"{error}; it declares an ignore label, which must not be counted: give a "
                "--dataset-json that says which value it is"
            ) from None
        say(console, f"Going on without label names: {error}", "yellow")
        return None
    ignored = label_set.ignore_index
    say(
        console,
        f"Labels from {found}" + ("" if ignored is None else f"; {ignored} is left out (ignore)"),
    )
    return label_set


def _say_problems(console: Console, cohort: Cohort) -> None:
    for name, why in cohort.failed.items():
        say(console, f"FAILED {name}: {why}", "red")
    for name, texts in list(cohort.notes.items())[:MAX_NOTES]:
        say(console, f"Note on {name}: {'; '.join(texts)}", "yellow")
    if len(cohort.notes) > MAX_NOTES:
        say(console, f"... and notes on {len(cohort.notes) - MAX_NOTES} more, see summary.json")
    for names, what in (
        (cohort.pairing.without_prediction, "references without a prediction, not in the means"),
        (cohort.pairing.without_reference, "predictions without a reference, left out"),
    ):
        if names:
            say(console, f"{len(names)} {what}: {', '.join(names)}", "yellow")
