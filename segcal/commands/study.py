"""``segcal study``: losses x seeds x data sets, of classification or of segmentation."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.evaluate import table_forms
from segcal.commands.experiment import OPTIONS, SetOptions
from segcal.commands.progress import progress_bar
from segcal.commands.running_options import Engine, Scheduler
from segcal.training.time_limit import NEVER, OutOfTimeError

if TYPE_CHECKING:  # torch is imported when there is work to do
    from segcal.classify.study import Trial


KINDS = ("classification", "segmentation")
"""Kinds of studies; a file that names none means the first."""
StudyConfig = Annotated[
    str,
    typer.Argument(
        help="The study: a YAML file, or the name of one that comes with segcal. Segmentation: "
        "phantom_small, phantom, phantom_nnunet, nacl_weight, hippocampus_small, hippocampus, "
        "hippocampus_nnunet, chaos, acdc, acdc_nnunet, flare. Classification: digits, cals, "
        "cals_ablation, docstrings, two_way_ablation, spa_grid, multilabel, slices, cifar10."
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--processes",
        "-p",
        min=1,
        help="Number of trainings at the same time. If there are several, each has a core, and "
        "all share a GPU if there is one.",
    ),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        "--minutes",
        min=0,
        help="Stop after so many minutes, each training after the epoch that it is in, and end "
        "with exit code 130. The same command goes on from there.",
    ),
]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help="Write the tables as markdown (tables.md) or latex (tables.tex); default: both, "
        "markdown,latex.",
    ),
]
Dry = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Train nothing: check everything, and list which trainings are done, which are to "
        "do, what they cost, and what is missing.",
    ),
]
Runs = Annotated[
    Engine,
    typer.Option(
        "--engine",
        help="For segmentation: what runs the trainings, processes on this machine or a Dask "
        'cluster (needs pip install "segcal[dask]").',
    ),
]
ReportOnly = Annotated[
    bool,
    typer.Option("--report-only", help="Train nothing; report what has been trained so far."),
]


def study(
    config: StudyConfig = "digits",
    settings: SetOptions = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of the report; default: report/ in the study's folder."
        ),
    ] = None,
    processes: Processes = 1,
    formats: Formats = None,
    report_only: ReportOnly = False,
    dry_run: Dry = False,
    engine: Runs = Engine.processes,
    scheduler: Scheduler = None,
    minutes: Minutes = None,
) -> None:
    """Train every loss with every seed on every data set, and report how the losses compare.

    Examples: segcal study phantom_small --dry-run

    segcal study phantom_small --processes 4

    segcal study acdc --set sets.acdc.raw=$nnUNet_raw/Dataset027_ACDC

    segcal study digits --processes 4

    segcal study multilabel --set sets.scene.changes.data.args.path=scene.arff.gz
    --set sets.emotions.changes.data.args.path=emotions.arff.gz

    What has been trained is not trained again: the same command continues a study that was stopped,
    or even killed. Other repairs (--set repairs=[temperature,class_region_bias]) need no new
    training: the networks predict and are measured again. --minutes 8 cuts it into slices: repeat
    the command until its exit code is not 130.

    In a study of segmentation, patients are divided into patients that train, that validate
    (repairs are fitted to them), and that only test. The study's folder gets results/cells.csv (a
    row for each training), results/cases.csv (a row for each test case, repair and decision) and
    report/, which compares every method with the baseline, patient by patient.

    In a study of classification, the report has index.html, runs.csv (a row for each training),
    means.csv, tables.md, tables.tex, and figures/: calibration against accuracy, metrics,
    calibration over the epochs (with training.test_curves for the test samples, too), the
    multipliers of CALS, reliability, and retrieval of samples by several labels at once.

    Exit code 0: all trained. 1: some training failed, the rest is there. 2: wrong usage. 130:
    interrupted, or --minutes are over.
    """
    from segcal.commands.segmentation_study import Options, run_study

    until = NEVER if minutes is None else time.time() + 60 * minutes
    with user_errors(OPTIONS):
        forms = table_forms(formats or ["markdown,latex"])
        content = _content(config, settings or [])
        kind = content.pop("kind", KINDS[0])
        if kind not in KINDS:
            raise ValueError(f"{config}: kind: expected {' or '.join(KINDS)}, got {kind!r}")
        segmentation = kind != KINDS[0]
        if not segmentation and (engine is not Engine.processes or scheduler):
            raise ValueError("--engine, --scheduler: only studies of segmentation take them")
    if segmentation:
        run_study(
            {"kind": kind, **content},
            Options(
                config,
                processes,
                engine.value,
                scheduler,
                forms,
                output,
                dry_run,
                report_only,
                until,
            ),
        )
        return
    if dry_run:
        _say_plan(config, settings or [])
        return
    _classification(config, settings or [], output, processes, forms, report_only, until)


def _content(config: str, settings: Sequence[str]) -> dict[str, Any]:
    """Content of a study's file, whatever its kind."""
    from segcal.classify.study import KIND, Study
    from segcal.training.experiments import read_content

    return read_content(config, Study, KIND, settings)


