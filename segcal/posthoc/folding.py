"""Folding a temperature into a network: its last layer is divided by the temperature.

Whatever runs the network then gets calibrated probabilities, and masks stay what they were: the
largest logit of a voxel stays the largest, and a mean of logits (over windows, mirrored images, or
neighbouring voxels in a resampling) is divided by the same number. Only in an ensemble, where every
member has a temperature of its own, a few voxels may change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from segcal.heads import head_layer, last_layer
from segcal.posthoc.temperature import Temperature

__all__ = ["FoldingError", "fitted_temperature", "fold_temperature"]

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class FoldingError(ValueError):
    """The temperature cannot be folded into the network, which is left as it was."""


def fitted_temperature(
    batches: Iterable[tuple[Tensor, Tensor]],
    number: int,
    *,
    ignore_index: int | None = None,
    per_channel: bool = False,
) -> Temperature:
    """Return a temperature fitted to batches of logits, of which a sample of voxels is kept.

    There are no warnings about a doubtful fit, because :func:`fold_temperature` then raises an
    error that says why.

    Args:
        batches: logits ``(N, K, *S)`` and labels ``(N, *S)``, per channel ``(N, K, *S)``.
        number: number of batches.
        ignore_index: label to leave out.
        per_channel: whether every channel is a sigmoid of its own, with a temperature of its own.

    Raises:
        ValueError: as :meth:`segcal.posthoc.calibrator.SampledCalibrator.fit`.
    """
    temperature = Temperature(per_channel=per_channel)
    rows = temperature.collect(batches, ignore_index, among=number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return temperature.fit_rows(rows)


def fold_temperature(
    network: nn.Module,
    temperature: Temperature,
    look: Callable[[], Tensor],
    *,
    num_heads: int = 1,
) -> list[float]:
    """Divide the last layer of a network by a temperature, in place.

    In a network with two heads this is the last layer of the probability head, whose logits are the
    calibrated ones. With deep supervision it is the last layer of the full resolution. The last
    layer is found by :func:`segcal.heads.last_layer`, and `look` proves that it is the right one.

    Args:
        network: returns ``(N, K, *S)``, with two heads ``(N, 2 K, *S)``.
        temperature: temperature fitted to logits of the network; per channel one for each channel.
        look: returns the logits ``(N, K, *S)`` behind the probabilities of some images, of the same
            images at every call.
        num_heads: 2 for a network that was built with ``2 K`` output channels.

    Returns:
        the temperature, or the temperature of each channel.

    Raises:
        FoldingError: the held-out cases do not determine a temperature, or the output of the
            network does not come from one layer alone (a residual unit at its end, say).
        ValueError: the temperature is not fitted yet.
    """
    values = _values(temperature)
    layer, first = _layer(network, temperature.facts["num_classes"], num_heads)
    parameters = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    before = [one.detach().clone() for one in parameters]
    with torch.no_grad():
        seen = look().float()
        divisor = torch.tensor(values, device=seen.device).expand(len(seen[0]))
        expected = seen / divisor.view(-1, *[1] * (seen.ndim - 2))
        for one in parameters:
            channel = 1 if one.ndim > 1 and isinstance(layer, TRANSPOSED) else 0
            rows = one.movedim(channel, 0)[first:]
            rows /= divisor.to(one).view(-1, *[1] * (one.ndim - 1))
        room = 1e-2 * max(float(expected.abs().max()), 1e-6)  # of half precision
        if torch.allclose(look().float(), expected, rtol=0, atol=room):
            return values
        for one, kept in zip(parameters, before, strict=True):
            one.copy_(kept)
    raise FoldingError(
        "the logits of this network do not come from one last layer, so dividing this layer by the "
        "temperature does not divide the logits"
    )


def _values(temperature: Temperature) -> list[float]:
    if not temperature.facts:
        raise ValueError("temperature: not fitted yet; call fit, or from_state")
    of = temperature.channels if temperature.per_channel else [temperature]
    if notes := temperature.facts.get("notes"):
        raise FoldingError("; ".join(notes))
    return [one.value if one.improved else 1.0 for one in of]


def _layer(network: nn.Module, num_classes: int, num_heads: int) -> tuple[nn.Conv2d, int]:
    """The last layer, and the first of its channels that give probabilities."""
    if (heads := head_layer(network)) is not None:
        return cast(nn.Conv2d, heads.probability), 0
    channels = num_heads * num_classes
    name = last_layer(network, channels)
    if not name:
        raise FoldingError(f"the network holds no layer with {channels} output channels")
    return cast(nn.Conv2d, network.get_submodule(name)), channels - num_classes
