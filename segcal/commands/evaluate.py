"""``segcal evaluate``: numbers of predictions against reference labels."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segcal.commands.errors import user_errors

if TYPE_CHECKING:  # torch is imported when there is work to do
    from numpy.typing import NDArray

    from segcal.evaluation.case import Settings
    from segcal.evaluation.cohort import Cohort
    from segcal.evaluation.store import Outcome, Store
    from segcal.io.cases import LabelSet, Pairing
    from segcal.io.volumes import Geometry
    from segcal.reporting.folder import ReportFolder
    from segcal.reporting.picture import Picture
    from segcal.reporting.tables import Table as PrintedTable

    Runner = Callable[..., Generator[tuple[int, Outcome]]]


class Compat(str, Enum):
    """Published evaluations whose numbers can be had, too."""

    marginloss = "marginloss"


READING, NUMBERS, REPORT, RUNNING = "What is read", "Numbers", "Report", "Running"
"""Groups of options in the help."""
DEFAULT_SCOPES = ("fg", "union", "dilated", "all")
STORE = ".segcal-results"
"""Folder in the report's, where results of cases wait for the last."""
MAX_NOTES = 5
MOST_CLASSES = 16
"""Classes that get a reliability diagram each."""
WORST = 3
FILES = (
    "index.html", "summary.json", "cases.csv", "reliability*.png", "confidence.png", "worst/*.png",
    "comparison.*", "tables.*",
)  # fmt: skip
"""What a report may write."""
LIBRARIES = ("segcal", "torch", "numpy", "scipy", "nibabel", "SimpleITK", "pandas")


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
        extras = _extras(images, formats or [])
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
            _report(console, job, cohort, settings, bootstrap, extras)
        if cohort.interrupted:
            say(console, "Interrupted: the report is of the cases before.", "red")
            say(console, "The same command with --resume goes on from there.")
            raise typer.Exit(130)
    with user_errors():
        if len(jobs) > 1 and not all(len(cohort.rows) for cohort in cohorts.values()):
            ReportFolder(output).close()  # no comparison: that of an earlier run is not of these
        elif len(jobs) > 1:
            _report_comparison(console, jobs, cohorts, settings, bootstrap, extras)
    if not any(cohort.failed for cohort in cohorts.values()):
        for job in jobs:  # not before: --resume would start from the first method again
            job.store(settings).remove()
    if any(cohort.failed or cohort.pairing.without_prediction for cohort in cohorts.values()):
        raise typer.Exit(1)


@dataclass(frozen=True)
class Job:
    """One set of predictions, checked and ready to be evaluated."""

    name: str
    predictions: Path
    references: Path
    output: Path
    pairing: Pairing
    label_set: LabelSet | None
    reader: str | None

    def store(self, settings: Settings) -> Store:
        """Where results of cases are until all of them are there."""
        from segcal.evaluation.store import Store

        labels = None if self.label_set is None else vars(self.label_set)
        making = [vars(settings), labels, self.reader, version("segcal")]
        return Store(self.output / STORE, json.dumps(making, default=str))

    def check(self, settings: Settings) -> None:
        """See to it that these labels can be evaluated by these settings.

        Raises:
            ValueError: they cannot.
        """
        labels = self.label_set
        if settings.compat and labels is None:
            raise ValueError(
                f"--compat {settings.compat}: its mean is over all labels, present or not, so a "
                "dataset.json is needed that names them"
            )
        if settings.compat and labels and (labels.regions or labels.ignore_index is not None):
            raise ValueError(
                f"--compat {settings.compat}: the published evaluation knows no regions and no "
                f"ignore label, which {labels.source} defines"
            )

    def header(self, settings: Settings) -> dict[str, Any]:
        """What a summary says about its making."""
        return {
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "predictions": str(self.predictions.resolve()),
            "references": str(self.references.resolve()),
            "labels": None if self.label_set is None else self.label_set.source,
            "reader": self.reader,
            "settings": vars(settings),
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in LIBRARIES},
            },
            "conventions": settings.conventions(),
        }


@dataclass(frozen=True)
class Extras:
    """What a report holds beyond the usual.

    Attributes:
        images: folder of the images below the worst cases; None without.
        forms: of the files of tables, keys of :data:`segcal.reporting.markup.FILES`.
    """

    images: Path | None
    forms: tuple[str, ...]


