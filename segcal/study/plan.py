"""The plan of a study: its YAML file, and the trainings that the file asks for.

A *cell* is one training: a data set, a network, a recipe and a seed. The seed draws which patients
train, validate and test, and seeds the training: all recipes of a seed see the same patients.
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
"""Value of ``kind`` in the file of a study."""
DATA = "data"
"""Folder of the prepared data within the folder of a study."""
RESULTS = "results"
"""Folder of the tables within the folder of a study."""
BASELINE = "dice_ce"
"""Recipe that others are compared with by default, if the study has it."""
Part = Literal["fit", "test"]
"""Patients that are predicted: ``fit`` validate the training, ``test`` only test it."""


class Cost(Strict):
    """What a study takes, as measured or estimated by its author.

    Attributes:
        cpu_hours: of one core, for all trainings; None for a study that needs a GPU.
        gpu_minutes: of one GPU, for all trainings; an estimate, not measured; None if unknown.
        disk_gb: for data and trainings; None if it is little.
    """

    cpu_hours: float | None = Field(default=None, ge=0)
    gpu_minutes: float | None = Field(default=None, ge=0)
    disk_gb: float | None = Field(default=None, ge=0)

    @property
    def sentence(self) -> str:
        """A sentence on what the study takes."""
        kinds = []
        if self.cpu_hours is not None:
            kinds.append(f"{self.cpu_hours:g} h of a CPU core")
        if self.gpu_minutes is not None:
            kinds.append(f"{self.gpu_minutes:g} min of a GPU (estimated, never run on one)")
        disk = "" if self.disk_gb is None else f", and {self.disk_gb:g} GB of a disk"
        return f"According to its file, the study takes about {', or '.join(kinds)}{disk}."

    @model_validator(mode="after")
    def _time(self) -> Cost:
        if self.cpu_hours is None and self.gpu_minutes is None:
            raise ValueError("expected cpu_hours, gpu_minutes, or both")
        return self


class Patients(Strict):
    """Numbers of patients to train, validate and test; cases of one patient stay together.

    Attributes:
        train: patients that train; None takes the remaining patients.
        validation: patients that validate the training and to which repairs are fitted.
        test: patients that only test; None takes the remaining patients, or with `folds` the
            patients of the fold.
    """

    train: int | None = Field(default=None, ge=1)
    validation: int = Field(ge=1)
    test: int | None = Field(default=None, ge=1)


class StudySet(Strict):
    """A data set, how its patients are split, and how long networks are trained on it.

    Attributes:
        phantom: generate phantoms with these arguments of
            :class:`segcal.datasets.phantom.PhantomSettings`; every seed gets other phantoms.
        raw: instead, a folder in nnU-Net's raw layout. Cases of ``imagesTr`` and ``imagesTs`` with
            a label map are split together.
        patient: regular expression that finds the patient in the name of a case (its first group,
            or all of it); None treats every case as a patient.
        cases_per_patient: instead, so many cases with consecutive numbers belong to one patient:
            with 2, case_001 and case_002.
        patients: numbers of patients to train, validate and test.
        folds: cross-validation with so many parts of the patients: seed N tests part N (after every
            round the order is drawn again). None draws the patients of every seed independently.
        middle_mm: side of the square that is cut out of the middle of every slice before anything
            else; None cuts nothing.
        data: settings of the network's host (the program that trains it), e.g. size and spacing_mm
            of ``segcal train``.
        epochs: number of passes over the training cases.
        training: settings of the host that differ from the study's.
        optimizer: in place of the study's.
        scheduler: in place of the study's.
        networks: networks of the study that are trained on this set; None takes all.
        recipes: recipes of the study that are trained on this set; None takes all.
        seeds: in place of the study's; with `folds`, the default is one seed per fold.
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
            raise ValueError("give either phantom: {} or raw: FOLDER")
        if self.patient is not None and self.cases_per_patient is not None:
            raise ValueError("patient and cases_per_patient: give only one of them")
        if self.phantom is not None:
            self._consistent_phantom()
        if self.folds is None and self.patients.train is None and self.patients.test is None:
            raise ValueError("patients: give the number to train, or the number to test")
        if self.folds is not None and self.patients.test is not None:
            raise ValueError("patients.test: leave it out; with folds, a fold's patients test")
        return self

    def _consistent_phantom(self) -> None:
        if None in (self.patients.train, self.patients.test):
            raise ValueError("patients: for phantoms, give the numbers to train, validate and test")
        for name in ("patient", "cases_per_patient", "folds", "middle_mm"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: leave it out; it is for files, not for phantoms")


class Variant(Strict):
    """A recipe under a name of its own.

    Attributes:
        recipe: name of a recipe, loss or penalty, or a YAML file.
        terms: arguments of its terms, by term.
        changes: settings of the host's training that differ only for this recipe.
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
    """A study of segmentation, described fully.

    Attributes:
        kind: ``segmentation``.
        summary: a sentence for readers.
        cost: what the study takes.
        sets: data sets by name.
        networks: by name, ``target`` and ``args`` of a MONAI network, or ``host: nnunet`` and its
            ``configuration``; both may have ``epochs`` in place of the set's.
        recipes: a list of names, or settings of :class:`Variant` by names of your own.
        seeds: of splits and trainings.
        baseline: the recipe that others are compared with; None takes ``dice_ce``, or the first.
        optimizer: as in ``segcal train``.
        scheduler: as in ``segcal train``; the value ``epochs`` of an argument stands for the number
            of epochs.
        training: settings of the host: batch_size, device, ...
        repairs: post-hoc methods that are fitted to the validation patients and measured in
            addition to the unrepaired probabilities. A cell that was measured without one of them
            is predicted and measured again, not trained.
        keep_predictions: whether to keep the predictions of every cell, which take most of the
            disk.
        output: folder for all results.
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
    repairs: tuple[str, ...] = ("temperature", "class_region", "class_region_case")
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
            raise ValueError(f"no post-hoc method {', '.join(unknown)}; expected some of {there}")
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
                        f"sets.{name}.{what}: {', '.join(unknown)} is not in the study, which "
                        f"has {', '.join(there)}"
                    )
        if self.baseline is not None and self.baseline not in self.recipes:
            raise ValueError(f"baseline: {self.baseline!r} is not one of {', '.join(self.recipes)}")
        for what, seeds in (
            ("", self.seeds),
            *((f"sets.{n}.", s.seeds) for n, s in self.sets.items()),
        ):
            if seeds is not None and (len(set(seeds)) != len(seeds) or min(seeds) < 0):
                raise ValueError(f"{what}seeds: expected different numbers >= 0, got {seeds}")
        return self

    @property
    def folder(self) -> Path:
        """Folder for all results."""
        return Path(self.output)

    @property
    def compared_with(self) -> str:
        """The recipe that others are compared with."""
        if self.baseline is not None:
            return self.baseline
        return BASELINE if BASELINE in self.recipes else next(iter(self.recipes))


