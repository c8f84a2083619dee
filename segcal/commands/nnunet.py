"""``segcal nnunet``: nnU-Net's own commands with segcal's trainers at hand."""

from __future__ import annotations

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


@app.command(context_settings=PASS_ON)
def predict(context: typer.Context) -> None:
    """Run nnUNetv2_predict with --save_probabilities; everything it takes is passed on.

    Example: segcal nnunet predict -i imagesTs -o predictions -d 27 -c 2d -f 0
    -tr nnUNetTrainerCRaC

    Use "-h" for nnU-Net's own help. Then: segcal evaluate predictions labelsTs -o report
    """
    from segcal.adapters.nnunet import running

    with user_errors():
        running.check_predict(context.args)
    running.predict(context.args)


@app.command("ext-path")
def ext_path() -> None:
    """Print the folder for nnUNet_extTrainer, so that stock commands find segcal's trainers.

    Example: export nnUNet_extTrainer="$(segcal nnunet ext-path)"
    """
    from segcal.adapters.nnunet.discovery import ext_path as folder

    typer.echo(folder())
