"""``segcal nnunet``: nnU-Net's own commands with segcal's trainers at hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from segcal.adapters.nnunet.patching import Aggregation, RefusedError
from segcal.commands.calibrating import MethodOption, chosen_method
from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train and predict with nnU-Net v2, with its trainers or segcal's (segcal nnunet recipes "
    "lists these).\n\n"
    "Example: segcal nnunet train 27 2d 0 -tr nnUNetTrainerConfidence",
)
PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": ["--help"],
}


@app.command(context_settings=PASS_ON)
def train(
    context: typer.Context,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs (nnU-Net: 1000).")] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, help="Training iterations per epoch (nnU-Net: 250).")
    ] = None,
    val_iterations: Annotated[
        int | None, typer.Option(min=1, help="Validation iterations per epoch (nnU-Net: 50).")
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs from checkpoint to checkpoint (nnU-Net: 50)."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Seed every epoch and load data in one process, which is repeatable but slower.",
        ),
    ] = None,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            help="At the end, fit a calibrator to the fold's validation cases, or to the cases "
            'under "calib" in splits_final.json, and write it to fold_X/calibrator.json, with '
            "which segcal nnunet predict calibrates. The probabilities of these cases are kept, as "
            "with --npz. Default: if the trainer's recipe says so (nnUNetTrainerConfidence).",
            show_default=False,
        ),
    ] = None,
    method: MethodOption = None,
    patients: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Regular expression that finds the patient in a case's name, e.g. "
            '"patient[0-9]+"; --calibrate then keeps cases of a patient together in '
            "cross-validation. Default: every case counts as a patient.",
        ),
    ] = None,
) -> None:
    """Run nnUNetv2_train; all options that it takes are passed on.

    Example: segcal nnunet train 27 2d 0 -tr nnUNetTrainerConfidence

    The options below work for every trainer, nnU-Net's own included. Use "-h" for nnU-Net's own
    help. With segcal's trainers the fold's folder gets segcal_log.jsonl: for every epoch, the terms
    of the loss and the multipliers (weights that penalties learn in validation). A network of
    nnUNetTrainerTwoHeadsConfidence has two heads: masks come from the decision head, probabilities
    (--npz, --calibrate, segcal nnunet predict) from the probability head.

    Use --c to continue a killed training from its last whole checkpoint. With --seed and the same
    options, on the CPU, it then equals an uninterrupted training, to rounding. Processes that load
    data end within seconds after their training.

    To calibrate a training that has ended, use --val --calibrate.
    """
    from segcal.adapters.nnunet import running

    with user_errors():
        fitted = chosen_method(calibrate, method, running.calibrator_of_recipe(context.args))
        if patients and fitted is None:
            raise ValueError("--patients: is for --calibrate, which nothing asks for here")
        budget = running.Budget(
            epochs, iterations, val_iterations, save_every, seed, fitted, patients,
            must_calibrate=bool(calibrate),
        )  # fmt: skip
        running.check_train(context.args, budget)
    with _refusals():  # what else fails in there keeps its traceback
        running.train(context.args, budget)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn a refusal inside nnU-Net into its message and exit code 2."""
    try:
        yield
    except RefusedError as error:
        with user_errors():
            raise error


class Average(str, Enum):
    """What is averaged over mirrors, windows and folds."""

    LOGIT = "logit"
    PROB = "prob"


AverageOption = Annotated[
    Average,
    typer.Option(
        help="What is averaged over mirrored copies, overlapping windows and folds: logits, as "
        "nnU-Net does, or probabilities."
    ),
]
LogitsOption = Annotated[
    bool,
    typer.Option(
        "--save-logits",
        help="Also write logits/CASE.npz (array logits, float32), to fit a calibrator to. Their "
        "softmax, or sigmoid for regions, is CASE.npz unless that is calibrated.",
    ),
]
PerFoldOption = Annotated[
    bool,
    typer.Option("--per-fold", help="Also write what each fold predicts alone, into fold_X/."),
]
CalibratorOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|model|none",
        help="Calibrate with this file that segcal calibrate fit wrote. 'model' takes the "
        "calibrator.json in the model's folder, or in the folder of its only fold (-f), and "
        "refuses to predict if it does not fit. 'none' does not calibrate. Default: the model's, "
        "if there is one that fits.",
        show_default=False,
    ),
]
AnyModelOption = Annotated[
    bool,
    typer.Option("--any-model", help="Accept a calibrator that was fitted to another model."),
]


