"""``segcal study``: losses x seeds x data sets, a table and the figures of the papers' kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from segcal.commands.console import say
from segcal.commands.errors import user_errors
from segcal.commands.evaluate import table_forms
from segcal.commands.experiment import Settings
from segcal.commands.progress import progress_bar


def study(
    config: Annotated[
        str,
        typer.Argument(
            help="The study: a YAML file, or the name of one that comes with segcal (digits, "
            "docstrings, multilabel, slices, cifar10)."
        ),
    ] = "digits",
    settings: Settings = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of the report; default: report in that of the study."
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            "--processes",
            "-p",
            min=1,
            help="Trainings at the same time; of several, each has a core.",
        ),
    ] = 1,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Write the tables as markdown (tables.md), latex (tables.tex) or, with a comma, "
            "both; default: both.",
        ),
    ] = None,
    report_only: Annotated[
        bool,
        typer.Option("--report-only", help="Train nothing: report what has been trained so far."),
    ] = False,
) -> None:
    """Train every loss with every seed on every data set, and report mean and deviation.

    Examples: segcal study digits --processes 4

    segcal study multilabel --set sets.scene.changes.data.args.path=scene.arff.gz
    --set sets.emotions.changes.data.args.path=emotions.arff.gz

    What has been trained is not trained again: the same command goes on where a study was stopped.
    The report has index.html, runs.csv (a row for each training), means.csv, tables.md,
    tables.tex, and figures/: metrics, calibration over the epochs, multipliers of CALS,
    reliability, retrieval of samples by several labels at once.

    Exit code 0: all trained. 1: some training failed, the rest is there. 2: wrong usage.
    """
    from segcal.classify.study import cells, check, load_study, run_cells, run_of
    from segcal.classify.study_report import FILES, write_study
    from segcal.reporting.folder import ReportFolder

    console = Console()
    with user_errors():
        forms = table_forms(formats or ["markdown,latex"])
        chosen = load_study(config, settings or [])
        folder = output or Path(chosen.output) / "report"
        ReportFolder(folder).check(FILES)
        found = cells(chosen)
        if not report_only:
            check(found)
        todo = [] if report_only else [cell for cell in found if cell.result() is None]
    say(console, f"{len(found)} trainings, {len(todo)} of them to do")
    failed: dict[str, str] = {}
    interrupted = False
    try:
        with progress_bar("Training", len(todo)) as advance:
            for cell, why in run_cells(todo, processes):
                if why:
                    failed[cell.name] = why
                    say(console, f"FAILED {cell.name}: {why}", "red")
                advance(cell.name)
    except KeyboardInterrupt:
        interrupted = True
    with user_errors():
        runs = [run for run in map(run_of, found) if run is not None]
        missing = [cell.name for cell in found if cell.result() is None and cell.name not in failed]
    if not runs:
        say(console, "Nothing has been trained with these settings: no report.", "red")
        raise typer.Exit(130 if interrupted else 1)
    with user_errors():
        files = write_study(
            folder,
            runs,
            header={
                "name": chosen.summary or config,
                "predictions": str(Path(chosen.output).resolve()),
                "references": ", ".join(chosen.sets),
                "study": chosen.model_dump(mode="json"),
            },
            failed=failed,
            missing=missing,
            forms=forms,
        )
    say(console, f"Written to {folder}: {', '.join(files)}")
    if interrupted:
        say(console, "Interrupted: the report is of the trainings before.", "red")
        say(console, "The same command goes on from there.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)
