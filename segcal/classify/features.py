"""Features of a trained network before its last layer, for training a new last layer.

A frozen network gives the same features of a sample in every epoch, so they are computed once and
stored in an archive. Training one or a few linear layers on the archive then takes seconds.
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
    """Features of all samples of an experiment, with its split into parts.

    Args:
        experiment: gives the samples, as they are evaluated (without `augment`), and the network.
        checkpoint: of a training of the same network by segcal, on any classes; None takes the
            weights that the experiment names (``weights`` for torchvision's networks,
            ``pretrained`` for timm's).

    Returns:
        features ``(N, F)`` with targets, names and parts.

    Raises:
        ValueError: no weights, or weights of another network.
    """
    if checkpoint is None and not has_weights(experiment):
        raise ValueError(
            "network: has random weights, whose features are useless; name trained weights "
            "(network.args.pretrained=true for timm, network.args.weights=DEFAULT for "
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
    """Remove the last layer, and fill the layers before it from a checkpoint."""
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
            f"{checkpoint}: does not fit this network, even without the last layer ({error})"
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