def _extras(images: Path | None, formats: list[str]) -> Extras:
    """Check what is asked for.

    Raises:
        ValueError: no such folder, or an unknown format.
    """
    from segcal.reporting.markup import FILES

    if images is not None and not images.is_dir():
        raise ValueError(f"--images: {images}: no such folder")
    asked = [part.strip() for given in formats for part in given.split(",")]
    if unknown := [form for form in asked if form not in FILES]:
        raise ValueError(
            f"--format: expected {' or '.join(FILES)}, got {', '.join(map(repr, unknown))}"
        )
    return Extras(images, tuple(dict.fromkeys(asked)))


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
    from segcal.io.cases import find_reader, pair, with_rois

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


def _report(
    console: Console, job: Job, cohort: Cohort, settings: Settings, bootstrap: int, extras: Extras
) -> None:
    """Write the files, each replacing that of an earlier run, and show the tables."""
    from segcal.evaluation.cohort import summarise
    from segcal.io.files import write_json, write_text
    from segcal.io.tables import write_csv
    from segcal.reporting import page, tables
    from segcal.reporting.folder import ReportFolder

    summary = {**job.header(settings), **summarise(cohort, resamples=bootstrap)}
    folder = ReportFolder(job.output)
    write_json(folder.place("summary.json"), summary)
    sections, printed = [], []
    if len(cohort.rows):
        write_csv(folder.place("cases.csv"), cohort.rows)
        console.print(class_table(summary))
        printed.append(tables.class_table(summary))
        sections.append(page.table_section(printed[-1]))
    if cohort.calibration:
        console.print(calibration_table(summary, settings.scopes))
        printed.append(tables.calibration_table(summary, settings.scopes))
        diagrams = _diagrams(job, cohort, settings)
        _save(folder, diagrams)
        sections.append(
            page.table_section(
                printed[-1],
                "Fractions of 1, the lower the better. The scope decides the ranking of methods: "
                "look at all of them. Over voxels that are chosen by their label (fg, union) even "
                "the true probabilities are not without error.",
                pictures=list(diagrams.values()),
            )
        )
    if len(cohort.rows):
        if settings.compat is not None:
            printed.append(tables.compat_table(summary, settings.compat))
            sections.append(page.table_section(printed[-1]))
        worst, notes = _worst(job, cohort, settings, extras.images)
        for note in notes:
            say(console, note, "yellow")
        _save(folder, worst)
        if worst:
            title = "Cases with the lowest DSC"
            sections.append(page.Section(title, notes, pictures=list(worst.values())))
        cases = tables.case_table(cohort.rows, summary["conventions"])
        note = "Click a heading to sort. All columns are in cases.csv."
        sections.append(page.table_section(cases, note))
    _write_tables(folder, printed, extras.forms)
    title = f"Evaluation: {job.name}"
    write_text(folder.place("index.html"), page.render(title, summary, sections))
    folder.close()
    _say_problems(console, cohort)
    say(console, f"Written to {job.output}: {', '.join(folder.written)}")


def _diagrams(job: Job, cohort: Cohort, settings: Settings) -> dict[str, Picture]:
    """Pictures of the pooled calibration by file name."""
    import numpy as np

    from segcal.reporting.picture import draw
    from segcal.reporting.reliability import (
        plot_class_reliability,
        plot_confidence,
        plot_reliability,
    )

    pooled = int(cohort.calibrated.sum())
    cases = f"{pooled} case{'' if pooled == 1 else 's'} pooled"
    top = f"Reliability of the top label, {cases}"
    confidence = f"Confidence of right and wrong voxels, {cases}"
    classes = f"Reliability of every class, {cases}"
    titled = {settings.scope_titles[k]: c for k, c in cohort.calibration.items()}
    known = {} if job.label_set is None else job.label_set.names
    count = len(next(iter(titled.values())).classes)
    names = [known.get(k, "background" if k == 0 else str(k)) for k in range(count)]
    if job.label_set is not None and job.label_set.regions:
        names = ["outside a region", "in it"]
    by_class = {k: c.classes for k, c in cohort.calibration.items()}
    if count > MOST_CLASSES:
        errors = [one.expected_error() for one in list(by_class.values())[-1]]
        worst = sorted(np.argsort(np.nan_to_num(errors))[::-1][:MOST_CLASSES])
        by_class = {k: [of[i] for i in worst] for k, of in by_class.items()}
        names = [names[i] for i in worst]
        classes = f"Reliability of the {MOST_CLASSES} classes with the largest error, {cases}"
    fine = {k: c.top_mass.statistics for k, c in titled.items()}
    return {
        "reliability.png": draw(plot_reliability({k: c.top for k, c in titled.items()}, top), top),
        "confidence.png": draw(plot_confidence(fine, confidence), confidence),
        "reliability_classes.png": draw(plot_class_reliability(by_class, names, classes), classes),
    }


