"""The registry of methods, which builds losses, penalties and objectives from YAML files.

A method is one file, ``configs/losses/NAME.yaml`` or ``configs/penalties/NAME.yaml``; a recipe,
``configs/recipes/NAME.yaml``, is a weighted sum of losses and penalties, which are called its
terms. Losses of multi-label classification are ``configs/multilabel/NAME.yaml``, post-hoc methods
``configs/posthoc/NAME.yaml``. An argument may be a target with arguments of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, Field, model_validator

from segcal.components import Component, build_component
from segcal.heads import HEADS, Head
from segcal.io.yaml import Model, Strict, config_root, merged, read_yaml, validated
from segcal.losses.cross_entropy import CrossEntropy
from segcal.objective import Objective, TwoHeads
from segcal.schedule import Ramp
from segcal.tensors import check_background
from segcal.term import Term

__all__ = [
    "Recipe",
    "build",
    "build_terms",
    "load_component",
    "load_objective",
    "load_recipe",
    "names",
    "objective_of",
    "resolve_terms",
]

ComponentKind = Literal["losses", "penalties", "multilabel", "posthoc"]
Kind = Literal[ComponentKind, "recipes"]
Value = TypeVar("Value")


class HeadTerms(Strict):
    """Weights of the base losses and of the penalties of a head, by config name."""

    base: dict[str, float] = Field(default={})
    penalties: dict[str, float] = Field(default={})

    @property
    def weights(self) -> dict[str, float]:
        """Weights of all losses and penalties."""
        return {**self.base, **self.penalties}


class Schedule(Strict):
    """A factor on a term's weight that changes during training (:class:`segcal.schedule.Ramp`).

    ``{from: 1, to: 0, start: 0.1, end: 0.5}`` fades a term out between a tenth and a half of the
    epochs; with ``dice: 0.8`` these shares count from the epoch in which validation reaches that
    Dice. ``{from: 0, to: 1, gap: [0.1, 0.5]}`` raises a term's weight as validation falls behind
    training.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    first: float = Field(default=1.0, alias="from")
    last: float = Field(default=0.0, alias="to")
    start: float = 0.0
    end: float = 1.0
    dice: float | None = None
    gap: tuple[float, float] | None = None

    @property
    def ramp(self) -> Ramp:
        """The schedule in the form that an objective takes."""
        return Ramp(self.first, self.last, self.start, self.end, self.dice, self.gap)

    @model_validator(mode="after")
    def _fits(self) -> Schedule:
        self.ramp  # noqa: B018 - raises ValueError
        return self


class Recipe(Strict):
    """A training objective: weights of base losses and of penalties, by config name.

    ``args`` holds arguments of a term where they differ from its config. nnU-Net's trainer of the
    recipe is called ``nnUNetTrainer`` + ``trainer``. With ``probability`` the network has two heads
    (:mod:`segcal.heads`): ``base`` and ``penalties`` then belong to the decision head, and the
    names of all terms begin with the name of their head (``probability/svls``). ``schedule``
    changes weights during training, by the name of the term. With ``temperature`` the last layer of
    the trained network is divided by the temperature that fits validation best
    (:mod:`segcal.posthoc.folding`). ``calibrator`` names a post-hoc method, which the training
    commands then fit to the validation cases; the prediction commands apply it.
    """

    summary: str = ""
    trainer: str = Field(default="", pattern=r"^[A-Za-z0-9]*$")
    base: dict[str, float]
    penalties: dict[str, float] = Field(default={})
    probability: HeadTerms | None = None
    multilabel: dict[str, float] = Field(default={})
    args: dict[str, dict[str, Any]] = Field(default={})
    schedule: dict[str, Schedule] = Field(default={})
    temperature: bool = False
    calibrator: str | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Recipe:
        if self.multilabel and (self.base or self.penalties or self.probability):
            raise ValueError("multilabel: cannot be combined with base, penalties or probability")
        if self.multilabel and self.temperature:
            raise ValueError("temperature: cannot be combined with multilabel")
        if self.calibrator is not None and self.calibrator not in (known := names("posthoc")):
            raise ValueError(f"calibrator: {self.calibrator!r} is none of {', '.join(known)}")
        for name in self.schedule:
            self.full_names(name)
        return self

    @property
    def heads(self) -> dict[Head, HeadTerms]:
        """Terms by head; a recipe with one head has only the decision head."""
        decision = HeadTerms(base=self.base, penalties=self.penalties)
        found: dict[Head, HeadTerms] = {"decision": decision}
        return found if self.probability is None else {**found, "probability": self.probability}

    @property
    def kinds(self) -> dict[str, ComponentKind]:
        """Kind of every term, by its name."""
        found: dict[str, ComponentKind] = dict.fromkeys(self.multilabel, "multilabel")
        for head, terms in self.heads.items():
            found |= {self._name(head, name): "losses" for name in terms.base}
            found |= {self._name(head, name): "penalties" for name in terms.penalties}
        return found

    @property
    def weights(self) -> dict[str, float]:
        """Weight of every term, by its name."""
        found = dict(self.multilabel)
        for head, terms in self.heads.items():
            found |= {self._name(head, name): w for name, w in terms.weights.items()}
        return found

    @property
    def ramps(self) -> dict[str, Ramp]:
        """Schedules by the full name of their term."""
        return {name: one.ramp for name, one in self.by_full_name(self.schedule).items()}

    def full_names(self, name: str) -> list[str]:
        """Names of the terms that a user means by `name`, of both heads if there are two.

        Raises:
            ValueError: there is no such term.
        """
        found = [full for full in self.kinds if name in (full, component_of(full))]
        if not found:
            raise ValueError(
                f"recipe: has no term {name}; it has {', '.join(self.kinds) or 'none'}"
            )
        return found

    def by_full_name(self, given: Mapping[str, Value]) -> dict[str, Value]:
        """The values given for terms, by the terms' full names.

        Raises:
            ValueError: a name of no term.
        """
        return {full: value for name, value in given.items() for full in self.full_names(name)}

    def _name(self, head: Head, name: str) -> str:
        return name if self.probability is None else f"{head}/{name}"


