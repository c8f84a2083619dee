"""The tables of a study's report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from segcal.reporting.tables import ARROWS, Cell, Column, Table, mark, number_cell
from segcal.study.comparing import (
    FIELDS,
    FOUGHT,
    GOALS,
    NEAR_ECE,
    NEAR_NLL,
    NLL,
    REPAIR,
    TACE,
    TRUTH,
    GroupComparison,
    RankedField,
)
from segcal.study.naming import better, definition, digits, is_relative, metric_name, unit
from segcal.study.published import Claim, PublishedTable
from segcal.study.results import Group, Method
from segcal.study.statistics import (
    MARGIN,
    RESAMPLES,
    Change,
    differences,
    non_inferior,
    patient_changes,
)

__all__ = [
    "RecipeCost",
    "claim_table",
    "cost_table",
    "difference_table",
    "duel_table",
    "floor_table",
    "goal_table",
    "mean_table",
    "overview_table",
    "patient_table",
    "published_table",
    "rank_table",
    "repair_table",
    "rival_table",
    "verdict_table",
]

JUDGED = (NEAR_ECE, NLL, NEAR_NLL, TACE)
"""Errors that the table of goals shows."""
MARKS = {-1: " ▼", 1: " ▲", 0: ""}
"""Marks of a change beyond chance."""
MARKED = (
    "▼ lower, ▲ higher beyond chance: paired t-test over patients, corrected for the number of "
    "methods (Holm, 5 %), the interval excludes 0, and all seeds agree."
)
DECIMAL = 0.2
"""Share below which a percentage is shown with a decimal."""
PUBLISHED = "_published"
"""End of the name of a recipe with a paper's settings."""


@dataclass(frozen=True)
class RecipeCost:
    """Cost of a recipe.

    Attributes:
        recipe: its name.
        cells: number of finished trainings (cells), and of all.
        seconds: mean of a cell; None if not measured.
        reached: epochs until validation was near the baseline's last value, for the seeds that
            reached it.
        tried: number of seeds with a log.
    """

    recipe: str
    cells: tuple[int, int]
    seconds: float | None
    reached: Sequence[int]
    tried: int


def verdict_table(
    comparisons: Sequence[GroupComparison], baseline: str, methods: Sequence[str] | None = None
) -> Table:
    """Table: in how many sets and networks a method reaches the goals.

    Args:
        comparisons: of the study.
        baseline: name of the method that all are compared with.
        methods: rows, by name; None takes all.
    """
    every = dict.fromkeys(m for c in comparisons for m in c.rows if m.name != baseline)
    rows = [m for m in every if methods is None or m.name in methods]
    asked: list[tuple[Column, Callable[[GroupComparison, Method], bool | None]]] = [
        (_goal_column(metric), partial(GroupComparison.reaches, metric=metric)) for metric in GOALS
    ]
    asked += [
        (
            Column("DSC kept", f"interval of the difference above -{MARGIN:g}, of the mask or of "
                   "the Dice-optimal decision"),
            GroupComparison.keeps_dsc,
        ),
        (
            Column("beats repair", f"lower ECE near and NLL than {baseline} + class_region"),
            GroupComparison.beats_repair,
        ),
    ]  # fmt: skip
    body = []
    for method in rows:
        own = [c for c in comparisons if method in c.rows]
        cells = [_count([ask(c, method) for c in own]) for _, ask in asked]
        goals = [[ask(c, method) for c in own] for _, ask in asked[: len(GOALS) + 1]]
        whole = _count(
            [None if None in of else all(map(bool, of)) for of in zip(*goals, strict=True)]
        )
        body.append([Cell(method.name, method.name), *cells, replace(whole, best=_all(whole))])
    columns = [Column("method"), *(column for column, _ in asked), Column("all goals")]
    caption = (
        f"Sets and networks in which the mean reaches the goal, of those where it is known. "
        f"Against {baseline} as it was trained. Bold: all goals in all of them."
    )
    return Table("verdict", "Goals, over all sets and networks", columns, body, caption)


def _goal_column(metric: str) -> Column:
    return Column(f"{metric_name(metric)} {100 * GOALS[metric]:+.0f} %", definition(metric))


