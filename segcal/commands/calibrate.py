"""``segcal calibrate``: repair probabilities that exist, without training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.evaluate import say_labels
from segcal.commands.progress import progress_bar, progress_bars
from segcal.commands.reading_options import OPTIONS as OF_READING
from segcal.commands.reading_options import (
    DatasetJson,
    PredictionPattern,
    ReferencePattern,
    known_labels,
    source_of,
)
from segcal.commands.reading_options import Labels as LabelNames
from segcal.commands.running_options import OPTIONS as OF_RUNNING
from segcal.commands.running_options import Engine, Processes, Resume, RunsOn, Scheduler

if TYPE_CHECKING:  # torch is imported when there is work to do
    from segcal.evaluation.api import Comparison
    from segcal.evaluation.compare import Difference
    from segcal.evaluation.job import Job
    from segcal.io.label_sets import LabelSet
    from segcal.repair.applying import Applied
    from segcal.repair.comparing import Repair
    from segcal.repair.saved import SavedCalibrator

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Repair the probabilities of a finished model: fit a calibrator to validation "
    "predictions, apply it to others, or compare what helps.\n\n"
    "Example: segcal calibrate fit predictions_validation labelsTr -o calibrator.json",
)
OPTIONS = {
    "method": "--method", "methods": "--methods", "patients": "--patients", "decide": "--decide",
    **OF_READING, **OF_RUNNING,
}  # fmt: skip
"""Options by the arguments they become."""

Predictions = Annotated[
    Path,
    typer.Argument(
        metavar="VALIDATION",
        help="Folder of predictions for cases that the network was not trained on, in any form "
        "that segcal evaluate reads; or the folder of a model that nnU-Net trained with --npz, "
        "which predicted every validation case by the fold that did not see it.",
    ),
]
Labels = Annotated[
    Path, typer.Argument(metavar="LABELS", help="Folder of the reference label maps.")
]
Patients = Annotated[
    str | None,
    typer.Option(
        metavar="REGEX",
        help="Regular expression that finds the patient in a case's name, e.g. "
        '"patient[0-9]+"; cases of a patient stay together. Default: every case is a patient.',
    ),
]


class Decide(str, Enum):
    """How the label map is made from calibrated probabilities."""

    argmax = "argmax"
    dice = "dice"
    offsets = "offsets"


class Precision(str, Enum):
    """Type of the written probabilities."""

    same = "same"
    float16 = "float16"
    float32 = "float32"


@app.command()
def fit(
    predictions: Predictions,
    labels: Labels,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File of the calibrator, JSON.")
    ] = Path("calibrator.json"),
    method: Annotated[
        str,
        typer.Option(
            help="Post-hoc method, e.g. class_region_case (a temperature per predicted class and "
            "region, which rises with the doubt of a case) or temperature; segcal methods lists "
            "them."
        ),
    ] = "class_region_case",
    set_arguments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Argument of the method, e.g. --set bands=[1,3] (mm); segcal methods NAME lists "
            "them. May be given several times.",
        ),
    ] = None,
    offsets: Annotated[
        bool,
        typer.Option(
            "--offsets",
            help="Also choose, for every structure, the offset of the decision with the best "
            "mean DSC on these cases, for calibrate apply --decide offsets.",
        ),
    ] = False,
    patients: Patients = None,
    dataset_json: DatasetJson = None,
    label_names: LabelNames = None,
    prediction_pattern: PredictionPattern = None,
    reference_pattern: ReferencePattern = None,
    processes: Processes = None,
) -> None:
    """Fit a calibrator to validation predictions and their labels.

    Examples: segcal calibrate fit predictions_validation labelsTr -o calibrator.json

    segcal calibrate fit results/Dataset027_ACDC/nnUNetTrainer__nnUNetPlans__2d labelsTr

    A calibrator turns the network's probabilities into better ones; the network stays as it is. It
    is fitted to the logits that segcal nnunet predict --save-logits wrote to logits/ beside the
    predictions or, without such files, to the logarithm of the probabilities. The calibrator's file
    says what it was fitted to, and is refused for another model. Never fit to the cases that you
    report on. Then: segcal calibrate apply PREDICTIONS calibrator.json -o OUT
    """
    console = open_console()
    with user_errors(OPTIONS):
        from segcal.io.case_patterns import Patterns
        from segcal.io.files import check_writable
        from segcal.repair.fitting import fit_job, plan_fit
        from segcal.repair.saved import write_calibrator

        if output.suffix != ".json":
            raise ValueError(f"--output: {output}: expected a file that ends in .json")
        check_writable(output.parent)
        job = plan_fit(
            predictions, labels, dataset_json=known_labels(dataset_json, label_names),
            patterns=Patterns(prediction_pattern, reference_pattern),
            found=lambda found: say_labels(console, found),
        )  # fmt: skip
        say_pairing(console, job)
        with progress_bar("Reading", len(job.pairing.cases)) as advance, _warnings(console):
            saved = fit_job(
                job, method=method, arguments=_arguments(set_arguments or []), offsets=offsets,
                patients=patients, processes=processes, progress=advance,
            )  # fmt: skip
        write_calibrator(output, saved)
    _say_fit(console, saved)
    say(console, f"Written: {output}")


@app.command()
def apply(
    predictions: Annotated[
        Path,
        typer.Argument(
            metavar="PREDICTIONS",
            help="Folder of predictions with probabilities: .npz (nnU-Net), 4-D volumes, 3-D maps "
            "of the foreground, or a folder per case with one file per class.",
        ),
    ],
    calibrator: Annotated[
        Path, typer.Argument(metavar="CALIBRATOR", help="File that calibrate fit wrote.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the calibrated predictions.")
    ],
    decide: Annotated[
        Decide,
        typer.Option(
            help="How the label map is made. argmax: the most probable class; dice: the mask with "
            "the largest expected Dice; offsets: with the offsets that fit --offsets chose. The "
            "probabilities are the same."
        ),
    ] = Decide.argmax,
    precision: Annotated[
        Precision,
        typer.Option("--dtype", help="Type of the written probabilities; same: as in each file."),
    ] = Precision.same,
    any_model: Annotated[
        bool,
        typer.Option(
            "--any-model",
            help="Accept predictions of another model, or of another kind of average.",
        ),
    ] = False,
    resume: Resume = False,
    dataset_json: DatasetJson = None,
    label_names: LabelNames = None,
    prediction_pattern: PredictionPattern = None,
    processes: Processes = None,
    engine: RunsOn = Engine.processes,
    scheduler: Scheduler = None,
) -> None:
    """Write calibrated copies of predictions, in the same formats and geometry.

    Example: segcal calibrate apply predictions calibrator.json -o calibrated --decide dice

    A label map beside the probabilities is copied, and changed only where the decision changed; the
    number of changed voxels is printed. Then: segcal evaluate calibrated labelsTs -o report

    Exit code 0: all written. 1: some case failed, the rest is there. 2: wrong usage.
    """
    console = open_console()
    with user_errors(OPTIONS):
        from segcal.evaluation.api import runner_of
        from segcal.repair.applying import apply_job, plan_apply
        from segcal.repair.saved import read_calibrator

        job = plan_apply(
            predictions, read_calibrator(calibrator), output, decide=decide.value,
            precision=precision.value, dataset_json=known_labels(dataset_json, label_names),
            prediction_pattern=prediction_pattern, any_model=any_model,
        )  # fmt: skip
        runner = runner_of(engine.value, scheduler)
    for note in job.notes:
        say(console, f"Note: {note}", "yellow")
    with user_errors(OPTIONS), progress_bar("Calibrating", len(job.sources)) as advance:
        try:
            done = apply_job(
                job, resume=resume, processes=processes, runner=runner, progress=advance
            )
        except KeyboardInterrupt:
            say(console, "Interrupted. The same command with --resume goes on from there.", "red")
            raise typer.Exit(130) from None
    _say_applied(console, done, job.label_set)
    say(console, f"Written to {output}")
    if any(one.failed for one in done.values()):
        raise typer.Exit(1)


@app.command()
def compare(
    predictions: Predictions,
    labels: Labels,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the report: HTML, CSV, JSON, PNG.")
    ],
    methods: Annotated[
        str | None,
        typer.Option(help="Post-hoc methods, separated by commas; default: all."),
    ] = None,
    patients: Patients = None,
    test: Annotated[
        Path | None,
        typer.Option(
            "--test",
            metavar="PREDICTIONS",
            help="Predictions of other cases, for instance from another scanner, on which the "
            "repair is tested, too.",
        ),
    ] = None,
    test_labels: Annotated[
        Path | None, typer.Option("--test-labels", help="Label maps of --test; default: LABELS.")
    ] = None,
    bootstrap: Annotated[
        int, typer.Option(min=2, help="Number of resamplings of the patients for 95 % intervals.")
    ] = 2000,
    dataset_json: DatasetJson = None,
    label_names: LabelNames = None,
    prediction_pattern: PredictionPattern = None,
    reference_pattern: ReferencePattern = None,
    processes: Processes = None,
) -> None:
    """Say which repair helps, cross-validated over cases, or that none does.

    Examples: segcal calibrate compare predictions_validation labelsTr -o repair

    segcal calibrate compare validation labelsTr --test predictionsTs --test-labels labelsTs -o out

    Each method is fitted to four fifths of the cases and evaluated on the rest, until every case
    has been evaluated once: NLL, ECE in every scope (set of voxels), TACE and DSC, with paired
    intervals. NLL (negative log-likelihood, in nats) judges probabilities as a whole; ECE says
    whether they keep what they promise. A method is recommended only if it helps beyond chance, by
    paired tests over patients that are corrected for the number of methods.
    """
    console = open_console()
    with user_errors(OPTIONS):
        from segcal.io.case_patterns import Patterns
        from segcal.repair.fitting import plan_fit
        from segcal.reporting.repair import write_repair
        from segcal.reporting.report import check_output

        check_output(output, [predictions, labels])
        job = plan_fit(
            predictions, labels, dataset_json=known_labels(dataset_json, label_names),
            patterns=Patterns(prediction_pattern, reference_pattern),
            found=lambda found: say_labels(console, found),
        )  # fmt: skip
        on = None
        if test is not None:
            on = plan_fit(
                test, test_labels or labels,
                dataset_json=known_labels(dataset_json, label_names),
                patterns=Patterns(prediction_pattern, reference_pattern),
            )  # fmt: skip
            _say_overlap(console, job, on)
        chosen = None if methods is None else [name.strip() for name in methods.split(",")]
        with _warnings(console):
            repair = _compared(job, chosen, on, patients, bootstrap, processes)
        written = write_repair(repair, output)
    _say_repair(console, repair)
    say(console, f"Written to {output}: {', '.join(written.files)}")


def say_pairing(console: Console, job: Job) -> None:
    """Say how cases were named, and which are left out of the fit."""
    if job.pairing.note:
        say(console, job.pairing.note)
    for names, what in (
        (job.pairing.without_prediction, "labels without a prediction"),
        (job.pairing.without_reference, "predictions without labels"),
    ):
        if names:
            say(console, f"{len(names)} {what}, left out: {', '.join(names[:9])}", "yellow")


@contextmanager
def _warnings(console: Console) -> Iterator[None]:
    """Print each warning of a fit once, as a sentence."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(one.message) for one in caught):
        say(console, f"Note: {text}", "yellow")


