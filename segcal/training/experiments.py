"""An experiment: one YAML file that defines a training, checked before work starts.

This module holds what all experiments have in common; each trainer adds its own settings in a
subclass. Relative paths are relative to the working directory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import BaseModel, Field, field_validator

from segcal.components import Component
from segcal.io.files import write_text
from segcal.io.yaml import Loader, Strict, config_root, read_yaml, validated
from segcal.recipes import load_objective
from segcal.training.devices import DEVICES

__all__ = [
    "Experiment",
    "TrainingSettings",
    "check_same",
    "differences",
    "filled",
    "load",
    "put",
    "read_content",
    "shipped",
    "to_yaml",
    "write_resolved",
]

CONFIG_NAME = "config.yaml"
"""Name of the resolved experiment beside its results."""
Model = TypeVar("Model", bound=BaseModel)


class TrainingSettings(Strict):
    """Length, batch size, seed and device of a training.

    Attributes:
        epochs: passes over the training data.
        batch_size: samples per step, over all processes together.
        early_stop: number of epochs without improvement after which training ends; None means
            never.
        seed: random seed of weights, order, augmentation and dropout. Every epoch has its own seed,
            so a resumed training continues as if it had not been stopped.
        device: ``auto`` uses a GPU if there is one.
    """

    epochs: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    early_stop: int | None = Field(default=None, ge=1)
    seed: int = Field(default=1, ge=0)
    device: str = Field(default="auto", pattern=f"^({DEVICES})$")


class Experiment(Strict):
    """Definition of a training.

    Attributes:
        summary: description for readers.
        data: training data, and how they are processed.
        network: a class or function that makes a network which returns logits; numbers of classes,
            channels and the like are filled in.
        recipe: the loss: name of a recipe, loss or penalty, or a YAML file.
        terms: arguments of the recipe's terms, by name.
        optimizer: a class of torch.optim.
        scheduler: a class of torch.optim.lr_scheduler that steps every epoch, or None.
            ReduceLROnPlateau gets the metric that chooses the best epoch.
        training: see :class:`TrainingSettings`.
        output: folder of the results; ``{recipe}`` and ``{seed}`` are replaced.
    """

    must_be_same: ClassVar[Mapping[str, Sequence[str]]] = {
        "data": (),
        "network": ("summary", "paper"),
        "recipe": (),
        "terms": (),
        "optimizer": (),
        "scheduler": (),
        "training": ("epochs", "early_stop", "device"),
    }
    """Parts that a resumed training may not change, each with the keys that it may change."""

    summary: str = ""
    data: Strict
    network: Component
    recipe: str
    terms: dict[str, dict[str, Any]] = Field(default={})
    optimizer: Component = Component(target="torch.optim.Adam", args={"lr": 1e-3})
    scheduler: Component | None = None
    training: TrainingSettings
    output: str

    @field_validator("recipe")
    @classmethod
    def _known_recipe(cls, value: str) -> str:
        cls.check_recipe(value)
        return value

    @staticmethod
    def check_recipe(name: str) -> None:
        """Raise ValueError unless there is a loss of that name."""
        load_objective(name)

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        return filled(self.output, recipe=Path(self.recipe).stem, seed=self.training.seed)


def load(config: str | Path, model: type[Model], kind: str, settings: Sequence[str] = ()) -> Model:
    """Read an experiment.

    Args:
        config: a YAML file, or the name of a shipped experiment.
        model: class of the experiment.
        kind: folder of the shipped experiments.
        settings: ``key=value``, keys with dots (``training.epochs=3``), values as in YAML.

    Raises:
        ValueError: there is no such file or name, or its content does not fit; the message lists
            every problem.
    """
    name = f"{config} with {' '.join(settings)}" if settings else str(config)
    return validated(read_content(config, model, kind, settings), model, name)


def read_content(
    config: str | Path, model: type[BaseModel], kind: str, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Read the content of a YAML file, and put the user's settings into it.

    Args:
        config: a YAML file, or the name of a shipped experiment.
        model: class of the experiment.
        kind: folder of the shipped experiments.
        settings: ``key=value``, keys with dots (``training.epochs=3``), values as in YAML.

    Raises:
        ValueError: there is no such file or name (the message lists the shipped names), or a
            setting has another form.
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
    """Put a setting, ``key=value``, into the content of a YAML file.

    Raises:
        ValueError: the setting has another form.
    """
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise ValueError(f"setting {setting!r}: expected key=value, e.g. training.epochs=3")
    *above, last = key.split(".")
    place = content
    for name in above:
        inner = place.get(name)
        place[name] = place = dict(inner) if isinstance(inner, dict) else {}
    try:
        place[last] = yaml.load(text, Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"setting {setting!r}: its value is no YAML ({error})") from None


def to_yaml(experiment: BaseModel) -> str:
    """All settings of an experiment, defaults included, as YAML that can be edited and used."""
    return yaml.safe_dump(experiment.model_dump(mode="json"), sort_keys=False)


def write_resolved(experiment: BaseModel, folder: Path) -> None:
    """Write the resolved experiment as ``config.yaml``."""
    write_text(folder / CONFIG_NAME, to_yaml(experiment))


def differences(before: BaseModel, now: BaseModel, parts: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences on the differences between some parts of two experiments.

    Args:
        before: an experiment.
        now: another experiment.
        parts: names of the parts to compare, each with the keys to leave out.
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
    before: Experiment, now: Experiment, path: Path, only: Collection[str] | None = None
) -> None:
    """Check that a checkpoint belongs to an experiment.

    Args:
        before: the experiment that the checkpoint holds.
        now: the experiment that it should belong to.
        path: path of the checkpoint.
        only: names of the parts to compare; None compares all parts that must be the same.

    Raises:
        ValueError: something differs; the message says what.
    """
    parts = {k: v for k, v in now.must_be_same.items() if only is None or k in only}
    if found := differences(before, now, parts):
        raise ValueError(
            f"{path}: was trained with {'; '.join(found)}. Use the settings it was trained with "
            f"({CONFIG_NAME} beside it), or choose another output"
        )


def filled(text: str, **values: object) -> Path:
    """A path with ``{recipe}``, ``{seed}``, ... replaced; other braces stay as they are."""
    for key, value in values.items():
        text = text.replace(f"{{{key}}}", str(value))
    return Path(text)
