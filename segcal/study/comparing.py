"""Every comparison of a study's report, computed once for tables, figures and CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from segcal.study.naming import better
from segcal.study.results import MASK, RAW, Group, Method, StudyResults
from segcal.study.results import TRUTH as TRUTH_RECIPE
from segcal.study.statistics import (
    MARGIN,
    Change,
    MeanRanks,
    MeanValue,
    differences,
    duels,
    means,
    non_inferior,
    ranks,
)

__all__ = ["GOALS", "GroupComparison", "RankedField", "compare_study", "rank_everywhere"]

NEAR_ECE, NLL, NEAR_NLL, TACE = "ece_dilated5", "nll_all", "nll_dilated5", "tace_all"
GOALS = {NEAR_ECE: -0.5, NLL: -0.1, TACE: -0.5}
"""Goals: relative changes against the baseline that a good method reaches."""
JUDGES = ("dsc", NEAR_ECE, NLL)
"""Metrics of ranks."""
FOUGHT = (NEAR_ECE, NLL)
"""Metrics of duels."""
REPAIR = "class_region"
"""The repair that a trained method has to beat."""
TRUTH = Method(TRUTH_RECIPE)
FIELDS = {"as trained": RAW, "repaired": REPAIR}
"""Fields of methods that are ranked together: all recipes with the same repair."""


@dataclass(frozen=True)
class RankedField:
    """Ranks of the recipes with one repair.

    Attributes:
        name: of the field.
        ranks: by metric.
    """

    name: str
    ranks: list[MeanRanks]


@dataclass(frozen=True)
class GroupComparison:
    """Results of all methods on one set and network.

    Attributes:
        group: the set and network.
        baseline: the method that the others are compared with.
        methods: methods with results: recipes, then repairs, then decisions.
        tables: means over the cases of every patient, by name of the method.
        means: of all methods, including the true posterior.
        changes: differences from the baseline; empty if it has no results.
        beside_repair: differences from the repaired baseline.
        duels: comparisons of all pairs of recipes, by field.
        fields: ranks, by field.
    """

    group: Group
    baseline: Method
    methods: list[Method]
    tables: dict[str, pd.DataFrame]
    means: list[MeanValue]
    changes: list[Change]
    beside_repair: list[Change]
    duels: dict[str, list[Change]]
    fields: list[RankedField]

    @cached_property
    def mean_of(self) -> dict[tuple[str, str], MeanValue]:
        """Means by method and metric."""
        return {(m.method, m.metric): m for m in self.means}

    @cached_property
    def change_of(self) -> dict[tuple[str, str], Change]:
        """Changes by method and metric."""
        return {(c.method, c.metric): c for c in self.changes}

    @cached_property
    def beside_of(self) -> dict[tuple[str, str], Change]:
        """Changes to the repaired baseline by method and metric."""
        return {(c.method, c.metric): c for c in self.beside_repair}

    @property
    def rows(self) -> list[Method]:
        """Recipes and repairs with the mask that the predictor wrote."""
        return [m for m in self.methods if m.decision == MASK]

    @property
    def seeds(self) -> dict[str, list[int]]:
        """Seeds with results by recipe."""
        found: dict[str, set[int]] = {}
        for method in self.methods:
            index = self.tables[method.name].index.get_level_values("seed")
            found.setdefault(method.recipe, set()).update(int(s) for s in index)
        return {recipe: sorted(of) for recipe, of in found.items()}

    def reaches(self, method: Method, metric: str) -> bool | None:
        """Whether the mean reaches the goal of a metric; None if unknown."""
        change = self.change_of.get((method.name, metric))
        return None if change is None else change.relative <= GOALS[metric]

    def keeps_dsc(self, method: Method) -> bool | None:
        """Whether the predicted mask, or the Dice-optimal decision's mask, loses no DSC."""
        verdicts = [
            non_inferior(self.change_of[m.name, "dsc"], margin=MARGIN)
            for m in self.methods
            if m[:2] == method[:2] and (m.name, "dsc") in self.change_of
        ]
        known = [v for v in verdicts if v is not None]
        return any(known) if known else None

    def beats_repair(self, method: Method) -> bool | None:
        """Whether near ECE and NLL are lower than those of the repaired baseline."""
        found = [self.beside_of.get((method.name, metric)) for metric in (NEAR_ECE, NLL)]
        if any(c is None for c in found):
            return None
        return all(c is not None and c.difference < 0 for c in found)