def _arguments(settings: list[str]) -> dict[str, Any]:
    """Parse arguments of a method, given as NAME=VALUE."""
    from segcal.training.experiments import put

    found: dict[str, Any] = {}
    for setting in settings:
        put(found, setting)
    return found


def _say_fit(console: Console, saved: SavedCalibrator) -> None:
    facts, made_of = saved.calibrator.facts, saved.fitted_on
    say(
        console,
        f"{saved.method}: fitted to {len(made_of['cases'])} cases, {facts['voxels']:,} voxels "
        f"(a sample of {facts['sampled']:,})",
    )
    say(
        console,
        f"NLL (mean -log p of the label, in nats): {facts['nll_before']:.5f} -> "
        f"{facts['nll_after']:.5f}",
    )
    if of_probabilities := len(made_of["cases"]) - made_of["saved_logits"]:
        floored = ""
        if made_of["floored_share"]:
            floored = (
                f"; {made_of['floored_share']:.2%} of their voxels have a probability below "
                f"{made_of['floor']:.2g}, which was raised to that"
            )
        say(console, f"Logits of {of_probabilities} cases: log-probabilities{floored}")
    state = saved.calibrator.state()
    learned = state["learned"]
    named = dict(zip(saved.channels, learned, strict=True)) if saved.regions else {"": learned}
    for region, one in named.items():
        where = f" of {region}" if region else ""
        if one is not None and "temperatures" in one:
            what = "Temperatures by predicted class and region of the prediction"
            say(console, f"{what}{where}; above 1 means that it was overconfident")
            classes = ("not in it", "in it") if region else saved.channels
            console.print(_temperatures(one, classes, state["arguments"]["bands"]))
            if "doubt" in one:
                say(console, _of_doubt(one["doubt"]["slope"], where))
        elif one is not None and "value" in one:
            text = f"Temperature{where}: {one['value']:.4g}"
            say(console, f"{text}; above 1 means that it was overconfident")


