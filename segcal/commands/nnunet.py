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
from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train and predict with nnU-Net v2, with segcal's trainers, too (segcal nnunet recipes "
    "lists them).\n\n"
    "Example: segcal nnunet train 27 2d 0 -tr nnUNetTrainerConfidence --npz",
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
        int | None, typer.Option(min=1, help="Training iterations an epoch (nnU-Net: 250).")
    ] = None,
    val_iterations: Annotated[
        int | None, typer.Option(min=1, help="Validation iterations an epoch (nnU-Net: 50).")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(min=1, help="Epochs between two checkpoints (nnU-Net: 50).")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Seed every epoch and load data in one process: repeatable, slower."
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="At the end, fit a calibrator to the fold's validation cases, or to those under "
            '"calib" in splits_final.json: fold_X/calibrator.json.',
        ),
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(
            help="What --calibrate fits (default: class_region, a temperature per predicted class "
            "and region); segcal methods lists them."
        ),
    ] = None,
) -> None:
    """Run nnUNetv2_train; everything it takes is passed on.

    Example: segcal nnunet train 27 2d 0 -tr nnUNetTrainerCRaC --npz --calibrate

    The options below work for every trainer, stock ones too. Use "-h" for nnU-Net's own help.
    With segcal's trainers the fold's folder gets segcal_log.jsonl: terms of the loss and
    multipliers of every epoch. nnUNetTrainerTwoHeadsConfidence has two heads: masks are those of
    the decision head, probabilities (--npz, --calibrate, segcal nnunet predict) the other's.

    A training that was killed goes on with --c from its last whole checkpoint; with --seed and the
    same options, on the CPU, it then equals one that was not killed. Workers that load data end
    within seconds of their training.

    A training that has ended is calibrated with --val --calibrate. Then predict with it: segcal
    nnunet predict ... -f X --calibrator model
    """
    from segcal.adapters.nnunet import running

    fitted = method or "class_region" if calibrate else None
    budget = running.Budget(epochs, iterations, val_iterations, save_every, seed, fitted)
    with user_errors():
        if method and not calibrate:
            raise ValueError("--method: is what --calibrate fits; say --calibrate, too")
        running.check_train(context.args, budget)
    with _refusals():  # what else fails in there keeps its traceback
        running.train(context.args, budget)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn what nnU-Net is not let into its message and exit code 2."""
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
        help="Average logits, as nnU-Net does, or probabilities, over mirrored copies, "
        "overlapping windows and folds."
    ),
]
LogitsOption = Annotated[
    bool,
    typer.Option(
        "--save-logits",
        help="Also write logits/CASE.npz (array logits, float32), whose softmax, or sigmoid for "
        "regions, is CASE.npz where that is not calibrated: for calibration after training.",
    ),
]
PerFoldOption = Annotated[
    bool,
    typer.Option("--per-fold", help="Also write what each fold predicts alone, into fold_X/."),
]
CalibratorOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|model",
        help="Calibrate with this file of segcal calibrate fit; 'model' takes the calibrator.json "
        "in the model's folder, or in that of its only fold (-f).",
    ),
]
AnyModelOption = Annotated[
    bool,
    typer.Option("--any-model", help="Take a calibrator that was fitted to another model."),
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
    """Run nnUNetv2_predict with --save_probabilities; everything it takes is passed on.

    Example: segcal nnunet predict -i imagesTs -o predictions -d 27 -c 2d -f 0
    -tr nnUNetTrainerCRaC

    Sums are kept in float32, nnU-Net's are in float16: results differ by that rounding.
    Averaging logits makes an ensemble surer than its members, averaging probabilities does not;
    neither is always the better calibrated. segcal_predict.json beside the predictions says which
    it was. Use "-h" for nnU-Net's own help. Then: segcal evaluate predictions labelsTs -o report

    Of a model with two heads (nnUNetTrainerTwoHeads...) label maps are the decision head's, and
    probabilities, logits and calibrators the probability head's.

    With --calibrator calibrator.json (segcal calibrate fit) probabilities are calibrated ones, the
    label map is theirs, and saved logits stay as they were. A calibrator of single folds calibrates
    each fold before they are averaged, one of an ensemble their mean. One that was fitted to
    another model is refused before the first case.

    Nothing of a model is run that is not nnU-Net's: checkpoints that hold code are refused, and
    networks of other packages, unless SEGCAL_NETWORKS=PACKAGE,... names those.
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
    """Run nnUNetv2_predict_from_modelfolder: as predict, of a folder given by -m.

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
    """A head of a network of two."""

    DECISION = "decision"
    PROBABILITY = "probability"


@app.command()
def export(
    model: Annotated[
        Path, typer.Argument(help="Folder of a trained model: DATASET/TRAINER__PLANS__CONFIG.")
    ],
    results: Annotated[
        Path, typer.Argument(help="Where it goes: a folder that can serve as nnUNet_results.")
    ],
    checkpoint: Annotated[
        str, typer.Option("-chk", help="Which checkpoint of the folds.")
    ] = "checkpoint_final.pth",
    head: Annotated[
        HeadName | None,
        typer.Option(
            help="Of a network of two heads (nnUNetTrainerTwoHeads...): the one whose mask is "
            "wanted, or the one whose probabilities are."
        ),
    ] = None,
) -> None:
    """Write a copy of a model that predicts with stock nnU-Net, where segcal is not installed.

    Example: segcal nnunet export results/Dataset027_ACDC/nnUNetTrainerCRaC__nnUNetPlans__2d shared

    The copy is shared/Dataset027_ACDC/nnUNetTrainer__nnUNetPlans__2d. Its probabilities are the
    same; its checkpoints say under "segcal" what trained them, and hold nothing but tensors and
    plain values, so torch.load(weights_only=True) reads them. A calibrator.json of the model, or of
    its folds, goes along for whoever has segcal (predict --calibrator model).

    A stock model has one head: of two, name it. --head decision predicts the same masks, its
    probabilities are those of Dice + cross-entropy; --head probability predicts calibrated
    probabilities and the masks that follow from them.
    """
    with user_errors():
        from segcal.adapters.nnunet.sharing import export_model
        from segcal.heads import Head

        of_head: Head | None = None if head is None else head.value
        target = export_model(model, results, checkpoint, head=of_head)
    typer.echo(f"Written: {target}")
    if calibrators := sorted(target.rglob("calibrator.json")):
        names = ", ".join(str(path.relative_to(target)) for path in calibrators)
        typer.echo(f"With it goes {names}: segcal nnunet predict --calibrator model applies it")
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
    fold: Annotated[str, typer.Option("-f", help="Fold, the one that the source was trained as.")],
    trainer: Annotated[str, typer.Option("-tr", help="Trainer that goes on.")],
    plans: Annotated[str, typer.Option("-p", help="Plans.")] = "nnUNetPlans",
    epochs: Annotated[int, typer.Option(min=1, help="How many epochs it is to train.")] = 100,
) -> None:
    """Start a calibrated training from the end of a stock one, segmentation head included.

    Example: segcal nnunet warmstart results/Dataset027_ACDC/nnUNetTrainer__nnUNetPlans__2d/fold_0
    -d 27 -c 2d -f 0 -tr nnUNetTrainerCRaC --epochs 100

    nnU-Net's -pretrained_weights leaves the head out, and so starts with random predictions. This
    writes checkpoint_latest.pth with all weights for the trainer's fold and prints the command
    that trains on. The learning rate is that of the source's last --epochs epochs; multipliers
    start anew.
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
            f"The source was trained for {done.source_epochs} epochs: this one starts with the "
            "full learning rate. Fewer --epochs would start with a lower one."
        )
    typer.echo(f"Train epochs {done.first_epoch} to {done.total_epochs - 1} with: {command}")


@app.command()
def doctor() -> None:
    """Look for what would stop a training: versions, folders, trainers, disks; seconds.

    Example: segcal nnunet doctor

    Exit code 0: nothing would. 1: something would.
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
    """List segcal's trainers: the name for -tr, and what its loss is.

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
            table.add_row(trainer, Text(loss), Text(recipe))
    console = open_console()
    console.print(table)
    others = [name for name in names("recipes") if name not in by_trainer.values()]
    for note in (
        f"Each of segcal's trainers is also there with the suffix {WITHOUT_DICE}: the same without "
        f"Dice, e.g. nnUNetTrainerCRaC{WITHOUT_DICE} is "
        f"{parts(load_recipe('crac')).formula(dice=False)}.",
        "decision and probability are heads of a network of two: the first gives the mask, the "
        "second the probabilities, and they share all but the last layer.",
        "What a term is, and its options: segcal methods TERM, e.g. segcal methods crac.",
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