def _count(answers: Sequence[bool | None]) -> Cell:
    known = [a for a in answers if a is not None]
    if not known:
        return Cell("-")
    return Cell(f"{sum(known)} of {len(known)}", repr(sum(known) / len(known)))


def _all(cell: Cell) -> bool:
    return cell.value == "1.0"


def overview_table(
    comparisons: Sequence[GroupComparison], metric: str, methods: Sequence[str]
) -> Table:
    """Table: changes of one metric from the baseline, one column per set and network.

    Args:
        comparisons: of one study, or of several.
        metric: its column.
        methods: rows, by name.
    """
    known = [c for c in comparisons if c.changes]
    body = []
    for name in methods:
        found = [c.change_of.get((name, metric)) for c in known]
        cells = [
            _relative_cell(change, GOALS.get(metric)) if is_relative(metric) else _dsc_cell(change)
            for change in found
        ]
        body.append([Cell(name, name), *cells])
    baseline = known[0].baseline.name if known else ""
    columns = [
        Column("method"),
        *(Column(c.group.name, better=ARROWS[better(metric)]) for c in known),
    ]
    caption = (
        f"{definition(metric)}. Change against {baseline}, 95 % intervals of patients nested in "
        f"seeds in brackets. {MARKED}"
    )
    title = f"{metric_name(metric)}, against {baseline}"
    return Table(f"overview-{metric}".replace("_", "-"), title, columns, body, caption)


def patient_table(
    comparisons: Sequence[GroupComparison], metric: str, methods: Sequence[str] | None = None
) -> Table:
    """Table: how an error changed from patient to patient, by set and network and by method.

    Args:
        comparisons: of the study.
        metric: column of an error.
        methods: names of the methods; None takes all that have a predicted mask.
    """
    body = []
    for c in comparisons:
        for method in [m.name for m in c.rows] if methods is None else methods:
            change = c.change_of.get((method, metric))
            if change is None:
                continue
            found = patient_changes(c.tables[method], c.tables[c.baseline.name], metric)
            if found is None:
                continue
            body.append([
                Cell(c.group.name, c.group.name),
                Cell(method, method),
                Cell(f"{_percent(change.relative)} %", repr(change.relative)),
                Cell(f"{_percent(found.median)} %", repr(found.median)),
                Cell(f"{found.lower} of {found.patients}", repr(found.lower / found.patients)),
                Cell(f"{found.halved} of {found.patients}", repr(found.halved / found.patients)),
                Cell(f"{100 * found.worst_share:.0f} %", repr(found.worst_share)),
                number_cell(found.with_dsc, 2, "+"),
            ])  # fmt: skip
    baseline = comparisons[0].baseline.name if comparisons else ""
    columns = [
        Column("set and network"), Column("method"),
        Column("mean", "change of the mean over patients"),
        Column("median", "of the patients' own changes"),
        Column("lower", "patients whose error fell"),
        Column("halved", "patients whose error fell by half or more"),
        Column("worst tenth", "share of what is left that belongs to the tenth of the patients "
               "with the largest errors, at least one"),
        Column("with DSC", "Spearman's rank correlation of what is left with the patient's DSC"),
    ]  # fmt: skip
    caption = (
        f"{definition(metric)}. Change from {baseline}; a patient in several seeds counts once, "
        "with the mean over the seeds."
    )
    key, title = f"patients-{metric}".replace("_", "-"), f"{metric_name(metric)}, by patient"
    if len(comparisons) == 1:
        key = f"{key}-{_key(comparisons[0].group)}"
        title = f"{title}: {comparisons[0].group.name}"
    return Table(key, title, columns, body, caption, sortable=True)


