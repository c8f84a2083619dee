"""What a study of segmentation has measured so far, read from its files.

``results/cells.csv`` has a row for every cell (set x network x recipe x seed),
``results/cases.csv`` one for every test case, repair and decision. The folder of every finished
cell holds reliability, logits, the log of the training and the resolved cell. If these files are
missing, because results were published without them, figures that need them are missing too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from segcal.binning import BinStatistics
from segcal.evaluation.reported import metric_of
from segcal.io.files import read_json
from segcal.training.epoch_log import EpochLog

__all__ = ["TRUTH", "CellKey", "Group", "Method", "StudyResults", "read_results"]

RESULTS = "results"
"""Folder of the tables of a study."""
CELL_KEYS = ("set", "network", "recipe", "seed")
CASE_KEYS = ("case", "patient", "repair", "decision")
RAW, MASK = "raw", "mask"
"""Names for unrepaired probabilities, and for the mask that the predictor wrote."""
REPAIRS = (RAW, "temperature", "class_region", "class_region_case")
DECISIONS = (MASK, "dice")
TRUTH = "true_posterior"
"""Name of the "repair" in rows of the true posterior, where it is known. It is then treated as a
recipe of its own, the floor of every error."""
LOG_NAME = "log.jsonl"
PRIVATE = ("kl",)
"""Prefixes of metrics that only a study has."""
FAILED = "failed"
"""Status of a cell that ended with an error."""
OF_LABEL = "dsc/"
"""Prefix of the columns of single structures."""
SPREAD = ("region", "label", "channel")
"""Columns that name a row of ``logits.csv``."""


class CellKey(NamedTuple):
    """Which training."""

    set: str
    network: str
    recipe: str
    seed: int

    @property
    def name(self) -> str:
        """Path of its folder within the folder of the study."""
        return f"{self.set}/{self.network}/{self.recipe}/seed_{self.seed}"


class Method(NamedTuple):
    """A recipe, the repair of its probabilities, and the decision rule of its mask."""

    recipe: str
    repair: str = RAW
    decision: str = MASK

    @property
    def name(self) -> str:
        """Name in tables and figures."""
        repaired = self.recipe if self.repair == RAW else f"{self.recipe} + {self.repair}"
        return repaired if self.decision == MASK else f"{repaired}, {self.decision}"


class Group(NamedTuple):
    """A set and a network; all methods of a group saw the same patients."""

    set: str
    network: str

    @property
    def name(self) -> str:
        """Name in tables and figures."""
        return f"{self.set}, {self.network}"


@dataclass(frozen=True)
class StudyResults:
    """All that a study has measured so far.

    Attributes:
        output: folder of the study.
        cells: one row per cell, with ``set, network, recipe, seed, status``.
        cases: a row for every test case, repair and decision of every cell, in any order.
    """

    output: Path
    cells: pd.DataFrame
    cases: pd.DataFrame

    @cached_property
    def metrics(self) -> list[str]:
        """Columns with a result of a case, without the columns of single structures."""
        return [c for c in self.cases.columns if "/" not in c and _is_metric(c)]

    @cached_property
    def groups(self) -> list[Group]:
        """Sets and networks in the order of the files."""
        pairs = self.cases[["set", "network"]].drop_duplicates()
        return [Group(*row) for row in pairs.itertuples(index=False)]

    @cached_property
    def recipes(self) -> list[str]:
        """Recipes with results, in the order of the study."""
        found = set(self.cases["recipe"])
        named = [r for r in dict.fromkeys(self.cells["recipe"]) if r in found]
        return [r for r in dict.fromkeys([*named, *self.cases["recipe"]]) if r != TRUTH]

    def methods(self, group: Group) -> list[Method]:
        """Methods with results in a group: recipes, then repairs, then decisions."""
        keys = ["recipe", "repair", "decision"]
        found = {Method(*row) for row in self.of(group)[keys].itertuples(index=False)}
        ranked = {name: place for place, name in enumerate(self.recipes)}
        return sorted(
            (m for m in found if m.recipe != TRUTH),
            key=lambda m: (
                ranked[m.recipe],
                _place(m.repair, REPAIRS),
                _place(m.decision, DECISIONS),
            ),
        )

    def of(self, group: Group) -> pd.DataFrame:
        """Rows of a group."""
        cases = self.cases
        return cases[(cases["set"] == group.set) & (cases["network"] == group.network)]

    def patients(self, group: Group) -> dict[Method, pd.DataFrame]:
        """Means over the cases of every patient, by method.

        Returns:
            rows by ``(seed, patient)``, one column per metric; the true posterior is one of the
            methods if it is known.
        """
        keys = ["recipe", "repair", "decision", "seed", "patient"]
        means = self.of(group).groupby(keys, sort=True)[self.metrics].mean()
        every = [*self.methods(group), *(Method(TRUTH, decision=d) for d in DECISIONS)]
        by_method = dict(iter(means.groupby(level=keys[:3])))
        return {m: by_method[tuple(m)].droplevel([0, 1, 2]) for m in every if tuple(m) in by_method}

    def cell_keys(self, group: Group, recipe: str | None = None) -> list[CellKey]:
        """Cells of a group with results, the true posterior left out."""
        rows = self.of(group)[list(CELL_KEYS)].drop_duplicates()
        keys = [CellKey(s, n, r, int(seed)) for s, n, r, seed in rows.itertuples(index=False)]
        return [k for k in keys if k.recipe != TRUTH and recipe in (None, k.recipe)]

    def reliability(self, key: CellKey) -> dict[str, dict[str, BinStatistics]]:
        """Bins by repair and scope; empty if the file is missing.

        Raises:
            ValueError: the file holds something else.
        """
        path = self.output / key.name / "reliability.json"
        if not path.is_file():
            return {}
        content = read_json(path)
        try:
            return {
                repair: {scope: BinStatistics.from_dict(bins) for scope, bins in scopes.items()}
                for repair, scopes in content.items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: expected bins by repair and scope, got something else ({error})"
            ) from None

    def logits(self, key: CellKey) -> pd.DataFrame | None:
        """Mean logits by region, label and channel; None if the file is missing."""
        path = self.output / key.name / "logits.csv"
        if not path.is_file():
            return None
        return _read_table(path, (*SPREAD, "mean_logit", "voxels"))

    def log(self, key: CellKey) -> list[dict[str, Any]]:
        """Lines of the log of a training; empty if the file is missing.

        Raises:
            ValueError: a damaged line.
        """
        log = EpochLog(self.output / key.name)
        log.path = self.output / key.name / LOG_NAME
        records = log.records()
        if not all(isinstance(r, dict) and "epoch" in r for r in records):
            raise ValueError(f"{log.path}: expected lines with an epoch, got lines without")
        return records

    def result(self, key: CellKey) -> Mapping[str, Any]:
        """Content of a cell's ``result.json``; empty if the file is missing."""
        path = self.output / key.name / "result.json"
        if not path.is_file():
            return {}
        content = read_json(path)
        if not isinstance(content, Mapping):
            raise ValueError(f"{path}: expected a mapping, got {type(content).__name__}")
        return content

    def loss(self, recipe: str) -> Mapping[str, Any]:
        """Resolved weights and terms of a recipe, from its first cell that records them."""
        for group in self.groups:
            for key in self.cell_keys(group, recipe):
                loss = self.result(key).get("loss")
                if isinstance(loss, Mapping) and loss:
                    return loss
        return {}

    @cached_property
    def labels(self) -> dict[str, list[str]]:
        """Names of the classes by set, background first; a class is known by its DSC column."""
        columns = [c for c in self.cases.columns if c.startswith(OF_LABEL)]
        known = self.cases.groupby("set", sort=False)[columns].count() > 0
        return {
            str(name): ["background", *(c.removeprefix(OF_LABEL) for c in columns if row[c])]
            for name, row in known.iterrows()
        }

    def failed(self) -> dict[str, str]:
        """Reasons of failed cells, by name."""
        rows = self.cells[self.cells["status"] == FAILED]
        reasons = [str(why) for why in rows["why"].fillna("no reason said")]
        names = [_cell_key(row).name for _, row in rows.iterrows()]
        return dict(zip(names, reasons, strict=True))

    def missing(self) -> list[str]:
        """Names of cells that neither failed nor have results."""
        have, failed = self._measured(), self.failed()
        names = [_cell_key(row).name for _, row in self.cells.iterrows()]
        return [name for name in names if name not in have and name not in failed]

    def outdated(self) -> list[str]:
        """Names of failed cells that have results, of repairs that were measured before."""
        have = self._measured()
        return [name for name in self.failed() if name in have]

    def _measured(self) -> set[str]:
        rows = self.cases[list(CELL_KEYS)].drop_duplicates()
        return {_cell_key(row).name for _, row in rows.iterrows()}


