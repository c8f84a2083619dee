"""Calibrators of a finished training: fitting to its validation cases, and use in predictions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from segcal.adapters.monai.dataset import CaseFiles
from segcal.adapters.monai.experiment import SegmentationExperiment
from segcal.adapters.monai.inference import Predictor, check_output, predict_cases
from segcal.repair.fitting import fit_calibrator
from segcal.repair.saved import (
    CALIBRATOR_NAME,
    SavedCalibrator,
    read_calibrator,
    write_calibrator,
)

__all__ = ["VALIDATION", "calibrate_training", "find_calibrator", "validation_cases"]

VALIDATION = "predictions_validation"
"""Folder, in that of the training, for predictions of the validation cases."""


def validation_cases(experiment: SegmentationExperiment) -> tuple[Predictor, list[CaseFiles]]:
    """The best network of a finished training, and the cases that it was validated on.

    Raises:
        ValueError: no training, or a training of something else.
    """
    predictor = Predictor(experiment, "best")
    return predictor, predictor.cases(None, validation=True)


def calibrate_training(
    predictor: Predictor,
    cases: list[CaseFiles],
    method: str,
    *,
    progress: Callable[[str], None] = lambda name: None,
) -> SavedCalibrator:
    """Predict validation cases, fit a calibrator to them, and write it into the training's folder.

    Cases of a patient stay together in cross-validation if ``data.split.patient`` tells which they
    are; without it every case counts as a patient. The predictions stay in
    ``predictions_validation/``, where other methods can be compared on them.

    Args:
        predictor: the best network of the training.
        cases: its validation cases, with their label maps in one folder.
        method: name of a post-hoc config.
        progress: called with the name of every case that was predicted.

    Raises:
        ValueError: the cases do not suffice for the method, or a file cannot be read or written.
    """
    training = predictor.experiment.folder
    folder = training / VALIDATION
    check_output(folder, predictor.experiment.data, cases)
    predict_cases(predictor, cases, folder, "npz", progress=progress)
    labels = next(case.label.parent for case in cases if case.label is not None)
    patient = predictor.experiment.data.split.patient
    whole = None if patient is None else f"^({patient})"  # as a split reads it
    saved = fit_calibrator(folder, labels, method=method, patients=whole)
    write_calibrator(training / CALIBRATOR_NAME, saved)
    return saved


def find_calibrator(
    predictor: Predictor,
    cases: Sequence[CaseFiles],
    asked: Path | None,
    *,
    any_model: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> SavedCalibrator | None:
    """Find the calibrator of a prediction, and check that it belongs to the network.

    Args:
        predictor: what predicts.
        cases: what is predicted.
        asked: file of a calibrator; None takes the one in the training's folder if it fits.
        any_model: whether a calibrator that was fitted to another network is accepted.
        say: called with sentences for the user.

    Returns:
        None if there is none, or if the one in the training's folder does not fit.

    Raises:
        ValueError: a file that cannot be read; a calibrator that was asked for and does not fit.
    """
    path = asked or predictor.experiment.folder / CALIBRATOR_NAME
    if asked is None and not path.is_file():
        return None
    saved = read_calibrator(path)
    try:
        notes = predictor.check_calibrator(saved, cases, any_model=any_model)
    except ValueError as error:
        if asked is not None:
            raise
        say(f"WARNING: {path} is not applied: {error}")
        return None
    for note in notes:
        say(note)
    say(f"Calibrated by {path} ({saved.method})")
    return saved
