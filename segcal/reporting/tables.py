"""Contents of the tables of a report, which are printed as HTML, Markdown or LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd

from segcal.evaluation.compare import SharedMean
from segcal.evaluation.reported import metric_of, readable, scope_metrics
from segcal.metrics import table
from segcal.metrics.table import Metric, ScopeMetric

ARROWS = {"higher": "↑", "lower": "↓", None: ""}
"""Arrows that point towards better values."""
INTERVALS = "Means over cases, 95 % bootstrap intervals in brackets."


@dataclass(frozen=True)
class Cell:
    """Content of a cell.

    Attributes:
        text: plain text, which every renderer escapes.
        value: value to sort by; empty values go last.
        extra: remark in small print.
        definition: meaning of the text.
        best: whether it is the best value of its column.
    """

    text: str
    value: str = ""
    extra: str = ""
    definition: str = ""
    best: bool = False


@dataclass(frozen=True)
class Column:
    """Heading of a column.

    Attributes:
        name: name of the quantity.
        definition: definition of the quantity.
        unit: unit of the quantity.
        better: arrow towards better values, or empty.
    """

    name: str
    definition: str = ""
    unit: str = ""
    better: str = ""

    @property
    def heading(self) -> str:
        """Name, unit and arrow, without a line break before the arrow."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.name}{unit}" + (f"\N{NO-BREAK SPACE}{self.better}" if self.better else "")


@dataclass(frozen=True)
class Table:
    """A table, independent of the format in which it is printed.

    Attributes:
        key: one word that identifies it, of letters.
        title: what it shows.
        columns: headings.
        rows: rows with one cell per column.
        caption: how to read it.
        sortable: whether readers can sort it on a page.
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = False


def class_table(summary: Mapping[str, Any], asked: Collection[str] | None = None) -> Table:
    """Overlap and surface distances of every class.

    Args:
        summary: content of ``summary.json``.
        asked: keys of the metrics; None shows the default metrics.
    """
    unit = summary.get("unit", "mm")
    printed = _class_columns(_meanings(summary["conventions"]), unit, asked)
    columns = [Column("label"), *(column for column, _ in printed)]
    rows = [
        [Cell(name, name), *(cell(block) for _, cell in printed)]
        for name, block in summary["classes"].items()
    ]
    return Table("classes", "Overlap and surfaces", columns, rows, INTERVALS)


OfClass = Callable[[Mapping[str, Any]], Cell]
"""Cell of a class, from its numbers in the summary."""


def _class_columns(
    meanings: Mapping[str, str], unit: str, asked: Collection[str] | None
) -> list[tuple[Column, OfClass]]:
    """Columns of the numbers of a class, with counts of misses before the first distance."""
    first = next(row.key for row in table.STRUCTURE if row.distance)
    of_first = [
        (
            Column("missed", "cases in which it is labelled, but not predicted", better="↓"),
            lambda block: _count(block[first]["missed"]),
        ),
        (
            Column("false alarms", "cases in which it is predicted, but not labelled", better="↓"),
            lambda block: _count(block[first]["false_alarms"]),
        ),
    ]
    printed: list[tuple[Column, OfClass]] = [
        (
            Column("n", "cases in which it is labelled or predicted"),
            lambda block: _count(block["dsc"]["n"]),
        )
    ]
    for row in table.STRUCTURE:
        printed += of_first if row.key == first else []
        if row.is_shown(asked):
            found = "; mean over the cases in which it is found" if row.distance else ""
            column = _column(row, f"{meanings[row.key]}{found}", unit)
            field = "mean_of_found" if row.distance else "mean"
            printed.append((column, partial(_of_class, row.key, field, row.digits)))
        for mean in table.PENALISED:
            if mean.is_shown(asked) and mean.of == row.key:
                cell = partial(_of_class, row.key, "penalised_mean", mean.digits)
                printed.append((_column(mean, meanings["penalised_mean"], unit), cell))
    return printed


def _of_class(key: str, field: str, digits: int, block: Mapping[str, Any]) -> Cell:
    return _mean({**block[key], "mean": block[key][field]}, digits)


def _column(row: Metric, definition: str, unit: str, name: str = "") -> Column:
    """Heading of a metric, with lengths in `unit`, under its own name or another."""
    return Column(name or row.heading, definition, row.unit_of(unit), ARROWS[row.better])


def calibration_table(
    summary: Mapping[str, Any], scopes: Sequence[str], asked: Collection[str] | None = None
) -> Table:
    """Calibration errors, with a column for every scope (selection of voxels).

    Args:
        summary: content of ``summary.json``.
        scopes: keys of the scopes.
        asked: keys of the metrics; None shows the default metrics.
    """
    conventions = summary["conventions"]
    columns = [Column("metric"), *(Column(s, conventions[f"scope {s}"]) for s in scopes)]
    counts = [_count(summary["metrics"][f"ece_{scope}"]["n"]) for scope in scopes]
    head = Cell("n", definition="cases with probabilities and a voxel of the scope")
    rows = [[head, *counts]]
    for row in scope_metrics():
        if row.is_shown(asked):
            rows += [_calibration_line(row, pooled, summary, scopes) for pooled in row.ways]
    caption = f"Fractions of 1, NLL in nats. {INTERVALS}"
    return Table("calibration", "Calibration", columns, rows, caption)


def _calibration_line(
    row: ScopeMetric, pooled: bool, summary: Mapping[str, Any], scopes: Sequence[str]
) -> list[Cell]:
    """A metric's mean over cases in every scope, or its value over all voxels together (pooled)."""
    name, meaning = row.heading, _meanings(summary["conventions"])[row.key]
    if pooled:
        name, meaning = f"{name}, pooled", f"{meaning}; over all voxels of all cases together"
    cells = [Cell(f"{name} {ARROWS[row.better]}".strip(), definition=meaning)]
    for scope in scopes:
        column = row.column(scope)
        if not row.is_of(scope, pooled=pooled):
            cells.append(Cell(""))
        elif pooled:
            cells.append(number_cell(summary["pooled"][column], row.digits))
        else:
            cells.append(_mean(summary["metrics"][column], row.digits))
    return cells


