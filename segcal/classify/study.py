"""A study: losses x seeds x data sets, trained and evaluated on test samples.

Every training has a folder of its own, ``OUTPUT/SET/RECIPE/seed_N``. A training whose
``result.json`` exists is not run again, so an interrupted study continues where it stopped.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from segcal.classify.building import build_objective
from segcal.classify.choosing import choice_table, choose
from segcal.classify.data import check_data, load
from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.experiment import KIND as EXPERIMENTS
from segcal.classify.experiment import ClassificationExperiment, check_recipe
from segcal.classify.measures import record
from segcal.classify.study_report import TrialResult, write_study
from segcal.classify.training import ClassificationRun
from segcal.io.files import read_json, write_json, write_text
from segcal.io.yaml import Strict, merged, validated
from segcal.reporting.tables import Table
from segcal.study.plan import Cost
from segcal.training.checkpoints import LAST_NAME
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import load as load_file
from segcal.training.experiments import read_content
from segcal.training.time_limit import NEVER, OutOfTimeError, is_past

KIND = "studies"
"""Folder of the shipped studies."""
RESULT_NAME = "result.json"
FAILURE_NAME = "failed.txt"
OVERRULED = {
    "terms": "terms.RECIPE.TERM of the study",
    "recipe": "recipes",
    "output": "the study's output",
    "training.seed": "seeds",
}
"""Keys of experiments whose values a study sets itself, and the study's keys for them."""


def _check_changes(value: dict[str, Any]) -> dict[str, Any]:
    for key, instead in OVERRULED.items():
        *above, last = key.split(".")
        if last in _inner(value, *above):
            raise ValueError(f"{key} has no effect here; set {instead} instead")
    return value


