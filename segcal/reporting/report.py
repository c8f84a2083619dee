"""The files of a report: numbers, tables, pictures and the page, written into a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.evaluation.case import Settings
from segcal.evaluation.cohort import Cohort, read_case, summarise
from segcal.evaluation.compare import Difference, as_records, compare, shared_means
from segcal.evaluation.compare import case_table as compared_cases
from segcal.evaluation.job import Job
from segcal.io.files import VOLUME_ENDINGS, write_json, write_text
from segcal.io.tables import write_csv
from segcal.io.volumes import Geometry, put_on, read_volume
from segcal.reporting import markup, page, tables
from segcal.reporting.comparison import plot_comparison
from segcal.reporting.folder import ReportFolder
from segcal.reporting.picture import Picture, draw
from segcal.reporting.reliability import plot_class_reliability, plot_confidence, plot_reliability
from segcal.reporting.worst import plot_case

MOST_CLASSES = 16
"""Classes that get a reliability diagram each."""
WORST = 3
FILES = (
    "index.html", "summary.json", "cases.csv", "reliability*.png", "confidence.png", "worst/*.png",
    "comparison.*", "tables.*",
)  # fmt: skip
"""What a report may write."""


@dataclass(frozen=True)
class Report:
    """What was written of one set of predictions.

    Attributes:
        summary: content of ``summary.json``.
        notes: what a reader should know about the pictures.
        files: relative to the folder.
    """

    summary: dict[str, Any]
    notes: list[str]
    files: list[str]


@dataclass(frozen=True)
class Comparison:
    """What was written of several sets of predictions.

    Attributes:
        differences: those that are shown first.
        files: relative to the folder.
    """

    differences: list[Difference]
    files: list[str]


def write_report(
    job: Job,
    cohort: Cohort,
    settings: Settings,
    *,
    bootstrap: int,
    images: Path | None = None,
    forms: Sequence[str] = (),
) -> Report:
    """Write the report of a set of predictions, each file replacing that of an earlier run.

    Args:
        job: what was evaluated.
        cohort: its results.
        settings: of the evaluation.
        bootstrap: resamples of the intervals.
        images: folder of the images below the worst cases; None without.
        forms: of the files of tables, keys of :data:`segcal.reporting.markup.FILES`.
    """
    summary = {**job.header(settings), **summarise(cohort, resamples=bootstrap)}
    folder = ReportFolder(job.output)
    write_json(folder.place("summary.json"), summary)
    sections: list[page.Section] = []
    printed: list[tables.Table] = []
    notes: list[str] = []
    if len(cohort.rows):
        write_csv(folder.place("cases.csv"), cohort.rows)
        printed.append(tables.class_table(summary))
        sections.append(page.table_section(printed[-1]))
    if cohort.calibration:
        printed.append(tables.calibration_table(summary, settings.scopes))
        diagrams = _diagrams(job, cohort, settings)
        _save(folder, diagrams)
        sections.append(
            page.table_section(
                printed[-1],
                "Fractions of 1, the lower the better. The scope decides the ranking of methods: "
                "look at all of them. Over voxels that are chosen by their label (fg, union) even "
                "the true probabilities are not without error.",
                pictures=list(diagrams.values()),
            )
        )
    if len(cohort.rows):
        if settings.compat is not None:
            printed.append(tables.compat_table(summary, settings.compat))
            sections.append(page.table_section(printed[-1]))
        worst, notes = _worst(job, cohort, settings, images)
        _save(folder, worst)
        if worst:
            title = "Cases with the lowest DSC"
            sections.append(page.Section(title, notes, pictures=list(worst.values())))
        cases = tables.case_table(cohort.rows, summary["conventions"])
        note = "Click a heading to sort. All columns are in cases.csv."
        sections.append(page.table_section(cases, note))
    _write_tables(folder, printed, forms)
    title = f"Evaluation: {job.name}"
    write_text(folder.place("index.html"), page.render(title, summary, sections))
    folder.close()
    return Report(summary, notes, folder.written)


def write_comparison(
    jobs: Sequence[Job],
    cohorts: Mapping[str, Cohort],
    settings: Settings,
    *,
    bootstrap: int,
    forms: Sequence[str] = (),
) -> Comparison:
    """Write how several sets of predictions differ, beside the folders of their reports.

    Args:
        jobs: what was evaluated; the first is what others are compared to.
        cohorts: results by name of the job.
        settings: of the evaluation.
        bootstrap: resamples of the intervals.
        forms: as of :func:`write_report`.
    """
    output = jobs[0].output.parent
    rows = {name: cohort.rows for name, cohort in cohorts.items()}
    header = {
        **jobs[0].header(settings),
        "predictions": ", ".join(str(job.predictions.resolve()) for job in jobs),
        "cases": {
            "evaluated": max(map(len, rows.values())),
            "interrupted": False,
            "failed": {f"{m}/{k}": v for m, c in cohorts.items() for k, v in c.failed.items()},
            "notes": {},
            "without_prediction": [],
            "without_reference": [],
        },
    }
    differences = compare(rows, resamples=bootstrap)
    folder = ReportFolder(output)
    write_json(
        folder.place("comparison.json"),
        {"differences": as_records(differences), "conventions": settings.conventions()},
    )
    write_csv(folder.place("comparison.csv"), compared_cases(rows))
    shown = [
        "dsc",
        "hd95_penalised_mm",
        *(f"{m}_{scope}" for m in ("ece", "tace") for scope in settings.scopes),
    ]
    chosen = [d for m in shown for d in differences if d.metric == m and d.mean is not None]
    picture = draw(plot_comparison(chosen), "Differences between methods")
    conventions = settings.conventions()
    means = shared_means(rows, shown, resamples=bootstrap)
    methods = tables.method_table(means, conventions)
    _save(folder, {"comparison.png": picture})
    _write_tables(folder, [methods, tables.difference_table(as_records(chosen))], forms)
    sections = [
        page.table_section(
            methods,
            "Look at DSC first: a bad segmentation can be well calibrated, so calibration compares "
            "methods that segment about equally well.",
            pictures=[picture],
        ),
        page.table_section(
            tables.difference_table(as_records(differences)),
            "Click a heading to sort. Wilcoxon p is not corrected for the number of comparisons.",
        ),
    ]
    title = f"Comparison: {', '.join(rows)}"
    write_text(folder.place("index.html"), page.render(title, header, sections, list(rows)))
    folder.close()
    return Comparison(chosen, folder.written)


def _diagrams(job: Job, cohort: Cohort, settings: Settings) -> dict[str, Picture]:
    """Pictures of the pooled calibration by file name."""
    pooled = int(cohort.calibrated.sum())
    cases = f"{pooled} case{'' if pooled == 1 else 's'} pooled"
    top = f"Reliability of the top label, {cases}"
    confidence = f"Confidence of right and wrong voxels, {cases}"
    classes = f"Reliability of every class, {cases}"
    titled = {settings.scope_titles[k]: c for k, c in cohort.calibration.items()}
    known = {} if job.label_set is None else job.label_set.names
    count = len(next(iter(titled.values())).classes)
    names = [known.get(k, "background" if k == 0 else str(k)) for k in range(count)]
    if job.label_set is not None and job.label_set.regions:
        names = ["outside a region", "in it"]
    by_class = {k: c.classes for k, c in cohort.calibration.items()}
    if count > MOST_CLASSES:
        errors = [one.expected_error() for one in list(by_class.values())[-1]]
        worst = sorted(np.argsort(np.nan_to_num(errors))[::-1][:MOST_CLASSES])
        by_class = {k: [of[i] for i in worst] for k, of in by_class.items()}
        names = [names[i] for i in worst]
        classes = f"Reliability of the {MOST_CLASSES} classes with the largest error, {cases}"
    fine = {k: c.top_mass.statistics for k, c in titled.items()}
    return {
        "reliability.png": draw(plot_reliability({k: c.top for k, c in titled.items()}, top), top),
        "confidence.png": draw(plot_confidence(fine, confidence), confidence),
        "reliability_classes.png": draw(plot_class_reliability(by_class, names, classes), classes),
    }


def _save(folder: ReportFolder, pictures: dict[str, Picture]) -> None:
    for name, picture in pictures.items():
        picture.save(folder.place(name))


def _write_tables(folder: ReportFolder, printed: list[tables.Table], forms: Sequence[str]) -> None:
    for form in forms if printed else ():
        write_text(folder.place(markup.FILES[form]), markup.render_tables(printed, form))


def _worst(
    job: Job, cohort: Cohort, settings: Settings, images: Path | None
) -> tuple[dict[str, Picture], list[str]]:
    """Pictures of the cases with the lowest DSC by file name, and what was odd."""
    scores = cohort.rows["dsc"].dropna().sort_values(kind="stable").head(WORST)
    by_name = {case.name: case for case in job.pairing.cases}
    pictures, notes = {}, []
    for name, score in scores.items():
        arrays = read_case(by_name[str(name)], job.label_set, settings=settings, reader=job.reader)
        p, geometry = arrays.probabilities, arrays.reference.geometry
        image, note = None, ""
        if images is not None:
            image, note = _image(images, str(name), geometry, settings.tolerance)
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


def _image(
    folder: Path, name: str, geometry: Geometry, tolerance: float
) -> tuple[NDArray[Any] | None, str]:
    """Grey values of a case (the first channel), or why there are none."""
    paths = [folder / f"{name}{channel}{e}" for channel in ("_0000", "") for e in VOLUME_ENDINGS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return None, f"{folder} holds no {name}_0000.nii.gz or {name}.nii.gz"
    try:
        array, _ = put_on(path, read_volume(path), geometry, tolerance)
    except ValueError as error:
        return None, str(error)
    if array.dtype.kind not in "fiub":
        return None, f"{path} holds {array.dtype}, which are no grey values"
    return array if array.ndim == 3 else array[0], ""
