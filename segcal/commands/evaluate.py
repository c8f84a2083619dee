"""``segcal evaluate``: numbers of predictions against reference labels."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
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
    from segcal.evaluation.case import Settings
    from segcal.evaluation.cohort import Cohort, Outcome
    from segcal.io.cases import Case, LabelSet, Pairing
    from segcal.reporting.page import Section

    Runner = Callable[..., Iterator[tuple[int, Outcome]]]

MAX_NOTES = 5
WORST = 3
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
            help="Folders of predictions: .npz (nnU-Net v2, --save_probabilities), 4-D NIfTI "
            "probabilities (class last) or label maps; or one such file each. Last, the folder of "
            "reference label maps, or one label map.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder of the report: HTML, CSV, JSON, PNG."),
    ],
    names: Annotated[
        str | None,
        typer.Option(
            help="Names of several predictions, with commas, the baseline first; default: those "
            "of their folders."
        ),
    ] = None,
    bootstrap: Annotated[
        int,
        typer.Option(
            min=0, help="Resamplings of the cases for 95 % intervals of the means; 0: none."
        ),
    ] = 2000,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            "-p",
            min=1,
            help="Cases evaluated at the same time; default: one a core, of four cases or more "
            "each. Each holds one case in memory.",
        ),
    ] = None,
    engine: Annotated[
        Engine,
        typer.Option(
            help="What runs the cases: processes of this machine, or a Dask cluster (needs "
            'pip install "segcal[dask]"). The numbers are the same.'
        ),
    ] = Engine.processes,
    scheduler: Annotated[
        str | None,
        typer.Option(
            help="With --engine dask: tcp://HOST:PORT of a running scheduler, or its scheduler "
            "file; its workers see the files under the same paths. Default: a cluster of "
            "--processes on this machine. Connect to none that you do not trust."
        ),
    ] = None,
    dataset_json: Annotated[
        Path | None,
        typer.Option(
            help="nnU-Net dataset.json with label names and 'ignore'; default: looked for beside "
            "the predictions and above the references."
        ),
    ] = None,
    bins: Annotated[
        int, typer.Option(min=1, max=10_000, help="Bins of the calibration errors.")
    ] = 15,
    tace_threshold: Annotated[
        float, typer.Option(min=0, max=1, help="TACE leaves out probabilities up to this.")
    ] = 1e-3,
    dilation: Annotated[
        int, typer.Option(min=1, max=100, help="Reach in voxels of the scope near the foreground.")
    ] = 5,
    tolerance: Annotated[
        float,
        typer.Option(min=0, help="How far, in voxels, a prediction may lie off its reference."),
    ] = 1e-2,
) -> None:
    """Overlap, surface distances and calibration of predictions, per case and in summary.

    Examples: segcal evaluate predictions labelsTs -o report

    segcal evaluate stock nacl crac labelsTs -o report --names stock,NACL,CRaC

    Files are matched by name (CASE.npz or CASE.nii.gz with CASE.nii.gz). The output folder gets
    index.html (to look at, in one file), cases.csv (one row a case), summary.json (means, counts,
    conventions, versions) and reliability.png. Calibration is reported for three scopes: fg
    (foreground-labelled voxels, as published), dilated (near the foreground) and all. Distances
    are in mm.

    Several predictions get a folder each, and comparison.json, .csv and .png: differences to the
    first over the cases they share, with 95 % bootstrap intervals and Wilcoxon's signed-rank test.

    Exit code 0: all evaluated. 1: some case failed or had no prediction, the rest is there. 2:
    wrong usage.
    """
    from segcal.evaluation.case import Settings

    console = Console()
    if not console.is_terminal:  # a pipe or a log has no width
        console = Console(width=100)
    with user_errors():
        settings = Settings(bins, tace_threshold, dilation, tolerance)
        *predictions, references = paths
        runner = _runner(engine, scheduler)
        jobs = _jobs(console, predictions, references, names, output, dataset_json)
    cohorts = {}
    for job in jobs:
        if len(jobs) > 1:
            say(console, f"{job.name}: {job.predictions}", "bold")
        cohort = cohorts[job.name] = _evaluate(job, settings, processes, runner)
        with user_errors():
            _report(console, job, cohort, settings, bootstrap)
        if cohort.interrupted:
            say(console, "Interrupted: the report is of the cases before.", "red")
            raise typer.Exit(130)
    if len(jobs) > 1 and all(len(cohort.rows) for cohort in cohorts.values()):
        with user_errors():
            _report_comparison(console, jobs, cohorts, settings, bootstrap)
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


def _jobs(
    console: Console,
    predictions: list[Path],
    references: Path,
    names: str | None,
    output: Path,
    dataset_json: Path | None,
) -> list[Job]:
    """Check all that is given before the first case is read."""
    from segcal.io.cases import find_reader, pair

    if not predictions:
        raise ValueError("give at least one folder of predictions, then the references")
    several = len(predictions) > 1
    chosen = [n.strip() for n in names.split(",")] if names else [p.stem for p in predictions]
    if len(chosen) != len(predictions) or len(set(chosen)) != len(chosen) or "" in chosen:
        raise ValueError(
            f"--names: expected {len(predictions)} different names, got {', '.join(chosen)}"
        )
    if unfit := [n for n in chosen if several and Path(n).name != n]:
        raise ValueError(f"--names: {', '.join(unfit)} cannot name a folder")
    jobs = []
    for name, one in zip(chosen, predictions, strict=True):
        folder = output / name if several else output
        pairing = pair(one, references)
        label_set = find_label_set(console, dataset_json, one, references)
        _check_output(folder, [*predictions, references])
        jobs.append(Job(name, one, references, folder, pairing, label_set, find_reader(one)))
    for job in jobs:
        job.output.mkdir(parents=True, exist_ok=True)
    return jobs


def _check_output(output: Path, given: list[Path]) -> None:
    """Refuse a folder in which somebody else's file would be overwritten."""
    from segcal.io.files import read_json

    if output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file; the report needs a folder")
    inputs = [path if path.is_dir() else path.parent for path in given]
    if output.resolve() in [path.resolve() for path in inputs]:
        raise ValueError(f"{output}: holds what is evaluated; name another folder for the report")
    summary = output / "summary.json"
    if summary.exists():
        content = read_json(summary)
        if not isinstance(content, dict) or "conventions" not in content:
            raise ValueError(f"{summary}: is not of segcal; name another folder for the report")


