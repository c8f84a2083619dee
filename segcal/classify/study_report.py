"""The report of a study: tables of mean and deviation, and figures as papers have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import reduce
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from segcal import __version__
from segcal.binning import BinStatistics
from segcal.classify.comparison import compare_set, difference_table
from segcal.classify.curves import multipliers, plot_curves, plot_multipliers, plot_retrieval
from segcal.classify.measures import (
    HIGHER_IS_BETTER,
    conventions,
)
from segcal.classify.multiplier_bands import plot_multiplier_bands
from segcal.classify.overview import SetRuns, draw_overview, draw_test_curves
from segcal.classify.prediction import SIGMOID, SOFTMAX
from segcal.classify.report import (
    LABEL_AXES,
    NAMES,
    count_of,
    metric_table,
    retrieval_table,
)
from segcal.io.files import write_json, write_text
from segcal.io.tables import write_csv
from segcal.reporting import markup, page
from segcal.reporting.folder import ReportFolder
from segcal.reporting.picture import Picture, draw
from segcal.reporting.reliability import plot_class_reliability
from segcal.reporting.tables import Column, Table

FILES = (
    "index.html", "summary.json", "runs.csv", "means.csv", "differences.csv", "tables.*",
    "figures/*.png",
)  # fmt: skip
"""Files that the report of a study may write."""
BLOCKS = 4
"""Number of columns of the methods' reliability diagrams."""


@dataclass(frozen=True)
class TrialResult:
    """A training of a study and its results.

    Attributes:
        set: name of the data set.
        recipe: the loss.
        seed: of the training.
        multilabel: whether a sample may have several labels.
        names: of the classes or labels.
        samples: numbers of training, validation and test samples.
        tested: checksum that identifies the test samples.
        notes: sentences that a reader should know.
        outcomes: ``metrics`` and ``reliability`` by the kind of probabilities.
        last: metrics after the last epoch, by the kind of probabilities.
        metric: of the validation samples, which chose the epoch.
        best: value of the metric.
        records: lines of the log.
    """

    set: str
    recipe: str
    seed: int
    multilabel: bool
    names: tuple[str, ...]
    samples: Mapping[str, int]
    tested: int
    notes: tuple[str, ...]
    outcomes: Mapping[str, Mapping[str, Any]]
    last: Mapping[str, Mapping[str, float | None]]
    metric: str
    best: float
    records: Sequence[Mapping[str, Any]]


def row_name(recipe: str, kind: str) -> str:
    """Name of a method's row; probabilities by a link have a separate row."""
    return recipe if kind in (SIGMOID, SOFTMAX) else f"{recipe} + {kind}"


def run_table(runs: Sequence[TrialResult]) -> pd.DataFrame:
    """A row for every training and kind of probabilities."""
    rows = [
        {
            "set": run.set,
            "method": row_name(run.recipe, kind),
            "recipe": run.recipe,
            "probabilities": kind,
            "seed": run.seed,
            **outcome["metrics"],
            **{f"retrieval_{n}": value for n, value in outcome["retrieval"].items()},
            **{f"last_{metric}": value for metric, value in run.last[kind].items()},
        }
        for run in runs
        for kind, outcome in run.outcomes.items()
    ]
    return pd.DataFrame(rows).set_index(["set", "method", "seed"])


def write_study(
    folder: Path,
    runs: Sequence[TrialResult],
    *,
    header: Mapping[str, Any],
    failed: Mapping[str, str],
    missing: Sequence[str] = (),
    forms: Sequence[str] = (),
    baseline: str | None = None,
    tables: Mapping[str, Sequence[Table]] = MappingProxyType({}),
) -> list[str]:
    """Write tables, figures and the page of a study.

    Args:
        folder: of the report.
        runs: trainings that have ended, in the order of the tables.
        header: ``name`` of the study and what else ``summary.json`` keeps.
        failed: trainings that failed, with the reason.
        missing: trainings that have not been run.
        forms: forms of the table files, keys of :data:`segcal.reporting.markup.FILES`.
        baseline: loss that the others are compared with; None is the first of every set.
        tables: additional tables, by data set.

    Returns:
        names of the files.
    """
    report = ReportFolder(folder)
    table = run_table(runs)
    metrics = table.drop(columns=["recipe", "probabilities"])
    grouped = metrics.groupby(level=["set", "method"], sort=False)
    means = grouped.agg(["mean", "std", "count"])
    means.columns = [f"{metric}_{what}" for metric, what in means.columns]
    write_csv(report.place("runs.csv"), table)
    write_csv(report.place("means.csv"), means)
    printed: list[Table] = []
    sets = {run.set: [one for one in runs if one.set == run.set] for run in runs}
    overview = draw_overview({name: _set_runs(own) for name, own in sets.items()})
    for key, picture in overview.items():
        picture.save(report.place(f"figures/{key}.png"))
    sections = [page.Section("All data sets", pictures=list(overview.values()))]
    changes: list[pd.DataFrame] = []
    for name, own in sets.items():
        printed.append(_set_table(name, own))
        pictures = _figures(name, own)
        for key, picture in pictures.items():
            picture.save(report.place(f"figures/{name}_{key}.png"))
        notes = dict.fromkeys(note for run in own for note in run.notes)
        answers = pictures.pop("retrieval", None)
        sections.append(page.table_section(printed[-1], *notes, pictures=list(pictures.values())))
        rows = table[table.index.get_level_values("set") == name].droplevel("set")
        redrawn = (
            len({run.tested for run in own}) > 1
        )  # a data set may say itself which samples test
        compared = compare_set(name, rows, baseline, samples=own[0].samples, redrawn=redrawn)
        if compared.changes:
            changes.append(compared.frame())
            printed.append(difference_table(compared, multilabel=own[0].multilabel))
            sections.append(page.table_section(printed[-1]))
        for one in (_last_table(name, own), *tables.get(name, ())):
            printed.append(one)
            sections.append(page.table_section(one))
        if answers is not None:
            title, head = f"{name}: retrieval", Column("method")
            printed.append(retrieval_table(f"{name}-retrieval", title, _retrieval(own), head=head))
            sections.append(page.table_section(printed[-1], pictures=[answers]))
    if changes:
        write_csv(report.place("differences.csv"), pd.concat(changes))
    summary = {**header, **_summary(runs, failed, missing)}
    write_json(report.place("summary.json"), summary)
    for form in forms:
        write_text(report.place(markup.FILES[form]), markup.render_tables(printed, form))
    title = f"Study: {header['name']}"
    write_text(report.place("index.html"), page.render(title, summary, sections))
    report.close()
    return report.written


