"""A trained classifier on samples that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from segcal.classify.building import build_network, build_objective
from segcal.classify.data import Part, Parted, check_data, load
from segcal.classify.experiment import ClassificationExperiment
from segcal.classify.measures import Measured, measure
from segcal.classify.prediction import label_loss, predict, probabilities
from segcal.classify.readers.samples import PARTS
from segcal.classify.training import ClassificationRun
from segcal.io.files import whole_file
from segcal.io.yaml import validated
from segcal.losses.multilabel.posterior import MultiLabelLoss
from segcal.training.checkpoints import BEST_NAME, read_checkpoint
from segcal.training.devices import choose_device
from segcal.training.experiments import put


@dataclass(frozen=True)
class Evaluated:
    """What a classifier says of a part of the samples, and what that is worth.

    Attributes:
        folder: of the training.
        experiment: what was trained.
        epoch: that the checkpoint was written after, from 0.
        data: the samples.
        part_name: ``test``, ``validation`` or ``train``.
        part: the samples of that name, which were evaluated.
        logits: ``(N, K)``.
        loss: of labels; None of classes.
        outcomes: numbers by the kind of probabilities.
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

    def notes(self) -> list[str]:
        """What a reader of the numbers should know."""
        if self.loss is None or not self.loss.no_posterior:
            return []
        return [
            f"No posterior goes with {self.experiment.recipe} ({self.loss.no_posterior}): "
            "calibration of its sigmoid is shown for comparison alone."
        ]

    def save(self, path: Path) -> None:
        """Write logits, probabilities of every kind, targets and numbers of the samples."""
        kinds = {
            f"probabilities_{kind}": p.numpy().astype(np.float32)
            for kind, p in probabilities(self.logits, self.loss).items()
        }
        arrays: dict[str, Any] = {
            "logits": self.logits.numpy(),
            "targets": self.part.targets.numpy(),
            "index": self.part.index.numpy(),
            "names": np.array(self.data.names),
            **kinds,
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
) -> Evaluated:
    """Evaluate a classifier.

    Args:
        folder: of its training.
        part: ``test``, ``validation`` or ``train``.
        checkpoint: name of the file.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:0``.
        settings: ``data.args.path=FILE`` and others of ``data.args``, where data have been moved.

    Raises:
        ValueError: no such part, checkpoint or device; other settings; data that have changed.
    """
    if part not in PARTS:
        raise ValueError(f"part: expected one of {', '.join(PARTS)}, got {part!r}")
    place, file = choose_device(device), folder / checkpoint
    content = read_checkpoint(file, ClassificationRun.keys)
    given = dict(content["experiment"])
    for setting in settings:
        if not setting.startswith("data.args."):
            raise ValueError(f"setting {setting!r}: of a training, only data.args may be said anew")
        put(given, setting)
    experiment = validated(given, ClassificationExperiment, str(file))
    data = load(experiment.data)
    check_data(content, data, file)
    network = build_network(experiment, data, pretrained=False)
    objective = build_objective(experiment, data)
    network.load_state_dict(content["network"])
    objective.load_state_dict(content["objective"])
    chosen, loss = data.parts[part], label_loss(objective)
    logits = predict(network.to(place), chosen.to(place)).cpu()
    outcomes = measure(logits, chosen.targets, data.names, loss, retrieval=True)
    epoch = int(content["epoch"]) - 1
    return Evaluated(folder, experiment, epoch, data, part, chosen, logits, loss, outcomes)