def repair_table(
    comparisons: Sequence[GroupComparison], repair: str, against: str, resamples: int = RESAMPLES
) -> Table:
    """Table: one repair against another, of the same trainings, by set and network and by recipe.

    Args:
        comparisons: of one study, or of several.
        repair: name of a post-hoc method.
        against: name of another.
        resamples: of the bootstrap.
    """
    body = []
    for c in comparisons:
        for method in c.rows:
            other = method._replace(repair=against).name
            if method.repair != repair or other not in c.tables:
                continue
            pair = {other: c.tables[other], method.name: c.tables[method.name]}
            found = {
                change.metric: change
                for change in differences(pair, other, FOUGHT, resamples=resamples)
            }
            seeds = str(found[NLL].seeds) if NLL in found else "-"
            body.append([
                Cell(c.group.name, c.group.name), Cell(method.recipe, method.recipe),
                Cell(seeds, seeds),
                *(_relative_cell(found.get(metric), None) for metric in FOUGHT),
            ])  # fmt: skip
    columns = [
        Column("set and network"), Column("recipe"), Column("seeds"),
        *(Column(metric_name(m), definition(m), better="↓") for m in FOUGHT),
    ]  # fmt: skip
    caption = (
        f"Change from {against} to {repair}, both fitted to the same validation patients, on test "
        "patients; 95 % intervals of patients nested in seeds in brackets. ▼ lower, ▲ higher "
        "beyond chance: paired t-test over patients (5 %), the interval excludes 0, and all seeds "
        "agree."
    )
    return Table(f"repair-{repair}".replace("_", "-"), f"{repair} against {against}", columns,
                 body, caption)  # fmt: skip


def goal_table(comparison: GroupComparison) -> Table:
    """Table: changes from the baseline in the metrics that have goals.

    Args:
        comparison: of a set and network.
    """
    body = []
    for method in comparison.rows:
        if method == comparison.baseline:
            continue
        errors = [
            _relative_cell(comparison.change_of.get((method.name, k)), GOALS.get(k)) for k in JUDGED
        ]
        masks = [
            _dsc_cell(comparison.change_of.get((method._replace(decision=d).name, "dsc")))
            for d in ("mask", "dice")
        ]
        body.append([Cell(method.name, method.name), *errors, *masks])
    columns = [
        Column("method"),
        *(Column(metric_name(k), definition(k), better="↓") for k in JUDGED),
        Column("DSC", f"difference of the predicted mask; {definition('dsc')}", better="↑"),
        Column("DSC, dice", "difference of the Dice-optimal decision's mask from the baseline's "
               "predicted mask", better="↑"),
    ]  # fmt: skip
    goals = ", ".join(f"{metric_name(k)} {100 * v:+.0f} %" for k, v in GOALS.items())
    caption = (
        f"Change against {comparison.baseline.name}, 95 % intervals of patients nested in seeds in "
        f"brackets. {MARKED} Bold: goal reached ({goals}; DSC: interval above -{MARGIN:g})."
    )
    key, title = f"goals-{_key(comparison.group)}", f"Goals: {comparison.group.name}"
    return Table(key, title, columns, body, caption, sortable=True)


def _relative_cell(change: Change | None, goal: float | None) -> Cell:
    if change is None or not math.isfinite(change.relative):
        return Cell("-")
    decimal, extra = abs(change.relative) < DECIMAL, ""
    if change.relative_ci95 is not None:
        low, high = (_percent(end, decimal) for end in change.relative_ci95)
        extra = f"[{low}, {high}]"
    reached = goal is not None and change.relative <= goal
    text = f"{_percent(change.relative, decimal)} %{MARKS[change.direction]}"
    return Cell(text, repr(change.relative), extra, best=reached)


def _percent(share: float, decimal: bool | None = None) -> str:
    decimal = abs(share) < DECIMAL if decimal is None else decimal
    text = f"{100 * share:+.{1 if decimal else 0}f}"
    return "0" if float(text) == 0 else text


def _dsc_cell(change: Change | None) -> Cell:
    if change is None:
        return Cell("-")
    return replace(_difference_cell(change), best=bool(non_inferior(change, margin=MARGIN)))


def _difference_cell(change: Change) -> Cell:
    n = digits(change.metric)
    cell = number_cell(change.difference, n, "+")
    if float(cell.text) == 0:
        cell = replace(cell, text=cell.text.lstrip("+-"))
    extra = ""
    if change.ci95 is not None:
        extra = f"[{change.ci95[0]:+.{n}f}, {change.ci95[1]:+.{n}f}]"
    return replace(cell, text=cell.text + MARKS[change.direction], extra=extra)


