"""Table of the differences between a study's losses and its baseline."""

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
"""Metrics of the table, for classes and for labels; differences.csv has all metrics."""
MARKS = {-1: " ▼", 0: "", 1: " ▲"}
NOT_COMPARED = {"recipe", "probabilities", *NO_MERIT, *(f"last_{name}" for name in NO_MERIT)}


@dataclass(frozen=True)
class SetComparison:
    """Comparison of the losses on a data set.

    Attributes:
        set: name of the data set.
        baseline: row that the others are compared with.
        changes: differences from the baseline.
        redrawn: ratio of test samples to training samples if every seed has its own; else 0.
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
    """Compare the losses of a data set with a baseline.

    Args:
        name: of the data set.
        table: a row for every method and seed, with its ``recipe``.
        baseline: recipe whose last row (its posterior) is the baseline; None takes the first.
        samples: numbers of training and test samples.
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
    """Table of differences from the baseline with intervals: methods as rows, metrics as columns.

    Args:
        comparison: of a data set.
        multilabel: whether to show metrics of labels.
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
            "variances are enlarged following Nadeau and Bengio (2003)."
        )
    else:
        caption += "All seeds have the same test samples: intervals hold for these samples only."
    key = f"{comparison.set}-differences"
    return Table(key, f"{comparison.set}: differences from {comparison.baseline}",
                 columns, rows, caption)  # fmt: skip


def _cell(change: PairedChange) -> Cell:
    better = change.higher if change.metric in HIGHER_IS_BETTER else change.lower
    extra = f"{better} of {change.seeds}"
    if change.ci95 is not None:
        extra = f"[{change.ci95[0]:+.4f}, {change.ci95[1]:+.4f}], {extra}"
    text = f"{change.difference:+.4f}{MARKS[change.direction]}"
    return Cell(text, repr(change.difference), extra)