def compare_study(results: StudyResults, baseline: str, *, resamples: int) -> list[GroupComparison]:
    """Compare the methods of every set and network.

    Args:
        results: of the study.
        baseline: a recipe, as trained, with the predicted mask.
        resamples: of the bootstrap.

    Raises:
        ValueError: a recipe that is not in the study.
    """
    known = list(dict.fromkeys([*results.cells["recipe"], *results.recipes]))
    if baseline not in known:
        raise ValueError(f"baseline: expected a recipe of the study, {', '.join(known)}; "
                         f"got {baseline}")  # fmt: skip
    return [_compare(results, group, Method(baseline), resamples) for group in results.groups]


def _compare(
    results: StudyResults, group: Group, baseline: Method, resamples: int
) -> GroupComparison:
    by_method = results.patients(group)
    methods = [m for m in by_method if m.recipe != TRUTH_RECIPE]
    tables = {m.name: by_method[m] for m in methods}
    metrics = results.metrics
    repaired = baseline._replace(repair=REPAIR).name
    return GroupComparison(
        group=group,
        baseline=baseline,
        methods=methods,
        tables=tables,
        means=means({m.name: t for m, t in by_method.items()}, metrics, resamples=resamples),
        changes=_changes(tables, baseline.name, metrics, resamples),
        beside_repair=_changes(tables, repaired, FOUGHT, resamples),
        duels={
            name: duels(_field(methods, tables, repair), FOUGHT, resamples=resamples)
            for name, repair in FIELDS.items()
        },
        fields=_ranked(methods, tables, baseline),
    )


def _changes(
    tables: Mapping[str, pd.DataFrame], baseline: str, metrics: Sequence[str], resamples: int
) -> list[Change]:
    if baseline not in tables:
        return []
    return differences(tables, baseline, metrics, resamples=resamples)


def _field(
    methods: Sequence[Method], tables: Mapping[str, pd.DataFrame], repair: str
) -> dict[str, pd.DataFrame]:
    """Recipes with one repair."""
    return {m.name: tables[m.name] for m in methods if m.repair == repair and m.decision == MASK}


def _ranked(
    methods: Sequence[Method], tables: Mapping[str, pd.DataFrame], baseline: Method
) -> list[RankedField]:
    """Ranks by field, of the methods that lack no seed that others have."""
    found = []
    for name, repair in FIELDS.items():
        field = _field(methods, tables, repair)
        repaired = baseline._replace(repair=REPAIR).name
        if repair == RAW and repaired in tables:
            field[repaired] = tables[repaired]
        most = max((len(rows) for rows in field.values()), default=0)
        whole = {m: rows for m, rows in field.items() if len(rows) == most}
        of = [ranks(whole, k, higher=better(k) == "higher") for k in JUDGES if _has(whole, k)]
        if of:
            found.append(RankedField(name, of))
    return found


def _has(tables: Mapping[str, pd.DataFrame], metric: str) -> bool:
    return bool(tables) and all(metric in rows for rows in tables.values())


def rank_everywhere(comparisons: Sequence[GroupComparison]) -> list[RankedField]:
    """Ranks over the patients of all sets and networks, of the methods present in all of them."""
    shared = set.intersection(*(set(c.tables) for c in comparisons))
    methods = [m for m in comparisons[0].methods if m.name in shared]
    tables = {
        m.name: pd.concat([_named(c.tables[m.name], f"{c.group.name}: ") for c in comparisons])
        for m in methods
    }
    return _ranked(methods, tables, comparisons[0].baseline)


def _named(rows: pd.DataFrame, prefix: str) -> pd.DataFrame:
    """Rows whose patients have names that differ between sets and networks."""
    seeds, patients = (rows.index.get_level_values(level) for level in ("seed", "patient"))
    named = [f"{prefix}{patient}" for patient in patients]
    return rows.set_axis(pd.MultiIndex.from_arrays([seeds, named], names=["seed", "patient"]))