def mean_table(comparison: GroupComparison, metrics: Sequence[str]) -> Table:
    """Table: means of all methods, the best of a column marked, and the true posterior below.

    Args:
        comparison: of a set and network.
        metrics: columns.
    """
    shown = [k for k in metrics if any((m.name, k) in comparison.mean_of for m in comparison.rows)]
    columns = [Column("method")]
    rows: list[list[Cell]] = [[Cell(m.name, m.name)] for m in comparison.rows]
    truth = [Cell("true posterior", definition="the floor: scores of a perfect predictor")]
    for k in shown:
        cells = [_mean_cell(comparison, m, k) for m in comparison.rows]
        columns.append(
            Column(metric_name(k), definition(k), unit(k), ARROWS[better(k)])
        )  # fmt: skip
        truth.append(_mean_cell(comparison, TRUTH, k))
        marked = mark(cells, higher=better(k) == "higher")
        if k == "dsc":
            decided = [
                _mean_cell(comparison, m._replace(decision="dice"), k) for m in comparison.rows
            ]
            columns.append(Column("DSC, dice", "of the Dice-optimal decision", better="↑"))
            truth.append(_mean_cell(comparison, TRUTH._replace(decision="dice"), k))
            pairs = zip(marked, mark(decided, higher=True), strict=True)
            for row, pair in zip(rows, pairs, strict=True):
                row += pair
            continue
        for row, cell in zip(rows, marked, strict=True):
            row.append(cell)
    if any(cell.value for cell in truth[1:]):
        rows.append(truth)
    caption = (
        f"{_counted(comparison)} Means over seeds of means over patients; intervals are in "
        "means.csv. Fractions of 1, NLL and KL in nats. Near is within 5 voxels of the labelled "
        "foreground. Bold: best mean. ECE of fg and union depends on voxels that the "
        "label selects, so the true posterior does not minimise it; judge by near, all, NLL and KL."
    )
    key, title = f"means-{_key(comparison.group)}", f"Means: {comparison.group.name}"
    return Table(key, title, columns, rows, caption, sortable=True)


def _mean_cell(comparison: GroupComparison, method: Method, metric: str) -> Cell:
    found = comparison.mean_of.get((method.name, metric))
    return Cell("-") if found is None else number_cell(found.mean, digits(metric))


def _counted(comparison: GroupComparison) -> str:
    """Numbers of patients and seeds, and which recipes have fewer."""
    seeds = comparison.seeds
    most = max((len(of) for of in seeds.values()), default=0)
    patients = max(
        (t.index.get_level_values("patient").nunique() for t in comparison.tables.values()),
        default=0,
    )
    text = f"{patients} test patient{_s(patients)}, {most} seed{_s(most)}."
    fewer = [f"{recipe} ({len(of)})" for recipe, of in seeds.items() if len(of) < most]
    return f"{text} With fewer seeds: {', '.join(fewer)}." if fewer else text


def _s(n: int) -> str:
    return "" if n == 1 else "s"


def _key(group: Group) -> str:
    return "-".join("".join(c if c.isalnum() else "-" for c in part) for part in group)


def difference_table(comparison: GroupComparison, metrics: Sequence[str]) -> Table:
    """Sortable table: differences from the baseline with their p-values.

    Args:
        comparison: of a set and network.
        metrics: their columns.
    """
    columns = [
        Column("method"), Column("metric"), Column("patients"),
        Column("difference", "method minus baseline"),
        Column("95 % interval", "bootstrap of patients nested in seeds"),
        Column("relative", "of the baseline's mean"),
        Column("p", "paired t-test over patients, Holm's correction for the number of methods"),
        Column("p seeds", "t-test over the means of the seeds, not corrected"),
        Column("seeds", "in which the method is better"),
    ]  # fmt: skip
    body = [_difference_row(c) for c in comparison.changes if c.metric in metrics and not c.same_as]
    title = f"Differences from {comparison.baseline.name}: {comparison.group.name}"
    caption = (
        "A method with the same values as a simpler one is not listed again. All metrics are in "
        "differences.csv. p describes these trainings; p seeds also describes trainings with other "
        "seeds, and has little power with few seeds."
    )
    key = f"differences-{_key(comparison.group)}"
    return Table(key, title, columns, body, caption, sortable=True)