def predicted_table(summary: Mapping[str, Any]) -> Table:
    """How well the DSC that was predicted without references agrees with the true DSC, by label.

    Args:
        summary: content of ``summary.json``.
    """
    defined = summary["conventions"]
    shown = [
        ("true", "true DSC", "mean over cases", "higher"),
        ("predicted", "predicted DSC", "mean soft Dice confidence of the same cases", None),
        ("mae", "MAE", defined["mae"], "lower"),
        ("spearman", "Spearman", defined["spearman"], "higher"),
        ("aurc", "AURC", defined["dsc aurc"], "lower"),
        ("aurc_random", "random", "the AURC of cases in no order", None),
        ("aurc_ideal", "ideal", "the AURC of cases in the order of their true DSC", None),
        ("aurc_excess", "excess AURC", "AURC - ideal AURC", "lower"),
    ]
    columns = [
        Column("label"), Column("n", "cases in which both are defined"),
        *(Column(name, meaning, better=ARROWS[better]) for _, name, meaning, better in shown),
    ]  # fmt: skip
    rows = [
        [Cell(name, name), _count(of["n"]), *(number_cell(of[key], 3) for key, *_ in shown)]
        for name, of in summary["predicted_dsc"].items()
    ]
    caption = (
        "AURC: area under the risk-coverage curve of 1 - DSC over cases; a low excess means that "
        "the confidence tells beforehand which cases are worst."
    )
    return Table("predicted", "Does the confidence hold?", columns, rows, caption)


def volume_table(summary: Mapping[str, Any]) -> Table:
    """Bias and agreement of expected volumes, and how often their intervals hold the true volume.

    Args:
        summary: content of ``summary.json``.
    """
    defined, level = summary["conventions"], summary["settings"]["level"]
    unit = "ml" if summary.get("unit", "mm") == "mm" else table.IN_PIXELS["ml"]
    columns = [
        Column("label"), Column("n", "cases with probabilities"),
        Column("bias", defined["volume bias_ml, limits_ml"], unit),
        Column("limits of agreement", defined["volume bias_ml, limits_ml"], unit),
        Column("MAE", "mean |expected - reference volume|", unit, ARROWS["lower"]),
        Column(f"in {100 * level:.4g} % intervals", defined["volume coverage"]),
        Column("median width", "median width of the intervals", unit, ARROWS["lower"]),
    ]  # fmt: skip
    rows = []
    for name, of in summary["volumes"].items():
        low, high = of["limits_ml"]
        limits = Cell("-") if low is None else Cell(f"{low:.2f} to {high:.2f}", repr(low))
        rows.append(
            [
                Cell(name, name), _count(of["n"]), number_cell(of["bias_ml"], 2, "+"), limits,
                number_cell(of["mae_ml"], 2), number_cell(of["coverage"], 3),
                number_cell(of["median_width_ml"], 2),
            ]
        )  # fmt: skip
    caption = (
        f"The expected volume is the sum of the probabilities. Intervals: {defined['intervals']}."
    )
    return Table("volumes", "Volumes", columns, rows, caption)


