"""``segcal predict``: probabilities of a network that ``segcal train`` trained."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from segcal.commands.errors import user_errors
from segcal.commands.experiment import OPTIONS, SetOptions
from segcal.commands.progress import progress_bar
from segcal.commands.train import Config


class Checkpoint(str, Enum):
    """Which state of a training predicts."""

    best = "best"
    last = "last"


class Form(str, Enum):
    """How probabilities are written."""

    npz = "npz"
    nifti = "nifti"


Images = Annotated[
    Path | None,
    typer.Option(
        "--input",
        "-i",
        help="Folder of images: CASE_0000.nii.gz, CASE.nii.gz, CASE.png or CASE.jpg; default: "
        "imagesTs of the data set.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="Folder to write to. Default: predictions/ in the training's folder, or "
        "predictions_validation/ with --validation; --calibrator appends _calibrated, or "
        "_uncalibrated.",
    ),
]


def predict(
    config: Config,
    settings: SetOptions = None,
    images: Images = None,
    validation: Annotated[
        bool,
        typer.Option("--validation", help="Predict the validation cases of the experiment."),
    ] = False,
    listed: Annotated[
        Path | None,
        typer.Option(
            "--cases",
            help="Text file with the names of the cases to predict, one per line; default: all.",
        ),
    ] = None,
    output: Output = None,
    checkpoint: Annotated[
        Checkpoint, typer.Option(help="Which checkpoint of the training predicts.")
    ] = Checkpoint.best,
    form: Annotated[
        Form,
        typer.Option(
            "--format",
            help="npz: CASE.npz in nnU-Net's form, and the label map CASE.nii.gz (CASE.png for "
            "pictures). nifti: CASE.nii.gz, 4-D, class last.",
        ),
    ] = Form.npz,
    calibrator: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|none",
            help="calibrator.json that segcal calibrate fit made from validation predictions of "
            "this training. The probabilities that are written are then calibrated. 'none' does "
            "not calibrate. Default: the training's, if there is one that fits; with --validation "
            "none.",
            show_default=False,
        ),
    ] = None,
    any_model: Annotated[
        bool,
        typer.Option("--any-model", help="Accept a calibrator that was fitted to another network."),
    ] = False,
) -> None:
    """Write the probabilities of a trained network, on the grid of each image.

    Examples: segcal predict my.yaml -i imagesTs -o predictions

    segcal predict my.yaml --set recipe=nacl_published --validation

    segcal predict my.yaml -i imagesTs -o calibrated --calibrator calibrator.json

    Give the same file and --set as in training (or config.yaml from the training's folder): they
    tell where the training is. Windows of data.size overlap by inference.overlap, and their
    probabilities are averaged in float32. Probabilities of a volume that was resampled for the
    network are brought back to the image's own grid. Then: segcal evaluate predictions labelsTs
    -o report

    A calibrator.json in the training's folder, which segcal train --calibrate writes, calibrates
    the probabilities. To make one of another method, predict with --validation, then run segcal
    calibrate fit FOLDER labelsTr -o calibrator.json. It is refused for any network but the one that
    made those predictions.
    """
    with user_errors(OPTIONS):
        from segcal.adapters.monai.calibration import VALIDATION, find_calibrator
        from segcal.adapters.monai.experiment import load_experiment
        from segcal.adapters.monai.inference import Predictor, check_output, predict_cases
        from segcal.io.files import read_names
        from segcal.repair.saved import NO_CALIBRATOR

        if images is not None and validation:
            raise ValueError("--input and --validation: give only one of the two")
        experiment = load_experiment(config, settings or [])
        predictor = Predictor(experiment, checkpoint.value)
        names = () if listed is None else read_names(listed)
        cases = predictor.cases(images, validation=validation, names=names)
        asked = None if calibrator in (None, NO_CALIBRATOR) else Path(str(calibrator))
        name = VALIDATION if validation else "predictions"
        name += "_calibrated" if asked else "_uncalibrated" if calibrator else ""
        folder = output or experiment.folder / name
        check_output(folder, experiment.data, cases)
        saved = None
        if asked or (calibrator is None and not validation):
            saved = find_calibrator(predictor, cases, asked, any_model=any_model, say=typer.echo)
        with progress_bar("Predicting", len(cases)) as advance:
            predict_cases(predictor, cases, folder, form.value, calibrator=saved, progress=advance)
    typer.echo(f"Written: {folder}")
