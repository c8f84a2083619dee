"""Publish what studies of classification measured: numbers for data/results, and pages of them.

    python scripts/publish_losses.py collect runs/study_digits runs/study_multilabel
    python scripts/publish_losses.py collect --ablation spa_grid runs/study_spa_grid
    python scripts/publish_losses.py page docs/which-loss.md docs/guides/classification.md

`collect` writes, for every set of a study, ``losses/SET.csv``: a row for every training and kind of
probabilities, with the numbers of the chosen epoch and, as ``last_``, of the last one, and how many
samples trained and tested; with ``--ablation NAME``, ``losses/ablations/NAME_SET.csv``. `page` puts
tables that are made of these files into Markdown pages, each between the marks ``<!-- NAME -->``
and ``<!-- /NAME -->``: ``classes`` and ``labels`` (means, all sets side by side),
``class-differences`` and ``label-differences`` (differences to the first loss), ``samples``, and
for every set of an ablation ``NAME_SET`` (differences to its first loss). Marks that a page does
not have are left out.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from segcal.classify.comparison import SetComparison, compare_set, difference_table
from segcal.classify.measures import HIGHER_IS_BETTER
from segcal.classify.report import NAMES
from segcal.io.files import read_json, whole_file, write_text
from segcal.reporting.markup import render_tables
from segcal.reporting.tables import Cell, Column, Table, mark, number_cell

ROOT = Path(__file__).resolve().parent.parent
KEYS = ["method", "seed"]
FIXED = "fixed"
ABLATIONS = "ablations"
MARKS = {-1: " ▼", 0: "", 1: " ▲"}
TITLES = {
    "digits": "digits", "digits_lt": "digits, long tail", "docstrings": "texts",
    "scene": "scene", "emotions": "emotions", "slices": "slices",
}  # fmt: skip
"""Sets in the order of the tables."""
SHOWN = {False: ("accuracy", "ece", "nll"), True: ("map_class", "ace", "nll", "retrieval_2")}
"""Metrics of classes and of labels."""
READABLE = {**NAMES, "retrieval_2": "two conditions"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    collecting = commands.add_parser("collect", help="write the numbers of studies")
    collecting.add_argument("studies", nargs="+", type=Path, metavar="OUTPUT")
    collecting.add_argument("--ablation", metavar="NAME", help="keep it apart, by this name")
    collecting.set_defaults(run=collect)
    paging = commands.add_parser("page", help="put tables into pages")
    paging.add_argument("pages", nargs="+", type=Path)
    paging.set_defaults(run=write_pages)
    for command in (collecting, paging):
        command.add_argument("--results", type=Path, default=ROOT / "data" / "results" / "losses")
    options = parser.parse_args()
    options.run(options)


def collect(options: argparse.Namespace) -> None:
    """Write the numbers of every set of every study."""
    folder = options.results / (ABLATIONS if options.ablation else "")
    folder.mkdir(parents=True, exist_ok=True)
    for output in options.studies:
        runs = pd.read_csv(output / "report" / "runs.csv")
        splits = read_json(output / "report" / "summary.json")["study"]["splits"]
        for name, rows in runs.groupby("set", sort=False):
            first = next((output / str(name)).glob("*/seed_*/result.json"))
            counts = read_json(first)["samples"]
            table = rows.drop(columns="set").dropna(axis="columns", how="all")
            table = table.assign(splits=splits, train=counts["train"], test=counts["test"])
            stem = f"{options.ablation}_{name}" if options.ablation else name
            with whole_file(folder / f"{stem}.csv") as temporary:
                table.to_csv(temporary, index=False, float_format="%.5g")
            print(f"{name}: {table['method'].nunique()} rows, {table['seed'].nunique()} seeds")


def published(folder: Path) -> dict[str, pd.DataFrame]:
    """Tables of all sets, those of TITLES first."""
    order = [*TITLES, *sorted(p.stem for p in folder.glob("*.csv") if p.stem not in TITLES)]
    found = {name: folder / f"{name}.csv" for name in order}
    tables = {n: pd.read_csv(path).set_index(KEYS) for n, path in found.items() if path.is_file()}
    if not tables:
        raise SystemExit(f"{folder}: holds no tables; collect first")
    return tables


def compared(name: str, table: pd.DataFrame) -> SetComparison:
    samples = {part: int(table[part].iloc[0]) for part in ("train", "test")}
    numbers = table.drop(columns=["splits", "train", "test"])
    redrawn = table["splits"].iloc[0] != FIXED
    return compare_set(name, numbers, None, samples=samples, redrawn=redrawn)


def write_pages(options: argparse.Namespace) -> None:
    """Make the tables, and put them between their marks."""
    tables = published(options.results)
    found: dict[str, Sequence[Table]] = {"samples": [samples_table(tables)]}
    for multilabel, kind, kinds in ((False, "class", "classes"), (True, "label", "labels")):
        own = {n: t for n, t in tables.items() if ("map_class" in t) == multilabel}
        if own:
            comparisons = {name: compared(name, table) for name, table in own.items()}
            found[kinds] = [
                means_table(own, comparisons, metric, kinds) for metric in SHOWN[multilabel]
            ]
            found[f"{kind}-differences"] = [
                difference_table(c, multilabel=multilabel) for c in comparisons.values()
            ]
    for path in sorted((options.results / ABLATIONS).glob("*.csv")):
        table = pd.read_csv(path).set_index(KEYS)
        multilabel = "map_class" in table
        found[path.stem] = [difference_table(compared(path.stem, table), multilabel=multilabel)]
    for page in options.pages:
        text = page.read_text(encoding="utf-8")
        for name, of in found.items():
            marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
            body = f"\n{render_tables(of, 'markdown').strip()}\n\n"
            text = marks.sub(lambda at, body=body: at[1] + body + at[2], text)
        write_text(page, text)


def means_table(
    tables: dict[str, pd.DataFrame], comparisons: dict[str, SetComparison], metric: str, kinds: str
) -> Table:
    """A metric of all methods, a column a set: mean over seeds, marked where beyond chance."""
    columns, better = [], metric in HIGHER_IS_BETTER or metric.startswith("retrieval")
    methods = list(dict.fromkeys(m for t in tables.values() for m in t.index.unique(0)))
    for name, table in tables.items():
        means = table[metric].groupby(level="method").mean()
        direction = {c.method: c.direction for c in comparisons[name].changes if c.metric == metric}
        cells = [number_cell(means[m], 3) if m in means else Cell("-") for m in methods]
        columns.append([
            Cell(c.text + MARKS[direction.get(m, 0)], c.value, c.extra, best=c.best)
            for m, c in zip(methods, mark(cells, higher=better), strict=True)
        ])  # fmt: skip
    arrow = "↑" if better else "↓"
    heads = [Column("method"), *(Column(TITLES.get(n, n), better=arrow) for n in tables)]
    rows = [
        [Cell(m, m), *cells] for m, cells in zip(methods, zip(*columns, strict=True), strict=True)
    ]
    first = next(iter(comparisons.values())).baseline
    caption = (
        f"Test samples, mean over seeds. ▼ lower, ▲ higher than {first} beyond chance (paired over "
        "seeds, corrected for the number of methods). Bold: best mean."
    )
    return Table(f"{kinds}-{metric}", READABLE[metric], heads, rows, caption)


def samples_table(tables: dict[str, pd.DataFrame]) -> Table:
    """What was trained."""
    said = {"seed": "drawn anew for every seed", "folds": "every sample tests in one fold"}
    rows = [
        [
            Cell(TITLES.get(name, name)), Cell(str(t["recipe"].nunique())),
            Cell(str(t.index.unique("seed").size)), Cell(str(t["train"].iloc[0])),
            Cell(str(t["test"].iloc[0])), Cell(said.get(t["splits"].iloc[0], "the same")),
        ]
        for name, t in tables.items()
    ]  # fmt: skip
    names = ("set", "losses", "seeds", "training samples", "test samples", "split")
    return Table("samples", "What was trained", [Column(n) for n in names], rows)


if __name__ == "__main__":
    main()