def read_results(output: Path) -> StudyResults:
    """Read the tables of a study.

    Args:
        output: folder of the study.

    Raises:
        ValueError: a file is missing, is no table, lacks a column, repeats a row or has text in
            place of numbers; the message names the file.
    """
    folder = output / RESULTS
    cells = _read_table(folder / "cells.csv", (*CELL_KEYS, "status"))
    cases = _read_table(folder / "cases.csv", (*CELL_KEYS, *CASE_KEYS))
    cells["status"] = cells["status"].fillna("").astype(str)
    cells["why"] = cells.get("why")
    for path, table in ((folder / "cells.csv", cells), (folder / "cases.csv", cases)):
        _check_seeds(path, table)
    if cases.empty:
        raise ValueError(f"{folder / 'cases.csv'}: no row; no cell of the study has ended yet")
    metrics = [c for c in cases.columns if _is_metric(c)]
    if not metrics:
        raise ValueError(f"{folder / 'cases.csv'}: no column of a metric")
    for name in metrics:
        if not pd.api.types.is_numeric_dtype(cases[name]):
            raise ValueError(f"{folder / 'cases.csv'}: column {name} holds text, expected numbers")
    keys = [*CELL_KEYS, *CASE_KEYS]
    if cases[keys].isna().any(axis=None):
        raise ValueError(f"{folder / 'cases.csv'}: a row without a {' or '.join(keys)}")
    if (twice := cases.duplicated(keys)).any():
        row = ", ".join(map(str, cases.loc[twice, keys].iloc[0]))
        raise ValueError(f"{folder / 'cases.csv'}: a row is repeated: {row}")
    cases[metrics] = cases[metrics].replace([np.inf, -np.inf], np.nan)
    return StudyResults(output, cells, _with_one_truth(cases))