def _inner(content: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    """Value of nested mappings under successive names; an empty mapping if a name is missing."""
    for name in names:
        inner = content.get(name)
        content = inner if isinstance(inner, Mapping) else {}
    return content


Changes = Annotated[dict[str, Any], AfterValidator(_check_changes)]
"""Keys and values in place of those of an experiment."""


class LossVariant(Strict):
    """A loss under a name of its own.

    Attributes:
        recipe: the loss.
        terms: arguments of its terms, by term; they override the study's.
    """

    recipe: str
    terms: dict[str, dict[str, Any]] = Field(default={})


def _by_name(value: Any) -> Any:
    """Lists of losses, and entries that only name a loss, as mappings."""
    if isinstance(value, list | tuple):
        paths = [Path(str(one)) for one in value]
        keys = [path.stem if path.suffix in (".yaml", ".yml") else str(path) for path in paths]
        found = {key: {"recipe": one} for key, one in zip(keys, value, strict=True)}
        if len(found) != len(value):
            raise ValueError("name each once; files of recipes need different names")
        return found
    if isinstance(value, Mapping):
        return {k: {"recipe": k} if one is None else one for k, one in value.items()}
    return value


def _name_folders(value: dict[str, Any]) -> dict[str, Any]:
    if unfit := [n for n in value if Path(n).name != n or n in (".", "..")]:
        raise ValueError(f"{', '.join(map(repr, unfit))} cannot name a folder")
    return value


Recipes = Annotated[
    dict[str, LossVariant], BeforeValidator(_by_name), AfterValidator(_name_folders)
]
"""A list of losses, or settings of :class:`LossVariant` by names of your own."""


class Set(Strict):
    """A data set of a study, with its network and training.

    Attributes:
        config: an experiment of classification: a shipped name or a YAML file.
        recipes: losses of this set, or names of losses of the study; None takes all of the study.
        changes: keys and values in place of those of the experiment.
    """

    config: str
    recipes: Recipes | None = None
    changes: Changes = Field(default={})


class Study(Strict):
    """A study of classification, described fully.

    Attributes:
        summary: a sentence for readers.
        sets: data sets by name.
        recipes: losses, in the order of the tables: a list, or settings of :class:`LossVariant` by
            names of your own.
        seeds: of the trainings.
        splits: ``seed`` draws new training, validation and test samples for every seed, unless the
            data set names them; deviations and intervals then include the choice of samples.
            ``folds`` is a cross-validation over all samples, with one fold per seed. ``fixed``
            takes the samples of the experiment's own seed.
        baseline: loss that the others are compared with; None is the first of every set.
        chosen: lists of recipes by names of your own: a row of that name shows, for every seed, the
            recipe that does best on the validation samples.
        terms: arguments of a recipe's terms, by recipe and term.
        changes: keys and values in place of those of all experiments.
        cost: what all trainings take, as measured or estimated by the author of the study; None if
            unknown.
        output: folder of the trainings and of the report.
    """

    summary: str = ""
    sets: Annotated[dict[str, Set], AfterValidator(_name_folders)] = Field(min_length=1)
    recipes: Recipes = Field(default={})
    seeds: tuple[int, ...] = Field(default=(1, 2, 3, 4, 5), min_length=1)
    splits: Literal["fixed", "seed", "folds"] = "seed"
    baseline: str | None = None
    chosen: dict[str, tuple[str, ...]] = Field(default={})
    terms: dict[str, dict[str, dict[str, Any]]] = Field(default={})
    changes: Changes = Field(default={})
    cost: Cost | None = None
    output: str

    @model_validator(mode="after")
    def _chosen_are_there(self) -> Study:
        for name, recipes in self.chosen.items():
            if name in self.recipes or len(set(recipes)) < max(2, len(recipes)):
                raise ValueError(
                    f"chosen.{name}: expected a name that no recipe has, and two or more recipes, "
                    f"each once; got {', '.join(recipes)}"
                )
            if unknown := sorted(set(recipes) - set(self.recipes)):
                raise ValueError(
                    f"chosen.{name}: {', '.join(unknown)} is not in the study, which has "
                    f"{', '.join(self.recipes)}"
                )
        return self

    @field_validator("terms")
    @classmethod
    def _recipes(cls, value: dict[str, Any]) -> dict[str, Any]:
        for recipe in value:  # those that this study leaves out may be there, misspelt ones not
            check_recipe(recipe)
        return value

    @model_validator(mode="after")
    def _splits(self) -> Study:
        overruled = {"seed": ("seed",), "folds": ("folds", "fold"), "fixed": ()}[self.splits]
        for changes in (self.changes, *(one.changes for one in self.sets.values())):
            if found := [key for key in overruled if key in _inner(changes, "data", "split")]:
                raise ValueError(
                    f"changes: data.split.{found[0]} has no effect with splits: {self.splits}"
                )
        if self.splits == "folds" and len(self.seeds) < 2:
            raise ValueError(
                "seeds: splits: folds makes a fold for every seed, so give two or more"
            )
        return self


@dataclass(frozen=True)
class Trial:
    """A training of a study.

    Attributes:
        set: name of the data set.
        recipe: name of the loss in the study.
        seed: of the training.
        experiment: its full description.
    """

    set: str
    recipe: str
    seed: int
    experiment: ClassificationExperiment

    @property
    def name(self) -> str:
        """Name of the training in messages."""
        return f"{self.set}, {self.recipe}, seed {self.seed}"

    def result(self) -> dict[str, Any] | None:
        """Result of the training, if it has been run with these settings."""
        path = self.experiment.folder / RESULT_NAME
        if not path.is_file():
            return None
        content: dict[str, Any] = read_json(path)
        same = content.get("experiment") == self.experiment.model_dump(mode="json")
        return content if same and "tested" in content else None


def load_study(config: str | Path, settings: Sequence[str] = ()) -> Study:
    """Read a study.

    Args:
        config: a YAML file, or the name of a shipped one (``digits``).
        settings: ``key=value``, keys with dots (``sets.scene.changes.data.args.path=FILE``).

    Raises:
        ValueError: no such file or name, or something that does not fit.
    """
    return load_file(config, Study, KIND, settings)


def trials(study: Study) -> list[Trial]:
    """The trainings of a study, each checked as far as possible from its settings.

    Raises:
        ValueError: settings that do not fit; the message names the set and the loss.
    """
    found = []
    for name, one in study.sets.items():
        recipes = study.recipes if one.recipes is None else one.recipes
        if not recipes:
            raise ValueError(f"sets.{name}: has no recipes, and the study names none")
        if study.baseline not in (None, *recipes):
            raise ValueError(
                f"baseline: expected a recipe that every set has, but {name} has "
                f"{', '.join(recipes)}; got {study.baseline!r}"
            )
        for recipe, alone in recipes.items():
            variant = study.recipes.get(recipe, alone)
            for place, seed in enumerate(study.seeds):
                own: dict[str, Any] = {"recipe": variant.recipe, "training": {"seed": seed}}
                own["output"] = f"{study.output}/{name}/{recipe}/seed_{seed}"
                if study.splits == "seed":
                    own["data"] = {"split": {"seed": seed}}
                elif study.splits == "folds":
                    own["data"] = {"split": {"folds": len(study.seeds), "fold": place}}
                try:
                    content = read_content(one.config, ClassificationExperiment, EXPERIMENTS)
                    for changes in (study.changes, one.changes, own):
                        content = merged(content, changes)
                    # not those of the file, which are of another recipe
                    content["terms"] = merged(study.terms.get(variant.recipe, {}), variant.terms)
                    experiment = validated(content, ClassificationExperiment, one.config)
                except ValueError as error:
                    raise ValueError(f"sets.{name}, {recipe}: {error}") from None
                found.append(Trial(name, recipe, seed, experiment))
    folders = [trial.experiment.folder for trial in found]
    if len(set(folders)) != len(folders):
        raise ValueError("recipes, seeds: name each once; files of recipes need different names")
    return found


def check(found: Sequence[Trial]) -> None:
    """Read all data, build every loss once, and check that existing results belong to these data.

    Raises:
        ValueError: data or settings that do not fit; the message names the set and the loss.
    """
    built = set()
    for trial in sorted(found, key=lambda trial: trial.experiment.data.model_dump_json()):
        try:
            data = load(trial.experiment.data)
            if (trial.set, trial.recipe) not in built:
                build_objective(trial.experiment, data)
                built.add((trial.set, trial.recipe))
            if result := trial.result():
                check_data(result, data, trial.experiment.folder / RESULT_NAME)
        except ValueError as error:
            raise ValueError(f"sets.{trial.set}, {trial.recipe}: {error}") from None


def lacking(found: Sequence[Trial]) -> dict[str, str]:
    """Problems by the names of data sets, mainly missing files."""
    wrong = {}
    for name in dict.fromkeys(trial.set for trial in found):
        try:
            check([trial for trial in found if trial.set == name])
        except ValueError as error:
            wrong[name] = str(error)
    return wrong


def run_trial(trial: Trial, until: float = NEVER) -> None:
    """Train and test, continuing from where it stopped; write ``result.json``.

    Args:
        trial: what is trained.
        until: time, as of ``time.time``, after which no epoch but the first begins.

    Raises:
        ValueError: another training is in its folder.
        FloatingPointError: the loss is no longer finite.
        OutOfTimeError: that time has come before the end.
    """
    done = ClassificationRun(trial.experiment, resume=True).run(until=until)
    device = trial.experiment.training.device
    evaluated = evaluate_classifier(done.folder, device=device)
    last = evaluate_classifier(done.folder, device=device, checkpoint=LAST_NAME)
    write_json(
        done.folder / RESULT_NAME,
        {
            "experiment": trial.experiment.model_dump(mode="json"),
            "data": evaluated.data.checksum,
            "tested": evaluated.data.tested,
            "epochs": done.epochs,
            "best_epoch": done.best_epoch,
            "metric": done.metric,
            "best": done.best,
            "multilabel": evaluated.data.multilabel,
            "names": list(evaluated.data.names),
            "samples": {name: len(part) for name, part in evaluated.data.parts.items()},
            "notes": evaluated.notes(),
            "outcomes": {kind: record(outcome) for kind, outcome in evaluated.outcomes.items()},
            "last": {kind: record(o)["metrics"] for kind, o in last.outcomes.items()},
        },
    )


def run_trials(
    todo: Sequence[Trial], processes: int, until: float = NEVER
) -> Iterator[tuple[Trial, str]]:
    """Run trainings; yield each when it has ended, with the reason if it failed.

    Args:
        todo: trainings to run.
        processes: number of trainings at the same time, with one thread each.
        until: time, as of ``time.time``, at which trainings stop after their epoch and no other
            begins, except as many as run at the same time.

    Raises:
        OutOfTimeError: after all that have ended: time was up before the end of some.
    """
    left = 0
    for trial, why in _outcomes(todo, processes, until):
        if why is None:
            left += 1
        else:
            yield trial, why
    if left:
        raise OutOfTimeError(f"{left} trainings are not done")


def _outcomes(
    todo: Sequence[Trial], processes: int, until: float
) -> Iterator[tuple[Trial, str | None]]:
    """Trainings, as they end, with why they failed, or "", or None if there was no time."""
    jobs = [(trial, place < processes, until) for place, trial in enumerate(todo)]
    if processes == 1:
        for job in jobs:
            yield job[0], _run_safely(*job)
        return
    with ProcessPoolExecutor(
        processes, get_context("spawn"), torch.set_num_threads, (1,)
    ) as executor:
        futures = {executor.submit(_run_safely, *job): job[0] for job in jobs}
        try:
            for future in as_completed(futures):
                why: str | None
                try:
                    why = future.result()
                except BrokenProcessPool:
                    why = "its process was killed, perhaps for lack of memory; run the study again"
                yield futures[future], why
        finally:
            executor.shutdown(cancel_futures=True)


def _run_safely(trial: Trial, begins: bool, until: float) -> str | None:
    """Run one, which `begins` even if time is up, and return what :func:`_outcomes` yields."""
    if not begins and is_past(until):
        return None
    told = trial.experiment.folder / FAILURE_NAME
    try:
        told.unlink(missing_ok=True)
        run_trial(trial, until)
    except OutOfTimeError:
        return None
    except (ValueError, FloatingPointError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - out of memory, a full disk, a network's own
        why = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            told.parent.mkdir(parents=True, exist_ok=True)
            write_text(told, traceback.format_exc())
            why += f" (more in {told})"
        return why
    return ""


def result_of(trial: Trial) -> TrialResult | None:
    """The data that a report needs of a training; None if it has not been run."""
    result = trial.result()
    if result is None:
        return None
    return TrialResult(
        set=trial.set,
        recipe=trial.recipe,
        seed=trial.seed,
        multilabel=result["multilabel"],
        names=tuple(result["names"]),
        samples=result["samples"],
        tested=result["tested"],
        notes=tuple(result["notes"]),
        outcomes=result["outcomes"],
        last=result["last"],
        metric=result["metric"],
        best=result["best"],
        records=EpochLog(trial.experiment.folder).records(),
    )


def report_study(
    study: Study,
    found: Sequence[Trial],
    folder: Path,
    *,
    name: str,
    failed: Mapping[str, str],
    forms: Sequence[str] = (),
) -> list[str]:
    """Write the report of the trainings of a study that have ended.

    Args:
        study: the study.
        found: its trainings.
        folder: of the report.
        name: of the study, if it has no summary.
        failed: reasons of failed trainings, by name.
        forms: forms of the table files, keys of :data:`segcal.reporting.markup.FILES`.

    Returns:
        names of the files; empty if nothing has been trained.

    Raises:
        ValueError: a log or a result that is damaged.
    """
    results = [result for result in map(result_of, found) if result is not None]
    if not results:
        return []
    done = {trial.name for trial in found if trial.result() is not None}
    tables: dict[str, list[Table]] = {}
    for set_name in study.sets:
        own = [run for run in results if run.set == set_name]
        for chosen_name, recipes in study.chosen.items():
            choice = choose(chosen_name, recipes, own)
            if choice is not None:
                results += choice.results()
                key = f"{set_name}-{chosen_name}"
                tables.setdefault(set_name, []).append(choice_table(key, choice))
    return write_study(
        folder,
        results,
        tables=tables,
        header={
            "name": study.summary or name,
            "predictions": str(Path(study.output).resolve()),
            "references": ", ".join(study.sets),
            "study": study.model_dump(mode="json"),
        },
        failed=failed,
        missing=[t.name for t in found if t.name not in done and t.name not in failed],
        baseline=study.baseline,
        forms=forms,
    )