@app.command(context_settings=PASS_ON)
def predict(
    context: typer.Context,
    average: AverageOption = Average.LOGIT,
    save_logits: LogitsOption = False,
    per_fold: PerFoldOption = False,
    calibrator: CalibratorOption = None,
    any_model: AnyModelOption = False,
) -> None:
    """Run nnUNetv2_predict with --save_probabilities; all options that it takes are passed on.

    Example: segcal nnunet predict -i imagesTs -o predictions -d 27 -c 2d -f 0
    -tr nnUNetTrainerCRaC

    Sums are kept in float32 where nnU-Net keeps float16, so results differ by that rounding.
    Averaging logits makes an ensemble more confident than its members, averaging probabilities does
    not; neither is always better calibrated. segcal_predict.json beside the predictions says which
    of the two was averaged. Use "-h" for nnU-Net's own help. Then: segcal evaluate predictions
    labelsTs -o report

    A model with two heads (nnUNetTrainerTwoHeads...) takes label maps from its decision head, and
    probabilities and logits from its probability head, which is also the head that is calibrated.

    A calibrator.json in the folder of the model (from segcal calibrate fit), or of its only fold
    (from segcal nnunet train), calibrates the probabilities, and so does the one that --calibrator
    names; --calibrator none leaves them as they are. A model with one head then takes its label map
    from the calibrated probabilities, and saved logits stay uncalibrated. A calibrator of single
    folds calibrates each fold before the folds are averaged; a calibrator of an ensemble calibrates
    the average. One that was fitted to another model is left out with a warning, or refused before
    the first case if --calibrator named it.

    No code that comes with a model is run: checkpoints that hold code are refused, and so are
    networks of packages other than nnU-Net's, unless SEGCAL_NETWORKS=PACKAGE,... names the package.
    """
    _predict(context.args, Aggregation(average.value, save_logits, per_fold, calibrator, any_model))


@app.command(context_settings=PASS_ON)
def predict_from_modelfolder(
    context: typer.Context,
    average: AverageOption = Average.LOGIT,
    save_logits: LogitsOption = False,
    per_fold: PerFoldOption = False,
    calibrator: CalibratorOption = None,
    any_model: AnyModelOption = False,
) -> None:
    """Run nnUNetv2_predict_from_modelfolder: like predict, for a model's folder given by -m.

    Example: segcal nnunet predict-from-modelfolder -i imagesTs -o predictions
    -m results/Dataset027_ACDC/nnUNetTrainerCRaC__nnUNetPlans__2d -f 0 1 --calibrator model
    """
    aggregation = Aggregation(average.value, save_logits, per_fold, calibrator, any_model)
    _predict(context.args, aggregation, from_modelfolder=True)


def _predict(
    arguments: list[str], aggregation: Aggregation, *, from_modelfolder: bool = False
) -> None:
    from segcal.adapters.nnunet import running

    with user_errors():
        running.check_predict(arguments, aggregation, from_modelfolder=from_modelfolder)
    with _refusals():
        running.predict(arguments, aggregation, from_modelfolder=from_modelfolder)


class HeadName(str, Enum):
    """A head of a network that has two."""

    DECISION = "decision"
    PROBABILITY = "probability"


