"""What commands print: sentences, and tables narrow enough for 80 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:  # torch is imported when there is work to do
    from collections.abc import Mapping, Sequence

    from segcal.classify.evaluation import Outcome
    from segcal.evaluation.compare import Difference


def say(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, brackets and all."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def class_table(summary: dict[str, Any]) -> Table:
    """Overlap and surface distances per class."""
    table = _table(f"Overlap and surfaces, cases: {summary['cases']['evaluated']}")
    table.add_column("label", overflow="fold")
    for name in ("n", "DSC", "missed", "false+", "HD", "HD95", "HD95 pen.", "ASSD"):
        table.add_column(name, justify="right", no_wrap=True)
    mean = {"dsc": summary["metrics"]["dsc"], **summary["surface_over_classes"]}
    for name, block in [*summary["classes"].items(), ("mean", mean)]:
        if block is mean:
            table.add_section()
        hd, hd95 = block["hd_mm"], block["hd95_pooled_mm"]
        table.add_row(
            Text(name),
            str(block["dsc"]["n"]),
            number(block["dsc"]["mean"], 4),
            str(hd["missed"]),
            str(hd["false_alarms"]),
            number(hd["mean_of_found"], 2),
            number(hd95["mean_of_found"], 2),
            number(hd95["penalised_mean"], 2),
            number(block["assd_pooled_mm"]["mean_of_found"], 2),
        )
    table.caption = (
        "mm; HD, HD95 (pooled), ASSD: mean over the found; pen.: a miss costs the diagonal"
    )
    return table


def calibration_table(summary: dict[str, Any], scopes: tuple[str, ...]) -> Table:
    """Calibration errors per scope."""
    table = _table("Calibration, mean over cases (fractions of 1)")
    table.add_column("scope", no_wrap=True)
    for name in ("n", "ECE", "pooled", "CECE", "TACE", "TACE ref", "NLL", "Brier"):
        table.add_column(name, justify="right", no_wrap=True)
    metrics = summary["metrics"]
    for scope in scopes:
        table.add_row(
            scope,
            str(metrics[f"ece_{scope}"]["n"]),
            number(metrics[f"ece_{scope}"]["mean"], 4),
            number(summary["pooled"][f"ece_{scope}"], 4),
            number(metrics[f"cece_{scope}"]["mean"], 4),
            number(metrics[f"tace_{scope}"]["mean"], 4),
            number(metrics["tace_ref"]["mean"], 4) if scope == "fg" else "",
            number(metrics[f"nll_{scope}"]["mean"], 4),
            number(metrics[f"brier_{scope}"]["mean"], 4),
        )
    table.caption = (
        "pooled: ECE of all voxels together; CECE: classwise; TACE: Nixon; TACE ref: CRaC poster's"
    )
    return table


def comparison_table(methods: Sequence[str], differences: Sequence[Difference]) -> Table:
    """Differences of methods to the first."""
    table = _table(f"Differences to {methods[0]}, mean over shared cases")
    for column in ("method", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("n", "difference", "95 % interval", "Wilcoxon p"):
        table.add_column(column, justify="right", no_wrap=True)
    for d in sorted(differences, key=lambda d: methods.index(d.method)):
        bounds = "-" if d.ci95 is None else f"{d.ci95[0]:+.4f} to {d.ci95[1]:+.4f}"
        p = "-" if d.p_wilcoxon is None else f"{d.p_wilcoxon:.2g}"
        table.add_row(d.method, d.metric, str(d.n), f"{d.mean:+.4f}", bounds, p)
    table.caption = "p is not corrected for the number of comparisons; all metrics: comparison.json"
    return table


def outcome_table(outcomes: Mapping[str, Outcome], title: str) -> Table:
    """Numbers of a classifier, a column for every kind of probabilities."""
    table = _table(title)
    table.add_column("metric", no_wrap=True)
    for kind in outcomes:
        table.add_column(kind, justify="right", no_wrap=True)
    for name in next(iter(outcomes.values())).metrics:
        table.add_row(name, *(number(o.metrics[name], 4) for o in outcomes.values()))
    return table


def number(value: float | None, digits: int) -> str:
    """Format a number, a dash where it is undefined."""
    return "-" if value is None else f"{value:.{digits}f}"


def _table(title: str) -> Table:
    """Narrow enough for 80 columns with every number whole."""
    return Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left",
                 caption_justify="left")  # fmt: skip