def _difference_row(change: Change) -> list[Cell]:
    n = digits(change.metric)
    interval = Cell("-")
    if change.ci95 is not None:
        low, high = change.ci95
        interval = Cell(f"{low:+.{n}f} to {high:+.{n}f}", repr(low))
    relative = Cell("-")
    if is_relative(change.metric) and math.isfinite(change.relative):
        relative = Cell(f"{_percent(change.relative)} %", repr(change.relative))
    agree = change.higher_seeds if better(change.metric) == "higher" else change.lower_seeds
    return [
        Cell(change.method, change.method),
        Cell(metric_name(change.metric), metric_name(change.metric)),
        Cell(str(change.patients), str(change.patients)),
        replace(_difference_cell(change), extra=""),
        interval,
        relative,
        _p_cell(change.p_holm),
        _p_cell(change.p_seeds),
        Cell(f"{agree} of {change.seeds}", str(agree)),
    ]


def _p_cell(p: float | None) -> Cell:
    if p is None:
        return Cell("-")
    return Cell("< .0001" if p < 1e-4 else f"{p:.4f}" if p < 0.01 else f"{p:.2f}", repr(p))


class _Duel(NamedTuple):
    """Sets and networks in which a method won against another, lost, and met it."""

    won: int = 0
    lost: int = 0
    met: int = 0

    @property
    def all_won(self) -> bool:
        return self.won == self.met


def _duels(
    comparisons: Sequence[GroupComparison], field: str, metric: str
) -> tuple[dict[tuple[str, str], _Duel], int]:
    """Duels by both names, seen from either side; and the number of sets and networks."""
    fought = [(c, d) for c in comparisons for d in c.duels[field] if d.metric == metric]
    names = list(dict.fromkeys(name for _, d in fought for name in (d.baseline, d.method)))
    sign = 1 if better(metric) == "higher" else -1
    found: dict[tuple[str, str], _Duel] = {}
    for _, d in fought:
        for pair, side in (((d.method, d.baseline), 1), ((d.baseline, d.method), -1)):
            won, lost, met = found.get(pair, _Duel())
            outcome = side * sign * d.direction
            found[pair] = _Duel(won + (outcome > 0), lost + (outcome < 0), met + 1)
    in_order = sorted(found, key=lambda pair: tuple(map(names.index, pair)))
    return {pair: found[pair] for pair in in_order}, len({c.group for c, _ in fought})


def duel_table(comparisons: Sequence[GroupComparison], field: str, metric: str) -> Table:
    """Table: in how many sets and networks a recipe beats another beyond chance.

    Args:
        comparisons: of the study.
        field: name of the methods that are compared.
        metric: its column.
    """
    duels, groups = _duels(comparisons, field, metric)
    recipe = {m.name: m.recipe for c in comparisons for m in c.methods}
    names = list(dict.fromkeys(row for row, _ in duels))
    body = [
        [Cell(recipe[row], row), *(_duel_cell(duels.get((row, column))) for column in names)]
        for row in names
    ]
    caption = (
        f"Of {groups} set{_s(groups)} and network{_s(groups)}: in how many the row's method has "
        "the better mean than the column's, beyond chance (paired t-test over patients, corrected "
        "for the number of pairs by Holm, 5 %; interval excludes 0; all seeds agree). Bold: in all."
    )
    title = f"Every recipe against every other: {metric_name(metric)}, {field}"
    key = f"duels-{metric}-{field.replace(' ', '-')}".replace("_", "-")
    return Table(key, title, [Column("recipe"), *(Column(recipe[n]) for n in names)], body, caption)


def _duel_cell(duel: _Duel | None) -> Cell:
    return Cell("") if duel is None else Cell(str(duel.won), str(duel.won), best=duel.all_won)


