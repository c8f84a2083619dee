"""The report as one HTML page that opens without a network: tables, pictures, definitions."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from matplotlib.figure import Figure

CASE_COLUMNS = ("dsc", "ece", "tace", "nll")
"""Beginnings of the columns of the table of cases."""


@dataclass(frozen=True)
class Cell:
    """What a cell shows, what it sorts by, and a remark in small print."""

    text: str
    value: str = ""
    extra: str = ""


@dataclass(frozen=True)
class Column:
    """Name and definition of a column."""

    name: str
    definition: str = ""


@dataclass(frozen=True)
class Table:
    """A table of the page."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    sortable: bool = False


@dataclass(frozen=True)
class Picture:
    """A picture inside the page, and words for those who do not see it."""

    uri: str
    alt: str


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    note: str = ""
    table: Table | None = None
    pictures: Sequence[Picture] = field(default_factory=tuple)


def picture(figure: Figure, alt: str) -> Picture:
    """Put a figure into the page as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    data = base64.b64encode(buffer.getvalue()).decode()
    return Picture(f"data:image/png;base64,{data}", alt)


def render(title: str, summary: Mapping[str, Any], sections: Sequence[Section]) -> str:
    """Return the page.

    Args:
        title: heading.
        summary: content of ``summary.json``.
        sections: what stands between the heading and the definitions.
    """
    environment = Environment(
        loader=PackageLoader("segcal.reporting", ""), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("page.html.j2").render(
        title=title,
        predictions=summary["predictions"],
        references=summary["references"],
        created=summary["created"],
        version=summary["versions"]["segcal"],
        cases=summary["cases"],
        conventions=summary["conventions"],
        sections=sections,
    )


def class_section(summary: Mapping[str, Any]) -> Section:
    """Overlap and surface distances of every class."""
    conventions = summary["conventions"]
    columns = [
        Column("label"),
        Column("n", "cases in which the label is in either map"),
        Column("DSC", conventions["dsc"]),
        Column("IoU", conventions["iou"]),
        Column("missed", "labelled, but nothing predicted"),
        Column("false alarms", "predicted, but nothing labelled"),
        Column("HD mm", f"{conventions['hd_mm']}; mean over the found"),
        Column("HD95 mm", f"{conventions['hd95_pooled_mm']}; mean over the found"),
        Column("HD95 penalised", conventions["penalised_mean"]),
        Column("ASSD mm", f"{conventions['assd_pooled_mm']}; mean over the found"),
        Column("volume ml", conventions["volume_difference_ml"]),
    ]
    rows = []
    for name, block in summary["classes"].items():
        hd, hd95 = block["hd_mm"], block["hd95_pooled_mm"]
        rows.append(
            [
                Cell(name, name),
                Cell(str(block["dsc"]["n"])),
                _mean(block["dsc"], 3),
                _mean(block["iou"], 3),
                Cell(str(hd["missed"])),
                Cell(str(hd["false_alarms"])),
                _cell(hd["mean_of_found"], 2),
                _cell(hd95["mean_of_found"], 2),
                _cell(hd95["penalised_mean"], 2),
                _cell(block["assd_pooled_mm"]["mean_of_found"], 2),
                _mean(block["volume_difference_ml"], 2),
            ]
        )
    return Section(
        "Overlap and surfaces",
        table=Table(columns, rows, "Means over cases, 95 % bootstrap intervals in brackets."),
    )


def calibration_section(
    summary: Mapping[str, Any], scopes: Sequence[str], pictures: Sequence[Picture]
) -> Section:
    """Calibration errors of every scope, and reliability diagrams."""
    conventions = summary["conventions"]
    metrics = {
        "ece": "ECE", "over": "over", "under": "under", "aece": "AECE", "ace": "ACE", "mce": "MCE",
        "cece": "CECE", "tace": "TACE", "nll": "NLL", "brier": "Brier",
    }  # fmt: skip
    meanings = {part: text for key, text in conventions.items() for part in key.split(", ")}
    columns = [Column("scope"), Column("n", "cases with probabilities")]
    columns += [Column(name, meanings[key]) for key, name in metrics.items()]
    columns.append(Column("TACE ref", conventions["tace_ref"]))
    rows = []
    for scope in scopes:
        found = summary["metrics"]
        row = [Cell(scope, scope), Cell(str(found[f"ece_{scope}"]["n"]))]
        row += [_mean(found[f"{key}_{scope}"], 4) for key in metrics]
        row.append(_mean(found["tace_ref"], 4) if scope == "fg" else Cell(""))
        rows.append(row)
    return Section(
        "Calibration",
        "Fractions of 1, the lower the better. The scope decides the ranking of methods: look at "
        "all of them. Over foreground-labelled voxels (fg) even the true probabilities are not "
        "without error, because that scope knows the label.",
        Table(columns, rows, "Means over cases, 95 % bootstrap intervals in brackets."),
        pictures,
    )


def case_section(rows: pd.DataFrame) -> Section:
    """Table of the cases, which sorts."""
    chosen = [
        c
        for c in rows.columns
        if c.startswith("dsc") or (c.startswith(CASE_COLUMNS) and "/" not in c)
    ]
    body = [
        [Cell(str(name), str(name)), *(_cell(float(row[c]), 4) for c in chosen)]
        for name, row in rows.iterrows()
    ]
    columns = [Column("case"), *map(Column, chosen)]
    return Section(
        "Cases",
        "Click a heading to sort. All columns are in cases.csv.",
        Table(columns, body, sortable=True),
    )


def comparison_section(
    differences: Sequence[Mapping[str, Any]], pictures: Sequence[Picture]
) -> Section:
    """Differences of methods to the baseline."""
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
            _cell(d["n"], 0),
            _cell(d["mean"], 4, "+"),
            Cell("" if d["ci95"] is None else f"{d['ci95'][0]:+.4f} to {d['ci95'][1]:+.4f}"),
            Cell("", "") if d["p_wilcoxon"] is None
            else Cell(f"{d['p_wilcoxon']:.2g}", str(d["p_wilcoxon"])),
        ]
        for d in differences
    ]  # fmt: skip
    return Section("Differences between methods", "", Table(columns, rows, sortable=True), pictures)


def _mean(block: Mapping[str, Any], digits: int) -> Cell:
    cell = _cell(block["mean"], digits)
    if "ci95" not in block:
        return cell
    low, high = block["ci95"]
    return Cell(cell.text, cell.value, f"[{low:.{digits}f}, {high:.{digits}f}]")


def _cell(value: float | None, digits: int, sign: str = "") -> Cell:
    if value is None or math.isnan(value):
        return Cell("-")
    text = "inf" if math.isinf(value) else f"{value:{sign}.{digits}f}"
    return Cell(text, repr(float(value)).replace("inf", "1e999"))