@app.command()
def export(
    model: Annotated[
        Path, typer.Argument(help="Folder of a trained model: DATASET/TRAINER__PLANS__CONFIG.")
    ],
    results: Annotated[
        Path, typer.Argument(help="Folder to write to, which can serve as nnUNet_results.")
    ],
    checkpoint: Annotated[
        str, typer.Option("-chk", help="Which checkpoint of the folds.")
    ] = "checkpoint_final.pth",
    head: Annotated[
        HeadName | None,
        typer.Option(
            help="Head to keep if the network has two (nnUNetTrainerTwoHeads...): decision for "
            "its masks, probability for its probabilities."
        ),
    ] = None,
) -> None:
    """Write a copy of a model that predicts with stock nnU-Net, where segcal is not installed.

    Example: segcal nnunet export results/Dataset027_ACDC/nnUNetTrainerCRaC__nnUNetPlans__2d shared

    The copy is shared/Dataset027_ACDC/nnUNetTrainer__nnUNetPlans__2d. Its probabilities are the
    same. Its checkpoints say under "segcal" what trained them, and hold nothing but tensors and
    plain values, so torch.load(weights_only=True) reads them. A calibrator.json of the model, or of
    its folds, is copied, too, for those who have segcal (segcal nnunet predict applies it).

    A stock model has one head, so choose one if the network has two. --head decision predicts the
    same masks, with the probabilities of a training with Dice + cross-entropy; --head probability
    predicts calibrated probabilities and the masks that follow from them.
    """
    with user_errors():
        from segcal.adapters.nnunet.sharing import export_model
        from segcal.heads import Head

        of_head: Head | None = None if head is None else head.value
        target = export_model(model, results, checkpoint, head=of_head)
    typer.echo(f"Written: {target}")
    if calibrators := sorted(target.rglob("calibrator.json")):
        names = ", ".join(str(path.relative_to(target)) for path in calibrators)
        typer.echo(f"Copied, too: {names}, which segcal nnunet predict applies")
    folds = " ".join(p.name[5:] for p in sorted(target.glob("fold_*")))
    command = f"nnUNetv2_predict_from_modelfolder -i IMAGES -o PREDICTIONS -m {target} -f {folds}"
    command += "" if checkpoint == "checkpoint_final.pth" else f" -chk {checkpoint}"
    typer.echo(f"Predict with it anywhere: {command}")


@app.command()
def warmstart(
    source: Annotated[
        Path, typer.Argument(help="Folder fold_X of a finished training, or a checkpoint of it.")
    ],
    dataset: Annotated[str, typer.Option("-d", help="Number or name of nnU-Net's data set.")],
    configuration: Annotated[str, typer.Option("-c", help="Configuration, e.g. 2d.")],
    fold: Annotated[str, typer.Option("-f", help="Fold of the source's training.")],
    trainer: Annotated[str, typer.Option("-tr", help="Trainer that continues.")],
    plans: Annotated[str, typer.Option("-p", help="Name of the plans.")] = "nnUNetPlans",
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs to train.")] = 100,
) -> None:
    """Start a calibrated training from the end of a stock one, segmentation head included.

    Example: segcal nnunet warmstart results/Dataset027_ACDC/nnUNetTrainer__nnUNetPlans__2d/fold_0
    -d 27 -c 2d -f 0 -tr nnUNetTrainerCRaC --epochs 100

    nnU-Net's -pretrained_weights leaves the head out, and so starts with random predictions. This
    command writes checkpoint_latest.pth with all weights for the trainer's fold, and prints the
    command that continues the training. The learning rate is that of the source's last --epochs
    epochs; multipliers (weights that penalties learn in validation) start anew.
    """
    with user_errors():
        from segcal.adapters.nnunet.discovery import require_paths

        require_paths("nnUNet_preprocessed", "nnUNet_results")
        from segcal.adapters.nnunet.warmstart import warmstart as write

        done = write(source, dataset, configuration, fold, trainer, plans, epochs)
    typer.echo(f"Written: {done.checkpoint}")
    command = f"segcal nnunet train {dataset} {configuration} {fold} -tr {trainer} --c"
    command += "" if plans == "nnUNetPlans" else f" -p {plans}"
    if done.total_epochs != done.default_epochs:
        command += f" --epochs {done.total_epochs}"
    if done.first_epoch == 0:
        typer.echo(
            f"The source was trained for {done.source_epochs} epochs, so this training starts with "
            "the full learning rate. Fewer --epochs would start with a lower one."
        )
    typer.echo(f"Train epochs {done.first_epoch} to {done.total_epochs - 1} with: {command}")


