"""The report of a study of segmentation: a page, tables, CSV files and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from segcal import __version__
from segcal.binning import BinStatistics
from segcal.io.files import write_json, write_text
from segcal.io.tables import write_csv
from segcal.reporting import markup, page
from segcal.reporting.folder import ReportFolder
from segcal.reporting.page import Section, table_section
from segcal.reporting.picture import Picture, draw
from segcal.reporting.tables import Table
from segcal.study import tables
from segcal.study.comparing import (
    FIELDS,
    FOUGHT,
    GOALS,
    JUDGES,
    NEAR_ECE,
    NEAR_NLL,
    NLL,
    TACE,
    TRUTH,
    GroupComparison,
    RankedField,
    compare_study,
    rank_everywhere,
)
from segcal.study.figures import (
    Point,
    learned_terms,
    plot_critical_differences,
    plot_curves,
    plot_differences,
    plot_front,
    plot_logits,
    plot_multipliers,
    plot_repairs,
    plot_sensitivity,
)
from segcal.study.naming import definition, metric_name
from segcal.study.published import load_published
from segcal.study.results import CellKey, Group, Method, StudyResults, read_results
from segcal.study.sensitivity import Family, families
from segcal.study.statistics import MARGIN, Change

__all__ = ["FILES", "REPORT", "report"]

REPORT = "report"
"""Folder of the report within the folder of the study."""
FILES = (
    "index.html", "summary.json", "differences.csv", "means.csv", "ranks.csv", "duels.csv",
    "sensitivity.csv", "tables.*", "figures/*.png",
)  # fmt: skip
"""Files that the report may write."""
RESAMPLES = 2000
FORESTS = ("dsc", NEAR_ECE, NLL, NEAR_NLL, TACE)
"""Panels of the figure of differences."""
SENSITIVE = ("dsc", NEAR_ECE, NLL, TACE)
VALIDATED = {"dsc": "DSC", "dice": "DSC", "miou": "mIoU"}
"""Names that a log may have for the quality of masks in validation, the best name first."""
CLOSE = 0.01
"""Distance from the baseline's quality that counts as near."""
SCOPE = "near"
"""Scope of the reliability diagrams."""


def report(
    output: Path,
    *,
    baseline: str,
    header: Mapping[str, Any],
    forms: Sequence[str] = (),
    folder: Path | None = None,
    resamples: int = RESAMPLES,
) -> list[str]:
    """Write the report of what a study has measured so far.

    Args:
        output: folder of the study.
        baseline: recipe that all methods are compared with, as it was trained.
        header: ``name`` of the study and other entries for ``summary.json``.
        forms: forms of the table files, keys of :data:`segcal.reporting.markup.FILES`.
        folder: of the report; None takes ``report`` in the folder of the study.
        resamples: of the bootstrap.

    Returns:
        names of the files.

    Raises:
        ValueError: a file of the study is missing or damaged, the baseline is not one of its
            recipes, or foreign files are in the report's way.
    """
    results = read_results(output)
    comparisons = compare_study(results, baseline, resamples=resamples)
    written = _Report(ReportFolder(folder or output / REPORT), results, comparisons, baseline)
    written.folder.check(FILES)
    written.write(header, forms)
    return written.folder.written