def rival_table(comparisons: Sequence[GroupComparison], recipe: str) -> Table:
    """Table: in how many sets and networks one recipe beats every other, and is beaten.

    Args:
        comparisons: of the study.
        recipe: the recipe whose duels are shown.
    """
    methods = {m.name: m.recipe for c in comparisons for m in c.methods}
    columns = {(f, m): f"{metric_name(m)}, {f}" for f in FIELDS for m in FOUGHT}
    rows: dict[str, dict[str, Cell]] = {}
    for (field, metric), column in columns.items():
        for (one, other), duel in _duels(comparisons, field, metric)[0].items():
            if methods[one] == recipe:
                text = f"{duel.won} : {duel.lost} of {duel.met}"
                cell = Cell(text, str(duel.won), best=duel.all_won)
                rows.setdefault(methods[other], {})[column] = cell
    body = [
        [Cell(name, name), *(of.get(column, Cell("-")) for column in columns.values())]
        for name, of in rows.items()
    ]
    caption = (
        f"First number: sets and networks in which {recipe} has the better mean beyond chance; "
        "second: in which the other recipe has; last: in which both were trained. Chance is ruled "
        "out as for every pair of recipes: paired t-test over patients, corrected for the number "
        "of pairs by Holm, 5 %; interval excludes 0; all seeds agree. Repaired: both with "
        f"{REPAIR}. Bold: better in all."
    )
    title = f"{recipe} against every other recipe"
    named = [Column("recipe"), *map(Column, columns.values())]
    return Table(f"rivals-{recipe}", title, named, body, caption)


def rank_table(fields: Sequence[RankedField], name: str) -> Table:
    """Table: mean ranks of the methods, field by field (recipes with the same repair).

    Args:
        fields: of a set and network.
        name: of the set and network.
    """
    metrics = list(dict.fromkeys(r.metric for f in fields for r in f.ranks))
    body = []
    for field in fields:
        of = {r.metric: r for r in field.ranks}
        for method in dict.fromkeys(m for r in field.ranks for m in r.mean):
            cells = [
                number_cell(of[k].mean.get(method) if k in of else None, 1) for k in metrics
            ]  # fmt: skip
            body.append([Cell(method, method), Cell(field.name), *cells])
        distances = [of[k].distance if k in of else None for k in metrics]
        body.append(
            [Cell("critical difference"), Cell(field.name), *(number_cell(d, 1) for d in distances)]
        )
    columns = [
        Column("method"),
        Column("field"),
        *(Column(metric_name(k), "mean rank, 1 is best") for k in metrics),
    ]
    caption = (
        "Mean rank over patients; two methods of a field differ beyond chance if their ranks "
        "differ by the critical difference (Nemenyi, 5 %)."
    )
    key = "ranks-" + "".join(c if c.isalnum() else "-" for c in name)
    return Table(key, f"Ranks: {name}", columns, body, caption)


def cost_table(costs: Sequence[RecipeCost], baseline: str, group: Group, near: float) -> Table:
    """Table: what every recipe cost, and how soon it was as good as the baseline.

    Args:
        costs: of a set and network.
        baseline: recipe.
        group: set and network.
        near: difference from the baseline that counts as near.
    """
    base = next((c.seconds for c in costs if c.recipe == baseline), None)
    body = []
    for cost in costs:
        share = cost.seconds / base if cost.seconds is not None and base else None
        epochs = sum(cost.reached) / len(cost.reached) if cost.reached else None
        reached = number_cell(epochs, 0)
        if cost.tried and len(cost.reached) < cost.tried:
            reached = replace(reached, extra=f"{len(cost.reached)} of {cost.tried} seeds")
        done, of = cost.cells
        body.append(
            [
                Cell(cost.recipe, cost.recipe),
                Cell(f"{done} of {of}", str(done)),
                number_cell(cost.seconds, 0),
                number_cell(share, 2),
                reached,
            ]
        )
    columns = [
        Column("recipe"), Column("cells", "that have ended"),
        Column("time", "mean of a cell: training, prediction, evaluation", "s"),
        Column("share", f"of {baseline}'s"),
        Column("epochs", f"until the validation's DSC (mIoU where that is logged) is within "
               f"{near:g} of {baseline}'s last, of the same seed"),
    ]  # fmt: skip
    caption = "Cells that ran at the same time shared the machine, so times are no benchmark."
    return Table(f"cost-{_key(group)}", f"Cost: {group.name}", columns, body, caption)