@dataclass(frozen=True, eq=False)
class StudyCell:
    """A training of a study, with everything that it depends on.

    Attributes:
        set: name of the data set.
        network: name of the network.
        recipe: name of the recipe.
        seed: of split and training.
        output: folder of the study.
        host: name of the program that trains the network.
        source: the data set.
        variant: the recipe.
        settings: for the host: ``network``, ``data``, ``epochs``, ``optimizer``, ``scheduler``,
            ``training``.
        repairs: post-hoc methods that are measured.
        keep_predictions: whether predictions are kept.
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
        """Name of the cell in messages."""
        return f"{self.set}, {self.network}, {self.recipe}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        """Folder of its training, predictions and numbers."""
        return self.output / self.set / self.network / self.recipe / f"seed_{self.seed}"

    @property
    def data(self) -> Path:
        """Folder of its data set in nnU-Net's raw layout, which all recipes of a seed share."""
        return self.output / DATA / self.set / f"seed_{self.seed}"

    def predictions(self, part: Part) -> Path:
        """Folder of predictions."""
        return self.folder / part

    def images(self, part: Part) -> Path:
        """Folder of the images to predict."""
        return self.data / "images" / part

    def labels(self, part: Part) -> Path:
        """Folder of the label maps of predicted cases."""
        return self.data / "labels" / part

    def posterior(self, part: Part) -> Path:
        """Folder of the true posteriors of predicted cases, where they are known."""
        return self.data / "posterior" / part


@dataclass(frozen=True)
class TrainedCell:
    """Facts about a finished training.

    Attributes:
        epochs: number of epochs that have been trained.
        best_epoch: the best of them, counted from 0; None if unknown.
        parameters: number of parameters of the network; None if unknown.
        seconds: time that its epochs took, including epochs before a resume.
        versions: of the software that trained.
    """

    epochs: int
    best_epoch: int | None
    parameters: int | None
    seconds: float
    versions: dict[str, str]


class Host(Protocol):
    """A program that trains networks and predicts with them, as a picklable object."""

    def resolve(self, cell: StudyCell, classes: int) -> BaseModel:
        """All settings of a training, checked as far as possible before it starts.

        Args:
            cell: what is trained.
            classes: of its data set, background included.

        Raises:
            ValueError: something does not fit.
        """
        ...

    def train(self, cell: StudyCell, until: float) -> TrainedCell:
        """Train to the end, continuing from where it stopped.

        Args:
            cell: what is trained.
            until: time, as of ``time.time``, at which to stop.

        Raises:
            ValueError: something does not fit.
            FloatingPointError: the loss is no longer finite.
            OutOfTimeError: that time has come before the end.
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
        """Folder of the log of the epochs, also during the training."""
        ...


def cells(
    study: SegmentationStudy, hosts: Collection[str] = ("monai", "nnunet")
) -> list[StudyCell]:
    """The trainings of a study, seed by seed, so that a part of a study compares recipes.

    Args:
        study: the study.
        hosts: names of the hosts.

    Raises:
        ValueError: a network with an unknown host.
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
    """Make a study from the content of a file.

    Args:
        content: of the file.
        name: of the file, for messages.

    Raises:
        ValueError: values that do not fit; the message lists all of them.
    """
    return validated(content, SegmentationStudy, name)
