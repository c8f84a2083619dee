"""What a trained network sees in samples before its last layer, for heads to be trained on.

A frozen network says the same of a sample in every epoch. So it is asked once: the features become
an archive, and trainings on it are those of a linear layer (or of a few), seconds long.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from segcal.classify.building import build_network, has_weights, last_layer
from segcal.classify.data import Parted, load
from segcal.classify.experiment import ClassificationExperiment
from segcal.classify.networks import Standardised
from segcal.classify.prediction import predict
from segcal.classify.readers.samples import PARTS, Samples
from segcal.classify.streaming import decoders
from segcal.classify.training import ClassificationRun
from segcal.training.checkpoints import read_checkpoint
from segcal.training.devices import choose_device

__all__ = ["extract_features"]


def extract_features(
    experiment: ClassificationExperiment, *, checkpoint: Path | None = None
) -> Samples:
    """Features of all samples of an experiment, parted as it parts them.

    Args:
        experiment: whose samples, as they are evaluated (no ``augment``), and whose network.
        checkpoint: of a training of that network by segcal, on whatever classes; None takes the
            weights that the experiment names (``weights`` of torchvision's networks, ``pretrained``
            of timm's).

    Returns:
        features ``(N, F)`` with targets, names and parts.

    Raises:
        ValueError: no weights, or those of another network.
    """
    if checkpoint is None and not has_weights(experiment):
        raise ValueError(
            "network: has random weights, in whose features there is nothing to learn from; name "
            "some (network.args.pretrained=true of timm, network.args.weights=DEFAULT of "
            "torchvision), or a checkpoint"
        )
    device = choose_device(experiment.training.device)
    data = load(experiment.data)
    torch.manual_seed(experiment.training.seed)
    network = build_network(experiment, data, pretrained=checkpoint is None)
    _behead(network, checkpoint)
    network.to(device)
    workers = decoders(experiment.training.workers)
    found = {name: predict(network, data.parts[name].to(device, workers)) for name in PARTS}
    return _samples(data, {name: values.cpu().flatten(1).numpy() for name, values in found.items()})


def _behead(network: Standardised, checkpoint: Path | None) -> None:
    """Take the last layer away, and fill what is before it from a checkpoint."""
    name, _ = last_layer(network)
    network.set_submodule(name, nn.Identity())
    if checkpoint is None:
        return
    given = read_checkpoint(checkpoint, ClassificationRun.keys)["network"]
    above = {key: value for key, value in given.items() if key.rpartition(".")[0] != name}
    try:
        network.load_state_dict(above)
    except RuntimeError as error:
        raise ValueError(
            f"{checkpoint}: is not of this network, its last layer apart ({error})"
        ) from None


def _samples(data: Parted, features: dict[str, NDArray[np.float32]]) -> Samples:
    targets = np.concatenate([data.parts[name].targets.numpy() for name in PARTS])
    parts = np.repeat(np.arange(len(PARTS)), [len(data.parts[name]) for name in PARTS])
    return Samples(
        inputs=np.concatenate([features[name] for name in PARTS]),
        targets=targets.astype(np.int8) if data.multilabel else targets,
        names=data.names,
        parts=parts,
    ).check("features")
