"""Choosing the calibrator of a prediction, and checking that it belongs to the model."""

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
from segcal.repair.saved import CALIBRATOR_NAME, NO_CALIBRATOR, SavedCalibrator, read_calibrator

OF_MODEL = "model"
"""Value of --calibrator that means the calibrator in the folder of the model."""


def find_calibrator(
    aggregation: Aggregation, model: Path, record: Mapping[str, Any], channels: int
) -> SavedCalibrator | None:
    """Find the calibrator of a prediction, check that it belongs to the model, and print which.

    Args:
        aggregation: names the calibrator, or leaves it to the folder of the model.
        model: folder of the trained model.
        record: of the predictions that are to be made.
        channels: of the network.

    Returns:
        None if none is to be applied, or if the one in the folder of the model, which nobody asked
        for, does not fit these predictions; that is then printed.

    Raises:
        ValueError: a file that cannot be read; a calibrator that was asked for and was fitted to
            another model or another number of networks.
    """
    folds, asked = record["folds"], aggregation.calibrator
    if asked == NO_CALIBRATOR:
        return None
    path = beside_model(model, folds) if asked in (None, OF_MODEL) else Path(str(asked))
    if path is None and asked is None:
        _say_of_folds(model, folds)
        return None
    if path is None:
        raise ValueError(
            f"{model}: holds no {CALIBRATOR_NAME}; segcal calibrate fit {model} LABELS -o "
            f"{model / CALIBRATOR_NAME} writes one"
        )
    saved = read_calibrator(path)
    try:
        _check(path, saved, aggregation, model, record, channels)
    except ValueError as error:
        if asked is not None:
            raise
        print(f"WARNING: {path} is not applied: {error}")
        return None
    how = f"the mean of {len(folds)} folds" if saved.of_mean else "each fold"
    print(
        f"Calibrated by {path} ({saved.method}): {how if len(folds) > 1 else folds[0]}"
        + ("" if asked else f"; --calibrator {NO_CALIBRATOR} would leave it out")
    )
    return saved


def _say_of_folds(model: Path, folds: Sequence[str]) -> None:
    """Say what would calibrate several folds, of which each has a calibrator of its own."""
    own = [fold for fold in folds if (model / fold / CALIBRATOR_NAME).is_file()]
    if own:
        print(
            f"Not calibrated: there are calibrators of single folds ({', '.join(own)}), but none "
            f"of all that predict here; segcal calibrate fit {model} LABELS -o "
            f"{model / CALIBRATOR_NAME} fits one to the validation of all folds"
        )


def _check(
    path: Path,
    saved: SavedCalibrator,
    aggregation: Aggregation,
    model: Path,
    record: Mapping[str, Any],
    channels: int,
) -> None:
    """Raise ValueError unless a calibrator fits a prediction; print what differs a little."""
    saved.check_labels(read_label_set(model / "dataset.json"), channels, str(model))
    _check_alone(path, saved, channels)
    if not aggregation.any_model:
        for text in _check_model(path, saved, model, record):
            print(f"WARNING: {text}")
    if aggregation.per_fold and saved.of_mean:
        raise ValueError(
            f"{path}: was fitted to the mean of {saved.members} networks, which does not fit a "
            "single fold; leave out --per-fold, or fit a calibrator to single folds"
        )


def beside_model(model: Path, folds: Sequence[str]) -> Path | None:
    """The calibrator in the folder of a model, or of the only fold that predicts."""
    places = [model, *([model / folds[0]] if len(folds) == 1 else [])]
    return next((p / CALIBRATOR_NAME for p in places if (p / CALIBRATOR_NAME).is_file()), None)


def _check_alone(path: Path, saved: SavedCalibrator, channels: int) -> None:
    """Check that a calibrator needs nothing but the logits of a volume."""
    try:
        saved.calibrator.apply(torch.zeros(1, channels, 2, 2, 2), spacing_mm=(1.0, 1.0, 1.0))
    except ValueError as error:
        raise ValueError(f"{path}: needs more than the logits of a volume ({error})") from None


def _check_model(
    path: Path, saved: SavedCalibrator, model: Path, record: Mapping[str, Any]
) -> list[str]:
    here = len(record["folds"])
    if saved.of_mean and saved.members != here:
        raise ValueError(
            f"{path}: was fitted to the mean of {saved.members} networks, but {here} predict "
            "here (-f); predict with as many, or fit a calibrator to single folds, which then "
            "calibrates each fold before they are averaged, or add --any-model"
        )
    seen = record if saved.of_mean else {**record, "members": 1}
    warnings = saved.check_model(seen, str(model))
    if not saved.members and here > 1:
        warnings.append(
            f"{path}: does not say how many networks made the predictions that it was fitted "
            "to; it is applied to each fold, as if it had been one"
        )
    return warnings


def check_continued(output: Path, saved: SavedCalibrator | None) -> None:
    """Check that predictions in `output`, which are continued, have the same calibrator.

    Raises:
        RefusedError: they were calibrated by another calibrator, or by none.
    """
    record = find_record(output)
    before = record.get("calibrator")
    now = None if saved is None else json.loads(json.dumps(saved.summary(), default=str))
    if not record or before == now:
        return
    was, would = (
        "without a calibrator" if one is None else f"with a calibrator ({_shown(one)})"
        for one in (before, now)
    )
    raise RefusedError(
        f"{output}: was predicted {was}, not {would}; continue in the same way (--calibrator), or "
        "predict into another folder"
    )


def _shown(summary: Mapping[str, Any]) -> str:
    return f"{summary['method']}, fitted to {summary['cases']} cases of {summary['fitted_on']}"


def for_trainer(saved: SavedCalibrator, trainer: str) -> SavedCalibrator:
    """The calibrator for a copy of the model that names another trainer, without private paths."""
    model = {**saved.model, "trainer": trainer} if saved.model else {}
    model.pop("weights", None)  # of two heads only one is copied
    fitted_on = {
        key: Path(value).name if key in ("predictions", "references") else value
        for key, value in saved.fitted_on.items()
    }
    return replace(saved, model=model, fitted_on=fitted_on)