def rater_table(summary: Mapping[str, Any], asked: Collection[str] | None = None) -> Table:
    """How predictions compare with several raters, label by label.

    Args:
        summary: content of ``summary.json`` for cases that several raters labelled.
        asked: keys of the metrics; None shows the default metrics.
    """
    classes, unit = summary["raters"]["classes"], summary.get("unit", "mm")
    meanings = _meanings(summary["conventions"])
    there = set().union(*(of.keys() for of in classes.values()))
    rows = [
        row for row in (*table.RATERS, table.ENERGY) if row.key in there and row.is_shown(asked)
    ]
    columns = [
        Column("label"),
        *(_column(row, meanings[row.key], unit, row.heading) for row in rows),
    ]
    body = [
        [Cell(name, name), *(_mean(of[row.key], row.digits) for row in rows)]
        for name, of in classes.items()
    ]
    caption = f"{summary['raters']['cases']} cases by up to {summary['raters']['most']} raters. "
    return Table("raters", "Agreement with several raters", columns, body, caption + INTERVALS)


def compat_table(summary: Mapping[str, Any], compat: str) -> Table:
    """Numbers by the rules of a published evaluation.

    Args:
        summary: content of ``summary.json``.
        compat: name of the evaluation, with which its keys begin.
    """
    conventions = summary["conventions"]
    rows = []
    for key, block in summary["metrics"].items():
        if key.startswith(f"{compat}_"):
            name = key.removeprefix(f"{compat}_")
            head = Cell(name, definition=conventions[f"{compat} {name}"])
            rows.append([head, _count(block["n"]), _mean(block, 4)])
    columns = [Column("metric"), Column("n", "cases in which it is defined"), Column("mean")]
    caption = (
        "For comparison with published tables; do not report these numbers, since their rules hide "
        f"misses. {INTERVALS}"
    )
    return Table("compat", f"By the rules of {compat}", columns, rows, caption)


def case_table(rows: pd.DataFrame, conventions: Mapping[str, str], *, unit: str = "mm") -> Table:
    """The cases, one row each, in a sortable table.

    Args:
        rows: rows of a :class:`segcal.evaluation.cohort.Cohort`.
        conventions: what the metrics mean.
        unit: unit of the lengths, ``mm`` or ``px``.
    """
    meanings = _meanings(conventions)
    found = {str(column): metric_of(str(column)) for column in rows.columns}
    metrics = {column: row for column, row in found.items() if row and row.in_cases}
    of_case = {c: r for c, r in metrics.items() if not isinstance(r, ScopeMetric)}
    errors = {c: r for c, r in metrics.items() if c not in of_case and "/" not in c}
    columns, chosen = [Column("case")], sorted(of_case, key=lambda c: "/" in c) + list(errors)
    for name in chosen:
        row = metrics[name]
        definition = meanings[row.key]
        if name in of_case and "/" not in name:
            definition = f"mean over the labels that are defined; {definition}"
        columns.append(Column(readable(name, unit), definition, better=ARROWS[row.better]))
    body = [
        [Cell(str(name), str(name)), *(number_cell(float(row[c]), 4) for c in chosen)]
        for name, row in rows.iterrows()
    ]
    return Table("cases", "Cases", columns, body, sortable=True)


