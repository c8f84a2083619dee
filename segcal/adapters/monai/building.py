"""Building and checking the network of an experiment, and how validation calls it."""

from __future__ import annotations

import copy

import torch
from monai.inferers import Inferer, SimpleInferer, SlidingWindowInferer
from torch import Tensor, nn

from segcal.adapters.monai.experiment import SegmentationExperiment, VolumeData
from segcal.training.building import build_part

PRETRAINED = "pretrained"
"""Argument of networks that can start from pretrained weights."""


def build_network(
    experiment: SegmentationExperiment, channels: int, outputs: int, *, fresh: bool = True
) -> nn.Module:
    """Build the network of an experiment.

    Args:
        experiment: names it.
        channels: of the images.
        outputs: channels of the logits, which is the number of classes times the heads of the
            recipe.
        fresh: False leaves out pretrained weights, which a checkpoint is about to replace.

    Raises:
        ValueError: not a network, or arguments that do not fit.
    """
    component = experiment.network
    if not fresh and component.args.get(PRETRAINED):
        component = component.model_copy(update={"args": {**component.args, PRETRAINED: False}})
    return build_part(
        component,
        nn.Module,
        "network",
        spatial_dims=experiment.data.axes,
        in_channels=channels,
        out_channels=outputs,
    )


@torch.no_grad()
def check_network(
    network: nn.Module,
    data: VolumeData,
    channels: int,
    outputs: int,
    device: torch.device,
    samples: int = 1,
) -> None:
    """Check that logits have the image's size, with images of zeros, in training and evaluation.

    Args:
        network: to check.
        data: what it is trained on.
        channels: of the images.
        outputs: channels of the logits.
        device: of the network.
        samples: of a batch.

    Raises:
        ValueError: the network fails, or its logits have another shape.
    """
    images = torch.zeros(samples, channels, *data.size, device=device)
    expected = (samples, outputs, *data.size)
    for training in (False, True):
        trial = copy.deepcopy(network).train(training)  # batch norm keeps what it sees
        try:
            output = trial(images)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"network: fails on images {tuple(images.shape)} ({error}); check that data.size "
                "is divisible by the network's strides, and that training.batch_size leaves no "
                "last batch of one sample"
            ) from None
        shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        if shape != expected:
            raise ValueError(
                f"network: expected logits {expected} for images {tuple(images.shape)}, got "
                f"{shape}; switch deep supervision off, and choose a data.size that is "
                "divisible by the strides"
            )


def window_inferer(experiment: SegmentationExperiment) -> Inferer:
    """How validation calls the network: on the crop used in training, or window by window."""
    if experiment.data.crop == "center":
        return SimpleInferer()
    return SlidingWindowInferer(
        experiment.data.size,
        experiment.training.val_batch_size,
        experiment.inference.overlap,
        experiment.inference.blend,
    )
