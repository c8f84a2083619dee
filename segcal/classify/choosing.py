"""A loss whose arguments are chosen on validation samples: for every seed, the best of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from segcal.classify.measures import HIGHER_IS_BETTER
from segcal.classify.report import NAMES
from segcal.classify.study_report import TrialResult
from segcal.reporting.tables import Cell, Column, Table, mark, number_cell

POSTERIOR = "posterior"
"""Name of probabilities by the link of the loss if it has one, else by the sigmoid."""

__all__ = ["Choice", "choice_table", "choose"]


@dataclass(frozen=True)
class Choice:
    """A choice between losses, and its result.

    Attributes:
        name: of the choice.
        metric: of the validation samples, which decides.
        runs: trainings by loss, for the seeds that have a training of every loss.
        chosen: the chosen training, by seed.
    """

    name: str
    metric: str
    runs: Mapping[str, Sequence[TrialResult]]
    chosen: Mapping[int, TrialResult]

    def results(self) -> list[TrialResult]:
        """The chosen trainings as results of a loss with the choice's name, in one row.

        For labels the row shows the posterior; only some of the losses have a link for it.
        """
        found = ", ".join(f"{run.recipe} of seed {seed}" for seed, run in self.chosen.items())
        note = (
            f"{self.name}: for every seed, the loss with the best validation "
            f"{NAMES[self.metric]} of {len(self.runs)}: {found}."
        )
        last = {seed: list(run.outcomes)[-1] for seed, run in self.chosen.items()}
        kind = POSTERIOR if len(set(last.values())) > 1 else next(iter(last.values()))
        return [
            replace(
                run,
                recipe=self.name,
                notes=(*run.notes, note),
                outcomes={kind: run.outcomes[last[seed]]},
                last={kind: run.last[last[seed]]},
            )
            for seed, run in self.chosen.items()
        ]


def choose(name: str, recipes: Sequence[str], runs: Sequence[TrialResult]) -> Choice | None:
    """Choose, for every seed, the loss with the best validation metric (the first if equal).

    Args:
        name: of the choice.
        recipes: losses to choose from.
        runs: trainings of one data set.

    Returns:
        None if no seed has a training of every loss.

    Raises:
        ValueError: trainings whose epochs were chosen by different metrics.
    """
    of = {(run.recipe, run.seed): run for run in runs if run.recipe in recipes}
    seeds = [s for s in dict.fromkeys(r.seed for r in runs) if all((r, s) in of for r in recipes)]
    if not seeds:
        return None
    metrics = sorted({run.metric for run in of.values()})
    if len(metrics) > 1:
        raise ValueError(
            f"chosen.{name}: expected losses whose epochs one metric chooses, got "
            f"{' and '.join(metrics)}; set changes.training.metric for all"
        )
    sign = -1 if metrics[0] in HIGHER_IS_BETTER else 1
    return Choice(
        name,
        metrics[0],
        {recipe: [of[recipe, seed] for seed in seeds] for recipe in recipes},
        {s: min((of[r, s] for r in recipes), key=lambda run: sign * run.best) for s in seeds},
    )


def choice_table(key: str, choice: Choice) -> Table:
    """Table of the losses' metrics on validation and test samples, and how often each was chosen.

    Args:
        key: of the table.
        choice: the choice.
    """
    higher, heading = choice.metric in HIGHER_IS_BETTER, NAMES[choice.metric]
    arrow = "↑" if higher else "↓"
    times = [run.recipe for run in choice.chosen.values()]
    means = {
        recipe: [np.mean([run.best for run in runs]), np.mean([_tested(r, choice) for r in runs])]
        for recipe, runs in choice.runs.items()
    }
    marked = [
        mark([number_cell(float(row[i]), 4) for row in means.values()], higher=higher)
        for i in (0, 1)
    ]
    rows = [
        [Cell(recipe, recipe), marked[0][i], marked[1][i], number_cell(float(n), 0)]
        for i, (recipe, n) in enumerate((recipe, times.count(recipe)) for recipe in means)
    ]
    tested = [_tested(run, choice) for run in choice.chosen.values()]
    mean = number_cell(float(np.mean(tested)), 4)
    rows.append([Cell(choice.name, choice.name), Cell("-"), mean, Cell("-")])
    columns = [
        Column("loss"),
        Column(f"validation {heading}", "decides the choice", better=arrow),
        Column(f"test {heading}", better=arrow),
        Column("chosen", "number of seeds"),
    ]
    caption = (
        f"Means over {len(times)} seeds. For every seed, {choice.name} is the loss whose "
        f"validation {heading} is best; test samples had no part in the choice."
    )
    data_set = next(iter(choice.chosen.values())).set
    title = f"{data_set}: {choice.name}, chosen on validation samples"
    return Table(key, title, columns, rows, caption)


def _tested(run: TrialResult, choice: Choice) -> float:
    """Metric on test samples, for the last kind of probabilities, which validation measured."""
    value = list(run.outcomes.values())[-1]["metrics"].get(choice.metric)
    return float("nan") if value is None else float(value)
