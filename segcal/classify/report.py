"""The report of a classifier: numbers, tables, diagrams and the page, written into a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from segcal import __version__
from segcal.classify.contact_sheet import draw_answers, plot_contact_sheet
from segcal.classify.curves import plot_retrieval
from segcal.classify.evaluation import Evaluated
from segcal.classify.loss_figure import plot_label_losses
from segcal.classify.measures import (
    CLASS_METRICS,
    HIGHER_IS_BETTER,
    LABEL_METRICS,
    MOST_CONDITIONS,
    NO_MERIT,
    Measured,
    conventions,
    record,
)
from segcal.io.files import write_json, write_text
from segcal.io.tables import write_csv
from segcal.repair.saved import CALIBRATOR_NAME, write_calibrator
from segcal.reporting import markup, page
from segcal.reporting.folder import ReportFolder
from segcal.reporting.picture import Picture, draw
from segcal.reporting.reliability import plot_class_reliability, plot_reliability
from segcal.reporting.tables import Cell, Column, Table, mark, number_cell

PREDICTIONS_NAME = "predictions.npz"
FILES = (
    "index.html", "summary.json", "classes.csv", "reliability*.png", "retrieval*.png",
    "loss.png", "tables.*",
    PREDICTIONS_NAME, CALIBRATOR_NAME,
)  # fmt: skip
"""Files that a report may write."""
RETRIEVAL = "Retrieval of samples by their labels"
MOST_CLASSES = 16
"""Largest number of classes that get a reliability diagram each."""
NAMES = {
    "accuracy": "accuracy", "ece": "ECE", "ece_floor": "ECE floor", "aece": "AECE",
    "cece": "CECE", "nll": "NLL", "brier": "Brier", "map_class": "mAP@class",
    "map_sample": "mAP@sample", "ace": "ACE", "mce": "MCE",
}  # fmt: skip
LABEL_AXES = ("probability", "frequency")


def metric_columns(multilabel: bool) -> list[Column]:
    """Headings of the metrics of classes or labels."""
    chosen = LABEL_METRICS if multilabel else CLASS_METRICS
    return [Column(NAMES[key], meaning, better=_arrow(key)) for key, meaning in chosen.items()]


def _arrow(metric: str) -> str:
    return "" if metric in NO_MERIT else "↑" if metric in HIGHER_IS_BETTER else "↓"


def metric_table(
    key: str,
    title: str,
    rows: Mapping[str, Sequence[Mapping[str, float | None]]],
    *,
    multilabel: bool,
    head: Column,
    caption: str,
) -> Table:
    """Table of mean ± deviation over runs: methods as rows, metrics as columns, the best in bold.

    Args:
        key: of the table.
        title: of the table.
        rows: metrics of every run, by method.
        multilabel: whether to show metrics of labels.
        head: heading of the first column.
        caption: explanation of the table.
    """
    names = list(LABEL_METRICS if multilabel else CLASS_METRICS)
    columns = dict(zip(names, metric_columns(multilabel), strict=True))
    return _table_of_means(key, title, rows, columns, head, caption)


def retrieval_table(
    key: str,
    title: str,
    rows: Mapping[str, Sequence[Mapping[str, float | None]]],
    *,
    head: Column,
) -> Table:
    """Table like :func:`metric_table` with numbers of conditions as columns.

    Args:
        key: of the table.
        title: of the table.
        rows: retrieval mAP of every run by number of conditions, by method.
        head: heading of the first column.
    """
    numbers = next(iter(rows.values()))[0]
    columns = {n: Column(f"{n} condition{'s' * (n != '1')}", better="↑") for n in numbers}
    caption = (
        "Mean average precision of the samples that have all wanted labels of a query and none of "
        "the unwanted ones, mean over queries drawn from the targets; scores are products of the "
        "labels' probabilities. Fractions of 1."
    )
    return _table_of_means(key, title, rows, columns, head, caption)


def _table_of_means(
    key: str,
    title: str,
    rows: Mapping[str, Sequence[Mapping[str, float | None]]],
    columns: Mapping[str, Column],
    head: Column,
    caption: str,
) -> Table:
    cells = [[Cell(row, row)] for row in rows]
    for name, column in columns.items():
        shown = [_mean_of([run.get(name) for run in runs]) for runs in rows.values()]
        if column.better:
            shown = mark(shown, higher=column.better == "↑")
        for row, cell in zip(cells, shown, strict=True):
            row.append(cell)
    return Table(key, title, [head, *columns.values()], cells, caption)


def _mean_of(values: Sequence[float | None]) -> Cell:
    """Mean over runs, with the deviation if there are several."""
    found = np.array([v for v in values if v is not None], float)
    if not len(found) or np.isnan(found).all():
        return Cell("-")
    cell = number_cell(float(np.nanmean(found)), 4)
    if len(found) < 2:
        return cell
    deviation = f"± {np.nanstd(found, ddof=1):.4f}"
    return Cell(cell.text, cell.value, deviation)


def write_classifier_report(
    folder: Path, evaluated: Evaluated, *, forms: Sequence[str] = ()
) -> list[str]:
    """Write the report of a classifier on samples; its files replace those of an earlier run.

    Args:
        folder: of the report.
        evaluated: outputs of the classifier and their evaluation.
        forms: forms of the table files, keys of :data:`segcal.reporting.markup.FILES`.

    Returns:
        names of the files.
    """
    report = ReportFolder(folder)
    outcomes, names, multilabel = (
        evaluated.outcomes,
        evaluated.data.names,
        evaluated.data.multilabel,
    )
    head = Column("probabilities", "how they are made from the logits")
    table = metric_table(
        "metrics",
        "Rankings and calibration" if multilabel else "Accuracy and calibration",
        {kind: [o.metrics] for kind, o in outcomes.items()},
        multilabel=multilabel,
        head=head,
        caption="Fractions of 1, NLL in nats.",
    )
    records = {kind: record(o) for kind, o in outcomes.items()}
    summary = _summary(evaluated, records)
    write_json(report.place("summary.json"), summary)
    per_class = pd.concat({kind: o.table for kind, o in outcomes.items()}, names=["probabilities"])
    write_csv(report.place("classes.csv"), per_class)
    pictures = {
        "reliability.png": _top_diagram(outcomes, multilabel),
        "reliability_classes.png": _class_diagrams(outcomes, names),
    }
    tables = [table]
    sections = [page.table_section(table, *evaluated.notes(), pictures=list(pictures.values()))]
    if multilabel:
        answered = {kind: [content["retrieval"]] for kind, content in records.items()}
        of_labels = _label_pictures(evaluated, answered)
        tables.append(retrieval_table("retrieval", RETRIEVAL, answered, head=head))
        sections.append(page.table_section(tables[-1], pictures=list(of_labels.values())))
        pictures |= of_labels
    for name, picture in pictures.items():
        picture.save(report.place(name))
    evaluated.save(report.place(PREDICTIONS_NAME))
    if evaluated.calibrator is not None:
        write_calibrator(report.place(CALIBRATOR_NAME), evaluated.calibrator)
    for form in forms:
        write_text(report.place(markup.FILES[form]), markup.render_tables(tables, form))
    sections.append(page.table_section(_class_table(per_class)))
    title = f"Classification: {summary['name']}"
    write_text(report.place("index.html"), page.render(title, summary, sections))
    report.close()
    return report.written


def check_folder(folder: Path, training: Path) -> None:
    """Check that a report can be written, before hours of work.

    Args:
        folder: of the report.
        training: folder of the training.

    Raises:
        ValueError: `folder` holds the training, or files that segcal did not write.
    """
    if folder.resolve() == training.resolve():
        raise ValueError(f"{folder}: holds the training; name another folder for the report")
    ReportFolder(folder).check(FILES)


def _summary(evaluated: Evaluated, records: Mapping[str, Any]) -> dict[str, Any]:
    """Description and results of the evaluation."""
    experiment, count = evaluated.experiment, len(evaluated.part)
    source, saved = experiment.data.source, evaluated.calibrator
    given = " ".join(f"{name}={value}" for name, value in experiment.data.args.items())
    return {
        "name": f"{experiment.recipe} on {source}",
        "predictions": f"{evaluated.folder.resolve()}, epoch {evaluated.epoch}",
        "references": f"{evaluated.part_name} samples of {source} {given}".rstrip(),
        "samples": count,
        "recipe": experiment.recipe,
        "seed": experiment.training.seed,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"segcal": __version__},
        "cases": count_of(count, "sample"),
        "conventions": conventions(
            evaluated.data.multilabel, (len(o.top.count) for o in evaluated.outcomes.values())
        ),
        **({} if saved is None else {"calibrator": {**saved.summary(), **saved.fitted_on}}),
        "outcomes": records,
        "classes": list(evaluated.data.names),
    }


def count_of(count: int, unit: str) -> dict[str, Any]:
    """Sentence on the number of evaluated samples."""
    return {
        "evaluated": count, "unit": unit, "interrupted": False, "failed": {}, "notes": {},
        "without_prediction": [], "without_reference": [],
    }  # fmt: skip


def _label_pictures(
    evaluated: Evaluated, answered: Mapping[str, Sequence[Mapping[str, float | None]]]
) -> dict[str, Picture]:
    """Pictures of samples found by labels, and of the loss of a label if it has a posterior."""
    loss, recipe = evaluated.loss, evaluated.experiment.recipe
    figure = plot_retrieval(answered, dict.fromkeys(answered, ""), RETRIEVAL)
    pictures = {"retrieval.png": draw(figure, RETRIEVAL)}
    if len(evaluated.part.shape) == 3:  # images
        title = f"Images that {recipe} finds by several labels"
        targets, names = evaluated.part.targets, evaluated.data.names
        answers = draw_answers(evaluated.log_odds(), targets, names, most=MOST_CONDITIONS)
        if answers:
            images = [evaluated.part.some(one.samples) for one in answers]
            figure = plot_contact_sheet(answers, images, title)
            pictures["retrieval_images.png"] = draw(figure, title)
    if loss is not None and not loss.no_posterior:
        title = f"{recipe}: loss of a label, and its link"
        pictures["loss.png"] = draw(plot_label_losses({recipe: loss}), title)
    return pictures


def _top_diagram(outcomes: Mapping[str, Measured], multilabel: bool) -> Picture:
    title = "Reliability of the top class"
    unit, names = "samples", ("confidence", "accuracy")
    if multilabel:
        title = "Reliability of all pairs of sample and label"
        unit, names = "pairs", LABEL_AXES
    diagrams = {kind: o.top for kind, o in outcomes.items()}
    floors = {kind: o.floor for kind, o in outcomes.items() if o.floor is not None}
    figure = plot_reliability(diagrams, title, unit=unit, axes_names=names, floors=floors)
    return draw(figure, title)


def _class_diagrams(outcomes: Mapping[str, Measured], names: Sequence[str]) -> Picture:
    by_kind = {kind: o.classes for kind, o in outcomes.items()}
    title = "Reliability of every class or label"
    if len(names) > MOST_CLASSES:
        errors = [one.expected_error() for one in list(by_kind.values())[-1]]
        worst = sorted(np.argsort(np.nan_to_num(errors))[::-1][:MOST_CLASSES])
        by_kind = {kind: [of[i] for i in worst] for kind, of in by_kind.items()}
        names = [names[i] for i in worst]
        title = f"Reliability of the {MOST_CLASSES} with the largest error"
    return draw(plot_class_reliability(by_kind, names, title, unit="samples"), title)


def _class_table(per_class: pd.DataFrame) -> Table:
    """Sortable table of every class or label, for every kind of probabilities."""
    whole = {"n", "positive"}
    rows = []
    for key, (_, row) in zip(per_class.index.tolist(), per_class.iterrows(), strict=True):
        kind, name = map(str, key)
        numbers = [number_cell(float(v), 0 if c in whole else 4) for c, v in row.items()]
        rows.append([Cell(name, name), Cell(kind, kind), *numbers])
    columns = [Column(str(c)) for c in ("name", "probabilities", *per_class.columns)]
    return Table("classes", "Classes", columns, rows, sortable=True)