def method_table(
    means: Sequence[SharedMean], conventions: Mapping[str, str], *, unit: str = "mm"
) -> Table:
    """Methods as rows and metrics as columns, with the best mean of each column marked.

    Means that are printed with the same digits count as equal: all of them are marked, or none if
    all methods are equal. An undefined mean is a dash and is never the best.

    Args:
        means: means of all methods over the cases they share.
        conventions: what the metrics mean.
        unit: unit of the lengths, ``mm`` or ``px``.
    """
    meanings = _meanings(conventions)
    methods = list(dict.fromkeys(m.method for m in means))
    metrics = list(dict.fromkeys(m.metric for m in means))
    found = {(m.method, m.metric): m for m in means}
    columns, cells = [Column("method")], [[Cell(name, name)] for name in methods]
    counts = [Cell("shared cases", definition="cases in which all methods have the metric")]
    for metric in metrics:
        column, digits = _method_column(metric, meanings, unit)
        shown = [_shared(found.get((name, metric)), digits) for name in methods]
        for row, cell in zip(cells, mark(shown, higher=column.better == "↑"), strict=True):
            row.append(cell)
        columns.append(column)
        counts.append(_count(max(m.n for m in means if m.metric == metric)))
    caption = (
        f"{INTERVALS} Only cases in which all methods have the metric count. Bold: best mean, and "
        "means that equal it in the digits shown, unless all methods are equal."
    )
    return Table("methods", "Methods", columns, [*cells, counts], caption)


def difference_table(differences: Sequence[Mapping[str, Any]], *, unit: str = "mm") -> Table:
    """Differences of methods to the baseline, metric by metric, in a sortable table.

    Args:
        differences: differences as records.
        unit: unit of the lengths, ``mm`` or ``px``.
    """
    columns = [
        Column("method"), Column("metric"), Column("n", "cases that both methods have"),
        Column("difference", "mean of (method - baseline) over these cases"),
        Column("95 % interval", "percentile bootstrap over cases"),
        Column("Wilcoxon p", "two-sided signed-rank test, not corrected for multiple comparisons"),
    ]  # fmt: skip
    rows = [
        [
            Cell(d["method"], d["method"]),
            Cell(readable(d["metric"], unit), d["metric"]),
            _count(d["n"]),
            number_cell(d["mean"], 4, "+"),
            Cell("-") if d["ci95"] is None
            else Cell(f"{d['ci95'][0]:+.4f} to {d['ci95'][1]:+.4f}", repr(d["ci95"][0])),
            Cell("-") if d["p_wilcoxon"] is None
            else Cell(f"{d['p_wilcoxon']:.2g}", str(d["p_wilcoxon"])),
        ]
        for d in differences
    ]  # fmt: skip
    baseline = differences[0]["baseline"] if differences else "the first"
    title = f"Differences to {baseline}"
    return Table("differences", title, columns, rows, sortable=True)


def _meanings(conventions: Mapping[str, str]) -> dict[str, str]:
    """Definitions by metric, from entries that several metrics may share."""
    return {part: text for key, text in conventions.items() for part in key.split(", ")}


def _method_column(metric: str, meanings: Mapping[str, str], unit: str) -> tuple[Column, int]:
    """Heading of a column of the table of cases, and the number of digits of its values.

    Raises:
        ValueError: the column belongs to no metric.
    """
    row = metric_of(metric)
    if row is None:
        raise ValueError(f"metric: expected a column of a reported metric, got {metric}")
    scope = metric.removeprefix(row.key).removeprefix("_")
    return _column(row, meanings[row.key], unit, f"{row.heading} {scope}".strip()), row.digits


def _shared(mean: SharedMean | None, digits: int) -> Cell:
    return Cell("-") if mean is None else _mean({"mean": mean.mean, "ci95": mean.ci95}, digits)


def mark(cells: Sequence[Cell], *, higher: bool) -> list[Cell]:
    """Mark all cells that show the same text as the best, unless all cells do."""
    defined = [c for c in cells if c.value]
    if len({c.text for c in defined}) < 2:
        return list(cells)
    best = (max if higher else min)(defined, key=lambda c: float(c.value))
    return [replace(c, best=bool(c.value) and c.text == best.text) for c in cells]


def _count(value: int) -> Cell:
    return Cell(str(value), str(value))


def _mean(block: Mapping[str, Any], digits: int) -> Cell:
    cell = number_cell(block["mean"], digits)
    if block.get("ci95") is None:
        return cell
    low, high = block["ci95"]
    return replace(cell, extra=f"[{low:.{digits}f}, {high:.{digits}f}]")


def number_cell(value: float | None, digits: int, sign: str = "") -> Cell:
    """A number, or a dash where it is undefined."""
    if value is None or math.isnan(value):
        return Cell("-")
    text = "inf" if math.isinf(value) else f"{value:{sign}.{digits}f}"
    return Cell(text, repr(float(value)).replace("inf", "1e999"))
