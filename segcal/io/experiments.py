"""Experiments: settings in place of those of a file, parts that they name, and what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel

from segcal.io.config import Component, build, config_root, read_yaml, target
from segcal.io.files import write_text

CONFIG_NAME = "config.yaml"
"""Name of the resolved experiment beside its results."""
Part = TypeVar("Part")


def read_content(config: str | Path, kind: str, settings: Sequence[str] = ()) -> dict[str, Any]:
    """Read what a YAML file says, with settings of the user's put in.

    Args:
        config: a YAML file, or the name of a shipped one.
        kind: folder of the shipped ones.
        settings: ``key=value``, keys with dots (``training.epochs=3``), values as in YAML.

    Raises:
        ValueError: no such file or name, with the names that there are; settings that are none.
    """
    path = Path(config)
    if path.suffix not in (".yaml", ".yml"):
        if str(config) not in shipped(kind):
            raise ValueError(
                f"{config}: no YAML file, and none of that name comes with segcal; there are "
                f"{', '.join(shipped(kind))}"
            )
        path = config_root() / kind / f"{config}.yaml"
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys and values, got {type(content).__name__}")
    for setting in settings:
        _put(content, setting)
    return content


def shipped(kind: str) -> list[str]:
    """Names of the experiments of a kind that come with segcal."""
    folder = config_root() / kind
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))


def merged(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`content` with `changes` in it, mapping by mapping; of a new target, no old arguments."""
    result = dict(content)
    for key, value in changes.items():
        old = result.get(key)
        if (
            isinstance(value, Mapping)
            and isinstance(old, Mapping)
            and value.get("target", old.get("target")) == old.get("target")
        ):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def _put(content: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(f"--set {setting}: expected key=value, e.g. training.epochs=3")
    *above, last = key.split(".")
    place = content
    for name in above:
        inner = place.get(name)
        place[name] = place = dict(inner) if isinstance(inner, dict) else {}
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"--set {setting}: its value is no YAML ({error})") from None


def write_resolved(experiment: BaseModel, folder: Path) -> None:
    """Write the resolved experiment as ``config.yaml``."""
    text = yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)
    write_text(folder / CONFIG_NAME, text)


def build_part(component: Component, kind: type[Part], name: str, **runtime: Any) -> Part:
    """Build what `component` names, a `kind` or a function that returns one.

    Args:
        component: target and arguments.
        kind: what must come of it.
        name: what messages call it.
        runtime: as of :func:`segcal.io.config.build`.

    Raises:
        ValueError: it is not, or its arguments do not fit.
    """
    what = target(component)
    expected = f"a {kind.__module__}.{kind.__qualname__}"
    if isinstance(what, type) and not issubclass(what, kind):
        raise ValueError(f"{name}: {component.target} is not {expected}")
    try:
        part = build(component, **runtime)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if not isinstance(part, kind):
        raise ValueError(
            f"{name}: {component.target} returns {type(part).__name__}, not {expected}"
        )
    return part


def differences(before: BaseModel, now: BaseModel, parts: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences on what differs of some parts of two experiments.

    Args:
        before: an experiment.
        now: another one.
        parts: names of the parts that are compared, and what of each does not count.
    """
    a, b = before.model_dump(mode="json"), now.model_dump(mode="json")
    found = []
    for part, ignored in parts.items():
        both = [d[part] if isinstance(d[part], dict) else {"": d[part]} for d in (a, b)]
        for key in dict.fromkeys((*both[0], *both[1])):
            if key not in ignored and both[0].get(key) != both[1].get(key):
                name = f"{part}.{key}".rstrip(".")
                found.append(f"{name} = {both[0].get(key)!r}, not {both[1].get(key)!r}")
    return found