def component_of(name: str) -> str:
    """Name of the config of a term, without the name of its head."""
    return name.rpartition("/")[2]


def names(kind: Kind) -> list[str]:
    """Names of the shipped configs of one kind."""
    return sorted(path.stem for path in (config_root() / kind).glob("*.yaml"))


def load_component(kind: ComponentKind, name: str) -> Component:
    """Load one loss, penalty or post-hoc method by name.

    Raises:
        ValueError: no config of that name, or a config that does not fit, with its path.
    """
    return _load(_path(kind, name), Component)


def load_recipe(recipe: str | Path) -> Recipe:
    """Load a recipe by name, or from a user's YAML file.

    Raises:
        ValueError: no recipe of that name, or one that does not fit, with its path.
    """
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        path = _path("recipes", str(recipe))
    return _load(path, Recipe)


def load_objective(name: str | PathLike[str], *, multilabel: bool = False) -> Recipe:
    """Load a recipe by name or path, or make a recipe of a single loss or penalty.

    Args:
        name: name of a recipe, else of a penalty, else of a loss; ``losses/NAME`` and
            ``penalties/NAME`` always mean the loss and the penalty.
        multilabel: whether `name` is the name of a multi-label loss.

    Raises:
        ValueError: nothing of that name, or a recipe that does not fit, with its path.
    """
    if multilabel:
        _path("multilabel", str(name))
        return Recipe(base={}, multilabel={str(name): 1.0})
    kind, _, single = str(name).rpartition("/")
    if not kind and single in names("recipes"):
        return load_recipe(single)
    if kind in ("", "penalties") and single in names("penalties"):
        return Recipe(base={}, penalties={single: 1.0})
    if kind in ("", "losses") and single in names("losses"):
        return Recipe(base={single: 1.0})
    if Path(name).suffix in (".yaml", ".yml"):
        return load_recipe(Path(name))
    raise ValueError(
        f"no recipe, penalty or loss is called {str(name)!r}, and it is no YAML file; there are "
        + "; ".join(
            f"{kind} {', '.join(names(kind))}" for kind in ("recipes", "penalties", "losses")
        )
    )


def resolve_terms(
    recipe: Recipe,
    *,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Component]:
    """Look up a recipe's losses and penalties, with a user's arguments put in.

    Args:
        recipe: what to look up.
        overrides: arguments of a term, by its name.

    Returns:
        components by name; their weights are in the recipe.

    Raises:
        ValueError: an override for a term that the recipe lacks, or no config of a name.
    """
    changes = [recipe.by_full_name(of) for of in (recipe.args, overrides or {})]
    terms = {}
    for name, kind in recipe.kinds.items():
        component = load_component(kind, component_of(name))
        arguments = component.args
        for change in changes:
            arguments = merged(arguments, change.get(name, {}))
        terms[name] = component.model_copy(update={"args": arguments})
    return terms


