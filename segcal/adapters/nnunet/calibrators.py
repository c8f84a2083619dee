"""Which calibrator a prediction is made with, and whether it is one of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from segcal.adapters.nnunet.patching import Aggregation, RefusedError
from segcal.io.label_sets import read_label_set
from segcal.io.pairing import find_record
from segcal.repair.saved import CALIBRATOR_NAME, SavedCalibrator, read_calibrator

OF_MODEL = "model"
"""What is said for the calibrator that lies beside the model."""


def find_calibrator(
    aggregation: Aggregation, model: Path, record: Mapping[str, Any], channels: int
) -> SavedCalibrator | None:
    """Find the calibrator that is asked for, and check that it is one of the model.

    Args:
        aggregation: what is asked for.
        model: folder of the trained model.
        record: of the predictions that are to be made.
        channels: of the network.

    Returns:
        None where none is asked for; one that lies beside the model is then mentioned.

    Raises:
        ValueError: a file that cannot be read, or was fitted to another model or kind of mean.
    """
    folds, asked = record["folds"], aggregation.calibrator
    beside = beside_model(model, folds)
    if asked is None:
        if beside is not None:
            print(f"There is {beside}, which is not applied; --calibrator {OF_MODEL} would")
        return None
    if asked == OF_MODEL and beside is None:
        raise ValueError(
            f"{model}: holds no {CALIBRATOR_NAME}; segcal calibrate fit {model} LABELS -o "
            f"{model / CALIBRATOR_NAME} writes one"
        )
    path = beside if asked == OF_MODEL and beside is not None else Path(asked)
    saved = read_calibrator(path)
    saved.check_labels(read_label_set(model / "dataset.json"), channels, str(model))
    _check_alone(path, saved, channels)
    if not aggregation.any_model:
        for text in _check_model(path, saved, model, record):
            print(f"WARNING: {text}")
    if aggregation.per_fold and saved.of_mean:
        raise ValueError(
            f"{path}: was fitted to the mean of {saved.members} networks, which no fold alone is; "
            "leave out --per-fold, or fit one to single folds"
        )
    how = f"the mean of {len(folds)} folds" if saved.of_mean else "each fold"
    print(f"Calibrated by {path} ({saved.method}): {how if len(folds) > 1 else folds[0]}")
    return saved


def beside_model(model: Path, folds: Sequence[str]) -> Path | None:
    """The calibrator in the folder of a model, or of the only fold that predicts."""
    places = [model, *([model / folds[0]] if len(folds) == 1 else [])]
    return next((p / CALIBRATOR_NAME for p in places if (p / CALIBRATOR_NAME).is_file()), None)


def _check_alone(path: Path, saved: SavedCalibrator, channels: int) -> None:
    """Check that it takes logits of a volume, and nothing else."""
    try:
        saved.calibrator.apply(torch.zeros(1, channels, 2, 2, 2), spacing_mm=(1.0, 1.0, 1.0))
    except ValueError as error:
        raise ValueError(f"{path}: does not calibrate logits of volumes alone ({error})") from None


def _check_model(
    path: Path, saved: SavedCalibrator, model: Path, record: Mapping[str, Any]
) -> list[str]:
    here = len(record["folds"])
    if saved.of_mean and saved.members != here:
        raise ValueError(
            f"{path}: was fitted to the mean of {saved.members} networks, here are {here} folds "
            "(-f); predict with as many, fit one to single folds, which then calibrates each fold "
            "before they are averaged, or say --any-model"
        )
    seen = record if saved.of_mean else {**record, "members": 1}
    warnings = saved.check_model(seen, str(model))
    if not saved.members and here > 1:
        warnings.append(
            f"{path}: does not say of how many networks the predictions were that it was fitted "
            "to; it is applied to each fold, as if of one"
        )
    return warnings


def check_continued(output: Path, saved: SavedCalibrator | None) -> None:
    """Check that predictions are gone on with that were calibrated alike.

    Raises:
        RefusedError: they were calibrated by another, or by none.
    """
    record = find_record(output)
    before = record.get("calibrator")
    now = None if saved is None else json.loads(json.dumps(saved.summary(), default=str))
    if not record or before == now:
        return
    was, asked = (
        "without --calibrator" if one is None else f"with --calibrator ({_shown(one)})"
        for one in (before, now)
    )
    raise RefusedError(
        f"{output}: was predicted {was}, not {asked}; go on with that, or predict into another "
        "folder"
    )


def _shown(summary: Mapping[str, Any]) -> str:
    return f"{summary['method']}, fitted to {summary['cases']} cases of {summary['fitted_on']}"


def for_trainer(saved: SavedCalibrator, trainer: str) -> SavedCalibrator:
    """The same for a copy of the model that names another trainer, without paths of the fit."""
    model = {**saved.model, "trainer": trainer} if saved.model else {}
    fitted_on = {
        key: Path(value).name if key in ("predictions", "references") else value
        for key, value in saved.fitted_on.items()
    }
    return replace(saved, model=model, fitted_on=fitted_on)