def floor_table(comparisons: Sequence[GroupComparison], metrics: Sequence[str]) -> Table:
    """Table: errors of the true posterior where it is known, beside the best method's.

    Args:
        comparisons: with a true posterior.
        metrics: their columns.
    """
    body = []
    for c in comparisons:
        floor = [_mean_cell(c, TRUTH, k) for k in metrics]
        body.append([Cell(c.group.name, c.group.name), Cell("true posterior"), *floor])
        best = [_least(c, k) for k in metrics]
        body.append([Cell(c.group.name, c.group.name), Cell("best method"), *best])
    columns = [
        Column("set and network"), Column("of"),
        *(Column(metric_name(k), definition(k), better=ARROWS[better(k)]) for k in metrics),
    ]  # fmt: skip
    caption = (
        "The true posterior on the same test cases. Its errors are the noise of finite cases, and "
        "no method is expected below them, except for fg and union, which depend on voxels that "
        "the label selects."
    )
    return Table("floor", "Floor of the errors", columns, body, caption)


def _least(comparison: GroupComparison, metric: str) -> Cell:
    found = [
        (comparison.mean_of[m.name, metric].mean, m.name)
        for m in comparison.rows
        if (m.name, metric) in comparison.mean_of
    ]
    if not found:
        return Cell("-")
    value, name = (max if better(metric) == "higher" else min)(found)
    return replace(number_cell(value, digits(metric)), extra=name)


def published_table(published: PublishedTable, comparison: GroupComparison) -> Table:
    """Table: a paper's numbers beside the study's.

    Args:
        published: the paper's.
        comparison: of a set and network that it belongs to.
    """
    recipes = list(dict.fromkeys(m.recipe for m in comparison.rows if m.repair == "raw"))
    ours = [r for r in recipes if r.removesuffix(PUBLISHED) in published.rows]
    of_both = {r: r.removesuffix(PUBLISHED) for r in ours}
    of_both |= {r: r for r in published.rows if r not in of_both.values()}
    of_both |= {r: "" for r in recipes if r not in of_both}
    body = []
    for recipe, row in of_both.items():
        cells = [Cell(recipe, recipe)]
        for index, column in enumerate(published.columns):
            printed = published.rows[row][index] if row else None
            places = 2 if printed is not None and printed >= 1 else 3
            cells += [
                number_cell(printed, places),
                _printed(comparison, Method(recipe), column.ours),
            ]
        body.append(cells)
    columns = [Column("recipe")]
    for column in published.columns:
        arrow = ARROWS[better(column.ours)]
        columns += [
            Column(f"{column.paper}, paper", better=arrow),
            Column(
                f"{metric_name(column.ours)}, ours", column.difference, unit(column.ours), arrow
            ),
        ]
    caption = f"Paper: {published.source}. Ours: as trained, the mask that was predicted."
    key = f"published-{_key(comparison.group)}"
    return Table(key, f"{published.title}, beside {comparison.group.name}", columns, body, caption)


def _printed(comparison: GroupComparison, method: Method, metric: str) -> Cell:
    found = comparison.mean_of.get((method.name, metric))
    return Cell("-") if found is None else number_cell(found.mean, 2 if unit(metric) else 3)


def claim_table(claims: Sequence[Claim], comparisons: Sequence[GroupComparison]) -> Table:
    """Table: what papers say about a method, and what the study found.

    Args:
        claims: of methods in the study.
        comparisons: of the study.
    """
    body = []
    for claim in claims:
        found = [c.change_of.get((claim.recipe, k)) for k in (NEAR_ECE, "dsc") for c in comparisons]
        half = len(comparisons)
        body.append([
            Cell(claim.recipe, claim.recipe, definition=claim.source), Cell(claim.claim),
            _range([c.relative for c in found[:half] if c is not None], percent=True),
            _range([c.difference for c in found[half:] if c is not None], percent=False),
        ])  # fmt: skip
    columns = [
        Column("recipe"), Column("the paper says"),
        Column("ECE near, ours", "smallest and largest change over sets and networks", better="↓"),
        Column("DSC, ours", "smallest and largest difference", better="↑"),
    ]  # fmt: skip
    caption = "The papers use other data, networks and definitions: see the sources at the recipes."
    return Table("claims", "What the papers claim", columns, body, caption)


def _range(values: Sequence[float], *, percent: bool) -> Cell:
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return Cell("-")
    texts = [f"{_percent(v)} %" if percent else f"{v:+.3f}" for v in (min(known), max(known))]
    return Cell(" to ".join(dict.fromkeys(texts)), repr(min(known)))