def _save(folder: ReportFolder, pictures: dict[str, Picture]) -> None:
    for name, picture in pictures.items():
        picture.save(folder.place(name))


def _write_tables(folder: ReportFolder, tables: list[PrintedTable], forms: tuple[str, ...]) -> None:
    from segcal.io.files import write_text
    from segcal.reporting import markup

    for form in forms if tables else ():
        write_text(folder.place(markup.FILES[form]), markup.render_tables(tables, form))


def _worst(
    job: Job, cohort: Cohort, settings: Settings, images: Path | None
) -> tuple[dict[str, Picture], list[str]]:
    """Pictures of the cases with the lowest DSC by file name, and what was odd."""
    from segcal.evaluation.cohort import read_case
    from segcal.reporting.picture import draw
    from segcal.reporting.worst import plot_case

    scores = cohort.rows["dsc"].dropna().sort_values(kind="stable").head(WORST)
    by_name = {case.name: case for case in job.pairing.cases}
    pictures, notes = {}, []
    for name, score in scores.items():
        arrays = read_case(by_name[str(name)], job.label_set, settings=settings, reader=job.reader)
        p, geometry = arrays.probabilities, arrays.reference.geometry
        image, note = None, ""
        if images is not None:
            image, note = _image(images, str(name), geometry, settings.tolerance)
        if note:
            notes.append(f"{name} is shown without its image: {note}")
        title = f"{name}: DSC {score:.3f}"
        figure = plot_case(
            arrays.reference.array,
            arrays.prediction,
            None if p is None else p.max(0),
            names=arrays.names,
            spacing_mm=geometry.spacing_mm,
            title=title,
            image=image,
            ignore_index=arrays.ignore_index,
        )
        pictures[f"worst/{name}.png"] = draw(figure, title)
    return pictures, notes


