"""Evaluating a trained classifier on samples that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from segcal.classify.building import build_network, build_objective, recipe_of
from segcal.classify.calibration import (
    calibrated,
    calibrated_log_odds,
    fit_classifier,
    kind_of,
    sentences,
)
from segcal.classify.data import Part, Parted, check_data, load
from segcal.classify.experiment import ClassificationExperiment
from segcal.classify.measures import Measured, measure, measure_classes, measure_labels
from segcal.classify.prediction import label_loss, log_odds_by_kind, predict, probabilities
from segcal.classify.readers.samples import PARTS
from segcal.classify.streaming import decoders
from segcal.classify.training import ClassificationRun
from segcal.io.files import whole_file
from segcal.io.yaml import validated
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.recipes import names
from segcal.repair.saved import SavedCalibrator
from segcal.training.checkpoints import BEST_NAME, read_checkpoint, weights_digest
from segcal.training.devices import choose_device
from segcal.training.experiments import put


@dataclass(frozen=True)
class Evaluated:
    """Outputs of a classifier for a part of the samples, and their evaluation.

    Attributes:
        folder: of the training.
        experiment: what was trained.
        epoch: after which the checkpoint was written, counted from 0.
        data: the samples.
        part_name: ``test``, ``validation`` or ``train``.
        part: the evaluated samples.
        logits: ``(N, K)``.
        loss: multi-label loss; None for classes.
        outcomes: results by the kind of probabilities.
        calibrator: fitted to the validation samples, which gives the last kind; None without.
    """

    folder: Path
    experiment: ClassificationExperiment
    epoch: int
    data: Parted
    part_name: str
    part: Part
    logits: Tensor
    loss: MultiLabelLoss | None
    outcomes: dict[str, Measured]
    calibrator: SavedCalibrator | None = None

    def notes(self) -> list[str]:
        """Sentences that a reader of the numbers should know."""
        found = [] if self.calibrator is None else sentences(self.calibrator)
        if self.loss is not None and self.loss.no_posterior:
            found.append(
                f"{self.experiment.recipe} has no posterior ({self.loss.no_posterior}): "
                "calibration of its sigmoid is shown for comparison only"
                + (
                    "; --calibrate fits probabilities to the validation samples."
                    if self.calibrator is None
                    else "."
                )
            )
        if self.loss is None and recipe_of(self.experiment, self.data).multilabel:
            found.append(
                f"{self.experiment.recipe} is a multi-label loss, used for classes: it ranks them, "
                "and the softmax of its scores is shown for comparison"
                + (
                    "; --calibrate fits probabilities to the validation samples."
                    if self.calibrator is None
                    else "."
                )
            )
        return found

    def log_odds(self) -> Tensor:
        """Log-odds ``(N, T)`` of the best available probabilities of labels.

        Raises:
            ValueError: samples have classes here, not labels.
        """
        if self.loss is None:
            raise ValueError("log_odds: needs labels, but samples have classes here")
        if self.calibrator is not None:
            probs = calibrated(self.logits, self.loss, self.calibrator.calibrator)
            return calibrated_log_odds(probs)
        return list(log_odds_by_kind(self.logits, self.loss).values())[-1]

    def save(self, path: Path) -> None:
        """Write logits, probabilities of every kind, targets and numbers of the samples."""
        kinds = probabilities(self.logits, self.loss)
        if self.calibrator is not None:
            kinds["calibrated"] = calibrated(self.logits, self.loss, self.calibrator.calibrator)
        arrays: dict[str, Any] = {
            "logits": self.logits.numpy(),
            "targets": self.part.targets.numpy(),
            "index": self.part.index.numpy(),
            "names": np.array(self.data.names),
            **{f"probabilities_{kind}": p.numpy().astype(np.float32) for kind, p in kinds.items()},
        }
        with whole_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(file, **arrays)


def evaluate_classifier(
    folder: Path,
    *,
    part: str = "test",
    checkpoint: str = BEST_NAME,
    device: str = "auto",
    settings: Sequence[str] = (),
    calibrate: str | None = None,
    bins: int | None = None,
) -> Evaluated:
    """Evaluate a classifier.

    Args:
        folder: of its training.
        part: ``test``, ``validation`` or ``train``.
        checkpoint: name of the file.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:0``.
        settings: ``data.args.path=FILE`` and others of ``data.args``, if data have been moved.
        calibrate: name of a post-hoc method, such as ``temperature``, to fit to the logits of the
            validation samples; probabilities of the part are then shown without and with
            calibration.
        bins: number of bins of calibration errors and diagrams; None takes the experiment's.

    Raises:
        ValueError: no such part, checkpoint, device or method; other settings; data that have
            changed; calibration of the same validation samples that it is fitted to.
    """
    _check_calibrate(calibrate, part)
    if part not in PARTS:
        raise ValueError(f"part: expected one of {', '.join(PARTS)}, got {part!r}")
    place, file = choose_device(device), folder / checkpoint
    content = read_checkpoint(file, ClassificationRun.keys)
    given = dict(content["experiment"])
    for setting in settings:
        if not setting.startswith("data.args."):
            raise ValueError(f"setting {setting!r}: only data.args may be changed after a training")
        put(given, setting)
    experiment = validated(given, ClassificationExperiment, str(file))
    data = load(experiment.data)
    check_data(content, data, file)
    network = build_network(experiment, data, pretrained=False)
    objective = build_objective(experiment, data)
    network.load_state_dict(content["network"])
    objective.load_state_dict(content["objective"])
    chosen, loss = data.parts[part], label_loss(objective)
    workers = decoders(experiment.training.workers)
    logits = predict(network.to(place), chosen.to(place, workers)).cpu()
    bins = experiment.bins if bins is None else bins
    outcomes = measure(logits, chosen.targets, data.names, loss, full=True, bins=bins)
    epoch, saved = int(content["epoch"]) - 1, None
    if calibrate is not None:
        held_out = data.parts["validation"]
        saved = fit_classifier(
            calibrate,
            predict(network, held_out.to(place, workers)).cpu(),
            held_out.targets,
            data.names,
            loss,
            model={
                "trainer": Path(experiment.recipe).stem,
                "checkpoint": checkpoint,
                "weights": weights_digest(content["network"]),
                "members": 1,
            },
            fitted_on={"predictions": f"validation samples of {experiment.data.source}"},
        )
        outcomes[kind_of(saved)] = _measure_calibrated(saved, logits, chosen, loss, bins)
    return Evaluated(folder, experiment, epoch, data, part, chosen, logits, loss, outcomes, saved)


def _check_calibrate(method: str | None, part: str) -> None:
    if method is None:
        return
    if method not in names("posthoc"):
        raise ValueError(f"method: expected one of {', '.join(names('posthoc'))}, got {method!r}")
    if part == "validation":
        raise ValueError(
            "calibrate: is fitted to the validation samples, so they cannot show its quality; "
            "evaluate the test part"
        )


def _measure_calibrated(
    saved: SavedCalibrator,
    logits: Tensor,
    part: Part,
    loss: MultiLabelLoss | None,
    bins: int | None,
) -> Measured:
    """Results of the calibrated probabilities of logits ``(N, K)``."""
    probs = calibrated(logits, loss, saved.calibrator)
    if loss is None:
        return measure_classes(probs, part.targets, saved.channels, full=True, bins=bins)
    log_odds = calibrated_log_odds(probs)
    return measure_labels(log_odds, part.targets, saved.channels, full=True, bins=bins)
