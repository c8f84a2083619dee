"""What commands print: sentences, and tables narrow enough for 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # torch is imported when there is work to do
    from collections.abc import Collection, Sequence

    from segcal.evaluation.compare import Difference
    from segcal.metrics.table import Metric, ScopeMetric

ERRORS_IN_A_LINE = 7
"""Columns of calibration errors that fit beside the scope into a line of 80 characters."""


def open_console(*, stderr: bool = False) -> Console:
    """A console that shows names as they are: no brackets are markup, no colons emoji."""
    console = Console(stderr=stderr, markup=False, emoji=False)
    if not console.is_terminal:  # a pipe or a log has no width
        console.width = 100
    return console


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, brackets and all."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def class_table(summary: dict[str, Any], asked: Collection[str] | None = None) -> Table:
    """Overlap and surface distances per class: the metrics in `asked`, or the usual ones."""
    from segcal.metrics.table import PENALISED, STRUCTURE

    first = next(row.key for row in STRUCTURE if row.distance)
    shown = [("n", "dsc", "n", 0)]
    for row in STRUCTURE:
        if row.key == first:
            shown += [("missed", first, "missed", 0), ("false+", first, "false_alarms", 0)]
        if _is_shown(row, asked):
            field = "mean_of_found" if row.distance else "mean"
            shown.append((row.brief or row.heading, row.key, field, _digits(row)))
        for of in PENALISED:
            if of.of == row.key and _is_shown(of, asked):
                shown.append((of.brief or of.heading, row.key, "penalised_mean", _digits(of)))
    table = _table(f"Overlap and surfaces, cases: {summary['cases']['evaluated']}")
    table.add_column("label", overflow="fold")
    for heading, *_ in shown:
        table.add_column(heading, justify="right", no_wrap=True)
    means = {row.key: summary["metrics"][row.key] for row in STRUCTURE if row.mean_of_labels}
    means |= summary["surface_over_classes"]
    for name, block in [*summary["classes"].items(), ("mean", means)]:
        if block is means:
            table.add_section()
        cells = (number(block.get(key, {}).get(field), digits) for _, key, field, digits in shown)
        table.add_row(Text(name), *cells)
    printed = [row for row in (*STRUCTURE, *PENALISED) if _is_shown(row, asked)]
    table.caption = _remarks(printed, summary.get("unit", "mm"))
    return table


def calibration_table(
    summary: dict[str, Any], scopes: tuple[str, ...], asked: Collection[str] | None = None
) -> Group:
    """Calibration errors per scope; columns that do not fit into 80 characters go on below."""
    from segcal.evaluation.reported import scope_metrics

    shown = [
        (row, pooled) for row in scope_metrics() if _is_shown(row, asked) for pooled in row.ways
    ]
    first = _table("Calibration, mean over cases (fractions of 1)")
    first.caption = _remarks([row for row, _ in shown])
    tables: list[Table] = []
    for start in range(0, len(shown), ERRORS_IN_A_LINE):
        part = shown[start : start + ERRORS_IN_A_LINE]
        table = _table("") if tables else first
        table.add_column("scope", no_wrap=True)
        for heading in (
            "n",
            *(
                "pooled" if pooled and len(row.ways) > 1 else row.brief or row.heading
                for row, pooled in part
            ),
        ):
            table.add_column(heading, justify="right", no_wrap=True)
        for scope in scopes:
            count = str(summary["metrics"][f"ece_{scope}"]["n"])
            table.add_row(scope, count, *(_error(*one, summary, scope) for one in part))
        tables.append(table)
    return Group(*tables)


def _remarks(shown: Sequence[Metric], unit: str = "mm") -> str:
    """How to read a table of these numbers, in a line."""
    from segcal.metrics.table import CalibrationMetric, PenalisedMean, StructureMetric

    keys = {row.key for row in shown}
    remarks = {
        ", ".join(dict.fromkeys(row.unit_of(unit) for row in shown if row.unit)): True,
        "HD95: pooled": "hd95_pooled_mm" in keys,
        "distances: mean over structures found": any(
            isinstance(row, StructureMetric) and row.distance for row in shown
        ),
        "pen. (penalised): a miss costs the image diagonal": any(
            isinstance(row, PenalisedMean) for row in shown
        ),
        "pooled: ECE of all voxels together": any(
            isinstance(row, CalibrationMetric) and row.show_pooled for row in shown
        ),
        "CECE: classwise ECE": "cece" in keys,
        "TACE: Nixon's": "tace" in keys,
    }
    return "; ".join(text for text, needed in remarks.items() if text and needed)


def _is_shown(row: Metric, asked: Collection[str] | None) -> bool:
    return bool(row.brief) if asked is None else row.is_shown(asked)


def _error(row: ScopeMetric, pooled: bool, summary: dict[str, Any], scope: str) -> str:
    if not row.is_of(scope, pooled=pooled):
        return ""
    column = row.column(scope)
    value = summary["pooled"][column] if pooled else summary["metrics"][column]["mean"]
    return number(value, 4)


def _digits(row: Metric) -> int:
    """Decimals of a number: two if it has a unit, four if it is a fraction."""
    return 2 if row.unit else 4


def comparison_table(
    methods: Sequence[str], differences: Sequence[Difference], unit: str = "mm"
) -> Table:
    """Differences of the other methods from the first."""
    from segcal.evaluation.reported import readable

    table = _table(f"Differences to {methods[0]}, mean over shared cases")
    for column in ("method", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("n", "difference", "95 % interval", "Wilcoxon p"):
        table.add_column(column, justify="right", no_wrap=True)
    for d in sorted(differences, key=lambda d: methods.index(d.method)):
        bounds = "-" if d.ci95 is None else f"{d.ci95[0]:+.4f} to {d.ci95[1]:+.4f}"
        p = "-" if d.p_wilcoxon is None else f"{d.p_wilcoxon:.2g}"
        table.add_row(d.method, readable(d.metric, unit), str(d.n), f"{d.mean:+.4f}", bounds, p)
    table.caption = "p is not corrected for the number of comparisons; all metrics: comparison.json"
    return table


def number(value: float | None, digits: int) -> str:
    """Format a number, a dash where it is undefined."""
    return "-" if value is None else f"{value:.{digits}f}"


def _table(title: str) -> Table:
    """Narrow enough for 80 columns with every number whole."""
    return Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left",
                 caption_justify="left")  # fmt: skip
