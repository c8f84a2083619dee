"""The loss of a training: nnU-Net's own, with the terms of a recipe at their places."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from torch import nn

from segcal.adapters.nnunet.host_loss import HeadLoss, head_of, without
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.loss import PenalisedLoss
from segcal.adapters.nnunet.settings import Parts
from segcal.objective import Objective
from segcal.recipes import Recipe, build_terms, resolve_terms
from segcal.term import TwoViewTerm

Arguments = Mapping[str, Mapping[str, Any]]
"""Arguments by term, beside those of the recipe."""


def build_loss(
    host: nn.Module,
    labels: Labels,
    recipe: Recipe,
    placed: Parts,
    arguments: Arguments,
    *,
    dice: bool,
) -> PenalisedLoss:
    """Put a recipe into nnU-Net's loss.

    Args:
        host: nnU-Net's loss, deep supervision included; it is changed.
        labels: how targets are read.
        recipe: what the terms are.
        placed: their places and weights.
        arguments: those that differ from the recipe's.
        dice: keep nnU-Net's Dice.

    Raises:
        ValueError: arguments that do not fit; deep supervision without a weight.
    """
    if not np.all(np.isfinite(getattr(host, "weight_factors", 1.0))):
        raise ValueError(
            "a network of two stages leaves deep supervision without a weight, and its loss is "
            "NaN; plan three stages or more"
        )
    terms = build_terms(recipe, only=placed.names, overrides=arguments, **labels.runtime())
    if not dice:
        without(head_of(host), "weight_dice")
    if placed.instead:
        instead = Objective({name: terms[name] for name in placed.instead}, placed.instead)
        host = _with_head(host, HeadLoss(head_of(host), instead, labels))
    two = [name for name in placed.added if terms[name].two_views]
    added = {name: weight for name, weight in placed.added.items() if name not in two}
    return PenalisedLoss(
        host,
        labels,
        Objective({name: terms[name] for name in added}, added) if added else None,
        next(((placed.added[n], n, cast(TwoViewTerm, terms[n])) for n in two), None),
    )


def describe_terms(
    recipe: Recipe, placed: Parts, arguments: Arguments, labels: Labels
) -> dict[str, dict[str, Any]]:
    """Weight, target and arguments of every term, by name: what a checkpoint was trained with."""
    components = resolve_terms(recipe, overrides=arguments)
    weights = {**placed.instead, **placed.added}
    return {
        name: {
            "weight": weights[name],
            "target": components[name].target,
            **labels.runtime(),
            **components[name].args,
        }
        for name in placed.names
    }


def _with_head(host: nn.Module, head: nn.Module) -> nn.Module:
    """Return nnU-Net's loss with another loss of one head."""
    if not isinstance(host, DeepSupervisionWrapper):
        return head
    host.loss = head
    return host