def _summary(
    runs: Sequence[TrialResult], failed: Mapping[str, str], missing: Sequence[str]
) -> dict[str, Any]:
    """Description of the evaluation, and the meaning of the numbers."""
    definitions: dict[str, str] = {}
    for multilabel in dict.fromkeys(run.multilabel for run in runs):
        of = "labels" if multilabel else "classes"
        outcomes = (
            o for run in runs if run.multilabel == multilabel for o in run.outcomes.values()
        )
        bins = (len(outcome["reliability"]["count"]) for outcome in outcomes)
        definitions |= {f"{of}: {k}": v for k, v in conventions(multilabel, bins).items()}
    return {
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"segcal": __version__},
        "cases": {
            **count_of(len(runs), "training"),
            "failed": dict(failed),
            "interrupted": bool(missing),
        },
        "missing": list(missing),
        "conventions": definitions,
    }


def _rows(runs: Sequence[TrialResult]) -> dict[str, list[tuple[TrialResult, Mapping[str, Any]]]]:
    """Trainings with their outcome, by the name of the row."""
    rows: dict[str, list[tuple[TrialResult, Mapping[str, Any]]]] = {}
    for run in runs:
        for kind, outcome in run.outcomes.items():
            rows.setdefault(row_name(run.recipe, kind), []).append((run, outcome))
    return rows


def _retrieval(runs: Sequence[TrialResult]) -> dict[str, list[Mapping[str, float | None]]]:
    """Retrieval mAP of every training by the number of conditions, by the name of the row."""
    return {row: [o["retrieval"] for _, o in of] for row, of in _rows(runs).items()}


def _set_table(name: str, runs: Sequence[TrialResult]) -> Table:
    seeds = sorted({run.seed for run in runs})
    counts = runs[0].samples
    what = ", ".join(f"{counts[part]} {part}" for part in counts)
    fewest = min(len(of) for of in _rows(runs).values())
    caption = (
        f"Test samples, mean ± standard deviation over {len(seeds)} seed"
        f"{'' if len(seeds) == 1 else 's'} ({what}). Fractions of 1, NLL in nats. Bold: best mean. "
        f"{_chosen_by(runs)}"
    )
    if runs[0].multilabel:
        caption += (
            " + link, + phi: posterior by the link of the loss; "
            "of focal and asymmetric losses, phi."
        )
    if fewest < len(seeds):
        caption += f" Some methods have only {fewest} trainings."
    rows = {row: [o["metrics"] for _, o in of] for row, of in _rows(runs).items()}
    return metric_table(
        name,
        name,
        rows,
        multilabel=runs[0].multilabel,
        head=Column("method"),
        caption=caption,
    )


def _chosen_by(runs: Sequence[TrialResult]) -> str:
    """Sentence on the metrics that chose the tested epochs."""
    by: dict[str, list[str]] = {}
    for run in runs:
        losses = by.setdefault(NAMES[run.metric], [])
        losses += [] if run.recipe in losses else [run.recipe]
    first, *others = sorted(by, key=lambda name: -len(by[name]))
    said = f"The epoch with the best validation {first} of every training was tested"
    rest = "".join(f", for {', '.join(by[o])} the epoch with the best {o}" for o in others)
    return f"{said}{rest}."


