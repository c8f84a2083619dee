"""What a study is of: one YAML file, and the trainings that it asks for.

A *cell* is a data set, a network, a recipe and a seed. The seed draws which patients train,
validate and test, and seeds the training: all recipes of a seed see the same patients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field, ValidationInfo, field_validator, model_validator

from segcal.io.yaml import Pattern, Strict, merged, validated
from segcal.recipes import load_objective, names

__all__ = [
    "BASELINE",
    "DATA",
    "RESULTS",
    "Cost",
    "Host",
    "Part",
    "Patients",
    "SegmentationStudy",
    "StudyCell",
    "StudySet",
    "TrainedCell",
    "Variant",
    "cells",
]  # fmt: skip

KIND = "segmentation"
"""What a study says that it is, as its ``kind``."""
DATA = "data"
"""Folder of the prepared data in that of a study."""
RESULTS = "results"
"""Folder of the tables in that of a study."""
BASELINE = "dice_ce"
"""Recipe that others are compared with, where it is there and nothing else is said."""
Part = Literal["fit", "test"]
"""Patients that are predicted: those that validate the training, and those that only test it."""


class Cost(Strict):
    """What a study takes, as measured or reckoned by whoever wrote it.

    Attributes:
        cpu_hours: of one core, for all trainings; None where it is only for a GPU.
        gpu_minutes: of one GPU, for all trainings; reckoned, never run on one; None where nobody
            knows.
        disk_gb: of data and trainings; None where it is little.
    """

    cpu_hours: float | None = Field(default=None, ge=0)
    gpu_minutes: float | None = Field(default=None, ge=0)
    disk_gb: float | None = Field(default=None, ge=0)

    @property
    def sentence(self) -> str:
        """What the study takes, for people."""
        kinds = []
        if self.cpu_hours is not None:
            kinds.append(f"{self.cpu_hours:g} h of a CPU core")
        if self.gpu_minutes is not None:
            kinds.append(f"{self.gpu_minutes:g} min of a GPU (reckoned, never run on one)")
        disk = "" if self.disk_gb is None else f", and {self.disk_gb:g} GB of a disk"
        return f"As its file has it, the study takes about {', or '.join(kinds)}{disk}."

    @model_validator(mode="after")
    def _time(self) -> Cost:
        if self.cpu_hours is None and self.gpu_minutes is None:
            raise ValueError("expected cpu_hours, gpu_minutes, or both")
        return self


class Patients(Strict):
    """How many patients do what; cases of one patient are never parted.

    Attributes:
        train: that train; None takes those that are left.
        validation: that validate the training, and that repairs are fitted to.
        test: that only test; None takes those that are left, or of `folds` those of the fold.
    """

    train: int | None = Field(default=None, ge=1)
    validation: int = Field(ge=1)
    test: int | None = Field(default=None, ge=1)


class StudySet(Strict):
    """A data set, how its patients are parted, and how long networks are trained on it.

    Attributes:
        phantom: generate phantoms, with these arguments of
            :class:`segcal.datasets.phantom.PhantomSettings`; every seed has others.
        raw: instead, a folder in nnU-Net's raw layout. Cases of ``imagesTr`` and ``imagesTs`` are
            parted together, as far as they have a label map.
        patient: regular expression that finds the patient in the name of a case (its first group,
            or all of it); None takes every case for a patient.
        cases_per_patient: instead, as many cases as follow each other in number are one patient:
            with 2, case_001 and case_002.
        patients: how many do what.
        folds: cross-validation: the patients are cut into as many parts, and seed N tests part N
            (of an order that is drawn anew after every round); None draws the patients of every
            seed anew.
        middle_mm: side of the middle that is cut out of every slice before anything else; None
            cuts nothing.
        data: keys of the network's host: size, spacing_mm, ... of ``segcal train``.
        epochs: passes over the training cases.
        training: keys of the host that differ from those of the study.
        optimizer: in place of that of the study.
        scheduler: in place of that of the study.
        networks: those of the study that are trained on this set; None takes all.
        recipes: those of the study that are trained on this set; None takes all.
        seeds: in place of those of the study; of `folds`, one for each is the default.
    """

    phantom: dict[str, Any] | None = None
    raw: Path | None = None
    patient: Pattern = None
    cases_per_patient: int | None = Field(default=None, ge=2)
    patients: Patients
    folds: int | None = Field(default=None, ge=2)
    middle_mm: float | None = Field(default=None, gt=0)
    data: dict[str, Any] = Field(default={})
    epochs: int = Field(ge=1)
    training: dict[str, Any] = Field(default={})
    optimizer: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    networks: tuple[str, ...] | None = None
    recipes: tuple[str, ...] | None = None
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> StudySet:
        if (self.phantom is None) == (self.raw is None):
            raise ValueError("give phantom: {} or raw: FOLDER, one of both")
        if self.patient is not None and self.cases_per_patient is not None:
            raise ValueError("patient and cases_per_patient: give one of both")
        if self.phantom is not None:
            self._consistent_phantom()
        if self.folds is None and self.patients.train is None and self.patients.test is None:
            raise ValueError("patients: give the number of those that train, or of those that test")
        if self.folds is not None and self.patients.test is not None:
            raise ValueError("patients.test: with folds, a fold's patients test")
        return self

    def _consistent_phantom(self) -> None:
        if None in (self.patients.train, self.patients.test):
            raise ValueError("patients: of phantoms, give how many train, validate and test")
        for name in ("patient", "cases_per_patient", "folds", "middle_mm"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: is of files, and phantoms are generated")


class Variant(Strict):
    """A recipe under a name of its own.

    Attributes:
        recipe: name of a recipe, loss or penalty, or a YAML file.
        terms: arguments of its terms, by term.
        changes: keys of the host's training that differ for this recipe alone.
    """

    recipe: str
    terms: dict[str, dict[str, Any]] = Field(default={})
    changes: dict[str, Any] = Field(default={})

    @field_validator("recipe")
    @classmethod
    def _known(cls, value: str) -> str:
        load_objective(value)
        return value


class SegmentationStudy(Strict):
    """All about a study of segmentation.

    Attributes:
        kind: ``segmentation``.
        summary: for people.
        cost: what it takes.
        sets: data sets by name.
        networks: by name: ``target`` and ``args`` of a network of MONAI's, or ``host: nnunet`` and
            its ``configuration``; with either, ``epochs`` in place of those of the set.
        recipes: a list of names, or by a name of one's own what :class:`Variant` says.
        seeds: of splits and trainings.
        baseline: the recipe that others are compared with; None takes ``dice_ce``, or the first.
        optimizer: as in ``segcal train``.
        scheduler: as in ``segcal train``; an argument ``epochs`` stands for their number.
        training: keys of the host: batch_size, device, ...
        repairs: post-hoc methods that are fitted to the validation patients and measured beside
            the probabilities as they are.
        keep_predictions: leave the predictions of every cell, which take the most room.
        output: folder of all that is written.
    """

    kind: Literal["segmentation"]
    summary: str = ""
    cost: Cost | None = None
    sets: dict[str, StudySet] = Field(min_length=1)
    networks: dict[str, dict[str, Any]] = Field(min_length=1)
    recipes: dict[str, Variant] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    baseline: str | None = None
    optimizer: dict[str, Any] = Field(default={"target": "torch.optim.Adam", "args": {"lr": 1e-3}})
    scheduler: dict[str, Any] | None = None
    training: dict[str, Any] = Field(default={})
    repairs: tuple[str, ...] = ("temperature", "class_region")
    keep_predictions: bool = False
    output: str

    @field_validator("recipes", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        """A list, and an entry that only names a recipe, as mappings."""
        if isinstance(value, list | tuple):
            if len(set(map(str, value))) != len(value):
                raise ValueError("name each recipe once")
            value = {Path(str(one)).stem: {"recipe": str(one)} for one in value}
        if not isinstance(value, Mapping):
            return value
        return {
            name: {"recipe": name, **(one or {})} if isinstance(one, Mapping | None) else one
            for name, one in value.items()
        }

    @field_validator("repairs")
    @classmethod
    def _known_repairs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := sorted(set(value) - set(names("posthoc"))):
            there = ", ".join(names("posthoc"))
            raise ValueError(f"no post-hoc method {', '.join(unknown)}; there are {there}")
        return value

    @field_validator("sets", "networks", "recipes")
    @classmethod
    def _folders(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        reserved = (DATA, RESULTS) if info.field_name == "sets" else ()
        unfit = [n for n in value if Path(n).name != n or n.startswith(".") or n in reserved]
        if unfit:
            raise ValueError(f"{', '.join(map(repr, unfit))} cannot name a folder")
        return value

    @model_validator(mode="after")
    def _names_are_there(self) -> SegmentationStudy:
        for name, one in self.sets.items():
            for what, chosen, there in (
                ("networks", one.networks, self.networks),
                ("recipes", one.recipes, self.recipes),
            ):
                if unknown := sorted(set(chosen or ()) - set(there)):
                    raise ValueError(
                        f"sets.{name}.{what}: {', '.join(unknown)} is not among those of the "
                        f"study, {', '.join(there)}"
                    )
        if self.baseline is not None and self.baseline not in self.recipes:
            raise ValueError(f"baseline: {self.baseline!r} is none of {', '.join(self.recipes)}")
        for what, seeds in (
            ("", self.seeds),
            *((f"sets.{n}.", s.seeds) for n, s in self.sets.items()),
        ):
            if seeds is not None and (len(set(seeds)) != len(seeds) or min(seeds) < 0):
                raise ValueError(f"{what}seeds: expected different numbers >= 0, got {seeds}")
        return self

    @property
    def folder(self) -> Path:
        """Folder of all that is written."""
        return Path(self.output)

    @property
    def compared_with(self) -> str:
        """The recipe that others are compared with."""
        if self.baseline is not None:
            return self.baseline
        return BASELINE if BASELINE in self.recipes else next(iter(self.recipes))


@dataclass(frozen=True, eq=False)
class StudyCell:
    """A training of a study, with all that it depends on.

    Attributes:
        set: name of the data set.
        network: name of the network.
        recipe: name of the recipe.
        seed: of split and training.
        output: folder of the study.
        host: name of what trains the network.
        source: the data set.
        variant: the recipe.
        settings: what the host is told: ``network``, ``data``, ``epochs``, ``optimizer``,
            ``scheduler``, ``training``.
        repairs: post-hoc methods that are measured.
        keep_predictions: whether they stay.
    """

    set: str
    network: str
    recipe: str
    seed: int
    output: Path
    host: str
    source: StudySet
    variant: Variant
    settings: dict[str, Any]
    repairs: tuple[str, ...]
    keep_predictions: bool = False

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.set}, {self.network}, {self.recipe}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of its training, predictions and numbers."""
        return self.output / self.set / self.network / self.recipe / f"seed_{self.seed}"

    @property
    def data(self) -> Path:
        """Folder of its data set in nnU-Net's raw layout, that all recipes of a seed share."""
        return self.output / DATA / self.set / f"seed_{self.seed}"

    def predictions(self, part: Part) -> Path:
        """Folder of predictions."""
        return self.folder / part

    def images(self, part: Part) -> Path:
        """Folder of the images of what is predicted."""
        return self.data / "images" / part

    def labels(self, part: Part) -> Path:
        """Folder of the label maps of what is predicted."""
        return self.data / "labels" / part

    def posterior(self, part: Part) -> Path:
        """Folder of the true posteriors of what is predicted, where they are known."""
        return self.data / "posterior" / part


