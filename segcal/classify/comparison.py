"""What the differences of a study's losses to its baseline are, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import pandas as pd

from segcal.classify.measures import HIGHER_IS_BETTER, NO_MERIT
from segcal.classify.paired import PairedChange, paired_changes
from segcal.classify.report import NAMES, metric_columns
from segcal.reporting.tables import Cell, Column, Table

__all__ = ["SetComparison", "compare_set", "difference_table"]

COMPARED = {False: ("accuracy", "ece", "nll", "brier"), True: ("map_class", "ace", "ece", "nll")}
"""Metrics of the table, of classes and of labels; differences.csv has all."""
MARKS = {-1: " ▼", 0: "", 1: " ▲"}
NOT_COMPARED = {"recipe", "probabilities", *NO_MERIT, *(f"last_{name}" for name in NO_MERIT)}


@dataclass(frozen=True)
class SetComparison:
    """What a data set says of its losses.

    Attributes:
        set: name of the data set.
        baseline: row that the others are compared with.
        changes: to it.
        redrawn: test samples for one that trained, where every seed has its own; else 0.
    """

    set: str
    baseline: str
    changes: Sequence[PairedChange]
    redrawn: float

    def frame(self) -> pd.DataFrame:
        """A row for every method and metric."""
        rows = []
        for change in self.changes:
            row = {"set": self.set, "baseline": self.baseline, **asdict(change)}
            low, high = row.pop("ci95") or (None, None)
            rows.append({**row, "ci95_low": low, "ci95_high": high})
        return pd.DataFrame(rows).set_index(["set", "method", "metric"])


def compare_set(
    name: str,
    table: pd.DataFrame,
    baseline: str | None,
    *,
    samples: Mapping[str, int],
    redrawn: bool,
) -> SetComparison:
    """Compare the losses of a data set with one of them.

    Args:
        name: of the data set.
        table: a row for every method and seed, with its ``recipe``.
        baseline: a recipe, whose last row (its posterior) is compared with; None is the first.
        samples: how many train and test.
        redrawn: whether every seed has samples of its own.
    """
    recipe = table["recipe"].iloc[0] if baseline is None else baseline
    rows = table.index[table["recipe"] == recipe].get_level_values("method")
    if not len(rows):  # it has not been trained yet
        return SetComparison(name, recipe, [], 0.0)
    tables = {str(m): of.droplevel("method") for m, of in table.groupby("method", sort=False)}
    metrics = [c for c in table.columns if c not in NOT_COMPARED]
    ratio = samples["test"] / samples["train"] if redrawn else 0.0
    changes = paired_changes(tables, rows[-1], metrics, redrawn=ratio)
    return SetComparison(name, rows[-1], changes, ratio)


def difference_table(comparison: SetComparison, *, multilabel: bool) -> Table:
    """Methods as rows, metrics as columns: difference to the baseline and its interval.

    Args:
        comparison: of a data set.
        multilabel: which metrics.
    """
    metrics = COMPARED[multilabel]
    named = {column.name: column for column in metric_columns(multilabel)}
    columns = [Column("method"), *(named[NAMES[metric]] for metric in metrics)]
    cells = {(c.method, c.metric): _cell(c) for c in comparison.changes}
    methods = dict.fromkeys(change.method for change in comparison.changes)
    rows = [[Cell(m, m), *(cells.get((m, k), Cell("-")) for k in metrics)] for m in methods]
    seeds = max(change.seeds for change in comparison.changes)
    caption = (
        f"Difference to {comparison.baseline} over {seeds} seed{'s' * (seeds != 1)}, each trained "
        "with both; 95 % intervals (Student's t) in brackets, then the seeds in which the method "
        "is better. ▼ lower, ▲ higher beyond chance: paired t-test over seeds, corrected for the "
        "number of methods (Holm, 5 %). "
    )
    if comparison.redrawn:
        caption += (
            "Every seed has its own training and test samples; since seeds share many of them, "
            "variances are enlarged as Nadeau and Bengio (2003) say."
        )
    else:
        caption += "All seeds have the same test samples: intervals speak of these alone."
    key = f"{comparison.set}-differences"
    return Table(key, f"{comparison.set}: differences to {comparison.baseline}",
                 columns, rows, caption)  # fmt: skip


def _cell(change: PairedChange) -> Cell:
    better = change.higher if change.metric in HIGHER_IS_BETTER else change.lower
    extra = f"{better} of {change.seeds}"
    if change.ci95 is not None:
        extra = f"[{change.ci95[0]:+.4f}, {change.ci95[1]:+.4f}], {extra}"
    text = f"{change.difference:+.4f}{MARKS[change.direction]}"
    return Cell(text, repr(change.difference), extra)