def _last_table(name: str, runs: Sequence[TrialResult]) -> Table:
    rows: dict[str, list[Mapping[str, float | None]]] = {}
    for run in runs:
        for kind, metrics in run.last.items():
            rows.setdefault(row_name(run.recipe, kind), []).append(metrics)
    return metric_table(
        f"{name}-last",
        f"{name}: after the last epoch",
        rows,
        multilabel=runs[0].multilabel,
        head=Column("method"),
        caption="The same test samples, with networks of the last epoch instead of a chosen epoch.",
    )


def _figures(name: str, runs: Sequence[TrialResult]) -> dict[str, Picture]:
    """Pictures of a data set, by their content."""
    multilabel = runs[0].multilabel
    together = _set_runs(runs)
    logs = together.logs
    title = f"{name}: test samples, mean and deviation over seeds"
    pictures = {
        "metrics": draw(plot_metrics(_rows(runs), multilabel=multilabel, title=title), title)
    }
    chosen = {"ece": "ECE"} if not multilabel else {"ace": "ACE", "map_class": "mAP@class"}
    for metric, label in chosen.items():
        title = f"{name}: {label} of the validation set"
        if metric == "ace":
            title += ", by the link where the loss has one"
        figure = plot_curves(logs, metric, f"{label}, validation", log=metric != "map_class")
        figure.suptitle(title)
        pictures[f"{metric}_epochs"] = draw(figure, title)
    pictures |= draw_test_curves(name, together)
    learned = {m: of for m, of in logs.items() if any(map(multipliers, of[0]))}
    if learned:
        title = f"{name}: multipliers of the classes"
        figure = plot_multipliers(learned, runs[0].names, title)
        pictures["multipliers"] = draw(figure, title)
        title = f"{name}: range of the multipliers over the classes"
        pictures["multiplier_bands"] = draw(plot_multiplier_bands(learned, title), title)
    if multilabel:
        title = f"{name}: retrieval, test samples, mean and deviation over seeds"
        methods = {row_name(run.recipe, kind): run.recipe for run in runs for kind in run.outcomes}
        pictures["retrieval"] = draw(plot_retrieval(_retrieval(runs), methods, title), title)
    title = f"{name}: reliability, test samples of all seeds pooled"
    rows = _rows(runs)
    diagrams = [
        reduce(add, (BinStatistics.from_dict(o["reliability"]) for _, o in of))
        for of in rows.values()
    ]
    unit, axes = ("pairs", LABEL_AXES) if multilabel else ("samples", ("confidence", "accuracy"))
    figure = plot_class_reliability(
        {"": diagrams}, list(rows), title, unit=unit, axes_names=axes, blocks=BLOCKS
    )
    pictures["reliability"] = draw(figure, title)
    return pictures


def _set_runs(runs: Sequence[TrialResult]) -> SetRuns:
    """The data that figures of a whole study need of a data set."""
    logs: dict[str, list[Sequence[Mapping[str, Any]]]] = {}
    for run in runs:
        logs.setdefault(run.recipe, []).append(run.records)
    metrics = {row: [o["metrics"] for _, o in of] for row, of in _rows(runs).items()}
    return SetRuns(runs[0].multilabel, metrics, logs)


def plot_metrics(
    rows: Mapping[str, Sequence[tuple[TrialResult, Mapping[str, Any]]]],
    *,
    multilabel: bool,
    title: str,
) -> Figure:
    """Draw every metric in a panel, with small dots for seeds, the mean and its deviation.

    Args:
        rows: trainings with their outcome, by method.
        multilabel: whether to show metrics of labels.
        title: of the figure.
    """
    chosen = (
        ("map_class", "map_sample", "ace", "mce", "ece", "nll")
        if multilabel
        else ("accuracy", "ece", "aece", "cece", "nll", "brier")
    )
    figure = Figure(figsize=(10, 2 * (0.9 + 0.21 * len(rows))), layout="constrained")
    axes = figure.subplots(2, 3, sharey=True)
    for axis, metric in zip(axes.flat, chosen, strict=True):
        for y, of in enumerate(rows.values()):
            values = np.array([o["metrics"].get(metric) for _, o in of], dtype=np.float64)
            values = values[np.isfinite(values)]
            if len(values):
                deviation = values.std(ddof=1) if len(values) > 1 else 0.0
                axis.plot(values, np.full(len(values), y + 0.25), ".", color="0.55", markersize=3)
                axis.errorbar(values.mean(), y, xerr=deviation, fmt="o", color="C0", markersize=4)
        axis.set_title(f"{NAMES[metric]} (better to the {_better(metric)})", fontsize=9)
        axis.set_yticks(range(len(rows)), list(rows), fontsize=8)
        axis.tick_params(axis="x", labelsize=8)
        axis.locator_params(axis="x", nbins=4)
        axis.ticklabel_format(axis="x", useOffset=False, style="plain")
        axis.grid(axis="y", color="0.93")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].invert_yaxis()  # the order of the table; shared by all
    figure.suptitle(title, fontsize=11)
    return figure


def _better(metric: str) -> str:
    return "right" if metric in HIGHER_IS_BETTER else "left"