def _runner(engine: Engine, scheduler: str | None) -> Runner:
    """Check that the engine can start."""
    from segcal.evaluation.cluster import check_cluster, run_on_cluster
    from segcal.evaluation.cohort import Outcome
    from segcal.evaluation.engine import run

    if engine is Engine.processes:
        if scheduler is not None:
            raise ValueError(f"--scheduler {scheduler}: is for --engine dask, got no such option")
        return run
    check_cluster(scheduler)

    def lost(case: Case, why: str) -> Outcome:
        return Outcome(f"{case.prediction}: {why}", [])

    return partial(run_on_cluster, lost=lost, scheduler=scheduler)


def _evaluate(job: Job, settings: Settings, processes: int | None, runner: Runner) -> Cohort:
    from segcal.commands.progress import progress_bar
    from segcal.evaluation.cohort import evaluate_cohort
    from segcal.evaluation.engine import default_jobs

    with progress_bar("Evaluating", len(job.pairing.cases)) as advance:
        return evaluate_cohort(
            job.pairing,
            label_set=job.label_set,
            reader=job.reader,
            settings=settings,
            jobs=processes or default_jobs(len(job.pairing.cases)),
            engine=runner,
            progress=lambda case: advance(case.name),
        )


def _report(console: Console, job: Job, cohort: Cohort, settings: Settings, bootstrap: int) -> None:
    """Write the files, each replacing that of an earlier run, and show the tables."""
    from segcal.evaluation.cohort import summarise
    from segcal.io.files import write_json, write_text
    from segcal.io.tables import write_csv
    from segcal.reporting import page
    from segcal.reporting.reliability import plot_reliability, save_figure

    summary = {**job.header(settings), **summarise(cohort, resamples=bootstrap)}
    cases, picture = job.output / "cases.csv", job.output / "reliability.png"
    written = ["summary.json", "index.html"]
    write_json(job.output / "summary.json", summary)
    sections = []
    if len(cohort.rows):
        write_csv(cases, cohort.rows)
        written.append(cases.name)
        console.print(class_table(summary))
        sections.append(page.class_section(summary))
    else:
        cases.unlink(missing_ok=True)
    if cohort.reliability:
        pooled = int(cohort.rows["ece_all"].notna().sum())
        titled = {settings.scope_titles[k]: v for k, v in cohort.reliability.items()}
        title = f"Reliability of the top label, {pooled} case(s) pooled"
        figure = plot_reliability(titled, title)
        save_figure(figure, picture)
        written.append(picture.name)
        console.print(calibration_table(summary, settings.scopes))
        diagrams = [page.picture(figure, title)]
        sections.append(page.calibration_section(summary, settings.scopes, diagrams))
    else:
        picture.unlink(missing_ok=True)
    if len(cohort.rows):
        sections.append(page.case_section(cohort.rows))
        sections.append(_worst(job, cohort, settings))
    write_text(job.output / "index.html", page.render(f"Evaluation: {job.name}", summary, sections))
    _say_problems(console, cohort)
    say(console, f"Written to {job.output}: {', '.join(written)}")


