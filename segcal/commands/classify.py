"""``segcal classify``: train and evaluate classifiers of images, tables and texts."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from segcal.commands.console import number, open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.evaluate import table_forms
from segcal.commands.experiment import (
    OPTIONS,
    ResumeOption,
    SetOptions,
    say_trained,
    training_begins,
    training_ends,
)
from segcal.commands.progress import progress_bar

if TYPE_CHECKING:
    from segcal.classify.evaluation import Evaluated

app = typer.Typer(
    no_args_is_help=True,
    help="Train and evaluate classifiers: one class, or several labels, for each sample.\n\n"
    "Example: segcal classify train digits --set recipe=cals",
)


class SamplePart(str, Enum):
    """Which samples are evaluated."""

    test = "test"
    validation = "validation"
    train = "train"


@app.command()
def train(
    config: Annotated[
        str,
        typer.Argument(
            help="The experiment: a YAML file, or the name of one that comes with segcal (digits, "
            "digits_lt, arff, slices, ...)."
        ),
    ],
    settings: SetOptions = None,
    resume: ResumeOption = False,
) -> None:
    """Train a classifier that is set up in one YAML file.

    Examples: segcal classify train digits --set recipe=cals

    segcal classify train arff --set data.args.path=scene.arff.gz --set recipe=spa_lpr

    The output folder gets config.yaml and run.json (all settings, seed, versions),
    segcal_log.jsonl (one line per epoch: terms of the loss, multipliers, metrics of the validation
    set), segcal_progress.png, checkpoint_best.pt and checkpoint_last.pt. Files and settings are
    checked before training begins. Then: segcal classify evaluate FOLDER -o REPORT.
    """
    console = open_console()
    with training_begins():
        from segcal.classify.experiment import load_experiment
        from segcal.classify.readers.decoding import ImageError
        from segcal.classify.training import ClassificationRun

        experiment = load_experiment(config, settings or [])
        training = ClassificationRun(experiment, resume=resume, say=lambda text: say(console, text))
    with progress_bar("Training", training.epochs_left) as advance, training_ends(console):
        try:
            done = training.run(advance)
        except ImageError as error:  # one of many that nobody looked at before
            say(console, f"Stopped: {error}; then train anew.", "red")
            raise typer.Exit(1) from None
    say_trained(console, done, experiment.training.early_stop)
    say(console, f"Next: segcal classify evaluate {done.folder} -o {done.folder}/test")


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="Output folder of a training.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder of the report: HTML, CSV, JSON, PNG."),
    ],
    part: Annotated[SamplePart, typer.Option(help="Samples to evaluate.")] = SamplePart.test,
    last: Annotated[
        bool, typer.Option("--last", help="Take the last checkpoint instead of the best one.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:0.")] = "auto",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Where the data set is now, if it has been moved since the training: "
            "data.args.path=FILE.",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Fit a post-hoc method to the logits of the validation samples, and report "
            "calibrated probabilities beside the uncalibrated ones.",
        ),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method of --calibrate: temperature (default), class_region (a temperature for "
            "each predicted class), or another that segcal methods lists."
        ),
    ] = None,
    bins: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of bins of calibration errors and reliability diagrams. Default: as in "
            "the experiment or, if it does not say, 15 for classes and 10 for labels.",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Also write the table as markdown (tables.md) or latex (tables.tex), or both: "
            "markdown,latex.",
        ),
    ] = None,
) -> None:
    """Measure accuracy, rankings and calibration of a trained classifier.

    Examples: segcal classify evaluate runs/digits/cals_1 -o report

    segcal classify evaluate runs/digits/cals_1 -o report --calibrate

    The report has index.html, summary.json, classes.csv (a row for each class or label),
    reliability.png, reliability_classes.png and predictions.npz (logits, probabilities, targets).
    If samples have several labels, the report also shows probabilities by the link of the loss (a
    function that turns scores into the posterior, phi for focal and asymmetric losses) beside the
    sigmoid's. retrieval.png shows how well samples are found that meet several conditions at once
    (this label and that label, but not a third), retrieval_images.png shows images that some of
    these queries find, and loss.png draws the loss of a label and the link over the logit.

    With --calibrate, the report has calibrated probabilities as well, and calibrator.json. If
    samples have several labels, each label gets its own fit, to the log-odds of the posterior or,
    if the loss has no posterior, to the logits; unknown targets are left out.
    """
    from segcal.classify.evaluation import evaluate_classifier
    from segcal.classify.report import check_folder, write_classifier_report
    from segcal.training.checkpoints import BEST_NAME, LAST_NAME

    console = open_console()
    with user_errors({**OPTIONS, "calibrate": "--calibrate", "method": "--method"}):
        if method is not None and not calibrate:
            raise ValueError("method: chooses what --calibrate fits; give --calibrate, too")
        forms = table_forms(formats or [])
        check_folder(output, folder)
        evaluated = evaluate_classifier(
            folder,
            part=part.value,
            checkpoint=LAST_NAME if last else BEST_NAME,
            device=device,
            settings=settings or [],
            calibrate=(method or "temperature") if calibrate else None,
            bins=bins,
        )
        files = write_classifier_report(output, evaluated, forms=forms)
    console.print(_outcome_table(evaluated))
    say(console, "Numbers are fractions of 1; nll is in nats.")
    for note in evaluated.notes():
        say(console, note, "yellow")
    say(console, f"Written to {output}: {', '.join(files)}")


def _outcome_table(evaluated: Evaluated) -> Table:
    """Numbers of a classifier, a column for every kind of probabilities."""
    table = Table(
        title=f"{len(evaluated.part)} {evaluated.part_name} samples",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title_justify="left",
    )
    table.add_column("metric", no_wrap=True)
    for kind in evaluated.outcomes:
        table.add_column(kind, justify="right", no_wrap=True)
    for name in next(iter(evaluated.outcomes.values())).metrics:
        values = (measured.metrics[name] for measured in evaluated.outcomes.values())
        table.add_row(name, *(number(value, 4) for value in values))
    return table


Size = Annotated[int, typer.Option(min=8, help="Height and width of the slices.")]
SliceAxis = Annotated[
    str,
    typer.Option(help="Axis along which slices follow each other; z is the last axis of a file."),
]
MinVoxels = Annotated[
    int,
    typer.Option(
        min=1,
        help="Fewest voxels of a label in a slice that shows it; with fewer, but not none, the "
        "label is unknown.",
    ),
]
Window = Annotated[
    tuple[float, float] | None,
    typer.Option(
        help="Intensities that become black and white (for CT, e.g. -160 240). Default: the range "
        "of each volume, without its outermost 0.5 %."
    ),
]
Patient = Annotated[
    str | None,
    typer.Option(
        help="Regular expression for the patient at the beginning of a case's name "
        "(patient\\d+); cases of a patient stay together. Default: every case is a patient."
    ),
]


@app.command()
def features(
    config: Annotated[
        str,
        typer.Argument(
            help="The experiment that has the samples and the network: a YAML file, or the name "
            "of one that comes with segcal."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, .npz.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint of a network that segcal trained, on any classes: "
            "FOLDER/checkpoint_best.pt. Default: the weights that the experiment names."
        ),
    ] = None,
    settings: SetOptions = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite an existing file.")
    ] = False,
) -> None:
    """Write what a network computes before its last layer, to train a new last layer on it.

    Example: segcal classify features images --set data.source=image_folder --set
    data.args={path: FOLDER} --set network.args.weights=DEFAULT -o features.npz

    Each sample passes through the frozen network once, as in evaluation. Last layers are then
    trained in seconds: segcal classify train features --set data.args.path=features.npz
    """
    from segcal.classify.readers.archives import check_new, write_npz

    console = open_console()
    with user_errors(OPTIONS):
        from segcal.classify.experiment import load_experiment
        from segcal.classify.features import extract_features

        check_new(output, overwrite=overwrite)
        samples = extract_features(load_experiment(config, settings or []), checkpoint=checkpoint)
        write_npz(output, samples)
    say(console, f"Written: {output}, features of {len(samples)} samples")
    say(console, f"Next: segcal classify train features --set data.args.path={output}")


@app.command("from-segmentation")
def from_segmentation(
    root: Annotated[
        Path,
        typer.Argument(
            help="A data set in nnU-Net's raw layout: dataset.json, imagesTr, labelsTr, and maybe "
            "imagesTs and labelsTs, which are for testing."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, .npz.")],
    size: Size = 64,
    axis: SliceAxis = "z",
    min_voxels: MinVoxels = 1,
    window: Window = None,
    patient: Patient = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite an existing file.")
    ] = False,
) -> None:
    """Turn a segmentation data set into a multi-label one: which labels does a slice show?

    Example: segcal classify from-segmentation $nnUNet_raw/Dataset038_CHAOST2 -o slices.npz

    Then: segcal classify train slices --set data.args.path=slices.npz
    """
    from segcal.classify.readers.archives import check_new, write_npz
    from segcal.classify.readers.presence import find_slice_cases, presence_of_labels

    console = open_console()
    with user_errors():
        cases = find_slice_cases(root, patient)
        check_new(output, overwrite=overwrite)
        with progress_bar("Reading", len(cases)) as advance:
            samples = presence_of_labels(
                root,
                size=size,
                axis=axis,
                min_voxels=min_voxels,
                window=window,
                patient=patient,
                progress=advance,
            )
        write_npz(output, samples)
    shown = ", ".join(
        f"{name} {n}" for name, n in zip(samples.names, (samples.targets == 1).sum(0), strict=True)
    )
    none = int((samples.targets == 0).all(1).sum())
    say(console, f"{len(samples)} slices of {len(cases)} cases: {shown}; none {none}")
    say(console, f"Written: {output}")
    say(console, f"Next: segcal classify train slices --set data.args.path={output}")
