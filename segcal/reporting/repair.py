"""Writes a comparison of repairs: a recommendation, its evidence, diagrams before and after.

A repair is a post-hoc calibration of finished predictions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from segcal.evaluation.api import Comparison
from segcal.evaluation.compare import Difference, as_records, shared_means
from segcal.evaluation.compare import case_table as compared_cases
from segcal.evaluation.reported import calibration_metrics
from segcal.io.files import write_json, write_text
from segcal.io.tables import write_csv
from segcal.repair.comparing import UNCALIBRATED, Repair
from segcal.reporting import page, tables
from segcal.reporting.comparison import plot_comparison
from segcal.reporting.folder import ReportFolder
from segcal.reporting.picture import Picture, draw
from segcal.reporting.reliability import plot_reliability
from segcal.reporting.report import Written, check_output

__all__ = ["shown_columns", "shown_differences", "write_repair"]

MASKS = ("dsc", "hd95_penalised_mm")
"""Metrics of the label map."""


def shown_columns(comparison: Comparison) -> list[str]:
    """Columns of the metrics that a repair is judged by."""
    settings = next(iter(comparison.reports.values())).job.settings
    rows = {row.key: row for row in calibration_metrics()}
    wide = settings.scopes[-2:]
    return [
        *MASKS,
        *(rows["nll"].column(scope) for scope in wide),
        *(rows["ece"].column(scope) for scope in settings.scopes),
        rows["tace"].column(wide[-1]),
    ]


def shown_differences(repair: Repair, comparison: Comparison) -> list[Difference]:
    """Differences to the uncalibrated predictions in the metrics that a repair is judged by.

    For a row that only changes the label map, only metrics of the label map are included.
    """
    columns = shown_columns(comparison)
    decided = {entry.name for entry in repair.entries if entry.decision != "argmax"}
    found = [
        d
        for d in comparison.differences
        if d.mean is not None and d.metric in (MASKS if d.method in decided else columns)
    ]
    return sorted(found, key=lambda d: columns.index(d.metric))


def write_repair(repair: Repair, folder: Path) -> Written:
    """Write how repairs compare: ``index.html``, JSON, CSV and reliability diagrams.

    Args:
        repair: result of :func:`segcal.repair.comparing.compare_methods`.
        folder: folder for the comparison.

    Raises:
        ValueError: as :func:`segcal.reporting.report.check_output`.
    """
    comparison = repair.comparison
    reports = comparison.reports
    first = next(iter(reports.values()))
    given = [first.job.predictions, first.job.references]
    check_output(folder, given)
    output = ReportFolder(folder)
    conventions = first.job.settings.conventions(first.job.unit)
    sections = [_verdict(repair)]
    sections += _sections(output, repair, comparison, "cross-validated", "")
    if repair.test is not None:
        sections += _sections(output, repair, repair.test, "on the other cases", "_test")
    write_json(
        output.place("comparison.json"),
        {
            "recommended": repair.recommendation.method,
            "reasons": repair.recommendation.reasons,
            "patients": repair.patients,
            "folds": repair.folds,
            "differences": as_records(comparison.differences),
            "test_differences": None
            if repair.test is None
            else as_records(repair.test.differences),
            "fits": repair.facts,
            "conventions": conventions,
        },
    )
    header: dict[str, Any] = {
        **first.summary,
        "conventions": conventions,
    }
    title = f"Which repair helps: {first.job.predictions.resolve().name}"
    write_text(output.place("index.html"), page.render(title, header, sections))
    output.close()
    return Written(output.written, [])


def _verdict(repair: Repair) -> page.Section:
    method = repair.recommendation.method
    title = "Recommended: none" if method is None else f"Recommended: {method}"
    how = (
        f"Every method was fitted to some of the {repair.patients} patients and evaluated on the "
        f"others, in {repair.folds} folds. Differences are to the uncalibrated probabilities, with "
        "95 % bootstrap intervals over patients; means are over cases. The recommendation rests on "
        "one-sided paired t-tests over patients, corrected for the number of methods (Holm)."
    )
    return page.Section(title, [*repair.recommendation.reasons, how])


def _sections(
    output: ReportFolder, repair: Repair, comparison: Comparison, where: str, suffix: str
) -> list[page.Section]:
    reports = comparison.reports
    job = next(iter(reports.values())).job
    conventions = job.settings.conventions(job.unit)
    rows = {name: report.cases for name, report in reports.items()}
    write_csv(output.place(f"comparison{suffix}_cases.csv"), compared_cases(rows))
    shared = shared_means(rows, shown_columns(comparison))
    means = tables.method_table(shared, conventions, unit=job.unit)
    shown = shown_differences(repair, comparison)
    picture = draw(
        plot_comparison(shown, unit=job.unit),
        f"Differences to the uncalibrated probabilities, {where}",
    )
    picture.save(output.place(f"comparison{suffix}.png"))
    differences = tables.difference_table(as_records(shown), unit=job.unit)
    diagrams = _diagrams(repair, comparison, where)
    for name, one in diagrams.items():
        one.save(output.place(f"reliability{suffix}_{name}.png"))
    return [
        page.Section(f"{means.title} ({where})", (), means, [picture]),
        page.Section(f"Reliability before and after, {where}", (), None, list(diagrams.values())),
        page.Section(
            f"{differences.title} ({where})",
            [
                "Click a heading to sort. Wilcoxon p is not corrected for the number of "
                "comparisons. All metrics are in comparison.json."
            ],
            differences,
        ),
    ]


def _diagrams(repair: Repair, comparison: Comparison, where: str) -> dict[str, Picture]:
    """Reliability diagrams of the uncalibrated probabilities, and of one repair."""
    after = repair.recommendation.method or _best(repair, comparison)
    pictures = {}
    for key, name in (("before", UNCALIBRATED), ("after", after)):
        report = comparison.reports[name]
        titles = report.job.settings.scope_titles
        title = f"Reliability of the top label, {name}, {where}"
        top = {titles[scope]: tally.top for scope, tally in report.calibration.items()}
        pictures[key] = draw(plot_reliability(top, title), title)
    return pictures


def _best(repair: Repair, comparison: Comparison) -> str:
    """The method with the lowest NLL, which is shown if no method is recommended."""
    methods: Sequence[str] = [
        one.name for one in repair.entries if one.method and one.decision == "argmax"
    ]
    return min(methods, key=lambda m: float(comparison.reports[m].cases["nll_all"].mean()))