def _say_plan(config: str, settings: Sequence[str]) -> None:
    """List the trainings of a study of classification, what they cost, and what is missing."""
    from segcal.classify.study import lacking, load_study, trials
    from segcal.io.files import check_writable

    console = open_console()
    with user_errors(OPTIONS):
        chosen = load_study(config, settings)
        found = trials(chosen)
        check_writable(Path(chosen.output))
        wrong = lacking(found)
    say(console, chosen.summary, "bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("set", "recipe", "seeds", "epochs", "state"):
        table.add_column(name)
    rows: dict[tuple[str, str], list[Trial]] = {}
    for trial in found:
        rows.setdefault((trial.set, trial.recipe), []).append(trial)
    for key, members in rows.items():
        done = sum(trial.result() is not None for trial in members)
        states = {"done": done, "to do": len(members) - done}
        state = ", ".join(f"{n} {name}" for name, n in states.items() if n)
        seeds = " ".join(str(trial.seed) for trial in members)
        table.add_row(*key, seeds, str(members[0].experiment.training.epochs), state)
    console.print(table)
    todo = sum(trial.result() is None for trial in found)
    say(console, f"{len(found)} trainings, {todo} of them to do")
    if chosen.cost is not None:
        say(console, chosen.cost.sentence)
    say(console, f"Output: {chosen.output}, where {free_gb(Path(chosen.output)):.0f} GB are free")
    for name, why in wrong.items():
        say(console, f"Missing for {name}: {why}", "red")
    if wrong:
        raise typer.Exit(2)


def free_gb(path: Path) -> float:
    """Free GB on the disk where a folder is, or would be made."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    return shutil.disk_usage(there).free / 1e9


def _classification(
    config: str,
    settings: Sequence[str],
    output: Path | None,
    processes: int,
    forms: Sequence[str],
    report_only: bool,
    until: float,
) -> None:
    from segcal.classify.study import check, load_study, report_study, trials
    from segcal.classify.study_report import FILES
    from segcal.io.files import check_writable
    from segcal.reporting.folder import ReportFolder

    console = open_console()
    with user_errors(OPTIONS):
        chosen = load_study(config, settings)
        folder = output or Path(chosen.output) / "report"
        ReportFolder(folder).check(FILES)
        found = trials(chosen)
        if not report_only:
            check_writable(Path(chosen.output))
            check(found)
        todo = [] if report_only else [trial for trial in found if trial.result() is None]
    say(console, f"{len(found)} trainings, {len(todo)} of them to do")
    failed, stopped = _train(console, todo, processes, until)
    with user_errors():
        files = report_study(chosen, found, folder, name=config, failed=failed, forms=forms)
    if not files:
        say(console, "Nothing has been trained with these settings: no report.", "red")
        raise typer.Exit(130 if stopped else 1)
    say(console, f"Written to {folder}: {', '.join(files)}")
    if stopped:
        say(console, f"{stopped}: the report covers the trainings that were done.", "red")
        say(console, "The same command goes on from there.")
        raise typer.Exit(130)
    if failed:
        raise typer.Exit(1)


def _train(
    console: Console, todo: Sequence[Trial], processes: int, until: float
) -> tuple[dict[str, str], str]:
    """Train what is to be trained; return why some failed, and what stopped the rest, or ""."""
    from segcal.classify.study import run_trials

    failed: dict[str, str] = {}
    try:
        with progress_bar("Training", len(todo)) as advance:
            for trial, why in run_trials(todo, processes, until):
                if why:
                    failed[trial.name] = why
                    say(console, f"FAILED {trial.name}: {why}", "red")
                advance(trial.name)
    except KeyboardInterrupt:
        return failed, "Interrupted"
    except OutOfTimeError:
        return failed, "Time is up"
    return failed, ""
