"""Experiments: settings in place of those of a file, parts that they name, and what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch
import yaml
from pydantic import BaseModel
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, ReduceLROnPlateau

from segcal.components import Component, build_component, target
from segcal.io.files import write_text
from segcal.io.yaml import Loader, config_root, read_yaml, validated
from segcal.training.checkpoints import LAST_NAME
from segcal.training.epoch_log import EpochLog

DEVICES = r"auto|cpu|cuda(:\d+)?"
"""Names of devices that work is done on."""
CONFIG_NAME = "config.yaml"
"""Name of the resolved experiment beside its results."""
Part = TypeVar("Part")
Model = TypeVar("Model", bound=BaseModel)


def load(config: str | Path, model: type[Model], kind: str, settings: Sequence[str] = ()) -> Model:
    """Read an experiment.

    Args:
        config: a YAML file, or the name of a shipped one.
        model: what it is to be.
        kind: folder of the shipped ones.
        settings: ``key=value``, keys with dots (``training.epochs=3``), values as in YAML.

    Raises:
        ValueError: no such file or name, or something that does not fit, with all that there is.
    """
    name = f"{config} with {' '.join(settings)}" if settings else str(config)
    return validated(read_content(config, model, kind, settings), model, name)


def read_content(
    config: str | Path, model: type[BaseModel], kind: str, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Read what a YAML file says, with settings of the user's put in.

    Args:
        config: a YAML file, or the name of a shipped one.
        model: what it is to be.
        kind: folder of the shipped ones.
        settings: ``key=value``, keys with dots (``training.epochs=3``), values as in YAML.

    Raises:
        ValueError: no such file or name, with the names that there are; settings that are none.
    """
    path = Path(config)
    if path.suffix not in (".yaml", ".yml"):
        if str(config) not in shipped(kind):
            raise ValueError(
                f"{config}: no YAML file and no shipped experiment; there are "
                f"{', '.join(shipped(kind))}"
            )
        path = config_root() / kind / f"{config}.yaml"
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected keys {', '.join(model.model_fields)}")
    for setting in settings:
        put(content, setting)
    return content


def shipped(kind: str) -> list[str]:
    """Names of the experiments of a kind that come with segcal."""
    folder = config_root() / kind
    return sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml"))


def put(content: dict[str, Any], setting: str) -> None:
    """Put a setting, ``key=value``, into what a YAML file says.

    Raises:
        ValueError: it is none.
    """
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(f"--set {setting}: expected key=value, e.g. training.epochs=3")
    *above, last = key.split(".")
    place = content
    for name in above:
        inner = place.get(name)
        place[name] = place = dict(inner) if isinstance(inner, dict) else {}
    try:
        place[last] = yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"--set {setting}: its value is no YAML ({error})") from None