class _Report:
    """A report that is being written."""

    def __init__(
        self,
        folder: ReportFolder,
        results: StudyResults,
        comparisons: Sequence[GroupComparison],
        baseline: str,
    ) -> None:
        self.folder = folder
        self.results = results
        self.comparisons = comparisons
        self.baseline = baseline
        self.sections: list[Section] = []
        self.printed: list[Table] = []

    def write(self, header: Mapping[str, Any], forms: Sequence[str]) -> None:
        self._verdict()
        self._front()
        self._ranks_everywhere()
        self._duels()
        self._floor()
        self._published()
        self._sensitivity()
        for comparison in self.comparisons:
            self._of_group(comparison)
            self._inside(comparison)
        self._files()
        summary = {**self._summary(), **header}
        write_json(self.folder.place("summary.json"), summary)
        for form in forms:
            text = markup.render_tables(self.printed, form)
            write_text(self.folder.place(markup.FILES[form]), text)
        title = f"Study: {header.get('name', self.results.output.name)}"
        write_text(self.folder.place("index.html"), page.render(title, summary, self.sections))
        self.folder.close()

    def _add(self, table: Table, *notes: str, pictures: Sequence[Picture] = ()) -> None:
        """Add a table to the page and to the table files."""
        self.printed.append(table)
        self.sections.append(table_section(table, *notes, pictures=pictures))

    def _picture(self, figure: Any, name: str, alt: str) -> Picture:
        picture = draw(figure, alt)
        picture.save(self.folder.place(f"figures/{_file_name(name)}.png"))
        return picture

    def _verdict(self) -> None:
        known = [c for c in self.comparisons if c.changes]
        if not known:
            note = (
                f"{self.baseline} has no results yet, or is the only recipe, so there is nothing "
                "to compare. Means are below."
            )
            self.sections.append(Section("Goals", [note]))
            return
        table = tables.verdict_table(known, self.baseline)
        self._add(table, *_verdict_words(known, self.baseline))

    def _of_group(self, comparison: GroupComparison) -> None:
        """Differences, means and ranks of a set and network."""
        name = comparison.group.name
        if len(comparison.rows) > 1 and comparison.changes:
            picture = self._differences_figure(comparison)
            self._add(tables.goal_table(comparison), pictures=[picture])
        elif len(self.comparisons) > 1:
            note = f"{self.baseline} has no results here, so there are no differences."
            self.sections.append(Section(f"Goals: {name}", [note]))
        self._add(tables.mean_table(comparison, self.results.metrics))
        if comparison.changes:
            self.sections.append(table_section(tables.difference_table(comparison, JUDGES)))
            by_patient = tables.patient_table([comparison], NEAR_ECE)
            if by_patient.rows:
                self._add(by_patient)
        self._ranks(comparison.fields, name)

    def _differences_figure(self, comparison: GroupComparison) -> Picture:
        metrics = [m for m in FORESTS if any(c.metric == m for c in comparison.changes)]
        rows = [
            (m.name, m.name, m._replace(decision="dice").name)
            for m in comparison.rows
            if m != comparison.baseline
        ]
        title = (
            f"{comparison.group.name}: change against {comparison.baseline.name}, 95 % intervals "
            "of patients nested in seeds"
        )
        figure = plot_differences(
            comparison.changes, rows, metrics, title=title, margin=MARGIN, goals=GOALS
        )
        return self._picture(figure, f"differences {comparison.group.name}", title)

    def _ranks(self, fields: Sequence[RankedField], name: str) -> None:
        pictures = []
        for field in fields:
            if any(len(r.mean) > 1 for r in field.ranks):
                title = f"{name}: mean ranks, recipes {field.name}"
                figure = plot_critical_differences(field.ranks, title=title)
                pictures.append(self._picture(figure, f"ranks {name} {field.name}", title))
        if pictures:
            note = (
                "A bar joins methods that do not differ beyond chance (Nemenyi, 5 %). Methods "
                "that lack a seed that others have are not ranked."
            )
            self._add(tables.rank_table(fields, name), note, pictures=pictures)

    def _ranks_everywhere(self) -> None:
        if len(self.comparisons) > 1:
            self._ranks(rank_everywhere(self.comparisons), "all sets and networks")

    def _front(self) -> None:
        panels = {c.group.name: _points(c) for c in self.comparisons}
        panels = {name: points for name, points in panels.items() if points}
        if not panels:
            return
        floors = {
            c.group.name: c.mean_of[TRUTH.name, NEAR_ECE].mean
            for c in self.comparisons
            if (TRUTH.name, NEAR_ECE) in c.mean_of
        }
        title = "DSC of the predicted mask against ECE near the foreground, 95 % intervals"
        figure = plot_front(panels, title=title, floors=floors, recipes=self.results.recipes)
        note = (
            "The best methods lie at the lower right; no method beats those on the front in both "
            "metrics. Repairs change no mask, so the points of a recipe lie above each other."
        )
        picture = self._picture(figure, "front", title)
        self.sections.append(Section("DSC against calibration", [note], pictures=[picture]))

    def _duels(self) -> None:
        for field in FIELDS:
            for metric in FOUGHT:
                table = tables.duel_table(self.comparisons, field, metric)
                if len(table.rows) > 1:
                    self._add(table)

    def _floor(self) -> None:
        known = [c for c in self.comparisons if any(m == TRUTH.name for m, _ in c.mean_of)]
        if known:
            metrics = [
                m for m in self.results.metrics if m.startswith(("ece", "tace", "nll", "kl"))
            ]
            self._add(tables.floor_table(known, metrics))

    def _published(self) -> None:
        published = load_published()
        sets = [c.group.set for c in self.comparisons]
        for table in published.tables:
            for comparison in self.comparisons:
                if comparison.group.set in table.belongs_to(sets):
                    notes = [_best_words(table, comparison), "Known differences of protocol:"]
                    metrics = [f"{c.paper}: {c.difference}." for c in table.columns]
                    self._add(
                        tables.published_table(table, comparison),
                        *notes, *metrics, *table.protocol,
                    )  # fmt: skip
        claims = [c for c in published.claims if c.recipe in self.results.recipes]
        if claims:
            self._add(tables.claim_table(claims, self.comparisons))

    def _inside(self, comparison: GroupComparison) -> None:
        """Sections on the trainings and on their probabilities and logits."""
        group, name = comparison.group, comparison.group.name
        keys = {r: self.results.cell_keys(group, r) for r in comparison.seeds}
        bins = {r: found for r, of in keys.items() if (found := self._pooled(of))}
        if bins:
            title = f"{name}: reliability near the foreground, all test cases and seeds pooled"
            picture = self._picture(plot_repairs(bins, title=title), f"reliability {name}", title)
            self.sections.append(Section(f"Before and after: {name}", (), pictures=[picture]))
        self._training(comparison, keys)
        logits = {r: t for r, of in keys.items() if (t := self._logits(of)) is not None}
        if logits:
            title = f"{name}: mean logit by class, in and outside of one-class neighbourhoods"
            figure = plot_logits(logits, self.results.labels.get(group.set, []), title=title)
            note = (
                "Mean over seeds and over the voxels of a true class whose neighbourhood in the "
                "label map holds one class (inner) or several (outer)."
            )
            picture = self._picture(figure, f"logits {name}", title)
            self.sections.append(Section(f"Logits: {name}", [note], pictures=[picture]))

    def _training(self, comparison: GroupComparison, keys: Mapping[str, Sequence[CellKey]]) -> None:
        name, pictures = comparison.group.name, []
        logs = {r: {k.seed: self.results.log(k) for k in of} for r, of in keys.items()}
        quality = _quality(logs)
        if quality:
            curves = {r: _curve(of, quality) for r, of in logs.items()}
            title = f"{name}: {VALIDATED[quality]} in validation, mean over seeds"
            recipes = self.results.recipes
            figure = plot_curves(
                {r: c for r, c in curves.items() if c.size},
                label=VALIDATED[quality], title=title, recipes=recipes,
            )  # fmt: skip
            pictures.append(self._picture(figure, f"validation {name}", title))
        learned = {
            r: list(of.values()) for r, of in logs.items() if learned_terms(list(of.values()))
        }
        if learned:
            title = f"{name}: multipliers and gaps, mean and extent over seeds"
            channels = _channels(learned, self.results.labels.get(comparison.group.set, []))
            figure = plot_multipliers(learned, channels, title=title)
            pictures.append(self._picture(figure, f"multipliers {name}", title))
        costs = [self._cost(comparison.group, r, logs, quality) for r in keys]
        table = tables.cost_table(costs, self.baseline, comparison.group, CLOSE)
        self._add(table, pictures=pictures)

    def _cost(
        self,
        group: Group,
        recipe: str,
        logs: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]],
        quality: str,
    ) -> tables.RecipeCost:
        cells = self.results.cells
        own = cells[
            (cells["set"] == group.set) & (cells["network"] == group.network)
            & (cells["recipe"] == recipe)
        ]  # fmt: skip
        done = len(self.results.cell_keys(group, recipe))
        seconds = (
            pd.to_numeric(own["seconds"], errors="coerce").mean() if "seconds" in own else None
        )
        base = logs.get(self.baseline, {})
        tried = [s for s, r in logs[recipe].items() if quality and r and base.get(s)]
        reached = [_reached(logs[recipe][s], base[s], quality) for s in tried]
        return tables.RecipeCost(
            recipe=recipe,
            cells=(done, max(len(own), done)),
            seconds=None if seconds is None or np.isnan(seconds) else float(seconds),
            reached=[epoch for epoch in reached if epoch is not None],
            tried=len(tried),
        )

    def _pooled(self, keys: Sequence[CellKey]) -> dict[str, BinStatistics]:
        """Bins of all seeds together, by repair."""
        found: dict[str, list[BinStatistics]] = {}
        for key in keys:
            for repair, scopes in self.results.reliability(key).items():
                if SCOPE in scopes:
                    found.setdefault(repair, []).append(scopes[SCOPE])
        return {repair: reduce(add, bins) for repair, bins in found.items()}

    def _logits(self, keys: Sequence[CellKey]) -> pd.DataFrame | None:
        """Mean logits over seeds, weighted by their numbers of voxels."""
        found = [t for key in keys if (t := self.results.logits(key)) is not None and len(t)]
        if not found:
            return None
        every = pd.concat(found)
        every = every[every["voxels"] > 0].dropna(subset=["mean_logit"])
        every["sum"] = every["mean_logit"] * every["voxels"]
        sums = every.groupby(["region", "label", "channel"], sort=False)[["sum", "voxels"]].sum()
        sums["mean_logit"] = sums["sum"] / sums["voxels"]
        return sums.reset_index() if len(sums) else None

    def _sensitivity(self) -> None:
        found = families({r: self.results.loss(r) for r in self.results.recipes})
        rows = []
        for family in found:
            curves = {c.group.name: _sensitivity_curve(c, family) for c in self.comparisons}
            curves = {name: curve for name, curve in curves.items() if curve}
            if not curves:
                continue
            base = {
                c.group.name: {
                    k: m.mean for (name, k), m in c.mean_of.items() if name == self.baseline
                }
                for c in self.comparisons
            }
            title = f"What {family.name} does: {', '.join(family.values)}"
            figure = plot_sensitivity(
                curves, SENSITIVE, argument=family.name, baseline=base, title=title
            )
            picture = self._picture(figure, f"sensitivity {family.name}", title)
            note = f"Recipes {', '.join(family.values)} differ in {family.argument} only."
            heading = f"Sensitivity to {family.name}"
            self.sections.append(Section(heading, [note], pictures=[picture]))
            rows += [
                {"argument": family.argument, "group": name, "value": value, "metric": k,
                 "mean": m.mean, **_ends("", m.ci95)}
                for name, curve in curves.items() for value, of in curve for k, m in of.items()
            ]  # fmt: skip
        if rows:
            self._csv("sensitivity.csv", rows, ["argument", "group", "value", "metric"])

    def _files(self) -> None:
        """Everything as plain numbers."""
        keys = ["set", "network", "metric", "method"]
        changes = [_change_row(c, change) for c in self.comparisons for change in c.changes]
        beside = [_change_row(c, change) for c in self.comparisons for change in c.beside_repair]
        self._csv("differences.csv", changes + beside, [*keys, "baseline"])
        self._csv("means.csv", [
            {**c.group._asdict(), "metric": m.metric, "method": m.method, "patients": m.patients,
             "seeds": m.seeds, "mean": m.mean, **_ends("", m.ci95), "deviation": m.deviation}
            for c in self.comparisons for m in c.means
        ], keys)  # fmt: skip
        self._csv("ranks.csv", [
            {**c.group._asdict(), "metric": r.metric, "method": method, "field": field.name,
             "rank": rank, "patients": r.blocks, "p_friedman": r.p,
             "critical_difference": r.distance}
            for c in self.comparisons for field in c.fields for r in field.ranks
            for method, rank in r.mean.items()
        ], [*keys, "field"])  # fmt: skip
        self._csv("duels.csv", [
            {**_change_row(c, change), "field": field}
            for c in self.comparisons for field, found in c.duels.items() for change in found
        ], [*keys, "baseline", "field"])  # fmt: skip

    def _csv(self, name: str, rows: Sequence[Mapping[str, Any]], index: list[str]) -> None:
        table = pd.DataFrame(list(rows)) if rows else pd.DataFrame(columns=index)
        write_csv(self.folder.place(name), table.set_index(index))

    def _summary(self) -> dict[str, Any]:
        results, missing, outdated = self.results, self.results.missing(), self.results.outdated()
        failed = {name: why for name, why in results.failed().items() if name not in outdated}
        notes = {"no result yet": missing, "not measured with the new repairs": outdated}
        done = sum(len(results.cell_keys(group)) for group in results.groups)
        return {
            "predictions": str(results.output),
            "references": ", ".join(dict.fromkeys(c.group.set for c in self.comparisons)),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "versions": {"segcal": __version__},
            "baseline": self.baseline,
            "cases": {
                "evaluated": done,
                "unit": "cell",
                "failed": failed,
                "without_prediction": [],
                "without_reference": [],
                "notes": {text: names for text, names in notes.items() if names},
                "interrupted": bool(missing),
            },
            "missing": missing,
            "conventions": {
                **{metric_name(m): definition(m) for m in results.metrics},
                **CONVENTIONS,
            },
        }


