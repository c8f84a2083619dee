"""Configuration: YAML that names a target and its arguments, checked before work starts.

A method is one file, ``configs/losses/NAME.yaml`` or ``configs/penalties/NAME.yaml``; a recipe,
``configs/recipes/NAME.yaml``, is a weighted sum of them. Losses of multi-label classification are
``configs/multilabel/NAME.yaml``. An argument may be a target with arguments of its own.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

ALLOWED_ROOTS = ("segcal.", "torch.", "torchvision.", "monai.")
"""Only targets below these are imported and called."""
ComponentKind = Literal["losses", "penalties", "multilabel"]
Kind = Literal[ComponentKind, "recipes"]
Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    """A part of a config: keys that it does not know are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Component(Strict):
    """One loss or penalty: what to build, and with which arguments."""

    target: str
    args: dict[str, Any] = {}
    summary: str = ""
    paper: str = ""

    @field_validator("target")
    @classmethod
    def _known_root(cls, value: str) -> str:
        if not value.startswith(ALLOWED_ROOTS):
            raise ValueError(f"only targets below {', '.join(ALLOWED_ROOTS)} are built")
        return value


class Recipe(Strict):
    """A training objective: weights of base losses and of penalties, by config name.

    ``args`` holds arguments of a term where they differ from those of its config; ``trainer``
    names nnU-Net's trainer of it: ``nnUNetTrainer`` + this.
    """

    summary: str = ""
    trainer: str = Field(default="", pattern=r"^[A-Za-z0-9]*$")
    base: dict[str, float]
    penalties: dict[str, float] = {}
    args: dict[str, dict[str, Any]] = {}


@cache
def config_root() -> Path:
    """Folder of the shipped configs: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "recipes").is_dir():
            return folder
    raise FileNotFoundError(f"segcal's configs are missing from {package}; install segcal again")


def names(kind: Kind) -> list[str]:
    """Names of the shipped configs of one kind."""
    return sorted(path.stem for path in (config_root() / kind).glob("*.yaml"))


def load_component(kind: ComponentKind, name: str) -> Component:
    """Load one loss or penalty by name.

    Raises:
        ValueError: no config of that name, or a config that does not fit, with its path.
    """
    return _load(_path(kind, name), Component)


def load_recipe(recipe: str | Path) -> Recipe:
    """Load a recipe by name, or from a YAML file of the user's.

    Raises:
        ValueError: no recipe of that name, or one that does not fit, with its path.
    """
    path = Path(recipe)
    if path.suffix not in (".yaml", ".yml"):
        path = _path("recipes", str(recipe))
    return _load(path, Recipe)


def load_objective(name: str | PathLike[str]) -> Recipe:
    """Load a recipe by name or path; or make one of a single loss or penalty.

    Args:
        name: of a recipe, else of a penalty, else of a loss; ``losses/NAME`` and
            ``penalties/NAME`` name those alone.

    Raises:
        ValueError: nothing of that name, or a recipe that does not fit, with its path.
    """
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
        f"no recipe, penalty or loss is called {str(name)!r}, and no YAML file: there are "
        + "; ".join(
            f"{kind} {', '.join(names(kind))}" for kind in ("recipes", "penalties", "losses")
        )
    )


def target(component: Component) -> Any:
    """Return the class or function that `component` names.

    Raises:
        ValueError: there is none.
    """
    module_name, _, attribute = component.target.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{component.target}: cannot be found ({error})") from None


def build(component: Component, **runtime: Any) -> Any:
    """Build what `component` names, from its arguments and those known only at run time.

    Args:
        component: target and arguments.
        runtime: e.g. ``num_classes`` and ``ignore_index``; those that the target does not take,
            and those that are None, are left out. ``per_channel`` is not left out: a method
            that has no such form says so.

    Raises:
        ValueError: unknown target; arguments that it does not take or lacks, with the accepted
            list; a config that says otherwise than `runtime`; whatever the target refuses.
    """
    what = target(component)
    accepted = accepted_arguments(what)
    if runtime.get("per_channel") and "per_channel" not in accepted:
        raise ValueError(
            f"{component.target}: has no form per channel (region-based labels, a sigmoid each); "
            "use labels that exclude each other, or a method that has one"
        )
    own = {k: _build_argument(v, runtime) for k, v in component.args.items()}
    runtime = {k: v for k, v in runtime.items() if k in accepted and v is not None}
    for name in set(runtime) & set(component.args):
        if component.args[name] != runtime[name]:
            raise ValueError(
                f"{component.target}: {name} is {component.args[name]!r} in the config but "
                f"{runtime[name]!r} here"
            )
    arguments = {**own, **runtime}
    unknown = sorted(set(arguments) - set(accepted))
    if unknown and not hands_on(what):
        raise ValueError(
            f"{component.target}: takes no {', '.join(unknown)}; it takes {', '.join(accepted)}"
        )
    missing = [n for n, p in accepted.items() if p.default is p.empty and n not in arguments]
    if missing:
        raise ValueError(f"{component.target}: needs {', '.join(missing)}")
    try:
        return what(**arguments)
    except (ValueError, OSError):
        raise
    except Exception as error:  # e.g. "0.1" where 0.1 was meant
        raise ValueError(
            f"{component.target}: {type(error).__name__}: {error}; given {component.args}"
        ) from error


def _build_argument(value: Any, runtime: Mapping[str, Any]) -> Any:
    """`value`, or what it describes if it is a target with arguments: a class of segcal."""
    if not (isinstance(value, dict) and "target" in value):
        return value
    component = validated(value, Component, str(value["target"]))
    if not (component.target.startswith("segcal.") and inspect.isclass(target(component))):
        raise ValueError(f"{component.target}: as an argument, only classes of segcal are built")
    return build(component, **runtime)


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
        components by name, their weights being those of the recipe.

    Raises:
        ValueError: an override for a term that the recipe lacks, or no config of a name.
    """
    overrides = overrides or {}
    kinds: dict[str, ComponentKind] = {
        **dict.fromkeys(recipe.base, "losses"),
        **dict.fromkeys(recipe.penalties, "penalties"),
    }
    if unknown := sorted({*overrides, *recipe.args} - set(kinds)):
        raise ValueError(
            f"recipe: has no term {', '.join(unknown)}; it has {', '.join(kinds) or 'none'}"
        )
    terms = {}
    for name, kind in kinds.items():
        component = load_component(kind, name)
        arguments = {**component.args, **recipe.args.get(name, {}), **overrides.get(name, {})}
        terms[name] = component.model_copy(update={"args": arguments})
    return terms