def to_yaml(experiment: BaseModel) -> str:
    """All settings of an experiment, defaults included, as a YAML file of one's own would say."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def write_resolved(experiment: BaseModel, folder: Path) -> None:
    """Write the resolved experiment as ``config.yaml``."""
    write_text(folder / CONFIG_NAME, to_yaml(experiment))


def build_part(component: Component, kind: type[Part], name: str, **runtime: Any) -> Part:
    """Build what `component` names, a `kind` or a function that is annotated to return one.

    Args:
        component: target and arguments.
        kind: what must come of it.
        name: what messages call it.
        runtime: as of :func:`segcal.components.build_component`.

    Raises:
        ValueError: it is not, or its arguments do not fit.
    """
    what = target(component)
    made = what if isinstance(what, type) else _annotated(what)
    if not (isinstance(made, type) and issubclass(made, kind)):
        raise ValueError(
            f"{name}: {component.target} is not a {kind.__module__}.{kind.__qualname__}"
        )
    try:
        part: Part = build_component(component, **runtime)
    except (ValueError, OSError) as error:
        raise ValueError(f"{name}: {error}") from None
    return part


def build_optimizer(
    optimizer: Component,
    scheduler: Component | None,
    network: nn.Module,
    *,
    epochs: int,
    metric: str,
    higher: bool,
) -> tuple[Optimizer, LRScheduler | None]:
    """Build what updates a network, and the schedule of its learning rate, a step an epoch.

    Args:
        optimizer: a class of torch.optim.
        scheduler: a class of torch.optim.lr_scheduler, or None.
        network: whose parameters are updated.
        epochs: of the training, which the schedule must last.
        metric: what a ReduceLROnPlateau is shown, for messages.
        higher: whether more of it is better.

    Raises:
        ValueError: no such class, arguments that do not fit, an optimiser that computes the loss
            itself, a plateau of the wrong direction, a schedule that ends before the training.
    """
    built = build_part(optimizer, Optimizer, "optimizer", params=list(network.parameters()))
    if signature(built.step).parameters["closure"].default is Parameter.empty:
        raise ValueError(
            f"optimizer: {optimizer.target} computes the loss anew within a step, for which there "
            "is no way here; take another, e.g. torch.optim.AdamW"
        )
    parameter = nn.Parameter(torch.zeros_like(next(network.parameters()).detach().flatten()[:1]))
    parameter.grad = torch.ones_like(parameter)
    trial = build_part(optimizer, Optimizer, "optimizer", params=[parameter])
    try:
        trial.step()
    except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
        raise ValueError(
            f"optimizer: {optimizer.target} fails ({type(error).__name__}: {error})"
        ) from None
    if scheduler is None:
        return built, None
    schedule = build_part(scheduler, LRScheduler, "scheduler", optimizer=built)
    if isinstance(schedule, ReduceLROnPlateau):
        mode = "max" if higher else "min"
        if schedule.mode != mode:
            raise ValueError(
                f"scheduler: ReduceLROnPlateau is shown the validation {metric}, of which "
                f"{'more' if higher else 'less'} is better; give it mode: {mode}"
            )
        return built, schedule
    if isinstance(schedule, CosineAnnealingLR) and schedule.T_max < epochs:
        raise ValueError(
            f"scheduler: with T_max {schedule.T_max} the learning rate would climb again before "
            f"the end of {epochs} epochs; give it T_max: {epochs} (a training that was begun with "
            "another cannot be made longer)"
        )
    rehearsal = build_part(scheduler, LRScheduler, "scheduler", optimizer=trial)
    try:
        for _ in range(epochs):
            trial.step()
            rehearsal.step()
    except Exception as error:  # noqa: BLE001 - whatever it says, it does not work
        raise ValueError(
            f"scheduler: {scheduler.target}, a step an epoch, does not last {epochs} epochs "
            f"({type(error).__name__}: {error})"
        ) from None
    return built, schedule


def _annotated(what: Any) -> Any:
    """What a function says that it returns, before it is called: not every one may be."""
    try:
        return get_type_hints(what).get("return")
    except (TypeError, NameError, AttributeError):
        return None


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


def check_same(
    before: BaseModel, now: BaseModel, parts: Mapping[str, Sequence[str]], path: Path
) -> None:
    """See to it that a checkpoint is of an experiment.

    Args:
        before: the experiment that it holds.
        now: what it should be of.
        parts: as of :func:`differences`.
        path: of the checkpoint.

    Raises:
        ValueError: what differs.
    """
    if found := differences(before, now, parts):
        raise ValueError(
            f"{path}: was trained with {'; '.join(found)}. Give the settings it was trained with "
            "(config.yaml beside it), or choose another output"
        )


def check_unused(folder: Path) -> None:
    """See to it that no training is overwritten.

    Raises:
        ValueError: one is in `folder`.
    """
    if (folder / LAST_NAME).exists() or EpochLog(folder).path.exists():
        raise ValueError(
            f"{folder}: holds a training; go on with --resume, or choose another output, e.g. with "
            "--set output=FOLDER"
        )


def filled(text: str, **values: object) -> Path:
    """A path with ``{recipe}``, ``{seed}``, ... replaced; other braces stay as they are."""
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", str(value))
    return Path(text)


def choose_device(name: str) -> torch.device:
    """The device that a name means: ``auto``, ``cpu``, ``cuda`` or ``cuda:0``.

    Raises:
        ValueError: there is none.
    """
    if not re.fullmatch(DEVICES, name):
        raise ValueError(f"device: expected auto, cpu, cuda or cuda:0, got {name!r}")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device: {name} was asked for and torch finds no GPU")
    return torch.device(name)
