"""What a recipe means in nnU-Net, and its settings in a configuration of the plans.

A configuration of the plans may hold settings under the key ``segcal``::

    "2d_tuned": {"inherits_from": "2d",
                 "segcal": {"crac": {"margin_inner": 3.0}, "multiplier_source": "volumes"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from segcal.recipes import Recipe, build_terms, component_of, load_recipe, names

PLANS_KEY = "segcal"
WITHOUT_DICE = "_CE"
"""Suffix of the trainers without Dice."""
HOSTS_OWN = {"cross_entropy": "weight_ce", "soft_dice": "weight_dice"}
"""Losses of a recipe that nnU-Net has itself, and nnU-Net's names of their weights."""


@dataclass(frozen=True)
class Parts:
    """Weights of a recipe's terms by the place they take in nnU-Net.

    Attributes:
        instead: in place of cross-entropy, on every head; empty keeps nnU-Net's.
        added: beside nnU-Net's loss, on the full resolution.
        probability: on the second head, which exists in the full resolution only; empty for a
            network with one head. With two heads, the names of terms begin with the name of their
            head.
    """

    instead: dict[str, float]
    added: dict[str, float]
    probability: dict[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, float]:
        """Weights of all terms."""
        return {**self.instead, **self.added, **self.probability}

    def named(self, name: str) -> list[str]:
        """Full names of the terms that a user means by `name`; with two heads, of both."""
        return [full for full in self.weights if name in (full, component_of(full))]

    def weighed(self, weights: Mapping[str, float]) -> Parts:
        """Return the same terms, with other weights for the terms named."""
        instead, added, probability = (
            {name: weights.get(name, w) for name, w in place.items()}
            for place in (self.instead, self.added, self.probability)
        )
        return Parts(instead, added, probability)

    def formula(self, *, dice: bool) -> str:
        """Say what a trainer minimises, e.g. ``Dice + cross-entropy + 0.1 mmce``."""
        weights = {"Dice": 1.0} if dice else {}
        weights |= {**(self.instead or {"cross-entropy": 1.0}), **self.added}
        if not self.probability:
            return _sum(weights)
        return f"decision: {_sum(weights)}; probability: {_sum(self.probability)}"


def _sum(weights: Mapping[str, float]) -> str:
    return " + ".join(
        component_of(name) if w == 1 else f"{w:g} {component_of(name)}"
        for name, w in weights.items()
    )


def parts(recipe: Recipe) -> Parts:
    """Place the terms of a recipe; if it has no cross-entropy, its losses replace nnU-Net's.

    Weights are scaled so that cross-entropy has weight 1, as in nnU-Net.

    Raises:
        ValueError: Dice and cross-entropy have different weights, which nnU-Net does not allow.
    """
    dice, cross_entropy = (recipe.base.get(name, 0.0) for name in ("soft_dice", "cross_entropy"))
    if dice and cross_entropy and dice != cross_entropy:
        raise ValueError(
            f"soft_dice, cross_entropy: nnU-Net weighs them alike, the recipe has {dice:g} and "
            f"{cross_entropy:g}"
        )
    own, probability = _by_head(recipe)
    if "cross_entropy" not in recipe.base:
        instead = {name: w for name, w in own.items() if recipe.kinds[name] == "losses"}
        added = {name: w for name, w in own.items() if name not in instead}
        return Parts(instead, added, probability)
    unit = recipe.base["cross_entropy"]
    added, probability = ({n: w / unit for n, w in of.items()} for of in (own, probability))
    return Parts({}, added, probability)


def _by_head(recipe: Recipe) -> tuple[dict[str, float], dict[str, float]]:
    """Weights of the terms, on both heads, that nnU-Net does not have itself."""
    mine = set(hosts_own(recipe))
    own = {name: w for name, w in recipe.weights.items() if name not in mine}
    probability = {name: w for name, w in own.items() if name.startswith("probability/")}
    return {name: w for name, w in own.items() if name not in probability}, probability


def hosts_own(recipe: Recipe) -> dict[str, str]:
    """nnU-Net's names of the weights of recipe terms that it has itself, by full name."""
    return {
        name: HOSTS_OWN[component_of(name)]
        for name in recipe.weights
        if component_of(name) in HOSTS_OWN and not name.startswith("probability/")
    }


