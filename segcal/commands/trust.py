"""``segcal trust``: which predictions to look at first, and how large structures are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from segcal.commands.calibrate import Labels as References
from segcal.commands.calibrate import Predictions, say_pairing
from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.evaluate import MAX_NOTES, say_labels
from segcal.commands.interval_options import OPTIONS as OF_INTERVALS
from segcal.commands.interval_options import (
    AnyModel,
    Interval,
    IntervalKind,
    Intervals,
    Level,
)
from segcal.commands.progress import progress_bar
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
    from segcal.evaluation.intervals import VolumeIntervals
    from segcal.trust.triage import Triage

DEFAULT = "report"
"""Command that is run if none is named."""
FIRST = 10
"""Number of cases on the console."""
LEVELS = (0.8, 0.9, 0.95)
"""Levels of the intervals whose width ``segcal trust fit`` prints."""
OPTIONS = {
    "images": "--images", "swing": "--swing",
    **OF_INTERVALS, **OF_READING, **OF_RUNNING,
}  # fmt: skip
"""Options by the arguments they become."""


class _WithDefault(TyperGroup):
    """Group of commands, of which the default one need not be named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the default command if none is named."""
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [DEFAULT, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_WithDefault,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Say which predictions to look at first, without references.\n\n"
    "Example: segcal trust predictions -o triage\n\n"
    "The word report may be left out: this is the same as segcal trust report.",
)


@app.command()
def report(
    predictions: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTIONS",
            help="Folder of predictions with probabilities, in any form that segcal evaluate "
            "reads, or one file. No references are needed.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the report: HTML, CSV, JSON, PNG.")
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the images (CASE_0000.nii.gz or CASE.nii.gz). Pictures are drawn over "
            "them, and they give the voxel size if there is no label map beside a .npz."
        ),
    ] = None,
    intervals: Intervals = None,
    interval: IntervalKind = Interval.conformal,
    level: Level = 0.95,
    any_model: AnyModel = False,
    swing: Annotated[
        float,
        typer.Option(
            min=0,
            help="Flag a structure whose volume would change by more than this share if its "
            "undecided voxels went the other way.",
        ),
    ] = 0.1,
    resume: Resume = False,
    dataset_json: DatasetJson = None,
    labels: Labels = None,
    prediction_pattern: PredictionPattern = None,
    tolerance: Annotated[
        float,
        typer.Option(
            rich_help_panel=READING,
            min=0,
            help="How far probabilities may lie off their label map or image, in voxels.",
        ),
    ] = 1e-2,
    processes: Processes = None,
    engine: RunsOn = Engine.processes,
    scheduler: Scheduler = None,
) -> None:
    """Say which predictions to look at first, and how large structures are, with intervals.

    Example: segcal trust predictions -o triage --images imagesTs

    The output folder gets index.html (to look at, in one file), trust.csv (a row for every case and
    label, the least confident first), trust.json, and pictures of the least confident slices in
    unsure/. Soft Dice confidence (SDC) is the DSC that the probabilities let one expect of the
    mask, so it is only as good as their calibration. Where there are references, segcal evaluate
    says how well it holds.

    Exit code 0: all done. 1: some case failed, the rest is there. 2: wrong usage.
    """
    console = open_console()
    with user_errors(OPTIONS):
        from segcal.evaluation.api import runner_of
        from segcal.evaluation.intervals import read_intervals
        from segcal.reporting.report import check_folder
        from segcal.reporting.trust import FILES, write_trust
        from segcal.trust.settings import TrustSettings
        from segcal.trust.triage import plan_trust, run_trust

        fitted = None if intervals is None else read_intervals(intervals)
        job = plan_trust(
            predictions,
            settings=TrustSettings(
                level=level, interval=interval.value, swing=swing, tolerance=tolerance
            ),
            images=images,
            intervals=fitted,
            any_model=any_model,
            dataset_json=known_labels(dataset_json, labels),
            prediction_pattern=prediction_pattern,
            found=lambda found: say_labels(console, found),
        )
        runner = runner_of(engine.value, scheduler)
        check_folder(output, [predictions], FILES)
        output.mkdir(parents=True, exist_ok=True)
        if not resume:
            job.store(output).remove()
    with progress_bar("Looking through", len(job.pairing.cases)) as advance:
        triage = run_trust(job, processes=processes, runner=runner, store=output, progress=advance)
    with user_errors(OPTIONS):
        written = write_trust(triage, output)
    _say_triage(console, triage, written.notes)
    say(console, f"Written to {output}: {', '.join(written.files)}")
    if triage.cohort.interrupted:
        say(console, "Interrupted. The same command with --resume goes on from there.", "red")
        raise typer.Exit(130)
    if triage.cohort.failed:
        raise typer.Exit(1)
    job.store(output).remove()


@app.command()
def fit(
    predictions: Predictions,
    references: References,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File of the intervals, JSON.")
    ] = Path("intervals.json"),
    dataset_json: DatasetJson = None,
    labels: Labels = None,
    prediction_pattern: PredictionPattern = None,
    reference_pattern: ReferencePattern = None,
    processes: Processes = None,
    engine: RunsOn = Engine.processes,
    scheduler: Scheduler = None,
) -> None:
    """Fit intervals of volumes to validation predictions and their labels.

    Example: segcal trust fit predictions_validation labelsTr -o intervals.json

    Voxels err together, so the spread of a volume is far larger than it would be for independent
    voxels. The validation cases show how much larger, for every structure: as an inflation of the
    variance (maximum likelihood), and as conformal scores. Then: segcal trust PREDICTIONS
    --intervals intervals.json -o REPORT. Never fit to the cases that you report on, and fit again
    after a calibrator was applied.
    """
    console = open_console()
    with user_errors(OPTIONS):
        from segcal.evaluation.api import runner_of
        from segcal.evaluation.intervals import write_intervals
        from segcal.io.case_patterns import Patterns
        from segcal.io.files import check_writable
        from segcal.repair.fitting import plan_fit
        from segcal.trust.fitting import fit_intervals

        if output.suffix != ".json":
            raise ValueError(f"--output: {output}: expected a file that ends in .json")
        check_writable(output.parent)
        runner = runner_of(engine.value, scheduler)
        job = plan_fit(
            predictions, references, dataset_json=known_labels(dataset_json, labels),
            patterns=Patterns(prediction_pattern, reference_pattern),
            found=lambda found: say_labels(console, found),
        )  # fmt: skip
        say_pairing(console, job)
        with progress_bar("Reading", len(job.pairing.cases)) as advance:
            fitted = fit_intervals(job, processes=processes, runner=runner, progress=advance)
        write_intervals(output, fitted)
    _say_fit(console, fitted)
    say(console, f"Written: {output}")


def _say_fit(console: Console, fitted: VolumeIntervals) -> None:
    """Print what was fitted, in units of the spread of independent voxels."""
    from segcal.evaluation.intervals import Kind

    shown = Table(
        title="Half width of the interval, in SD of independent voxels", box=box.SIMPLE_HEAD,
        pad_edge=False, title_justify="left", caption_justify="left",
        caption="inf: too few cases. Independent voxels would have 1.28, 1.64, 1.96",
    )  # fmt: skip
    shown.add_column("label", overflow="fold")
    headings = [f"{kind}\n{100 * level:g} %" for kind in get_args(Kind) for level in LEVELS]
    for heading in ("cases", "inflation", *headings):
        shown.add_column(heading, justify="right")
    for name, one in fitted.structures.items():
        factors = (f"{one.factor(kind, level):.3g}" for kind in get_args(Kind) for level in LEVELS)
        shown.add_row(Text(name), str(len(one.scores)), f"{one.inflation:.3g}", *factors)
    console.print(shown)
    if few := fitted.too_few("conformal", LEVELS[-1]):
        say(console, few, "yellow")


def _say_triage(console: Console, triage: Triage, notes: list[str]) -> None:
    if len(triage.rows):
        console.print(_first_table(triage))
        flagged = triage.summary["flagged"]
        say(
            console,
            f"{flagged} of {len(triage.rows)} structures have an undecided volume (it would change "
            f"by more than {triage.job.settings.swing:.0%} if undecided voxels went the other way)",
        )
    job = triage.job
    if job.intervals is None:
        say(console, f"Intervals of volumes: {job.settings.conventions()['intervals']}")
    elif few := job.intervals.too_few(job.settings.interval, job.settings.level):
        say(console, few, "yellow")
    for note in notes:
        say(console, note, "yellow")
    for name, why in triage.cohort.failed.items():
        say(console, f"FAILED {name}: {why}{source_of(triage.job.labels.label_set, why)}", "red")
    for name, texts in list(triage.cohort.notes.items())[:MAX_NOTES]:
        say(console, f"Note on {name}: {'; '.join(texts)}", "yellow")
    if len(triage.cohort.notes) > MAX_NOTES:
        say(
            console, f"Notes on {len(triage.cohort.notes) - MAX_NOTES} more cases are in trust.json"
        )


def _first_table(triage: Triage) -> Table:
    """Least confident structure of the first cases."""
    unit = "ml" if triage.job.unit == "mm" else "1000 px"
    shown = min(FIRST, len(triage.order))
    first = Table(
        title=f"Look at these first ({shown} of {len(triage.order)} cases)", box=box.SIMPLE_HEAD,
        pad_edge=False, title_justify="left",
    )  # fmt: skip
    first.add_column("case", overflow="fold")
    first.add_column("least sure", overflow="fold")
    for heading in ("SDC", f"volume ({unit})", "from", "to", "swing"):
        first.add_column(heading, justify="right", no_wrap=True)
    for case in triage.order[:shown]:
        row = triage.rows[triage.rows["case"] == case].iloc[0]
        first.add_row(
            Text(case),
            Text(row["label"]),
            f"{row['soft_dice_confidence']:.3f}",
            *(f"{row[key]:.2f}" for key in ("volume_ml", "volume_low_ml", "volume_high_ml")),
            f"{row['volume_swing']:.1%}",
        )
    return first
