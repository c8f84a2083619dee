"""nnU-Net's own loss: a weight of it set to 0, its cross-entropy replaced, or taken out of it.

Its Dice, its masks and its weights of heads stay nnU-Net's code: what is made here are copies of
its modules that share everything but the weight that differs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.robust_ce_loss import RobustCrossEntropyLoss
from torch import Tensor, nn

from segcal.adapters.nnunet.labels import Labels
from segcal.losses.cross_entropy import CrossEntropy
from segcal.objective import Objective

Heads = Tensor | Sequence[Tensor]
"""What nnU-Net's network returns, and its targets: with deep supervision one a head."""


class HeadLoss(nn.Module):
    """nnU-Net's loss of one head, its cross-entropy replaced.

    Args:
        host: nnU-Net's Dice + cross-entropy; its weight of cross-entropy is set to 0.
        instead: what takes that place.
        labels: how targets are read.
    """

    def __init__(self, host: nn.Module, instead: Objective, labels: Labels) -> None:
        super().__init__()
        self.host = without(host, "weight_ce")
        self.instead = instead
        self.labels = labels

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of logits ``(N, K, *S)`` and nnU-Net's target."""
        return self.host(output, target) + self.instead(output, self.labels.of(target))


class HostWeights:
    """The weights of nnU-Net's own Dice and cross-entropy, which a schedule may change.

    Args:
        host: nnU-Net's compound loss of one head.
        attributes: what it calls the weights, by the name of the term.
    """

    def __init__(self, host: nn.Module, attributes: Mapping[str, str]) -> None:
        self.host = host
        self.attributes = dict(attributes)
        self.weights = {name: float(getattr(host, a)) for name, a in self.attributes.items()}

    def weigh(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Set factors on the weights, see :meth:`segcal.objective.Objective.weigh`."""
        in_force = {name: w * factors.get(name, 1.0) for name, w in self.weights.items()}
        for name, weight in in_force.items():
            setattr(self.host, self.attributes[name], weight)
        return {name: in_force[name] for name in factors if name in in_force}


class RestOfLoss(nn.Module):
    """nnU-Net's loss without the cross-entropy of its full-resolution head.

    nnU-Net's loss is this plus :attr:`weight` times :attr:`cross_entropy` of that head.

    Args:
        host: nnU-Net's loss, deep supervision included; it is left as it is.
        cross_entropy: its cross-entropy as a term.

    Attributes:
        weight: of the cross-entropy in nnU-Net's loss.
    """

    def __init__(self, host: nn.Module, cross_entropy: CrossEntropy) -> None:
        super().__init__()
        head = head_of(host)
        self.cross_entropy = cross_entropy
        self.weight = float(head.weight_ce)
        self.full_resolution = without(copy.copy(head), "weight_ce")
        self.others: Any = None
        if isinstance(host, DeepSupervisionWrapper):
            self.head_weight = float(host.weight_factors[0])
            self.weight *= self.head_weight
            self.others = copy.copy(host)
            self.others.weight_factors = (0.0, *host.weight_factors[1:])

    def forward(self, output: Heads, target: Heads) -> Tensor | float:
        """Return the rest of nnU-Net's ``(N, K, *S)`` heads and targets; 0 if nothing is left."""
        if self.others is None:
            return self.full_resolution(output, target)
        full = self.head_weight * self.full_resolution(output[0], target[0])
        return full + self.others(output, target)


def take_apart(host: nn.Module, num_classes: int) -> RestOfLoss | None:
    """Return nnU-Net's loss without the cross-entropy of its first head, and that cross-entropy.

    Args:
        host: nnU-Net's loss, deep supervision included.
        num_classes: K.

    Returns:
        None where that is not the mean over voxels that :class:`CrossEntropy` computes: with
        regions, with label smoothing, when it is replaced, or in a loss of another kind.
    """
    head = head_of(host)
    if type(head) is not DC_and_CE_loss or type(head.ce) is not RobustCrossEntropyLoss:
        return None
    if head.ce.label_smoothing or head.ce.reduction != "mean" or not head.weight_ce:
        return None
    weight = head.ce.weight
    cross_entropy = CrossEntropy(
        num_classes,
        class_weight=None if weight is None else weight.tolist(),
        ignore_index=head.ignore_label,
    )
    return RestOfLoss(host, cross_entropy)


def head_of(host: nn.Module) -> Any:
    """Return nnU-Net's loss of one head."""
    return host.loss if isinstance(host, DeepSupervisionWrapper) else host


def without(host: nn.Module, weight: str) -> nn.Module:
    """Set a weight of nnU-Net's compound loss, ``weight_ce`` or ``weight_dice``, to 0.

    Raises:
        AttributeError: nnU-Net has renamed it.
    """
    if not hasattr(host, weight):
        raise AttributeError(f"nnU-Net's {type(host).__name__} has no {weight} any more")
    setattr(host, weight, 0)
    return host