class TrainerSettings(BaseModel):
    """Settings of a training other than the arguments of its terms.

    Attributes:
        multiplier_source: data on which multipliers (the learned weights of penalties) are updated:
            ``val_patches``, nnU-Net's random validation patches; ``fixed_patches``, as many patches
            that are the same in every epoch; ``volumes``, all validation cases, every voxel once.
        volumes_every: epochs between two passes over volumes.
        patch_seed: of the fixed patches.
        deep_supervision: nnU-Net's, on or off.
        epochs: number of epochs, unless the command gives it; None leaves nnU-Net's.
        iterations: number of training iterations per epoch, likewise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    multiplier_source: Literal["val_patches", "fixed_patches", "volumes"] = "val_patches"
    volumes_every: int = Field(default=5, ge=1)
    patch_seed: int = Field(default=0, ge=0)
    deep_supervision: bool = True
    epochs: int | None = Field(default=None, ge=1)
    iterations: int | None = Field(default=None, ge=1)


def read_settings(
    content: Mapping[str, Any], placed: Parts
) -> tuple[TrainerSettings, Parts, dict[str, dict[str, Any]]]:
    """Read the ``segcal`` entry of a plans configuration.

    Terms that only other trainers have are skipped, see :func:`of_other_trainers`.

    Args:
        content: the entry.
        placed: the recipe's terms; `content` may leave out the head from their names.

    Returns:
        the settings, the terms with their resulting weights, and arguments by term.

    Raises:
        ValueError: an unknown key, or a value that does not fit.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f'plans, "{PLANS_KEY}": expected an object, got {content!r}')
    given = {name: value for name, value in content.items() if placed.named(name)}
    if wrong := [name for name, value in given.items() if not isinstance(value, Mapping)]:
        raise ValueError(
            f'plans, "{PLANS_KEY}": {", ".join(wrong)}: expected arguments by name, e.g. '
            '{"crac": {"margin_inner": 3.0}}'
        )
    others = of_other_trainers(content, placed)
    rest = {name: value for name, value in content.items() if name not in {*given, *others}}
    if unknown := sorted(set(rest) - set(TrainerSettings.model_fields)):
        takes = [*placed.weights, *TrainerSettings.model_fields]
        near = get_close_matches(unknown[0], [*takes, *names("losses"), *names("penalties")], 1)
        raise ValueError(
            f'plans, "{PLANS_KEY}": unknown {", ".join(unknown)}; this trainer takes '
            f"{', '.join(takes)}{f'; is {near[0]} meant?' if near else ''}"
        )
    arguments: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        for full in placed.named(name):
            arguments[full] = {**arguments.get(full, {}), **value}
    weights = {name: v["weight"] for name, v in arguments.items() if "weight" in v}
    for name, weight in weights.items():
        if not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
            raise ValueError(
                f'plans, "{PLANS_KEY}": {name}: weight: expected a number >= 0, got {weight!r}'
            )
    of_terms = {k: {n: x for n, x in v.items() if n != "weight"} for k, v in arguments.items()}
    try:
        return TrainerSettings.model_validate(rest), placed.weighed(weights), of_terms
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ValueError(f'plans, "{PLANS_KEY}": {problems}') from None


def of_other_trainers(content: Mapping[str, Any], placed: Parts) -> list[str]:
    """Names of terms in the ``segcal`` entry that this trainer lacks and other trainers have.

    Args:
        content: the entry.
        placed: the trainer's terms.
    """
    known = {*names("losses"), *names("penalties")}
    return [n for n in content if not placed.named(n) and component_of(n) in known]


def check_block(
    content: Mapping[str, Any], recipe: Recipe, **runtime: Any
) -> tuple[TrainerSettings, Parts, dict[str, dict[str, Any]]]:
    """Read the ``segcal`` entry of a plans configuration, and try the arguments that it gives.

    Args:
        content: the entry.
        recipe: of the trainer.
        runtime: arguments of terms that the data set determines.

    Returns:
        as :func:`read_settings`.

    Raises:
        ValueError: an unknown key or argument, or a value that does not fit.
    """
    found = read_settings(content, parts(recipe))
    _, placed, arguments = found
    build_terms(recipe, only=placed.weights, overrides=arguments, **runtime)
    return found


def problem_of_block(content: Any) -> str:
    """Error that a ``segcal`` entry would raise in the trainers it is meant for; empty if none.

    Args:
        content: the entry.
    """
    recipes = [recipe for recipe in map(load_recipe, names("recipes")) if recipe.trainer]
    keys = content if isinstance(content, Mapping) else ()
    meant = [r for r in recipes if any(map(parts(r).named, keys))]
    try:
        for recipe in meant or recipes[:1]:
            check_block(content, recipe, num_classes=4, ignore_index=None, per_channel=None)
    except ValueError as error:
        return str(error)
    return ""
