"""Reads YAML files and checks them against a pydantic model before work starts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from segcal.io.files import DEPTH

Model = TypeVar("Model", bound=BaseModel)


def check_pattern(value: str | None) -> str | None:
    """Return a regular expression, or None, unchanged.

    Raises:
        ValueError: the text is not a valid regular expression.
    """
    try:
        re.compile(value or "")
    except re.error as error:
        raise ValueError(f"{value!r} is no regular expression ({error})") from None
    return value


Pattern = Annotated[str | None, AfterValidator(check_pattern)]
"""A regular expression of a config, or None."""


LARGEST = 100_000
"""Most values in a config; shipped configs have hundreds."""


class Strict(BaseModel):
    """A part of a config, which refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@cache
def config_root() -> Path:
    """Folder of the shipped configs: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).parent.parent
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "recipes").is_dir():
            return folder
    raise FileNotFoundError(f"segcal's configs are missing from {package}; install segcal again")


class Loader(yaml.SafeLoader):
    """YAML in which 1e-3 is a number, as people mean it; YAML 1.1 needs 1.0e-3.

    A file that is nested too deeply, or grows too large when its aliases are expanded, is refused.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Make the next node; its size counts an alias each time it is used.

        Raises:
            yaml.YAMLError: the node is nested too deeply, is too large, or contains itself.
        """
        self._depth += 1
        if self._depth > DEPTH:
            raise yaml.YAMLError(f"nested more than {DEPTH} levels deep")
        alias = self.check_event(yaml.AliasEvent)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if node is None:
            return node
        if alias and id(node) not in self._sizes:
            raise yaml.YAMLError("an alias refers to a part that contains it")
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        size = self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
        if size > LARGEST:
            raise yaml.YAMLError(f"its aliases stand for more than {LARGEST} values")
        return node


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ValueError: the file is missing or is not YAML; the message names it.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506 - a SafeLoader
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not a YAML file ({error})") from None


def validated(content: Any, model: type[Model], name: str) -> Model:
    """Make a config from the content of a file.

    Raises:
        ValueError: the content does not fit; the message starts with `name` and lists every
            problem, and for an unknown key, the known keys.
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


def merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Put `changes` into `content`, mapping by mapping; a new target or source drops old args.

    Args:
        content: values to change.
        changes: values to put in their place.
    """
    result = dict(content)
    for key, value in changes.items():
        old = result.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping):
            other = any(value.get(k, old.get(k)) != old.get(k) for k in ("target", "source"))
            result[key] = merged({k: v for k, v in old.items() if k != "args" or not other}, value)
        else:
            result[key] = value
    return result
