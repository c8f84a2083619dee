"""``segcal classify``: classes and labels of images, tables and texts."""

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
    help="Train and evaluate classifiers: classes that exclude each other, or several labels.\n\n"
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
    """Train a classifier; all about it stands in one YAML file.

    Examples: segcal classify train digits --set recipe=cals

    segcal classify train arff --set data.args.path=scene.arff.gz --set recipe=spa_lpr

    The output folder gets config.yaml and run.json (all settings, seed, versions),
    segcal_log.jsonl (one line an epoch: terms of the loss, multipliers, metrics of the validation
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
    folder: Annotated[Path, typer.Argument(help="Folder of a training.")],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder of the report: HTML, CSV, JSON, PNG."),
    ],
    part: Annotated[SamplePart, typer.Option(help="Which samples.")] = SamplePart.test,
    last: Annotated[
        bool, typer.Option("--last", help="The last checkpoint instead of the best one.")
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
            help="Fit a post-hoc method to the logits of the validation samples, and show the "
            "probabilities with it beside those without.",
        ),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="Of --calibrate: temperature (default), class_region (a temperature for each "
            "predicted class), or another of segcal methods."
        ),
    ] = None,
    bins: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of calibration errors and reliability diagrams; default: those of the "
            "experiment, which are 15 of classes and 10 of labels if it does not say.",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="Write the table as markdown (tables.md) or latex (tables.tex), too; give it "
            "twice, or with a comma, for both.",
        ),
    ] = None,
) -> None:
    """Accuracy, rankings and calibration of a trained classifier.

    Examples: segcal classify evaluate runs/digits/cals_1 -o report

    segcal classify evaluate runs/digits/cals_1 -o report --calibrate

    The report has index.html, summary.json, classes.csv (a row for each class or label),
    reliability.png, reliability_classes.png and predictions.npz (logits, probabilities, targets).
    Of labels, probabilities by the link of the loss (phi of focal and asymmetric losses) have rows
    of their own beside the sigmoid's, and retrieval.png shows how well samples are found by several
    conditions at once (this label and that one, not a third), retrieval_images.png the images that
    some such queries find, and loss.png the loss of a label and the link over the logit.

    With --calibrate, the report has calibrated probabilities as well, and calibrator.json. Of
    labels, each gets its own fit, to the log-odds of the posterior or, if the loss has none, to the
    logits; unknown targets are left out.
    """
    from segcal.classify.evaluation import evaluate_classifier
    from segcal.classify.report import check_folder, write_classifier_report
    from segcal.training.checkpoints import BEST_NAME, LAST_NAME

    console = open_console()
    with user_errors({**OPTIONS, "calibrate": "--calibrate", "method": "--method"}):
        if method is not None and not calibrate:
            raise ValueError("method: is of --calibrate, which was not given")
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
    say(console, "Fractions of 1; nll in nats.")
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
    typer.Option(help="Along which slices follow each other, as files store them: z is last."),
]
MinVoxels = Annotated[
    int,
    typer.Option(
        min=1,
        help="Voxels of a label, at least, in a slice that shows it; with "
        "fewer, but not none, it is unknown.",
    ),
]
Window = Annotated[
    tuple[float, float] | None,
    typer.Option(
        help="Intensities that become black and white (of CT, e.g. -160 240); "
        "default: those of each volume, without the outermost 0.5 %."
    ),
]
Patient = Annotated[
    str | None,
    typer.Option(
        help="Regular expression for the patient at the beginning of a case's name "
        "(patient\\d+); default: every case is one. Patients are never parted."
    ),
]


@app.command()
def features(
    config: Annotated[
        str,
        typer.Argument(
            help="The experiment whose samples and network are meant: a YAML file, or the name of "
            "one that comes with segcal."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write, .npz.")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Of a training of the network by segcal, on whatever classes: "
            "FOLDER/checkpoint_best.pt; default: the weights that the experiment names."
        ),
    ] = None,
    settings: SetOptions = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write over a file that is there.")
    ] = False,
) -> None:
    """What a trained network sees in samples before its last layer: transfer with it frozen.

    Example: segcal classify features images --set data.source=image_folder --set
    data.args={path: FOLDER} --set network.args.weights=DEFAULT -o features.npz

    Samples are seen as in evaluation, once; then heads are trained in seconds: segcal classify
    train features --set data.args.path=features.npz
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
        bool, typer.Option("--overwrite", help="Write over a file that is there.")
    ] = False,
) -> None:
    """Make a multi-label data set of a segmentation data set: which labels does a slice show?

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
