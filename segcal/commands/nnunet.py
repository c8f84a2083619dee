"""``segcal nnunet``: nnU-Net's own commands with segcal's trainers at hand."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from segcal.commands.errors import user_errors

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Train and predict with nnU-Net v2, segcal's trainers (nnUNetTrainerCRaC, "
    "nnUNetTrainerNACL) included.",
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
) -> None:
    """Run nnUNetv2_train; everything it takes is passed on.

    Example: segcal nnunet train 27 2d 0 -tr nnUNetTrainerCRaC --npz

    The options below work for every trainer, stock ones too. Use "-h" for nnU-Net's own help.
    With segcal's trainers the fold's folder gets segcal_log.jsonl: terms of the loss and
    multipliers of every epoch.
    """
    from segcal.adapters.nnunet import running

    budget = running.Budget(epochs, iterations, val_iterations, save_every, seed)
    with user_errors():
        running.check_train(context.args, budget)
    running.train(context.args, budget)  # what fails in there keeps its traceback


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
        "regions, is CASE.npz: for calibration after training.",
    ),
]
PerFoldOption = Annotated[
    bool,
    typer.Option("--per-fold", help="Also write what each fold predicts alone, into fold_X/."),
]


@app.command(context_settings=PASS_ON)
def predict(
    context: typer.Context,
    average: AverageOption = Average.LOGIT,
    save_logits: LogitsOption = False,
    per_fold: PerFoldOption = False,
) -> None:
    """Run nnUNetv2_predict with --save_probabilities; everything it takes is passed on.

    Example: segcal nnunet predict -i imagesTs -o predictions -d 27 -c 2d -f 0
    -tr nnUNetTrainerCRaC

    Sums are kept in float32, nnU-Net's are in float16: results differ by that rounding.
    Averaging logits makes an ensemble surer than its members, averaging probabilities does not;
    neither is always the better calibrated. segcal_predict.json beside the predictions says which
    it was. Use "-h" for nnU-Net's own help. Then: segcal evaluate predictions labelsTs -o report
    """
    _predict(context.args, average, save_logits, per_fold)


@app.command(context_settings=PASS_ON)
def predict_from_modelfolder(
    context: typer.Context,
    average: AverageOption = Average.LOGIT,
    save_logits: LogitsOption = False,
    per_fold: PerFoldOption = False,
) -> None:
    """Run nnUNetv2_predict_from_modelfolder: as predict, of a folder given by -m.

    Example: segcal nnunet predict-from-modelfolder -i imagesTs -o predictions
    -m results/Dataset027_ACDC/nnUNetTrainerCRaC__nnUNetPlans__2d -f 0 1 --average prob
    """
    _predict(context.args, average, save_logits, per_fold, from_modelfolder=True)


def _predict(
    arguments: list[str],
    average: Average,
    save_logits: bool,
    per_fold: bool,
    *,
    from_modelfolder: bool = False,
) -> None:
    from segcal.adapters.nnunet import running

    aggregation = running.Aggregation(average.value, save_logits, per_fold)
    with user_errors():
        running.check_predict(arguments, aggregation, from_modelfolder=from_modelfolder)
    running.predict(arguments, aggregation, from_modelfolder=from_modelfolder)


@app.command("ext-path")
def ext_path() -> None:
    """Print the folder for nnUNet_extTrainer, so that stock commands find segcal's trainers.

    Example: export nnUNet_extTrainer="$(segcal nnunet ext-path)"
    """
    from segcal.adapters.nnunet.discovery import ext_path as folder

    typer.echo(folder())
