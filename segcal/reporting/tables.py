"""What the tables of a report say; HTML, Markdown and LaTeX are three ways to print it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from segcal.evaluation.compare import SharedMean

CASE_COLUMNS = ("ece", "tace", "nll")
"""Beginnings of the columns of the table of cases, besides DSC."""
CALIBRATION = {
    "ece": "ECE", "over": "over", "under": "under", "aece": "AECE", "ace": "ACE", "mce": "MCE",
    "cece": "CECE", "tace": "TACE", "nll": "NLL", "brier": "Brier",
}  # fmt: skip
INTERVALS = "Means over cases, 95 % bootstrap intervals in brackets."


@dataclass(frozen=True)
class Cell:
    """What a cell shows.

    Attributes:
        text: plain text, which every renderer escapes.
        value: what it sorts by; empty goes last.
        extra: a remark in small print.
        definition: what the text means.
        best: whether it is the best of its column.
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
        name: of the quantity.
        definition: of the quantity.
        unit: in which it is given.
        better: an arrow to the better values, or nothing.
    """

    name: str
    definition: str = ""
    unit: str = ""
    better: str = ""

    @property
    def heading(self) -> str:
        """Name, unit and arrow; no line ends before the arrow."""
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.name}{unit}" + (f"\N{NO-BREAK SPACE}{self.better}" if self.better else "")


@dataclass(frozen=True)
class Table:
    """A table, before anybody prints it.

    Attributes:
        key: a word for it, of letters.
        title: what it shows.
        columns: headings.
        rows: cells, as many as there are columns.
        caption: how to read it.
        sortable: whether a page lets its reader sort.
    """

    key: str
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = False


def class_table(summary: Mapping[str, Any]) -> Table:
    """Overlap and surface distances of every class.

    Args:
        summary: content of ``summary.json``.
    """
    conventions = summary["conventions"]
    columns = [
        Column("label"),
        Column("n", "cases in which the label is in either map"),
        Column("DSC", conventions["dsc"], better="↑"),
        Column("IoU", conventions["iou"], better="↑"),
        Column("missed", "labelled, but nothing predicted", better="↓"),
        Column("false alarms", "predicted, but nothing labelled", better="↓"),
        Column("HD", f"{conventions['hd_mm']}; mean over the found", "mm", "↓"),
        Column("HD95", f"{conventions['hd95_pooled_mm']}; mean over the found", "mm", "↓"),
        Column("HD95 penalised", conventions["penalised_mean"], "mm", "↓"),
        Column("ASSD", f"{conventions['assd_pooled_mm']}; mean over the found", "mm", "↓"),
        Column("NSD", conventions["nsd"], better="↑"),
        Column("volume difference", conventions["volume_difference_ml"], "ml"),
    ]
    rows = []
    for name, block in summary["classes"].items():
        hd, hd95 = block["hd_mm"], block["hd95_pooled_mm"]
        rows.append(
            [
                Cell(name, name),
                _count(block["dsc"]["n"]),
                _mean(block["dsc"], 3),
                _mean(block["iou"], 3),
                _count(hd["missed"]),
                _count(hd["false_alarms"]),
                number_cell(hd["mean_of_found"], 2),
                number_cell(hd95["mean_of_found"], 2),
                number_cell(hd95["penalised_mean"], 2),
                number_cell(block["assd_pooled_mm"]["mean_of_found"], 2),
                _mean(block["nsd"], 3),
                _mean(block["volume_difference_ml"], 2),
            ]
        )
    return Table("classes", "Overlap and surfaces", columns, rows, INTERVALS)


def calibration_table(summary: Mapping[str, Any], scopes: Sequence[str]) -> Table:
    """Calibration errors, a column for every scope.

    Args:
        summary: content of ``summary.json``.
        scopes: keys of the scopes.
    """
    conventions, metrics = summary["conventions"], summary["metrics"]
    meanings = _meanings(conventions)
    columns = [Column("metric"), *(Column(s, conventions[f"scope {s}"]) for s in scopes)]
    counts = [_count(metrics[f"ece_{scope}"]["n"]) for scope in scopes]
    rows = [
        [
            Cell("n", definition="cases with probabilities and a voxel of the scope"),
            *counts,
        ]
    ]
    pooled = Cell("ECE, pooled ↓", definition=f"{meanings['ece']}; of all voxels of all cases")
    for key, name in CALIBRATION.items():
        head = Cell(f"{name} ↓", definition=meanings[key])
        rows.append([head, *(_mean(metrics[f"{key}_{scope}"], 4) for scope in scopes)])
        if key == "ece":
            rows.append([pooled, *(number_cell(summary["pooled"][f"ece_{s}"], 4) for s in scopes)])
    reference = [_mean(metrics["tace_ref"], 4) if s == "fg" else Cell("") for s in scopes]
    rows.append([Cell("TACE ref ↓", definition=conventions["tace_ref"]), *reference])
    caption = f"Fractions of 1, NLL in nats. {INTERVALS}"
    return Table("calibration", "Calibration", columns, rows, caption)


def compat_table(summary: Mapping[str, Any], compat: str) -> Table:
    """Numbers by the rules of a published evaluation.

    Args:
        summary: content of ``summary.json``.
        compat: beginning of their keys.
    """
    conventions = summary["conventions"]
    rows = []
    for key, block in summary["metrics"].items():
        if key.startswith(f"{compat}_"):
            name = key.removeprefix(f"{compat}_")
            head = Cell(name, definition=conventions[f"{compat} {name}"])
            rows.append([head, _count(block["n"]), _mean(block, 4)])
    columns = [Column("metric"), Column("n", "cases in which it is defined"), Column("mean")]
    caption = f"To compare with its tables, not to report: its rules hide misses. {INTERVALS}"
    return Table("compat", f"As the evaluation of {compat} counts", columns, rows, caption)


def case_table(rows: pd.DataFrame, conventions: Mapping[str, str]) -> Table:
    """The cases, one row each; it sorts.

    Args:
        rows: of :class:`segcal.evaluation.cohort.Cohort`.
        conventions: what the metrics mean.
    """
    meanings = _meanings(conventions)
    chosen = ["dsc", *(c for c in rows.columns if c.startswith("dsc/"))]
    chosen += [c for c in rows.columns if c.startswith(CASE_COLUMNS) and "/" not in c]
    body = [
        [Cell(str(name), str(name)), *(number_cell(float(row[c]), 4) for c in chosen)]
        for name, row in rows.iterrows()
    ]
    columns = [Column("case")]
    for name in chosen:
        metric = name.split("/")[0]
        definition = meanings.get(name) or meanings.get(metric.split("_")[0], "")
        if name == "dsc":
            definition = f"mean over the labels that are defined; {definition}"
        better = "↑" if metric == "dsc" else "↓"
        columns.append(Column(name, definition, better=better))
    return Table("cases", "Cases", columns, body, sortable=True)


def method_table(means: Sequence[SharedMean], conventions: Mapping[str, str]) -> Table:
    """Methods as rows, metrics as columns, the best of a column marked.

    Means that print alike are alike: all of them are marked. Nothing is marked where all methods
    print alike. An undefined mean is a dash and is never the best.

    Args:
        means: of all methods over the cases they share.
        conventions: what the metrics mean.
    """
    meanings = _meanings(conventions)
    methods = list(dict.fromkeys(m.method for m in means))
    metrics = list(dict.fromkeys(m.metric for m in means))
    found = {(m.method, m.metric): m for m in means}
    columns, cells = [Column("method")], [[Cell(name, name)] for name in methods]
    counts = [Cell("shared cases", definition="in which all methods have the metric")]
    for metric in metrics:
        column, digits = _method_column(metric, meanings)
        shown = [_shared(found.get((name, metric)), digits) for name in methods]
        for row, cell in zip(cells, mark(shown, higher=column.better == "↑"), strict=True):
            row.append(cell)
        columns.append(column)
        counts.append(_count(max(m.n for m in means if m.metric == metric)))
    caption = (
        f"{INTERVALS} Over the cases in which all methods have the metric. Bold: best mean; means "
        "that print alike share it; nothing is bold where all print alike."
    )
    return Table("methods", "Methods", columns, [*cells, counts], caption)


def difference_table(differences: Sequence[Mapping[str, Any]]) -> Table:
    """Differences of methods to the baseline, metric by metric; it sorts."""
    columns = [
        Column("method"), Column("metric"), Column("n", "cases that both have"),
        Column("difference", "mean over those cases, method less baseline"),
        Column("95 % interval", "percentile bootstrap over cases"),
        Column("Wilcoxon p", "two-sided signed-rank test, not corrected for multiple comparisons"),
    ]  # fmt: skip
    rows = [
        [
            Cell(d["method"], d["method"]),
            Cell(d["metric"], d["metric"]),
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
    """Definitions by metric; some share an entry."""
    return {part: text for key, text in conventions.items() for part in key.split(", ")}


def _method_column(metric: str, meanings: Mapping[str, str]) -> tuple[Column, int]:
    """Heading of a metric, and digits of its values."""
    if metric == "dsc":
        return Column("DSC", meanings["dsc"], better="↑"), 3
    if metric == "hd95_penalised_mm":
        return Column("HD95 penalised", meanings[metric], "mm", "↓"), 2
    key, _, scope = metric.partition("_")
    return Column(f"{CALIBRATION[key]} {scope}", meanings[key], better="↓"), 4


def _shared(mean: SharedMean | None, digits: int) -> Cell:
    return Cell("-") if mean is None else _mean({"mean": mean.mean, "ci95": mean.ci95}, digits)


def mark(cells: Sequence[Cell], *, higher: bool) -> list[Cell]:
    """Mark what prints like the best, unless all print alike."""
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
