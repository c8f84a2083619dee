"""Figures of a whole study, and of test metrics over the epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from segcal.classify.curves import Records, plot_curve_panels, plot_curves
from segcal.classify.measures import HIGHER_IS_BETTER, TEST
from segcal.classify.report import NAMES
from segcal.classify.trade_off import Panel, plot_trade_off
from segcal.reporting.picture import Picture, draw

CHOSEN = {False: ("accuracy", "ece"), True: ("map_class", "ace")}
"""Metrics of decisions and of probabilities, for classes and for labels."""


@dataclass(frozen=True)
class SetRuns:
    """The trainings of a data set.

    Attributes:
        multilabel: whether a sample may have several labels.
        metrics: of the test samples, of every training, by method and kind of probabilities.
        logs: lines of the trainings' logs, by loss.
    """

    multilabel: bool
    metrics: Mapping[str, Sequence[Mapping[str, Any]]]
    logs: Mapping[str, Sequence[Records]]


def draw_overview(sets: Mapping[str, SetRuns]) -> dict[str, Picture]:
    """Draw calibration against accuracy, and calibration over epochs, with one panel per data set.

    Args:
        sets: by name; if there is only one, its own figure shows the epochs.

    Returns:
        pictures by their content.
    """
    panels = {}
    for name, runs in sets.items():
        right, down = CHOSEN[runs.multilabel]
        points = {
            method: [(metrics.get(right), metrics.get(down)) for metrics in of]
            for method, of in runs.metrics.items()
        }
        panels[name] = Panel(points, NAMES[right], NAMES[down])
    title = "Calibration against accuracy, test samples, mean and deviation over seeds"
    pictures = {"trade_off": draw(plot_trade_off(panels, title), title)}
    for multilabel, (_, metric) in CHOSEN.items():
        courses = {name: of.logs for name, of in sets.items() if of.multilabel == multilabel}
        if len(courses) > 1:
            title = f"{NAMES[metric]} of the validation sets"
            figure = plot_curve_panels(courses, metric, f"{NAMES[metric]}, validation", log=True)
            figure.suptitle(title)
            pictures[f"{metric}_epochs"] = draw(figure, title)
    return pictures


def draw_test_curves(name: str, runs: SetRuns) -> dict[str, Picture]:
    """Draw test metrics over the epochs, if trainings measured them after every epoch.

    Args:
        name: of the data set.
        runs: its trainings.

    Returns:
        pictures by their content.
    """
    pictures = {}
    for metric in CHOSEN[runs.multilabel]:
        key, what = f"{TEST}{metric}", NAMES[metric]
        if any(key in line for of in runs.logs.values() for log in of for line in log):
            title = f"{name}: {what} of the test samples, which choose no epoch"
            log = metric not in HIGHER_IS_BETTER
            figure = plot_curves(runs.logs, key, f"{what}, test", log=log)
            figure.suptitle(title)
            pictures[f"{key}_epochs"] = draw(figure, title)
    return pictures