def build_terms(
    recipe: Recipe,
    *,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
    only: Collection[str] | None = None,
    **runtime: Any,
) -> dict[str, Term]:
    """Build a recipe's losses and penalties, in the same way for every framework.

    Args:
        recipe: what to build.
        overrides: arguments of a term, by its name.
        only: names of the terms to build, where a framework has the others itself; None builds all.
        runtime: arguments known only now, as in :func:`segcal.components.build_component`.

    Returns:
        terms by name; their weights are in the recipe.

    Raises:
        ValueError: an unknown term or argument, with what there is instead; a target that is no
            term.
    """
    terms = {}
    for name, component in resolve_terms(recipe, overrides=overrides).items():
        if only is not None and name not in only:
            continue
        terms[name] = build_component(component, **runtime)
        if not isinstance(terms[name], Term):
            raise ValueError(f"{name}: {component.target} is not a segcal.term.Term")
    return terms


def objective_of(recipe: Recipe, terms: Mapping[str, Term]) -> Objective:
    """Put a recipe's terms together with its weights and schedules.

    Args:
        recipe: the recipe that the terms belong to.
        terms: terms from :func:`build_terms`, all or some; with two heads, some of each head.
    """
    weights = recipe.weights
    ramps = recipe.ramps

    def of(names: Iterable[str]) -> Objective:
        kept = {component_of(n): n for n in names}
        return Objective(
            {short: terms[n] for short, n in kept.items()},
            {short: weights[n] for short, n in kept.items()},
            {short: ramps[n] for short, n in kept.items() if n in ramps},
        )

    if recipe.probability is None:
        return of(terms)
    decision, probability = (
        of(name for name in terms if name.startswith(f"{head}/")) for head in HEADS
    )
    return TwoHeads(decision, probability)


def build(
    name: str | PathLike[str],
    num_classes: int,
    *,
    ignore_index: int | None = None,
    per_channel: bool = False,
    include_background: bool = True,
    **overrides: Mapping[str, Any],
) -> Objective:
    """Build the objective of a recipe, or of a single loss or penalty.

    Example::

        objective = build("crac", num_classes=4, crac={"margin_inner": 3.0})
        loss = objective(logits, labels)        # (N, K, *S), (N, *S)
        objective.observe(logits, labels)       # every validation batch, under no_grad
        objective.dual_step()                   # once after the last

    Args:
        name: name of a shipped recipe; name of a loss or penalty (``losses/NAME`` or
            ``penalties/NAME`` where a recipe has the same name); or a YAML file with a recipe.
        num_classes: K.
        ignore_index: label that every term leaves out.
        per_channel: whether labels are ``(N, K, *S)`` of 0 and 1 that may overlap, with a sigmoid
            per channel (nnU-Net's regions); only some methods have this form.
        include_background: False leaves class 0 out of Dice and of the penalties, which are sums
            over classes. Cross-entropy still sees every voxel, or nothing would learn background.
        **overrides: arguments of a term, by its name. (Weights are those of the recipe; a YAML
            file of your own can set others.)

    Returns:
        a module with the methods ``forward``, ``observe`` and ``dual_step``. For a recipe with two
        heads (``two_heads_confidence``) it takes logits ``(N, 2 K, *S)`` (:mod:`segcal.heads`).
        With a schedule, call ``advance(share of the epochs done)`` before every epoch.

    Raises:
        ValueError: an unknown name, term or argument, with what there is instead; a term without a
            form per channel, or without background.
    """
    check_background(include_background, per_channel)
    if ignore_index is not None and not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index: expected an integer or None, got {ignore_index!r}")
    if wrong := [term for term, value in overrides.items() if not isinstance(value, Mapping)]:
        raise ValueError(
            f"{', '.join(wrong)}: arguments belong to a term, e.g. crac={{'margin_inner': 3.0}}"
        )
    recipe = load_objective(name)
    terms = build_terms(
        recipe,
        overrides=overrides,
        num_classes=num_classes,
        ignore_index=ignore_index,
        per_channel=per_channel or None,
        include_background=None if include_background else False,
    )
    if not include_background:
        _check_without_background(terms)
    return objective_of(recipe, terms)


def _check_without_background(terms: Mapping[str, Term]) -> None:
    """Raise ValueError unless all terms but cross-entropy leave class 0 out."""
    by_class = {n: t for n, t in terms.items() if not isinstance(t, CrossEntropy)}
    whole = [n for n, t in by_class.items() if t.include_background]
    if whole or not by_class:
        raise ValueError(
            f"include_background: {', '.join(whole or terms)} cannot leave class 0 out; choose a "
            "method that can, or keep class 0"
        )


def _path(kind: Kind, name: str) -> Path:
    if name not in names(kind):
        raise ValueError(f"{kind}: no config named {name!r}; there are {', '.join(names(kind))}")
    return config_root() / kind / f"{name}.yaml"


def _load(path: Path, model: type[Model]) -> Model:
    return validated(read_yaml(path), model, str(path))