CONVENTIONS = {
    "cell": "a training: set x network x recipe x seed; the seed also draws the split of patients",
    "patient": "the unit of all statistics, represented by the mean over its cases",
    "mean": "mean over seeds of the mean over the patients of each seed",
    "interval": "95 % percentile bootstrap: with three seeds or more, seeds are drawn, and "
    "patients within each; with fewer, only patients within every seed",
    "p": "two-sided paired t-test over patients, where a patient in several seeds counts once with "
    "the mean; Holm's correction for the number of methods within a metric of a set and network",
    "p seeds": "t-test over the means of the seeds, not corrected",
    "beyond chance": "corrected p is at most 0.05, the interval excludes 0, and all seeds agree",
    "repair": "raw: as trained; temperature: one for all voxels; class_region: one for each "
    "predicted class, inside and at borders of the predicted map; class_region_case: these, rising "
    "with the errors that the network expects in a case; fitted to validation patients",
    "decision": "mask: the mask that the predictor wrote; dice: the mask of largest expected Dice",
}
"""Meaning of the report's terms."""


def _verdict_words(comparisons: Sequence[GroupComparison], baseline: str) -> list[str]:
    """Which methods reach all goals, or how many goals the best methods reach."""
    rows = list(dict.fromkeys(m for c in comparisons for m in c.rows if m.name != baseline))
    scored: list[tuple[Method, int, int]] = []
    for method in rows:
        own = [c for c in comparisons if method in c.rows]
        answers = [c.reaches(method, k) for c in own for k in GOALS]
        answers += [c.keeps_dsc(method) for c in own]
        known = [a for a in answers if a is not None]
        if len(own) == len(comparisons) and known:
            scored.append((method, sum(known), len(known)))
    if not scored:
        return ["No method has results in all sets and networks."]
    whole = [m.name for m, reached, of in scored if reached == of]
    n = len(comparisons)
    where = "the set and network" if n == 1 else f"all {n} sets and networks"
    if whole:
        return [f"All goals in {where}: {', '.join(whole)}."]
    most = max(reached / of for _, reached, of in scored)
    best = [f"{m.name} ({reached} of {of})" for m, reached, of in scored if reached / of == most]
    return [f"No method reaches all goals in {where}. Nearest: {', '.join(best)}."]


