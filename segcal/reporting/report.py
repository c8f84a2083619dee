"""Writes the files of a report into a folder: numbers, tables, pictures and the page."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from segcal.arrays import check_choice
from segcal.evaluation.agreement import MEAN, dsc_agreement, in_words, predicted_dsc, volumes
from segcal.evaluation.api import Comparison, Report
from segcal.evaluation.compare import as_records
from segcal.evaluation.compare import case_table as compared_cases
from segcal.evaluation.reading import read_case
from segcal.io.files import write_json, write_text
from segcal.io.pairing import find_image
from segcal.io.tables import write_csv
from segcal.io.volumes import Geometry, put_on, read_volume
from segcal.metrics.table import IN_PIXELS
from segcal.reporting import markup, page, tables
from segcal.reporting.agreement import plot_predicted_dsc, plot_risk_coverage, plot_volumes
from segcal.reporting.comparison import plot_comparison
from segcal.reporting.folder import ReportFolder
from segcal.reporting.picture import Picture, draw
from segcal.reporting.reliability import (
    plot_case_reliability,
    plot_class_reliability,
    plot_confidence,
    plot_reliability,
)
from segcal.reporting.worst import plot_case

__all__ = ["Written", "check_output", "write_comparison", "write_report"]

PathLike = str | os.PathLike[str]
Name = TypeVar("Name", bound=Hashable)
MOST_CLASSES = 16
"""Most classes that get a diagram each."""
WORST = 3
OF_RATERS = (
    "Overlap and surfaces above are measured against the label that most raters give, calibration "
    "against the shares of all raters. Errors against each rater are in summary.json (raters).",
)
FILES = (
    "index.html", "summary.json", "cases.csv", "reliability*.png", "confidence.png", "worst/*.png",
    "comparison.*", "comparison_*.*", "tables.*", "predicted_dsc.png", "risk_coverage.png",
    "volumes.png",
)  # fmt: skip
"""Names of the files that a report may write."""


@dataclass(frozen=True)
class Written:
    """Files that were written.

    Attributes:
        files: paths relative to the folder.
        notes: what a reader should know about the pictures.
    """

    files: list[str]
    notes: list[str]


def check_output(folder: PathLike, given: Iterable[Path]) -> None:
    """Refuse a folder in which somebody else's file would be overwritten.

    Args:
        folder: folder for a report.
        given: folders and files that are evaluated.

    Raises:
        ValueError: the folder holds the evaluated files, or files that no report wrote.
    """
    check_folder(folder, given, FILES)


def check_folder(folder: PathLike, given: Iterable[Path], files: Iterable[str]) -> None:
    """Check a folder as :func:`check_output` does, for a report with other files.

    Args:
        folder: folder for a report.
        given: folders and files that are evaluated.
        files: patterns of the names of files that the report may write.

    Raises:
        ValueError: the folder holds the evaluated files, or files that no report wrote.
    """
    output = Path(folder)
    inputs = [path if path.is_dir() else path.parent for path in given]
    if output.resolve() in [path.resolve() for path in inputs]:
        raise ValueError(
            f"{output}: holds the files to evaluate; name another folder for the report"
        )
    ReportFolder(output).check(files)


def write_report(
    report: Report,
    folder: PathLike,
    *,
    images: PathLike | None = None,
    formats: Sequence[str] = (),
    asked: Collection[str] | None = None,
) -> Written:
    """Write the report of a set of predictions; its files replace those of an earlier run.

    Args:
        report: result of :func:`segcal.evaluation.api.evaluate`.
        folder: folder for the report.
        images: folder of the images, which are shown below the labels of the worst cases, or None.
        formats: formats in which tables are written, too: ``markdown``, ``latex``.
        asked: keys of the metrics in these tables; None shows the default metrics.

    Raises:
        ValueError: a format is unknown, or the folder of images does not exist; or as
            :func:`check_output`.
    """
    job = report.job
    check_output(folder, [job.predictions, job.references])
    forms, below = _checked(formats), _images(images)
    output = ReportFolder(Path(folder))
    write_json(output.place("summary.json"), report.summary)
    sections: list[page.Section] = []
    printed: list[tables.Table] = []
    notes: list[str] = []
    if len(report.cases):
        write_csv(output.place("cases.csv"), report.cases)
        printed.append(tables.class_table(report.summary, asked))
        sections.append(page.table_section(tables.class_table(report.summary)))
    if report.calibration:
        scopes = job.settings.scopes
        printed.append(tables.calibration_table(report.summary, scopes, asked))
        diagrams = _diagrams(report)
        _save(output, diagrams)
        sections.append(
            _calibration_section(tables.calibration_table(report.summary, scopes), diagrams)
        )
    if "predicted_dsc" in report.summary:
        sections += _confidence_sections(output, report)
    if len(report.cases):
        if "raters" in report.summary:
            printed.append(tables.rater_table(report.summary, asked))
            sections.append(page.table_section(tables.rater_table(report.summary), *OF_RATERS))
        if job.settings.compat is not None:
            printed.append(tables.compat_table(report.summary, job.settings.compat))
            sections.append(page.table_section(printed[-1]))
        worst, notes = _worst(report, below)
        _save(output, worst)
        if worst:
            title = "Cases with the lowest DSC"
            sections.append(page.Section(title, notes, pictures=list(worst.values())))
        cases = tables.case_table(report.cases, report.summary["conventions"], unit=job.unit)
        note = "Click a heading to sort. All columns are in cases.csv."
        sections.append(page.table_section(cases, note))
    _write_tables(output, printed, forms)
    title = f"Evaluation: {job.name}"
    write_text(output.place("index.html"), page.render(title, report.summary, sections))
    output.close()
    return Written(output.written, notes)


def _confidence_sections(output: ReportFolder, report: Report) -> list[page.Section]:
    """Sections on how well predicted DSC and volumes agree with the reference."""
    job, rows = report.job, report.cases
    found = predicted_dsc(rows)
    unit = "ml" if job.unit == "mm" else IN_PIXELS["ml"]
    titles = {
        "predicted_dsc.png": "Predicted and true DSC, one point per case",
        "risk_coverage.png": "Risk and coverage: errors among the most confident cases and voxels",
        "volumes.png": "Volumes: difference against mean, with intervals",
    }
    of_volumes = volumes(rows)
    labels = _worst_labels(
        {name: dsc_agreement(of)["mae"] for name, of in found.items() if name != MEAN}
    )
    by_volume = _worst_labels(
        {name: _mean_error(of["expected"], of["true"]) for name, of in of_volumes.items()}
    )
    if len(by_volume) < len(of_volumes):
        ends = f", the {MOST_CLASSES} labels with the largest error"
        titles |= {n: titles[n] + ends for n in ("predicted_dsc.png", "volumes.png")}
    figures = (
        plot_predicted_dsc(
            {n: of for n, of in found.items() if n in (MEAN, *labels)}, titles["predicted_dsc.png"]
        ),
        plot_risk_coverage(found, report.calibration, titles["risk_coverage.png"]),
        plot_volumes({n: of_volumes[n] for n in by_volume}, unit, titles["volumes.png"]),
    )
    pictures = {n: draw(f, t) for (n, t), f in zip(titles.items(), figures, strict=True)}
    _save(output, pictures)
    predicted, risk, volume = pictures.values()
    notes = []
    if job.intervals is not None:
        notes = [job.intervals.too_few(job.settings.interval, job.settings.level)]
    return [
        page.table_section(
            tables.predicted_table(report.summary),
            "Soft Dice confidence is the DSC that the probabilities predict for a mask, without "
            "the reference.",
            *filter(None, [in_words(list(report.summary["predicted_dsc"].values())[-1])]),
            pictures=[predicted, risk],
        ),
        page.table_section(
            tables.volume_table(report.summary), *filter(None, notes), pictures=[volume]
        ),
    ]


def _worst_labels(errors: Mapping[Name, float | None]) -> list[Name]:
    """Names that get a diagram each: all, or if there are many, those with the largest errors."""
    known = {name: -np.inf if error is None else error for name, error in errors.items()}
    worst = sorted(known, key=lambda name: -np.nan_to_num(known[name], nan=-np.inf))[:MOST_CLASSES]
    return [name for name in errors if name in worst]


def _mean_error(found: pd.Series[float], true: pd.Series[float]) -> float:
    """Mean absolute error, as a share of the mean true value; NaN without one."""
    return float((found - true).abs().mean() / true.mean()) if len(true) else float("nan")


def _calibration_section(table: tables.Table, diagrams: dict[str, Picture]) -> page.Section:
    return page.table_section(
        table,
        "Fractions of 1; lower is better. A scope is the selection of voxels that an error is "
        "computed over. Scopes can rank methods differently, so look at all of them. Over voxels "
        "that are selected by their label (fg, union), even the true probabilities have an error.",
        pictures=list(diagrams.values()),
    )


def write_comparison(
    comparison: Comparison, folder: PathLike, *, formats: Sequence[str] = ()
) -> Written:
    """Write how several sets of predictions differ.

    The page links to ``NAME/index.html``, where the report of each method is expected.

    Args:
        comparison: result of :func:`segcal.evaluation.api.compare_methods`.
        folder: folder for the comparison.
        formats: formats in which tables are written, too: ``markdown``, ``latex``.

    Raises:
        ValueError: a format is unknown; or as :func:`check_output`.
    """
    jobs = [report.job for report in comparison.reports.values()]
    check_output(folder, [*(job.predictions for job in jobs), jobs[0].references])
    forms = _checked(formats)
    rows = {name: report.cases for name, report in comparison.reports.items()}
    unit = jobs[0].unit
    conventions = jobs[0].settings.conventions(unit)
    output = ReportFolder(Path(folder))
    write_json(
        output.place("comparison.json"),
        {"differences": as_records(comparison.differences), "conventions": conventions},
    )
    write_csv(output.place("comparison.csv"), compared_cases(rows))
    picture = draw(plot_comparison(comparison.shown, unit=unit), "Differences between methods")
    methods = tables.method_table(comparison.means, conventions, unit=unit)
    _save(output, {"comparison.png": picture})
    differences = tables.difference_table(as_records(comparison.shown), unit=unit)
    _write_tables(output, [methods, differences], forms)
    sections = [
        page.table_section(
            methods,
            "Look at DSC first: a bad segmentation can be well calibrated, so compare calibration "
            "only between methods that segment about equally well.",
            pictures=[picture],
        ),
        page.table_section(
            tables.difference_table(as_records(comparison.listed), unit=unit),
            "Click a heading to sort. Wilcoxon p is not corrected for the number of comparisons.",
        ),
    ]
    title = f"Comparison: {', '.join(rows)}"
    header = _comparison_header(comparison)
    write_text(output.place("index.html"), page.render(title, header, sections, list(rows)))
    output.close()
    return Written(output.written, [])


def _comparison_header(comparison: Comparison) -> dict[str, Any]:
    """Part of the page of a comparison that says how it was made."""
    reports = comparison.reports
    first = next(iter(reports.values())).job
    return {
        **first.header(),
        "predictions": ", ".join(str(r.job.predictions.resolve()) for r in reports.values()),
        "cases": {
            "evaluated": max(len(report.cases) for report in reports.values()),
            "interrupted": False,
            "failed": {f"{m}/{k}": why for m, r in reports.items() for k, why in r.failed.items()},
            "notes": {},
            "without_prediction": [],
            "without_reference": [],
        },
    }


def _checked(formats: Sequence[str]) -> list[str]:
    for form in formats:
        check_choice("formats", form, tuple(markup.FILES))
    return list(dict.fromkeys(formats))


def _images(folder: PathLike | None) -> Path | None:
    if folder is not None and not Path(folder).is_dir():
        raise ValueError(f"images: {folder}: no such folder")
    return None if folder is None else Path(folder)


def _diagrams(report: Report) -> dict[str, Picture]:
    """Pictures of the calibration of all cases together (pooled), by file name."""
    job, cohort = report.job, report.cohort
    pooled = int(cohort.calibrated.sum())
    cases = f"{pooled} case{'' if pooled == 1 else 's'} pooled"
    top = f"Reliability of the top label, {cases}"
    confidence = f"Confidence of right and wrong voxels, {cases}"
    classes = f"Reliability of every class, {cases}"
    by_case = f"How the reliability of the top label varies over {pooled} cases"
    titles = job.settings.scope_titles
    titled = {titles[k]: c for k, c in cohort.calibration.items()}
    floors = {titles[k]: floor for k, floor in cohort.floors.items()}
    each = {titles[k]: of for k, of in cohort.reliability.items()}
    known = {} if job.label_set is None else job.label_set.names
    count = len(next(iter(titled.values())).classes)
    names = [known.get(k, "background" if k == 0 else str(k)) for k in range(count)]
    if job.label_set is not None and job.label_set.regions:
        names = ["outside the region", "inside the region"]
    by_class = {k: c.classes for k, c in cohort.calibration.items()}
    if count > MOST_CLASSES:
        last = list(by_class.values())[-1]
        worst = _worst_labels({k: one.expected_error() for k, one in enumerate(last)})
        by_class = {k: [of[i] for i in worst] for k, of in by_class.items()}
        names = [names[i] for i in worst]
        classes = f"Reliability of the {MOST_CLASSES} classes with the largest error, {cases}"
    fine = {k: c.top_mass.statistics for k, c in titled.items()}
    return {
        "reliability.png": draw(
            plot_reliability({k: c.top for k, c in titled.items()}, top, floors=floors), top
        ),
        "reliability_cases.png": draw(plot_case_reliability(each, by_case), by_case),
        "confidence.png": draw(plot_confidence(fine, confidence), confidence),
        "reliability_classes.png": draw(plot_class_reliability(by_class, names, classes), classes),
    }


def _save(folder: ReportFolder, pictures: dict[str, Picture]) -> None:
    for name, picture in pictures.items():
        picture.save(folder.place(name))


def _write_tables(folder: ReportFolder, printed: list[tables.Table], forms: Sequence[str]) -> None:
    for form in forms if printed else ():
        write_text(folder.place(markup.FILES[form]), markup.render_tables(printed, form))


def _worst(report: Report, images: Path | None) -> tuple[dict[str, Picture], list[str]]:
    """Pictures of the cases with the lowest DSC by file name, and notes on them."""
    job, tolerance = report.job, report.job.settings.tolerance
    scores = report.cases["dsc"].dropna().sort_values(kind="stable").head(WORST)
    by_name = {case.name: case for case in job.pairing.cases}
    pictures, notes = {}, []
    for name, score in scores.items():
        arrays = read_case(
            by_name[str(name)], job.label_set, tolerance=tolerance, reader=job.reader,
            threshold=job.settings.threshold,
        )  # fmt: skip
        p, geometry = arrays.probabilities, arrays.reference.geometry
        image, note = None, ""
        if images is not None:
            image, note = place_image(images, str(name), geometry, tolerance)
        if note:
            notes.append(f"{name} is shown without its image: {note}")
        title = f"{name}: DSC {score:.3f}"
        figure = plot_case(
            arrays.reference.array,
            arrays.prediction,
            None if p is None else p.max(0),
            names=arrays.names,
            spacing_mm=geometry.spacing_mm,
            title=title,
            image=image,
            ignore_index=arrays.ignore_index,
        )
        pictures[f"worst/{name}.png"] = draw(figure, title)
    return pictures, notes


def place_image(
    folder: Path, name: str, geometry: Geometry, tolerance: float
) -> tuple[NDArray[Any] | None, str]:
    """Grey values of a case (the first channel), or the reason why there are none.

    Args:
        folder: folder of the images.
        name: name of the case.
        geometry: geometry that the image must have.
        tolerance: how far, in voxels, the geometry of the image may deviate.
    """
    path = find_image(folder, name)
    if path is None:
        return None, f"{folder} holds no {name}_0000.nii.gz or {name}.nii.gz"
    try:
        array, _ = put_on(path, read_volume(path), geometry, tolerance)
    except ValueError as error:
        return None, str(error)
    if array.dtype.kind not in "fiub":
        return None, f"{path} holds values of type {array.dtype}, which are not grey values"
    return array if array.ndim == 3 else array[0], ""
