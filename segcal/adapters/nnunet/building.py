"""The loss of a training: nnU-Net's own loss with the terms of a recipe put into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from nnunetv2.training.loss.deep_supervision import DeepSupervisionWrapper
from torch import nn

from segcal.adapters.nnunet.host_loss import HeadLoss, HostWeights, head_of, without
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.loss import PenalisedLoss, Weighed
from segcal.adapters.nnunet.settings import Parts, hosts_own
from segcal.objective import Objective
from segcal.recipes import Recipe, build_terms, resolve_terms
from segcal.schedule import Schedules
from segcal.term import Term, TwoViewTerm

Arguments = Mapping[str, Mapping[str, Any]]
"""Arguments by term that differ from the recipe's."""


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
        placed: places and weights of the terms.
        arguments: that differ from the recipe's, by term.
        dice: whether to keep nnU-Net's Dice.

    Raises:
        ValueError: arguments that do not fit; deep supervision without a weight; a term that
            compares two views, with two heads.
    """
    if not np.all(np.isfinite(getattr(host, "weight_factors", 1.0))):
        raise ValueError(
            "a network of two stages leaves deep supervision without a weight, and its loss is "
            "NaN; plan three stages or more, or turn it off in the configuration of the plans: "
            '"segcal": {"deep_supervision": false}'
        )
    terms = build_terms(recipe, only=placed.weights, overrides=arguments, **labels.runtime())
    two = [name for name in terms if terms[name].two_views]
    if two and placed.probability:
        raise ValueError(f"{', '.join(two)}: comparing two views does not work with two heads")
    if not dice:
        without(head_of(host), "weight_dice")
    own = {name: a for name, a in hosts_own(recipe).items() if name in recipe.ramps}
    inside: list[Weighed] = [HostWeights(head_of(host), own)]
    if placed.instead:
        instead = _objective(terms, placed.instead)
        inside.append(instead)
        host = _with_head(host, HeadLoss(head_of(host), instead, labels))
    added = {name: weight for name, weight in placed.added.items() if name not in two}
    return PenalisedLoss(
        host,
        labels,
        _objective(terms, added) if added else None,
        next(((placed.added[n], n, cast(TwoViewTerm, terms[n])) for n in two), None),
        probability=_objective(terms, placed.probability) if placed.probability else None,
        schedules=Schedules(recipe.ramps),
        elsewhere=inside,
    )


def _objective(terms: Mapping[str, Term], weights: Mapping[str, float]) -> Objective:
    return Objective({name: terms[name] for name in weights}, weights)


def describe_terms(
    recipe: Recipe, placed: Parts, arguments: Arguments, labels: Labels
) -> dict[str, dict[str, Any]]:
    """Weight, target, arguments and schedule of every term, by name.

    A checkpoint keeps this as the record of its training. nnU-Net's own terms are listed if they
    have a schedule.
    """
    components = resolve_terms(recipe, overrides=arguments)
    found: dict[str, dict[str, Any]] = {
        name: {
            "weight": weight,
            "target": components[name].target,
            **labels.runtime(),
            **components[name].args,
        }
        for name, weight in placed.weights.items()
    }
    for name, ramp in recipe.ramps.items():
        found[name] = {**found.get(name, {}), "schedule": vars(ramp)}
    return found


def _with_head(host: nn.Module, head: nn.Module) -> nn.Module:
    """Return nnU-Net's loss with `loss` in place of its loss for one head."""
    if not isinstance(host, DeepSupervisionWrapper):
        return head
    host.loss = head
    return host