def _worst(job: Job, cohort: Cohort, settings: Settings) -> Section:
    """Pictures of the cases with the lowest DSC."""
    from segcal.evaluation.cohort import read_case
    from segcal.reporting.page import Section, picture
    from segcal.reporting.worst import plot_case

    scores = cohort.rows["dsc"].dropna().sort_values().head(WORST)
    by_name = {case.name: case for case in job.pairing.cases}
    pictures = []
    for name, score in scores.items():
        arrays = read_case(by_name[str(name)], job.label_set, settings=settings, reader=job.reader)
        p = arrays.probabilities
        title = f"{name}: DSC {score:.3f}"
        figure = plot_case(
            arrays.reference.array,
            arrays.prediction,
            None if p is None else p.max(0),
            spacing_mm=arrays.reference.geometry.spacing_mm,
            title=title,
        )
        pictures.append(picture(figure, title))
    return Section("Cases with the lowest DSC", pictures=pictures)


def _report_comparison(
    console: Console,
    jobs: list[Job],
    cohorts: dict[str, Cohort],
    settings: Settings,
    bootstrap: int,
) -> None:
    from segcal.evaluation.compare import as_records, case_table, compare
    from segcal.io.files import write_json, write_text
    from segcal.io.tables import write_csv
    from segcal.reporting import page
    from segcal.reporting.comparison import plot_comparison
    from segcal.reporting.reliability import save_figure

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
    write_json(
        output / "comparison.json",
        {"differences": as_records(differences), "conventions": settings.conventions()},
    )
    write_csv(output / "comparison.csv", case_table(tables))
    shown = ["dsc", *(f"{m}_{scope}" for m in ("ece", "tace") for scope in settings.scopes)]
    chosen = [d for m in shown for d in differences if d.metric == m and d.mean is not None]
    figure = plot_comparison(chosen)
    save_figure(figure, output / "comparison.png")
    title = f"Comparison: {', '.join(tables)}"
    section = page.comparison_section(
        as_records(differences), [page.picture(figure, "Differences between methods")]
    )
    write_text(output / "index.html", page.render(title, header, [section]))
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
    say(console, f"Written to {output}: index.html, comparison.json, comparison.csv and .png")


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
        if isinstance(content, dict) and "ignore" in (content.get("labels") or {}):
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