def accepted_arguments(what: Any) -> dict[str, inspect.Parameter]:
    """Named arguments of a class, following ``**kwargs`` into its base classes."""
    found: dict[str, inspect.Parameter] = {}
    for cls in inspect.getmro(what) if inspect.isclass(what) else [what]:
        if inspect.isclass(cls) and "__init__" not in vars(cls):
            continue
        parameters = list(inspect.signature(cls).parameters.values())
        for parameter in parameters:
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and (
                parameter.name != "self"
            ):
                found.setdefault(parameter.name, parameter)
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return found


def hands_on(what: Any) -> bool:
    """Whether this is a function that hands arguments on to another that it does not name."""
    if inspect.isclass(what):
        return False
    try:
        parameters = inspect.signature(what).parameters.values()
    except (TypeError, ValueError):  # nothing that can be called, or not written in Python
        return False
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _path(kind: Kind, name: str) -> Path:
    if name not in names(kind):
        raise ValueError(f"{kind}: no config named {name!r}; there are {', '.join(names(kind))}")
    return config_root() / kind / f"{name}.yaml"


def _load(path: Path, model: type[Model]) -> Model:
    return validated(read_yaml(path), model, str(path))


class Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as people mean it; YAML 1.1 wants 1.0e-3."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ValueError: the file is missing or not YAML, with its name.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a YAML file ({error})") from None


def validated(content: Any, model: type[Model], name: str) -> Model:
    """Make a config of what a file holds.

    Raises:
        ValueError: starting with `name`: all that does not fit, unknown keys with the known ones.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, e['loc'])) or 'file'}: {_problem(e, model)}"
            for e in error.errors()
        )
        raise ValueError(f"{name}: {problems}") from None


def _problem(error: ErrorDetails, model: type[BaseModel]) -> str:
    if error["type"] != "extra_forbidden":
        return error["msg"].removeprefix("Value error, ")
    place = model
    for key in error["loc"][:-1]:
        field = place.model_fields.get(str(key))
        parts = () if field is None else (field.annotation, *get_args(field.annotation))
        place = next((p for p in parts if inspect.isclass(p) and issubclass(p, BaseModel)), place)
    return f"unknown; there are {', '.join(place.model_fields)}"
