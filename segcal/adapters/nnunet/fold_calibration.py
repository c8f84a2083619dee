"""Fitting a calibrator at the end of a fold's training, to cases that were not trained on."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from nnunetv2.utilities.label_handling.label_handling import convert_labelmap_to_one_hot

from segcal.adapters.nnunet.exporting import export
from segcal.adapters.nnunet.final_validation import predictor_of
from segcal.adapters.nnunet.patching import RefusedError
from segcal.adapters.nnunet.prediction import digest_of
from segcal.adapters.nnunet.sources import calibration_cases_of
from segcal.repair.saved import CALIBRATOR_NAME, SavedCalibrator, write_calibrator

CALIBRATION = "calibration"
"""Folder of a fold for predictions of the cases under "calib"."""


def fit_after_validation(
    trainer: Any, method: str, *, patients: str | None = None, required: bool = True
) -> None:
    """Let nnU-Net's trainer keep the probabilities of its validation, then fit a calibrator.

    It is fitted to the cases that ``splits_final.json`` lists under "calib", which are then
    predicted as well, or else to the validation cases. It is written into the fold's folder.

    Args:
        trainer: nnU-Net's, not yet trained.
        method: name of a post-hoc config.
        patients: regular expression that finds the patient in the name of a case; None counts every
            case as a patient.
        required: raise the error of a fit that fails; False writes it into the log and keeps the
            training without a calibrator.

    Raises:
        RefusedError: the expression does not find a patient in the name of every case.
    """
    if patients is not None:
        _know_patients(trainer, patients)
    validate = trainer.perform_actual_validation

    def perform_actual_validation(save_probabilities: bool = False) -> None:
        validate(True)
        if trainer.local_rank:
            return
        try:
            fit_fold(trainer, method, patients)
        except ValueError as error:
            if required:
                raise
            trainer.print_to_log_file(f"WARNING: segcal: no calibrator was fitted: {error}")

    trainer.perform_actual_validation = perform_actual_validation


def _know_patients(trainer: Any, pattern: str) -> None:
    """Check the names of all cases now, and later whether the split keeps patients apart."""
    from segcal.repair.fitting import owners

    ending = trainer.dataset_json["file_ending"]
    names = sorted(path.name for path in _references(trainer).glob(f"*{ending}"))
    try:
        owners([name.removesuffix(ending) for name in names], pattern)
    except ValueError as error:
        raise RefusedError(str(error)) from None
    split = trainer.do_split
    told: set[str] = set()

    def do_split() -> tuple[list[str], list[str]]:
        train, val = split()
        held_out = calibration_cases_of(trainer, train, val) or val
        both = sorted({*owners(train, pattern)} & {*owners(held_out, pattern)} - told)
        if both and trainer.fold != "all":
            told.update(both)
            trainer.print_to_log_file(
                f"WARNING: segcal: {', '.join(both[:3])}{', ...' if both[3:] else ''}: the fold "
                "trains on cases of these patients and holds out others, so validation and the "
                "calibrator will look too good; divide by patient in splits_final.json"
            )
        return train, val

    trainer.do_split = do_split


def fit_fold(trainer: Any, method: str, patients: str | None = None) -> SavedCalibrator:
    """Fit a calibrator to the held-out cases of a fold, and write it into its folder.

    Args:
        trainer: nnU-Net's, trained and validated.
        method: name of a post-hoc config.
        patients: see :func:`fit_after_validation`.
    """
    from segcal.repair.fitting import fit_calibrator  # late: most trainings fit none

    fold = Path(trainer.output_folder)
    cases = calibration_cases_of(trainer, *trainer.do_split())
    if cases:
        predict_cases(trainer, cases, fold / CALIBRATION)
    predictions = fold / (CALIBRATION if cases else "validation")
    references = _references(trainer)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        saved = fit_calibrator(predictions, references, method=method, patients=patients)
    network = trainer.network.module if trainer.is_ddp else trainer.network
    # so that a fold that is trained again does not take the calibrator of the one before
    model = {**saved.model, "weights": {fold.name: digest_of(network)}}
    saved = replace(saved, model=model)
    for text in sorted({str(warning.message) for warning in noted}):
        trainer.print_to_log_file(f"WARNING: segcal: {text}")
    write_calibrator(fold / CALIBRATOR_NAME, saved)
    facts = saved.calibrator.facts
    trainer.print_to_log_file(
        f'segcal: {method} fitted to {facts["cases"]} cases of "{"calib" if cases else "val"}", '
        f"NLL {facts['nll_before']:.4f} -> {facts['nll_after']:.4f}, written to "
        f"{fold / CALIBRATOR_NAME}, which segcal nnunet predict -f {fold.name[5:]} applies"
    )
    if not cases:
        trainer.print_to_log_file(
            "segcal: calibration on the validation cases now looks too good; list cases under "
            '"calib" in splits_final.json to calibrate on those'
        )
    if len(list(fold.parent.glob("fold_[0-9]*/validation/*.npz"))) > len(
        list(fold.glob("validation/*.npz"))
    ):
        trainer.print_to_log_file(
            "segcal: for a calibrator of all folds together: segcal calibrate fit "
            f"{fold.parent} {references} -o {fold.parent / CALIBRATOR_NAME}"
        )
    return saved


def _references(trainer: Any) -> Path:
    """Folder of the label maps of all cases."""
    return Path(trainer.preprocessed_dataset_folder_base) / "gt_segmentations"


def predict_cases(trainer: Any, cases: list[str], folder: Path) -> None:
    """Predict preprocessed cases with the network of a trainer, and keep their logits.

    With two heads these are the logits of the probability head.

    Args:
        trainer: nnU-Net's.
        cases: their names.
        folder: for the predictions; its previous content is removed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    predictor = predictor_of(trainer)
    predictor.describe(folder)
    dataset = trainer.dataset_class(
        trainer.preprocessed_dataset_folder,
        cases,
        folder_with_segs_from_previous_stage=trainer.folder_with_segs_from_previous_stage,
    )
    trainer.set_deep_supervision_enabled(False)
    for case in cases:
        trainer.print_to_log_file(f"predicting {case}")
        data, _, before, properties = dataset.load_case(case)
        image = data[:]
        if trainer.is_cascaded:
            one_hot = convert_labelmap_to_one_hot(
                before[:], trainer.label_manager.foreground_labels, output_dtype=image.dtype
            )
            image = np.vstack((image, one_hot))
        logits = predictor.predict_sliding_window_return_logits(torch.tensor(image)).cpu()
        export(
            logits, properties, trainer.configuration_manager, trainer.plans_manager,
            trainer.dataset_json, str(folder / case), True, save_logits=True,
        )  # fmt: skip
    trainer.set_deep_supervision_enabled(True)
