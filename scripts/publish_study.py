"""Publish what studies of segmentation have measured: numbers for data/results, and pages of them.

    python scripts/publish_study.py collect runs/study_phantom_small runs/study_acdc
    python scripts/publish_study.py page docs/which-method.md

`collect` writes, for every set of a study, ``SET.csv`` (means over the cases of every patient, by
network, recipe, seed, repair and decision; four digits) and ``SET_cells.csv`` (a row for every
training: epochs, seconds, validation scores, the commit of segcal). Rows of trainings that a study
has are renewed, those of others stay. They hold numbers alone, no image. The settings of a training
are in ``configs/studies`` and ``configs/recipes`` at its commit.

`page` puts tables that are made of these files into a Markdown page, each between the marks
``<!-- NAME -->`` and ``<!-- /NAME -->``: ``overview``, ``patients``, ``verdict``, ``goals``,
``means``, ``duels``, ``rivals``, ``ranks``, ``claims`` and ``studies``. Marks that a page does not
have are left out. Studies of one method's weight go into a folder of their own, so that they take
no part in ranks: ``collect --results data/results/weights OUTPUT``; their goals stand between the
marks ``weights``. What ``scripts/repair_ceiling.py`` has measured stands between ``ceiling``, and
what ``scripts/patients_needed.py`` has measured between ``needed``.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from segcal.io.files import read_json, whole_file, write_text
from segcal.reporting.markup import render_tables
from segcal.reporting.tables import Cell, Column, Table, number_cell
from segcal.study import tables
from segcal.study.comparing import (
    FIELDS,
    FOUGHT,
    NEAR_ECE,
    REPAIR,
    GroupComparison,
    compare_study,
    rank_everywhere,
)
from segcal.study.naming import definition, metric_name
from segcal.study.published import load_published
from segcal.study.results import MASK, RAW, REPAIRS, Method, StudyResults, read_results

ROOT = Path(__file__).resolve().parent.parent
BASELINE, OURS = "dice_ce", "confidence"
BY_CASE = "class_region_case"
"""The repair whose temperatures also follow the doubt of a case."""
WEIGHTS = "weights"
"""Folder of studies of one method's weight, below that of the results."""
CEILING = "ceiling"
"""Folder of repairs that know the test patients."""
NEEDED = "needed"
"""Folder of repairs that were fitted to so many patients."""
TRAINING = ["network", "recipe", "seed"]
KEYS = [*TRAINING, "patient", "repair", "decision"]
OF_MASK = ["dsc", "hd95_penalised_mm"]
OF_PROBABILITIES = [
    "ece_fg", "ece_union", "ece_dilated5", "ece_all", "nll_all", "nll_dilated5", "tace_all",
    "kl_all", "kl_dilated5",
]  # fmt: skip
ENDED = ("done", "failed")
"""States of trainings that are published; others are still to do."""
OF_CELL = ["network", "recipe", "seed", "status", "epochs", "best_epoch", "seconds", "parameters"]
OVERVIEW = ["ece_dilated5", "nll_all", "tace_all", "dsc"]
SHOWN = ["dsc", "ece_dilated5", "nll_all", "tace_all", "kl_all"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    collecting = commands.add_parser("collect", help="write the numbers of studies")
    collecting.add_argument("studies", nargs="+", type=Path, metavar="OUTPUT")
    collecting.set_defaults(run=collect)
    paging = commands.add_parser("page", help="put tables into a page")
    paging.add_argument("page", type=Path)
    paging.add_argument("--baseline", default=BASELINE, metavar="RECIPE")
    paging.add_argument("--resamples", type=int, default=2000, help="of the bootstrap")
    paging.set_defaults(run=write_page)
    for command in (collecting, paging):
        command.add_argument("--results", type=Path, default=ROOT / "data" / "results")
    options = parser.parse_args()
    options.run(options)


def collect(options: argparse.Namespace) -> None:
    """Write the numbers of every set of every study."""
    options.results.mkdir(parents=True, exist_ok=True)
    for output in options.studies:
        results = read_results(output)
        for name in dict.fromkeys(results.cells["set"]):
            cases = results.cases[results.cases["set"] == name]
            cells = results.cells[results.cells["set"] == name]
            cells = cells[cells["status"].isin(ENDED)]
            if cases.empty:
                continue
            _renew(options.results / f"{name}.csv", _of_patients(cases))
            _renew(options.results / f"{name}_cells.csv", _of_cells(cells, results))
            print(f"{name}: {len(cells)} trainings, {cases['patient'].nunique()} test patients")


def _of_patients(cases: pd.DataFrame) -> pd.DataFrame:
    """Means by patient; numbers of probabilities stand in the rows of the predicted mask alone."""
    columns = [c for c in (*OF_MASK, *OF_PROBABILITIES) if c in cases]
    means = cases.groupby(KEYS, sort=False)[columns].mean().reset_index()
    twice = [c for c in OF_PROBABILITIES if c in means]
    means.loc[means["decision"] != MASK, twice] = None
    return means


def _of_cells(cells: pd.DataFrame, results: StudyResults) -> pd.DataFrame:
    found = cells[[c for c in cells if c in OF_CELL or c.startswith("val_")]].copy()
    commits = []
    for row in cells.itertuples():
        path = results.output / row.set / row.network / row.recipe / f"seed_{row.seed}"
        told = path / "result.json"
        versions = read_json(told).get("versions", {}) if told.is_file() else {}
        commits.append(versions.get("commit"))
    found["commit"] = commits
    return found


def _renew(path: Path, table: pd.DataFrame) -> None:
    """Write a table, with those rows of the file whose training it does not have."""
    if path.is_file():
        before = pd.read_csv(path, dtype={"patient": str})
        known = pd.MultiIndex.from_frame(table[TRAINING].drop_duplicates())
        others = before[~pd.MultiIndex.from_frame(before[TRAINING]).isin(known)]
        table = pd.concat([others, table], ignore_index=True)
    with whole_file(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.4g")


def published(folder: Path) -> StudyResults:
    """All that has been collected, as if it were one study."""
    cells, cases = [], []
    for path in sorted(folder.glob("*_cells.csv")):
        name = path.stem.removesuffix("_cells")
        cells.append(_ours_first(pd.read_csv(path).assign(set=name)))
        table = pd.read_csv(folder / f"{name}.csv", dtype={"patient": str})
        table = table.assign(set=name, case=table["patient"])
        of_probabilities = [c for c in OF_PROBABILITIES if c in table]
        keys = KEYS[:-1]
        masks = table[table["decision"] == MASK][[*keys, *of_probabilities]]
        rest = table.drop(columns=of_probabilities)
        cases.append(rest.merge(masks, on=keys, how="left", validate="many_to_one"))
    if not cells:
        raise SystemExit(f"{folder}: holds no SET_cells.csv; collect first")
    every = pd.concat(cells, ignore_index=True)
    every["why"] = None
    return StudyResults(folder, every, pd.concat(cases, ignore_index=True))


def _ours_first(cells: pd.DataFrame) -> pd.DataFrame:
    """The order in which tables show recipes: the baseline, the default, the others as stored."""
    first = {name: place for place, name in enumerate((BASELINE, OURS))}
    return cells.sort_values(
        "recipe", key=lambda names: names.map(first).fillna(len(first)), kind="stable"
    )


def write_page(options: argparse.Namespace) -> None:
    """Make the tables, and put them between their marks."""
    results = published(options.results)
    comparisons = compare_study(results, options.baseline, resamples=options.resamples)
    text = options.page.read_text(encoding="utf-8")
    found = dict(sections(results, comparisons, options.baseline, options.resamples))
    if (options.results / WEIGHTS).is_dir():
        of_weights = published(options.results / WEIGHTS)
        found["weights"] = [
            tables.goal_table(replace(c, methods=[m for m in c.methods if m.repair == RAW]))
            for c in compare_study(of_weights, options.baseline, resamples=options.resamples)
        ]
    found["ceiling"] = [ceiling_table(p) for p in sorted((options.results / CEILING).glob("*.csv"))]
    found["needed"] = needed_tables(options.results / NEEDED)
    for name, of in found.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        body = f"\n{render_tables(of, 'markdown').strip()}\n\n"
        text, count = marks.subn(lambda at, body=body: at[1] + body + at[2], text)
        if not count:
            print(f"{options.page}: has no marks {name}")
    write_text(options.page, text)


def sections(
    results: StudyResults,
    comparisons: Sequence[GroupComparison],
    baseline: str,
    resamples: int,
) -> Mapping[str, Sequence[Table]]:
    """Tables by the name of their marks."""
    claims = [c for c in load_published().claims if c.recipe in results.recipes]
    shown = [m for m in SHOWN if m in results.metrics]
    methods = {m.name: m for c in comparisons for m in c.rows if m.name != baseline}
    repaired = tuple(
        Method(recipe, repair) for recipe in (baseline, OURS) for repair in (REPAIR, BY_CASE)
    )
    trained = [name for name, m in methods.items() if m.repair == RAW or m in repaired]
    return {
        "overview": [tables.overview_table(comparisons, metric, trained) for metric in OVERVIEW],
        "patients": [tables.patient_table(comparisons, NEAR_ECE, [Method(OURS, REPAIR).name])],
        "repairs": [tables.repair_table(comparisons, BY_CASE, REPAIR, resamples)],
        "verdict": [tables.verdict_table(comparisons, baseline, trained)],
        "goals": [tables.goal_table(c) for c in comparisons if c.changes],
        "means": [tables.mean_table(c, shown) for c in comparisons],
        "duels": [tables.duel_table(comparisons, f, m) for f in FIELDS for m in FOUGHT],
        "rivals": [tables.rival_table(comparisons, OURS)],
        "ranks": [tables.rank_table(rank_everywhere(comparisons), "all sets")],
        "claims": [tables.claim_table(claims, comparisons)] if claims else [],
        "studies": [studies_table(results)],
    }


def ceiling_table(path: Path) -> Table:
    """What repairs leave that know the test patients, beside those that do not."""
    table = pd.read_csv(path)
    metrics = ["ece_dilated5", "nll_all"]
    means = table.groupby(["repair", "seed"], sort=False)[metrics].mean()
    means = means.groupby("repair", sort=False).mean()
    (recipe,) = table["recipe"].unique()
    rows = [
        [Cell(f"{repair}, validation patients" if repair in REPAIRS and repair != RAW else repair)]
        + [
            replace(number_cell(of[m], 3), extra=f"{100 * (of[m] / means[m][RAW] - 1):+.0f} %")
            for m in metrics
        ]
        for repair, of in means.sort_values(metrics[0], ascending=False).iterrows()
    ]
    columns = [
        Column("repair, and what it was fitted to"),
        *(Column(metric_name(m), definition(m), better="↓") for m in metrics),
    ]
    caption = (
        f"Means over {table['seed'].nunique()} seeds of means over test patients, of {recipe}, and "
        "the change by the repair. All temperatures minimise NLL. What was fitted to test patients "
        "is no method but the limit of such a fit."
    )
    key = f"ceiling-{path.stem}"
    return Table(key, f"How far temperatures reach: {path.stem}", columns, rows, caption)


def needed_tables(folder: Path) -> list[Table]:
    """Change of a metric by the slope, by the number of patients that chose it."""
    paths = sorted(folder.glob("*.csv"))
    if not paths:
        return []
    table = pd.concat([pd.read_csv(p).assign(set=p.stem) for p in paths], ignore_index=True)
    (recipe,) = table["recipe"].unique()
    return [_needed_table(table, metric, recipe) for metric in (NEAR_ECE, "nll_all")]


def _needed_table(table: pd.DataFrame, metric: str, recipe: str) -> Table:
    change = 100 * (table[f"{metric}_case"] / table[f"{metric}_group"] - 1)
    digits = 0 if metric == NEAR_ECE else 1
    numbers = sorted(set(table["patients"]))
    rows = []
    for name, of in change.groupby(table["set"] + ", " + table["network"]):
        cells = {n: Cell("-") for n in numbers}
        for n, draws in of.groupby(table["patients"]):
            mean, low, high = (
                f"{round(one, digits) + 0.0:+.{digits}f}"  # 0 instead of -0
                for one in (draws.mean(), draws.min(), draws.max())
            )
            cells[n] = Cell(f"{mean} % [{low}, {high}]")
        rows.append([Cell(name), *cells.values()])
    columns = [Column("set and network"), *(Column(str(n)) for n in numbers)]
    caption = (
        f"Change from {REPAIR} to {BY_CASE}, both fitted to so many patients, drawn from those "
        f"that did not train {recipe}, and measured on the others of these (six or more). Means "
        "over draws, three for every training; least to greatest in brackets. In this table a "
        "slope is chosen whatever the number of patients."
    )
    title = f"{metric_name(metric)}, by the number of patients that the repair was fitted to"
    return Table(f"needed-{metric}", title, columns, rows, caption)


def studies_table(results: StudyResults) -> Table:
    """What was trained: sets, recipes, seeds, patients, hours."""
    rows = []
    for group in results.groups:
        cells = results.cells
        own = cells[(cells["set"] == group.set) & (cells["network"] == group.network)]
        cases = results.of(group)
        rows.append([
            Cell(group.set), Cell(group.network), Cell(str(own["recipe"].nunique())),
            Cell(", ".join(map(str, sorted(own["seed"].unique())))),
            Cell(str(cases["patient"].nunique())), Cell(f"{own['seconds'].sum() / 3600:.1f}"),
            Cell(", ".join(sorted(own["commit"].dropna().astype(str).unique()))),
        ])  # fmt: skip
    names = ("set", "network", "recipes", "seeds", "test patients", "hours", "commit")
    caption = "Hours of a core of a shared CPU for training, prediction and measurement."
    return Table("studies", "What was trained", [Column(n) for n in names], rows, caption)


if __name__ == "__main__":
    main()