def _image(
    folder: Path, name: str, geometry: Geometry, tolerance: float
) -> tuple[NDArray[Any] | None, str]:
    """Grey values of a case (the first channel), or why there are none."""
    from segcal.io.files import VOLUME_ENDINGS
    from segcal.io.volumes import put_on, read_volume

    paths = [folder / f"{name}{channel}{e}" for channel in ("_0000", "") for e in VOLUME_ENDINGS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None, f"{folder} holds no {name}_0000.nii.gz or {name}.nii.gz"
    try:
        array, _ = put_on(path, read_volume(path), geometry, tolerance)
    except ValueError as error:
        return None, str(error)
    if array.dtype.kind not in "fiub":
        return None, f"{path} holds {array.dtype}, which are no grey values"
    return array if array.ndim == 3 else array[0], ""


def _report_comparison(
    console: Console,
    jobs: list[Job],
    cohorts: dict[str, Cohort],
    settings: Settings,
    bootstrap: int,
    extras: Extras,
) -> None:
    from segcal.evaluation.compare import as_records, case_table, compare, shared_means
    from segcal.io.files import write_json, write_text
    from segcal.io.tables import write_csv
    from segcal.reporting import page
    from segcal.reporting.comparison import plot_comparison
    from segcal.reporting.folder import ReportFolder
    from segcal.reporting.picture import draw
    from segcal.reporting.tables import difference_table, method_table

    output = jobs[0].output.parent
    tables = {name: cohort.rows for name, cohort in cohorts.items()}
    header = {
        **jobs[0].header(settings),
        "predictions": ", ".join(str(job.predictions.resolve()) for job in jobs),
        "cases": {
            "evaluated": max(map(len, tables.values())),
            "interrupted": False,
            "failed": {f"{m}/{k}": v for m, c in cohorts.items() for k, v in c.failed.items()},
            "notes": {},
            "without_prediction": [],
            "without_reference": [],
        },
    }
    differences = compare(tables, resamples=bootstrap)
    folder = ReportFolder(output)
    write_json(
        folder.place("comparison.json"),
        {"differences": as_records(differences), "conventions": settings.conventions()},
    )
    write_csv(folder.place("comparison.csv"), case_table(tables))
    shown = [
        "dsc",
        "hd95_penalised_mm",
        *(f"{m}_{scope}" for m in ("ece", "tace") for scope in settings.scopes),
    ]
    chosen = [d for m in shown for d in differences if d.metric == m and d.mean is not None]
    picture = draw(plot_comparison(chosen), "Differences between methods")
    conventions = settings.conventions()
    means = shared_means(tables, shown, resamples=bootstrap)
    methods = method_table(means, conventions)
    _save(folder, {"comparison.png": picture})
    _write_tables(folder, [methods, difference_table(as_records(chosen))], extras.forms)
    sections = [
        page.table_section(
            methods,
            "Look at DSC first: a bad segmentation can be well calibrated, so calibration compares "
            "methods that segment about equally well.",
            pictures=[picture],
        ),
        page.table_section(
            difference_table(as_records(differences)),
            "Click a heading to sort. Wilcoxon p is not corrected for the number of comparisons.",
        ),
    ]
    title = f"Comparison: {', '.join(tables)}"
    write_text(folder.place("index.html"), page.render(title, header, sections, list(tables)))
    folder.close()
    table = _table(f"Differences to {next(iter(tables))}, mean over shared cases")
    for column in ("method", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("n", "difference", "95 % interval", "Wilcoxon p"):
        table.add_column(column, justify="right", no_wrap=True)
    for d in sorted(chosen, key=lambda d: list(tables).index(d.method)):
        bounds = "-" if d.ci95 is None else f"{d.ci95[0]:+.4f} to {d.ci95[1]:+.4f}"
        p = "-" if d.p_wilcoxon is None else f"{d.p_wilcoxon:.2g}"
        table.add_row(d.method, d.metric, str(d.n), f"{d.mean:+.4f}", bounds, p)
    table.caption = "p is not corrected for the number of comparisons; all metrics: comparison.json"
    console.print(table)
    say(console, f"Written to {output}: {', '.join(folder.written)}")


def find_label_set(
    console: Console, dataset_json: Path | None, predictions: Path, references: Path
) -> LabelSet | None:
    """Read what the labels mean, from what is given or found; None if there is nothing.

    Raises:
        ValueError: a file that is given, or one with an ignore label, cannot be understood.
    """
    from segcal.io.cases import find_dataset_json, read_label_set
    from segcal.io.files import read_json

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


def class_table(summary: dict[str, Any]) -> Table:
    """Overlap and surface distances per class."""
    table = _table(f"Overlap and surfaces, cases: {summary['cases']['evaluated']}")
    table.add_column("label", overflow="fold")
    for name in ("n", "DSC", "missed", "false+", "HD", "HD95", "HD95 pen.", "ASSD"):
        table.add_column(name, justify="right", no_wrap=True)
    mean = {"dsc": summary["metrics"]["dsc"], **summary["surface_over_classes"]}
    for name, block in [*summary["classes"].items(), ("mean", mean)]:
        if block is mean:
            table.add_section()
        hd, hd95 = block["hd_mm"], block["hd95_pooled_mm"]
        table.add_row(
            Text(name),
            str(block["dsc"]["n"]),
            number(block["dsc"]["mean"], 4),
            str(hd["missed"]),
            str(hd["false_alarms"]),
            number(hd["mean_of_found"], 2),
            number(hd95["mean_of_found"], 2),
            number(hd95["penalised_mean"], 2),
            number(block["assd_pooled_mm"]["mean_of_found"], 2),
        )
    table.caption = (
        "mm; HD, HD95 (pooled), ASSD: mean over the found; pen.: a miss costs the diagonal"
    )
    return table


def calibration_table(summary: dict[str, Any], scopes: tuple[str, ...]) -> Table:
    """Calibration errors per scope."""
    table = _table("Calibration, mean over cases (fractions of 1)")
    table.add_column("scope", no_wrap=True)
    for name in ("n", "ECE", "pooled", "CECE", "TACE", "TACE ref", "NLL", "Brier"):
        table.add_column(name, justify="right", no_wrap=True)
    metrics = summary["metrics"]
    for scope in scopes:
        table.add_row(
            scope,
            str(metrics[f"ece_{scope}"]["n"]),
            number(metrics[f"ece_{scope}"]["mean"], 4),
            number(summary["pooled"][f"ece_{scope}"], 4),
            number(metrics[f"cece_{scope}"]["mean"], 4),
            number(metrics[f"tace_{scope}"]["mean"], 4),
            number(metrics["tace_ref"]["mean"], 4) if scope == "fg" else "",
            number(metrics[f"nll_{scope}"]["mean"], 4),
            number(metrics[f"brier_{scope}"]["mean"], 4),
        )
    table.caption = (
        "pooled: ECE of all voxels together; CECE: classwise; TACE: Nixon; TACE ref: CRaC poster's"
    )
    return table


def number(value: float | None, digits: int) -> str:
    """Format a number, a dash where it is undefined."""
    return "-" if value is None else f"{value:.{digits}f}"


def _table(title: str) -> Table:
    """Narrow enough for 80 columns with every number whole."""
    return Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left",
                 caption_justify="left")  # fmt: skip


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


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, brackets and all."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
