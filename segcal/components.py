"""Components of a config, classes or functions with arguments, are found, checked and built."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from segcal.io.yaml import Strict, validated

__all__ = ["Component", "accepted_arguments", "build_component", "hands_on", "target"]

ALLOWED_ROOTS = ("segcal.", "torch.", "torchvision.", "timm.", "monai.")
"""Only targets below these are imported and called."""


class Component(Strict):
    """One loss or penalty: what to build, and with which arguments."""

    target: str
    args: dict[str, Any] = Field(default={})
    summary: str = ""
    paper: str = ""

    @field_validator("target")
    @classmethod
    def _known_root(cls, value: str) -> str:
        if not value.startswith(ALLOWED_ROOTS):
            raise ValueError(f"only targets below {', '.join(ALLOWED_ROOTS)} are built")
        return value


def target(component: Component) -> Any:
    """Return the class or function that `component` names.

    Raises:
        ValueError: there is none.
    """
    module_name, _, attribute = component.target.rpartition(".")
    try:
        with warnings.catch_warnings():  # of a library's own lines, about what it will change
            warnings.simplefilter("ignore", FutureWarning)
            return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{component.target}: cannot be found ({error})") from None


def build_component(component: Component, **runtime: Any) -> Any:
    """Build what `component` names, from its arguments and arguments known only at run time.

    Args:
        component: target and arguments.
        runtime: arguments such as ``num_classes`` and ``ignore_index``. Arguments that the target
            does not take, and arguments that are None, are left out. ``per_channel`` is not left
            out: a method without a form per channel raises an error.

    Raises:
        ValueError: unknown target; arguments that the target does not take or lacks, with the list
            of accepted arguments; a config that contradicts `runtime`; errors of the target.
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
    """`value`, or the object of a segcal class that it describes by a target with arguments."""
    if not (isinstance(value, dict) and "target" in value):
        return value
    component = validated(value, Component, str(value["target"]))
    if not (component.target.startswith("segcal.") and inspect.isclass(target(component))):
        raise ValueError(f"{component.target}: as an argument, only classes of segcal are built")
    return build_component(component, **runtime)


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
    """Whether this is a function that hands on arguments which it does not name itself."""
    if inspect.isclass(what):
        return False
    try:
        parameters = inspect.signature(what).parameters.values()
    except (TypeError, ValueError):  # nothing that can be called, or not written in Python
        return False
    return any(p.kind is p.VAR_KEYWORD for p in parameters)