def _best_words(published: Any, comparison: GroupComparison) -> str:
    """The paper's best numbers beside the study's best."""
    parts = []
    for index, column in enumerate(published.columns):
        higher = column.ours == "dsc"
        of = {recipe: row[index] for recipe, row in published.rows.items()}
        name = (max if higher else min)(of, key=lambda r: of[r])
        own = {
            m.name: comparison.mean_of[m.name, column.ours].mean
            for m in comparison.rows
            if (m.name, column.ours) in comparison.mean_of
        }
        text = f"{column.paper} {of[name]:.3f} ({name})"
        if own:
            best = (max if higher else min)(own, key=lambda m: own[m])
            text += f", here {own[best]:.3f} ({best})"
        parts.append(text)
    return f"Best of the paper and of this study, repairs included: {'; '.join(parts)}."


def _points(comparison: GroupComparison) -> list[Point]:
    means = comparison.mean_of
    return [
        Point(m, means[m.name, "dsc"], means[m.name, NEAR_ECE])
        for m in comparison.rows
        if (m.name, "dsc") in means and (m.name, NEAR_ECE) in means
    ]


def _quality(logs: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]) -> str:
    """The logs' name for the quality of masks; empty if they do not record it."""
    keys = {key for of in logs.values() for records in of.values() for r in records for key in r}
    return next((key for key in VALIDATED if key in keys), "")