def _of_doubt(slope: float, where: str) -> str:
    """How the temperatures of a case follow its doubt, or that they do not."""
    if not slope:
        return (
            f"The same temperatures{where} for all cases, as with class_region: there are too few "
            "patients to tell how they follow the doubt of a case, or it does not help"
        )
    return (
        f"Temperatures{where} follow the doubt of a case: if the network expects twice the errors "
        f"of another case, they are {2**slope:.2f} times as high"
    )


def _temperatures(
    learned: dict[str, Any], classes: Sequence[str], bands: list[float] | None
) -> Table:
    """Temperatures by predicted class and region."""
    regions = ["inside", "boundary"]
    if bands is not None:
        regions = [f"to {end:g} mm" for end in bands] + [f"beyond {bands[-1]:g} mm"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("predicted as")
    for region in regions:
        table.add_column(region, justify="right")
    for name, of in zip(classes, learned["temperatures"], strict=True):
        table.add_row(Text(name), *(f"{value:.3f}" for value in of))
    table.add_row("all", f"{learned['global_temperature']:.3f}", end_section=True)
    return table


def _say_applied(console: Console, done: dict[str, Applied], label_set: LabelSet | None) -> None:
    for name, one in done.items():
        if one.failed:
            source = source_of(label_set, one.failed)
            say(console, f"FAILED {name}: {one.failed}{source}", "red")
        elif one.notes:
            say(console, f"Note on {name}: {'; '.join(one.notes)}", "yellow")
    whole = [one for one in done.values() if not one.failed]
    changed = [one.changed for one in whole if one.changed]
    say(
        console,
        f"{len(whole)} cases calibrated; label maps changed in {len(changed)} of them, by "
        f"{sum(changed):,} voxels",
    )


def _say_overlap(console: Console, job: Job, test: Job) -> None:
    """Warn if cases of --test are among the cases that methods are fitted to."""
    names = {case.name for case in job.pairing.cases}
    shared = sorted(names & {case.name for case in test.pairing.cases})
    if job.predictions.resolve() == test.predictions.resolve() or shared:
        say(
            console,
            f"Note: {len(shared)} cases of --test have names of cases that methods are fitted to "
            f"({', '.join(shared[:3])}): a repair looks better on these than on new cases",
            "yellow",
        )


def _compared(
    job: Job,
    methods: list[str] | None,
    test: Job | None,
    patients: str | None,
    bootstrap: int,
    processes: int | None,
) -> Repair:
    """Compare with a bar for each of the steps."""
    from segcal.repair.comparing import compare_methods, planned_steps

    counts = planned_steps(job, methods, patients, test)
    steps = dict(zip(("Reading", "Fitting", "Evaluating"), counts, strict=True))
    with progress_bars(steps) as (collected, fitted, evaluated):
        return compare_methods(
            job, methods=methods, test=test, patients=patients, resamples=bootstrap,
            processes=processes, collected=collected, fitted=fitted, evaluated=evaluated,
        )  # fmt: skip


def _say_repair(console: Console, repair: Repair) -> None:
    for title, comparison in (("Cross-validated", repair.comparison), ("--test", repair.test)):
        if comparison is not None:
            console.print(_repair_table(title, repair, comparison))
    method = repair.recommendation.method
    say(console, f"Recommended: {method or 'none'}", "bold")
    for reason in repair.recommendation.reasons:
        say(console, reason)


def _repair_table(title: str, repair: Repair, comparison: Comparison) -> Table:
    """Means of every row, with a mark where it differs from the first with 95 % certainty."""
    from segcal.evaluation.reported import metric_of, readable

    scopes = next(iter(comparison.reports.values())).job.settings.scopes
    columns = ["dsc", f"nll_{scopes[-1]}", *(f"ece_{scope}" for scope in scopes)]
    table = Table(
        title=f"{title}, mean over cases", box=box.SIMPLE_HEAD, pad_edge=False,
        title_justify="left", caption_justify="left",
        caption="* better, ! worse than uncalibrated: the 95 % interval over patients excludes 0",
    )  # fmt: skip
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(readable(column), justify="right", no_wrap=True)
    differences = {(d.method, d.metric): d for d in comparison.differences}
    for entry in repair.entries:
        rows = comparison.reports[entry.name].cases
        cells = [entry.name]
        for column in columns:
            metric = metric_of(column)
            higher = metric is not None and metric.better == "higher"
            mark = _mark(differences.get((entry.name, column)), higher=higher)
            cells.append(f"{rows[column].mean():.4f}{mark}")
        table.add_row(*cells)
    return table


def _mark(difference: Difference | None, *, higher: bool) -> str:
    from segcal.repair.comparing import FEWEST

    if difference is None or difference.ci95 is None or difference.n < FEWEST:
        return " "
    low, high = difference.ci95
    if low <= 0 <= high:
        return " "
    return "*" if (low > 0) == higher else "!"
