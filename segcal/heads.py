"""Networks with two heads: one decides the mask, the other gives calibrated probabilities.

Dice gives a good mask and overconfident probabilities; a loss that calibrates probabilities may
cost Dice. A network with two heads does not have to choose: its last layer has 2K channels, which
share all features. The first K, the *decision* head, are trained with Dice and cross-entropy, and
their argmax is the mask. The other K, the *probability* head, are trained to be calibrated, and
their softmax is reported.

A network gets two heads by being built with 2K output channels, or, where it exists already or must
have K channels (as in nnU-Net), by :func:`add_probability_head`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

__all__ = [
    "Head",
    "TwoHeadLayer",
    "add_probability_head",
    "both_heads",
    "head_layer",
    "last_layer",
    "one_head",
    "output_of",
    "split_heads",
]

Head = Literal["decision", "probability"]
"""Names of the heads, in the order of their channels."""
HEADS: tuple[Head, ...] = get_args(Head)
Output = Literal["both", "decision", "probability"]
LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear,
          nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)  # fmt: skip


def split_heads(logits: Tensor, num_classes: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the logits of the decision and of the probability head.

    Args:
        logits: ``(N, 2 K, *S)`` of both heads, the decision's first.
        num_classes: K; None takes half the number of channels.

    Returns:
        views ``(N, K, *S)``.

    Raises:
        ValueError: a number of channels that does not fit two heads.
    """
    channels = logits.shape[1] if logits.ndim > 1 else 0
    if channels % 2 or channels != (2 * num_classes if num_classes else channels) or not channels:
        k, both = ("K", "2 K") if num_classes is None else (num_classes, 2 * num_classes)
        raise ValueError(
            f"logits: expected (N, {both}, *S), the {k} channels of the decision head and then the "
            f"{k} of the probability head, got {tuple(logits.shape)}; build the network with twice "
            "as many output channels as there are classes, or see "
            "segcal.heads.add_probability_head"
        )
    decision, probability = logits.chunk(2, 1)
    return decision, probability


class TwoHeadLayer(nn.Module):
    """Two copies of a last layer, one for each head.

    Attributes:
        output: the head whose channels are returned; ``both`` returns ``(N, 2 K, *S)``, the
            decision's channels first.

    Args:
        layer: convolution, or linear layer, with K output channels. Both heads begin with its
            weights, so that before any training both return what the layer returned.
        output: first value of the attribute.
    """

    def __init__(self, layer: nn.Module, output: Output = "both") -> None:
        super().__init__()
        self.decision = layer
        self.probability = copy.deepcopy(layer)
        self.output: Output = output

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of `output`."""
        if self.output == "both":
            return torch.cat([self.decision(x), self.probability(x)], 1)
        layer = self.decision if self.output == "decision" else self.probability
        logits: Tensor = layer(x)
        return logits


def add_probability_head(
    network: nn.Module, num_classes: int, *, output: Output = "both"
) -> TwoHeadLayer:
    """Put a probability head beside the last layer of a network, in place.

    The last layer is found by :func:`last_layer`. A network whose output is the sum of several
    layers (a residual unit at its end) has no last layer; build it with 2K output channels instead.

    Args:
        network: returns ``(N, K, *S)``, or with deep supervision a list whose first element is the
            full resolution, made by the last layer; lower resolutions keep K channels.
        num_classes: K.
        output: the head whose channels the network returns from now on, or ``both``; change it by
            the attribute `output` of the returned layer.

    Returns:
        the layer that replaces the last layer.

    Raises:
        ValueError: the network has no such layer, or two heads already.
    """
    if head_layer(network) is not None:
        raise ValueError("network: has two heads already")
    found = last_layer(network, num_classes)
    if not found:
        raise ValueError(
            f"network: holds no convolution or linear layer with {num_classes} output channels to "
            "put a second head beside; build it with twice as many output channels instead"
        )
    parent, _, name = found.rpartition(".")
    place = network.get_submodule(parent)
    layer = TwoHeadLayer(getattr(place, name), output)
    setattr(place, name, layer)
    return layer


def last_layer(network: nn.Module, channels: int) -> str:
    """Return the name of the last layer of a network, "" where there is none.

    This is the last convolution or linear layer, in the order in which the modules were made, that
    has `channels` output channels and is not the network itself.
    """
    found = [
        name
        for name, module in network.named_modules()
        if isinstance(module, LAYERS) and _channels(module) == channels
    ]
    return found[-1] if found else ""


def head_layer(network: nn.Module) -> TwoHeadLayer | None:
    """Return the last layer of a network with two heads; None if it has a single head.

    Args:
        network: any network, also one that torch.compile or DistributedDataParallel has wrapped.
    """
    return next((m for m in network.modules() if isinstance(m, TwoHeadLayer)), None)


@contextmanager
def output_of(network: nn.Module, output: Output) -> Iterator[None]:
    """Let a network with two heads return `output` in this block; a single head stays.

    Args:
        network: any network, also one that torch.compile or DistributedDataParallel has wrapped.
        output: the head whose channels are returned, or ``both``.
    """
    layer = head_layer(network)
    if layer is None:
        yield
        return
    before = layer.output
    layer.output = output
    try:
        yield
    finally:
        layer.output = before


def both_heads(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Return the state of a network with one head as a state of `network`, for both its heads.

    Args:
        state: ``state_dict`` of the same network before :func:`add_probability_head`; a state with
            two heads is returned as it is.
        network: network with two heads, also wrapped by torch.compile or DistributedDataParallel.
    """
    found = dict(state)
    for name, module in network.named_modules(remove_duplicate=False):
        if not isinstance(module, TwoHeadLayer):
            continue
        for key in module.decision.state_dict():
            if (value := found.pop(f"{name}.{key}", None)) is not None:
                found |= {f"{name}.{head}.{key}": value.clone() for head in HEADS}
    return found


def one_head(state: Mapping[str, Tensor], head: Head) -> dict[str, Tensor]:
    """Return the state of a network as if it had a single head.

    Args:
        state: ``state_dict`` of a network that :func:`add_probability_head` has changed.
        head: the head that stays, under the names that the layer had before.

    Raises:
        ValueError: not one of `HEADS`, or a state without two heads.
    """
    if head not in HEADS:
        raise ValueError(f"head: expected one of {', '.join(HEADS)}, got {head!r}")
    left = next(name for name in HEADS if name != head)
    marks = {name: f".{name}." for name in HEADS}
    if not any(marks[head] in key for key in state):
        raise ValueError(f"state: holds no {head} head; is it that of a network of two heads?")
    return {
        key.replace(marks[head], "."): value
        for key, value in state.items()
        if marks[left] not in key
    }


def _channels(layer: nn.Module) -> int:
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return int(channels)  # type: ignore[arg-type]