def _values(records: Sequence[Mapping[str, Any]], quality: str) -> dict[int, float]:
    return {
        int(r["epoch"]): float(r[quality])
        for r in records
        if isinstance(r.get(quality), int | float)
    }


def _curve(runs: Mapping[int, Sequence[Mapping[str, Any]]], quality: str) -> NDArray[np.float64]:
    """Quality ``(seeds, epochs)``; NaN where a line does not record it."""
    found = [_values(records, quality) for records in runs.values()]
    epochs = 1 + max((epoch for of in found for epoch in of), default=-1)
    values = np.full((len(found), epochs), np.nan)
    for row, of in zip(values, found, strict=True):
        row[list(of)] = list(of.values())
    return values


def _reached(
    records: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], quality: str
) -> int | None:
    """Epochs until the quality is near the baseline's last value; None if it never is."""
    aim = _values(base, quality)
    if not aim:
        return None
    least = aim[max(aim)] - CLOSE
    return next(
        (epoch + 1 for epoch, value in sorted(_values(records, quality).items()) if value >= least),
        None,
    )


def _channels(
    logs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]], names: Sequence[str]
) -> Sequence[str]:
    """Names of the channels with multipliers; numbers if the names do not match."""
    most = 0
    for runs in logs.values():
        for term in learned_terms(runs):
            rows = next(r[term]["lam"] for of in runs for r in of if term in r)
            most = max(most, np.atleast_2d(np.asarray(rows)).shape[1])
    return names if len(names) == most else [str(k) for k in range(most)]


def _sensitivity_curve(comparison: GroupComparison, family: Family) -> list[tuple[float, Any]]:
    """Means by metric at every value of the number."""
    curve = []
    for recipe, value in family.values.items():
        of = {k: m for (name, k), m in comparison.mean_of.items() if name == recipe}
        if of:
            curve.append((value, {k: of[k] for k in SENSITIVE if k in of}))
    return curve if len(curve) > 1 else []


def _change_row(comparison: GroupComparison, change: Change) -> dict[str, Any]:
    method = next(m for m in comparison.methods if m.name == change.method)
    row = {k: v for k, v in vars(change).items() if k not in ("ci95", "relative_ci95")}
    return {
        **comparison.group._asdict(),
        **method._asdict(),
        **row,
        **_ends("", change.ci95),
        **_ends("relative_", change.relative_ci95),
        "direction": change.direction,
    }


def _ends(prefix: str, interval: tuple[float, float] | None) -> dict[str, float | None]:
    low, high = interval or (None, None)
    return {f"{prefix}low": low, f"{prefix}high": high}


def _file_name(name: str) -> str:
    return "_".join("".join(c if c.isalnum() else " " for c in name).split())