@dataclass(frozen=True)
class TrainedCell:
    """What came of a training.

    Attributes:
        epochs: that have been trained.
        best_epoch: the best of them, from 0; None where nobody has looked.
        parameters: numbers that the network has learned; None where nobody knows.
        seconds: that its epochs took, those before a resume included.
        versions: of what made it.
    """

    epochs: int
    best_epoch: int | None
    parameters: int | None
    seconds: float
    versions: dict[str, str]


class Host(Protocol):
    """What trains networks and predicts with them; it can be pickled."""

    def resolve(self, cell: StudyCell, classes: int) -> BaseModel:
        """All that a training is of, checked as far as can be before it.

        Args:
            cell: what is trained.
            classes: of its data set, background included.

        Raises:
            ValueError: something does not fit.
        """
        ...

    def train(self, cell: StudyCell) -> TrainedCell:
        """Train to the end, from where it was left.

        Raises:
            ValueError: something does not fit.
            FloatingPointError: the loss is no longer finite.
        """
        ...

    def predict(self, cell: StudyCell, part: Part) -> None:
        """Write CASE.npz (probabilities) and CASE.nii.gz (the mask) of the last epoch.

        Args:
            cell: whose training has ended.
            part: of the patients; the files go to ``cell.predictions(part)``.
        """
        ...

    def log(self, cell: StudyCell) -> Path:
        """Folder of the log of the epochs, while it is trained, too."""
        ...


