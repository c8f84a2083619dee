"""nnU-Net's own loss with a weight set to 0, with its cross-entropy replaced, or taken apart.

Dice, masks and the weights of deep supervision remain nnU-Net's code: this module makes copies of
nnU-Net's modules that share everything but the changed weight.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss
from nnunetv2.training.loss.robust_ce_loss import RobustCrossEntropyLoss
from torch import Tensor, nn

from segcal.adapters.nnunet.labels import Labels
from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import of_all_classes
from segcal.objective import Objective
from segcal.sweep.terms import OverlapTerm
from segcal.term import Term

CROSS_ENTROPY, DICE = "host/cross_entropy", "host/dice"
"""Names of nnU-Net's own terms, which no recipe uses."""
LEAST_SIZE = 1e-8
"""Least denominator of nnU-Net's Dice."""
Heads = Tensor | Sequence[Tensor]
"""Output of nnU-Net's network, or its targets; with deep supervision one tensor per head."""


class HeadLoss(nn.Module):
    """nnU-Net's loss of one head with its cross-entropy replaced.

    Args:
        host: nnU-Net's Dice + cross-entropy; its weight of cross-entropy is set to 0.
        instead: replaces cross-entropy.
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
        attributes: the names of these weights in nnU-Net, by term.
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


class HostDice(Term):
    """nnU-Net's Dice of one head as a term, which a sweep can compute.

    Args:
        host: nnU-Net's compound loss of one head.
        num_classes: K.
    """

    def __init__(self, host: nn.Module, num_classes: int) -> None:
        super().__init__()
        self.host: Any = host
        self.num_classes = num_classes
        self.ignore_index = cast(int | None, host.ignore_label)

    def swept(self) -> OverlapTerm | None:
        """Description for :mod:`segcal.sweep`; None for a Dice of another kind.

        nnU-Net itself computes sums over a batch that several processes share.
        """
        dice = self.host.dc
        if type(dice) is not MemoryEfficientSoftDiceLoss or (dice.ddp and dice.batch_dice):
            return None
        return OverlapTerm(self.num_classes, self._of_overlaps, self.ignore_index)

    def _of_overlaps(
        self, probability: Tensor, overlap: Tensor, labelled: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dice = self.host.dc
        sums = [x[:, 0 if dice.do_bg else 1 :] for x in (probability, overlap, labelled)]
        p, o, t = (x.sum(0) for x in sums) if dice.batch_dice else sums
        twice, size = 2 * o + dice.smooth, t + p + dice.smooth
        moves, size = (size >= LEAST_SIZE).to(size), size.clamp_min(LEAST_SIZE)
        return (
            -(twice / size).mean(),
            of_all_classes(moves * twice / size**2 / size.numel(), probability),
            of_all_classes(-2 / size / size.numel(), overlap),
        )

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return nnU-Net's value for logits ``(N, K, *S)`` and labels ``(N, *S)``."""
        target, mask = labels.unsqueeze(1), None
        if self.ignore_index is not None:
            mask = target != self.ignore_index
            target = torch.where(mask, target, 0)
        value: Tensor = self.host.dc(logits, target, loss_mask=mask)
        return value


class RestOfLoss(nn.Module):
    """nnU-Net's loss without the terms of its full-resolution head.

    nnU-Net's loss is this plus what :attr:`terms` with their :attr:`weights` give for that head.

    Args:
        host: nnU-Net's loss, deep supervision included; it is left as it is.
        cross_entropy: its cross-entropy as a term.

    Attributes:
        terms: cross-entropy and Dice of the full resolution, if they have a weight.
        weights: of the terms in nnU-Net's loss.
    """

    def __init__(self, host: nn.Module, cross_entropy: CrossEntropy) -> None:
        super().__init__()
        head, scale = head_of(host), 1.0
        self.others: Any = None
        if isinstance(host, DeepSupervisionWrapper):
            scale = float(host.weight_factors[0])
            self.others = copy.copy(host)
            self.others.weight_factors = (0.0, *host.weight_factors[1:])
        self.terms: dict[str, Term] = {CROSS_ENTROPY: cross_entropy}
        self.weights = {CROSS_ENTROPY: scale * float(head.weight_ce)}
        if head.weight_dice:
            self.terms[DICE] = HostDice(head, cross_entropy.num_classes)
            self.weights[DICE] = scale * float(head.weight_dice)

    def forward(self, output: Heads, target: Heads) -> Tensor | float:
        """Return the rest of nnU-Net's ``(N, K, *S)`` heads and targets; 0 if nothing is left."""
        return 0.0 if self.others is None else self.others(output, target)

    def take(self, values: dict[str, Tensor]) -> Tensor:
        """Take the values of the terms out of `values`, and return their weighted sum."""
        return torch.stack([self.weights[name] * values.pop(name) for name in self.terms]).sum()


def take_apart(host: nn.Module, num_classes: int) -> RestOfLoss | None:
    """Return nnU-Net's loss split into its first head's cross-entropy and Dice, and the rest.

    Args:
        host: nnU-Net's loss, deep supervision included.
        num_classes: K.

    Returns:
        None where the cross-entropy is not the mean over voxels that :class:`CrossEntropy`
        computes: with regions, with label smoothing, when it is replaced, or in a loss of another
        kind.
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