@app.command()
def doctor() -> None:
    """Look, in seconds, for what would stop a training: versions, folders, trainers, disks.

    Example: segcal nnunet doctor

    Exit code 0: nothing would stop it. 1: something would.
    """
    from segcal.adapters.nnunet.doctor import diagnose

    findings = diagnose(os.environ)
    colour = {"ok": "green", "note": "yellow", "stop": "red"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "what", "found"):
        table.add_column(column, no_wrap=column != "found", overflow="fold")
    for f in findings:
        table.add_row(Text(f.verdict, style=colour[f.verdict]), Text(f.what), Text(f.found))
    console = open_console()
    console.print(table)
    for text, verdict in dict.fromkeys(
        (f"{f.what}: {f.advice}", f.verdict) for f in findings if f.advice
    ):
        say(console, text, colour[verdict])
    stops = dict.fromkeys(f.what for f in findings if f.verdict == "stop")
    if stops:
        console.print(Text(f"A training would not work: {', '.join(stops)}.", style="red"))
        raise typer.Exit(1)
    console.print("Nothing would stop a training.")


@app.command()
def recipes() -> None:
    """List segcal's trainers: the name for -tr, and the loss.

    Example: segcal nnunet recipes
    """
    from segcal.adapters.nnunet.registration import recipes_of_trainers
    from segcal.adapters.nnunet.settings import WITHOUT_DICE, parts
    from segcal.recipes import load_recipe, names

    by_trainer = recipes_of_trainers()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("-tr", no_wrap=True)
    for column in ("loss", "recipe"):
        table.add_column(column)
    table.add_row("nnUNetTrainer", "Dice + cross-entropy", "(nnU-Net's own)")
    for trainer, recipe in by_trainer.items():
        if not trainer.endswith(WITHOUT_DICE):
            content = load_recipe(recipe)
            loss = parts(content).formula(dice=True)
            changes = ", ".join(
                f"{name} {one.first:g} to {one.last:g}"
                + ("" if one.gap is None else " as validation falls behind training")
                for name, one in content.schedule.items()
            )
            loss += f" (weights by schedule: {changes})" if changes else ""
            loss += "; a temperature at the end" if content.temperature else ""
            loss += "" if content.calibrator is None else f"; {content.calibrator} in prediction"
            table.add_row(trainer, Text(loss), Text(recipe))
    console = open_console()
    console.print(table)
    others = [name for name in names("recipes") if name not in by_trainer.values()]
    for note in (
        f"Each of segcal's trainers also exists without Dice, with the suffix {WITHOUT_DICE}: "
        f"nnUNetTrainerCRaC{WITHOUT_DICE} is "
        f"{parts(load_recipe('crac')).formula(dice=False)}.",
        "decision and probability are the heads of a network that has two: the first gives the "
        "mask, the second the probabilities, and they share all but the last layer.",
        "segcal methods TERM explains a term and its options, e.g. segcal methods crac.",
        f"Recipes without a trainer, for your own loop: {', '.join(others)}.",
    ):
        console.print(note, style="dim", highlight=False)


@app.command("ext-path")
def ext_path() -> None:
    """Print the folder for nnUNet_extTrainer, so that stock commands find segcal's trainers.

    Example: export nnUNet_extTrainer="$(segcal nnunet ext-path)"
    """
    from segcal.adapters.nnunet.discovery import ext_path as folder

    typer.echo(folder())