def _with_one_truth(cases: pd.DataFrame) -> pd.DataFrame:
    """Rows in which the true posterior, measured in every cell, becomes one recipe of its own."""
    truth = cases["repair"] == TRUTH
    once = cases[truth].assign(recipe=TRUTH, repair=RAW)
    once = once.drop_duplicates([*CELL_KEYS, *CASE_KEYS])
    return pd.concat([cases[~truth], once], ignore_index=True)


def _is_metric(column: str) -> bool:
    return metric_of(column) is not None or column.startswith(tuple(f"{p}_" for p in PRIVATE))


def _read_table(path: Path, needed: Sequence[str]) -> pd.DataFrame:
    """Read a CSV file; names stay text even if they consist of digits."""
    words = dict.fromkeys((*CELL_KEYS[:3], *CASE_KEYS, *SPREAD, "status", "why"), str)
    try:
        table = pd.read_csv(path, dtype=words, keep_default_na=False, na_values=["", "nan", "NaN"])
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; run the study first") from None
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no table ({error})") from None
    absent = [c for c in needed if c not in table]
    if absent:
        raise ValueError(f"{path}: expected columns {', '.join(needed)}, lacks {', '.join(absent)}")
    return table


def _check_seeds(path: Path, table: pd.DataFrame) -> None:
    if len(table) and not pd.api.types.is_integer_dtype(table["seed"]):
        raise ValueError(f"{path}: seed: expected whole numbers, got other values")


def _cell_key(row: pd.Series[Any]) -> CellKey:
    return CellKey(row["set"], row["network"], row["recipe"], int(row["seed"]))


def _place(name: str, order: Sequence[str]) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)