def cells(
    study: SegmentationStudy, hosts: Collection[str] = ("monai", "nnunet")
) -> list[StudyCell]:
    """The trainings of a study, seed by seed, so that a part of a study compares recipes.

    Args:
        study: all about it.
        hosts: that there are.

    Raises:
        ValueError: a network of a host that there is not.
    """
    found = []
    for name, one in study.sets.items():
        seeds = one.seeds or (study.seeds if one.folds is None else tuple(range(one.folds)))
        for seed in seeds:
            for network in one.networks or study.networks:
                content = dict(study.networks[network])
                host = content.pop("host", "monai")
                epochs = content.pop("epochs", one.epochs)
                if host not in hosts:
                    raise ValueError(
                        f"networks.{network}.host: expected one of {', '.join(hosts)}, got {host!r}"
                    )
                for recipe in one.recipes or study.recipes:
                    settings = {
                        "network": content,
                        "data": one.data,
                        "epochs": epochs,
                        "optimizer": one.optimizer or study.optimizer,
                        "scheduler": one.scheduler or study.scheduler,
                        "training": merged(study.training, one.training),
                    }
                    found.append(StudyCell(
                        name, network, recipe, seed, study.folder, host, one,
                        study.recipes[recipe], settings, study.repairs, study.keep_predictions,
                    ))  # fmt: skip
    return found


def load_study(content: Mapping[str, Any], name: str) -> SegmentationStudy:
    """Make a study of what a file says.

    Args:
        content: of the file.
        name: of it, for messages.

    Raises:
        ValueError: all that does not fit.
    """
    return validated(content, SegmentationStudy, name)
