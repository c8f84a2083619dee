"""``segcal train``: networks of MONAI, trained from one YAML file."""

from __future__ import annotations

import shlex
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from segcal.commands.calibrating import MethodOption, chosen_method
from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.experiment import (
    OPTIONS,
    ResumeOption,
    SetOptions,
    say_trained,
    training_begins,
    training_ends,
)
from segcal.commands.progress import progress_bar

if TYPE_CHECKING:  # MONAI is imported when there is work to do
    from segcal.adapters.monai.experiment import SegmentationExperiment

Config = Annotated[
    str,
    typer.Argument(
        help="The experiment: a YAML file, or the name of one that comes with segcal "
        "(acdc/unet, acdc/dynunet, flare/unet, flare/dynunet, voc2012/deeplabv3)."
    ),
]


def train(
    config: Config,
    settings: SetOptions = None,
    resume: ResumeOption = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show", help="Print all settings, as a file of your own to start from, and end."
        ),
    ] = False,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            help="At the end, predict the validation cases into predictions_validation/, fit a "
            "calibrator to them, and write it to calibrator.json, with which segcal predict "
            "calibrates. Default: if the recipe says so (confidence).",
            show_default=False,
        ),
    ] = None,
    method: MethodOption = None,
) -> None:
    """Train a MONAI network with a recipe (a sum of losses and penalties), set up in a YAML file.

    Examples: segcal train acdc/unet --set data.root=$nnUNet_raw/Dataset027_ACDC

    segcal train acdc/unet --show > my.yaml

    segcal train my.yaml --set recipe=nacl_published --set training.epochs=10

    torchrun --nproc_per_node 2 -m segcal train my.yaml

    The output folder gets config.yaml and run.json (all settings, seed, versions, cases),
    segcal_log.jsonl (one line per epoch: terms of the loss, multipliers, constraints, and mean IoU
    and ECE of the validation set), segcal_progress.png, tensorboard/ if tensorboard is installed,
    checkpoint_best.pt and checkpoint_last.pt. A multiplier is a weight that a penalty learns from
    the validation set. The best epoch has the highest mean IoU over the foreground classes, each
    computed from all validation voxels together, as published. Files and labels are checked before
    training begins. training.batch_size counts the samples of all processes together. Then: segcal
    predict.

    Pictures work as well as volumes. Name data.images (PNG or JPEG, whose colours are channels),
    data.labels (PNG, grey or with a palette), data.classes and data.ignore, and lists of cases in
    data.split.train and data.split.val.
    """
    console = open_console()
    with user_errors(OPTIONS):
        from segcal.adapters.monai.experiment import load_experiment
        from segcal.adapters.monai.training import SegmentationRun
        from segcal.recipes import load_objective
        from segcal.training.devices import processes
        from segcal.training.experiments import to_yaml

        experiment = load_experiment(config, settings or [])
        fitted = chosen_method(calibrate, method, load_objective(experiment.recipe).calibrator)
    if show:
        typer.echo(to_yaml(experiment), nl=False)
        return
    with ExitStack() as stack:
        with training_begins():
            ranks = stack.enter_context(processes(experiment.training.device))
            training = SegmentationRun(
                experiment, ranks, resume=resume, say=lambda text: say(console, text)
            )
        advance = (
            stack.enter_context(progress_bar("Training", training.iterations))
            if ranks.first
            else lambda state: None
        )
        with training_ends(console):
            done = training.run(advance)
        del training  # the network of several processes must be gone before their group is
    if not ranks.first:
        return
    say_trained(console, done, experiment.training.early_stop)
    if fitted is not None:
        _calibrate(console, experiment, fitted, required=bool(calibrate))
    chosen = [part for setting in settings or [] for part in ("--set", setting)]
    say(console, f"Next: {shlex.join(['segcal', 'predict', config, *chosen])}")


def _calibrate(
    console: Console, experiment: SegmentationExperiment, method: str, *, required: bool
) -> None:
    """Fit a calibrator to the validation cases and say so; one not `required` may fail."""
    from segcal.adapters.monai.calibration import calibrate_training, validation_cases
    from segcal.repair.saved import CALIBRATOR_NAME

    with user_errors(OPTIONS):
        predictor, cases = validation_cases(experiment)
        try:
            with progress_bar("Predicting validation", len(cases)) as advance:
                saved = calibrate_training(predictor, cases, method, progress=advance)
        except ValueError as error:
            if required:
                raise
            say(console, f"WARNING: no calibrator was fitted: {error}")
            return
    facts = saved.calibrator.facts
    say(
        console,
        f"{method} fitted to {facts['cases']} validation cases, NLL {facts['nll_before']:.4f} -> "
        f"{facts['nll_after']:.4f}. Written: {experiment.folder / CALIBRATOR_NAME}",
    )
