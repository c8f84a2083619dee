"""Curves over the epochs and the numbers of conditions."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from segcal.classify.curves import (
    multipliers,
    plot_curve_panels,
    plot_curves,
    plot_multipliers,
    plot_retrieval,
)
from segcal.classify.multiplier_bands import plot_multiplier_bands
from segcal.classify.trade_off import Panel, plot_trade_off
from segcal.reporting.legends import COLOURS
from segcal.reporting.picture import draw
from tests.conftest import close


def course(*values):
    return [{"epoch": epoch, "ece": value} for epoch, value in enumerate(values)]


def legend_of(figure):
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def penalised(classes, epochs=2):
    lam = [[0.1 * (k + 1) for k in range(classes)]]
    return [{"epoch": epoch, "crac": {"lam": lam}} for epoch in range(epochs)]


def test_multipliers_are_found_by_what_they_are():
    """A recipe of the user's own is not called like its penalty."""
    line = {"epoch": 0, "val": {"cals": 0.1}, "cals": {"lam": [[0.1, 0.2]], "rho": [[1.0, 1.0]]}}
    assert multipliers(line) == [0.1, 0.2]
    assert multipliers({"epoch": 0, "val": {"nacl": 0.1}}) is None
    figure = plot_multipliers({"mine": [[line, line]]}, ["a", "b"], "title")
    (axis,) = figure.axes
    assert axis.get_title() == "mine"
    assert [line.get_ydata().tolist() for line in axis.lines if line.get_label() in "ab"] == [
        [0.1, 0.1], [0.2, 0.2],
    ]  # fmt: skip


def test_curves_are_means_in_bands_of_one_deviation():
    """Of two trainings, the longer one cut; the deviation of 1 and 3 is the root of 2."""
    logs = {"ce": [course(1.0, 0.5), course(3.0, 0.5, 9.0)], "cals": [course(0.2, 0.1)]}
    figure = plot_curves(logs, "ece", "ECE")
    (axis,) = figure.axes
    assert axis.get_yscale() == "linear"
    assert [line.get_ydata().tolist() for line in axis.lines] == [[2.0, 0.5], [0.2, 0.1]]
    (band,) = axis.collections  # none of a single training
    corners = {(x, round(y, 9)) for x, y in band.get_paths()[0].vertices}
    assert corners == {
        (0.0, round(2 - 2**0.5, 9)), (0.0, round(2 + 2**0.5, 9)), (1.0, 0.5),
    }  # fmt: skip
    assert legend_of(figure) == ["ce", "cals"]


def test_bands_on_a_log_axis_do_not_fall_below_what_was_measured():
    (axis,) = plot_curves({"ce": [course(0.01, 1.0), course(1.0, 1.0)]}, "ece", "E", log=True).axes
    assert axis.get_yscale() == "log"
    lowest = min(y for _, y in axis.collections[0].get_paths()[0].vertices)
    close(lowest, 0.01)  # the mean less the deviation is negative


@pytest.mark.parametrize(("epochs", "marker"), [(1, "o"), (2, "")])
def test_a_single_epoch_is_seen(epochs, marker):
    (axis,) = plot_curves({"ce": [course(*[0.5] * epochs)]}, "ece", "ECE").axes
    assert [line.get_marker() for line in axis.lines] == [marker]
    if epochs == 1:
        left, right = axis.get_xlim()
        assert [tick for tick in axis.get_xticks() if left <= tick <= right] == [0.0]
    (panel,) = plot_multipliers({"crac": [penalised(2, epochs)]}, ["a", "b"], "").axes
    assert {line.get_marker() for line in panel.lines if line.get_label() in "ab"} == {marker}


def test_twenty_methods_differ_in_colour():
    logs = {f"method {i}": [course(0.1, 0.2)] for i in range(20)}
    figure = plot_curves(logs, "ece", "ECE")
    shown = np.array([to_rgb(line.get_color()) for line in figure.axes[0].lines])
    distance = np.linalg.norm(shown[:, None] - shown[None], axis=-1) + 9 * np.eye(20)
    assert distance.min() > 0.2
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["-"] * 10 + ["--"] * 10
    assert legend_of(figure) == list(logs)


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize("log", [True, False])
def test_a_sentence_where_there_are_no_values(value, log):
    curves = plot_curves({"ce": [course(value, value)] * 2}, "ece", "ECE", log=log)
    answers = plot_retrieval({"ce": [{"1": value, "2": value}] * 2}, {"ce": "ce"}, "title")
    assert answers.get_suptitle() == "title"
    for figure, said in ((curves, "ECE: no value"), (answers, "no sample meets any query")):
        (axis,) = figure.axes
        assert [text.get_text() for text in axis.texts] == [said]
        assert not axis.axison
        assert not axis.lines
        assert draw(figure, "").png.startswith(b"\x89PNG")


def test_retrieval():
    """Values that are None count in no mean; the rows of a method share a colour."""
    rows = {
        "bce": [{"1": 0.5, "2": 0.2, "3": None}, {"1": 0.7, "2": None, "3": None}],
        "bce + link": [{"1": 0.6, "2": 0.3, "3": 0.1}] * 2,
        "lpr": [{"1": 0.9, "2": 0.8, "3": 0.7}] * 2,
    }
    methods = {"bce": "bce", "bce + link": "bce", "lpr": "lpr"}
    figure = plot_retrieval(rows, methods, "title")
    (axis,) = figure.axes
    lines = dict(zip(rows, (container[0] for container in axis.containers), strict=True))
    found = lines["bce"].get_ydata()
    close(found[:2], [0.6, 0.2])
    assert np.ma.getmaskarray(found).tolist() == [False, False, True]
    close(lines["lpr"].get_ydata(), [0.9, 0.8, 0.7])
    assert np.round(lines["lpr"].get_xdata()).tolist() == [1, 2, 3]
    assert [line.get_linestyle() for line in lines.values()] == [":", "-", "-"]
    assert [line.get_color() for line in lines.values()] == [COLOURS[0], COLOURS[0], COLOURS[1]]
    (bars,) = axis.containers[0][2]
    low, high = bars.get_segments()[0][:, 1]
    close([low, high], [0.6 - 0.02**0.5, 0.6 + 0.02**0.5])  # of 0.5 and 0.7
    assert legend_of(figure) == list(rows)


@pytest.mark.parametrize(("classes", "named"), [(20, True), (21, False)])
def test_many_classes_get_a_colour_bar(classes, named):
    names = [f"kind {k}" for k in range(classes)]
    figure = plot_multipliers({"crac": [penalised(classes)] * 3, "bwcr": [penalised(classes)]},
                              names, "title")  # fmt: skip
    panels = [axis for axis in figure.axes if axis.get_ylabel() == "multiplier"]
    shown = [line for line in panels[0].lines if line.get_label() in names]
    close([line.get_ydata()[0] for line in shown], [0.1 * (k + 1) for k in range(classes)])
    if named:
        assert legend_of(figure) == names
        assert len(figure.axes) == 2
        return
    assert not figure.legends
    (bar,) = [axis for axis in figure.axes if axis not in panels]
    labels = [label.get_text() for label in bar.get_yticklabels()]
    assert labels == ["0: kind 0", "5", "10", "15", "20: kind 20"]
    assert len(panels[0].lines) == classes  # means only
    draw(figure, "")
    assert min(panel.get_position().width for panel in panels) > 0.25


def test_panels_of_curves_share_the_look_of_a_method():
    """The second set lacks the first method, and the third has no values."""
    sets = {
        "a": {"ce": [course(1.0, 0.5)], "fl": [course(0.4, 0.2)]},
        "b": {"fl": [course(0.3, 0.1), course(0.5, 0.3)]},
        "c": {"ce": [course(None, None)]},
        "d": {"ls": [course(0.7)]},
    }
    figure = plot_curve_panels(sets, "ece", "ECE")
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == list(sets)
    assert [line.get_label() for line in panels[1].lines] == ["fl"]
    close(panels[1].lines[0].get_ydata(), [0.4, 0.2])
    assert panels[0].lines[1].get_color() == panels[1].lines[0].get_color() == COLOURS[1]
    assert panels[3].lines[0].get_color() == COLOURS[2]
    assert [text.get_text() for text in panels[2].texts] == ["no value"]
    assert legend_of(figure) == ["ce", "fl", "ls"]
    (rows, columns) = panels[3].get_subplotspec().get_gridspec().get_geometry()
    assert (rows, columns) == (2, 3)
    assert draw(figure, "").png.startswith(b"\x89PNG")


def test_the_band_of_multipliers_is_their_extent():
    """Classes at 1 and 3, then 2 and 6; in the second training 3 and 5: means over both."""
    first = [{"cals": {"lam": [[1.0, 3.0]]}}, {"cals": {"lam": [[2.0, 6.0]]}}]
    second = [{"cals": {"lam": [[3.0, 5.0]]}}] * 3  # one epoch more, which is cut off
    figure = plot_multiplier_bands({"cals": [first, second]}, "title")
    (axis,) = figure.axes
    assert {line.get_label(): line.get_ydata().tolist() for line in axis.lines} == {
        "largest": [4.0, 5.5], "mean": [3.0, 4.0], "smallest": [2.0, 2.5],
    }  # fmt: skip
    (band,) = axis.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices}
    assert corners == {(0.0, 2.0), (0.0, 4.0), (1.0, 2.5), (1.0, 5.5)}
    assert legend_of(figure) == ["largest", "mean", "smallest"]
    assert axis.get_yscale() == "linear"
    wide = [{"cals": {"lam": [[1e-6, 0.5]]}}] * 2
    assert plot_multiplier_bands({"cals": [wide]}, "").axes[0].get_yscale() == "log"


def test_a_point_of_the_trade_off_is_a_mean_with_its_deviation():
    """Accuracies .8 and 1.0 deviate by .1 root 2, errors .1 and .3 as well; a value is missing."""
    points = {"ce": [(0.8, 0.1), (1.0, 0.3), (0.9, None)], "ls": [(0.7, 0.2)], "fl": [(None, 0.1)]}
    panels = {"a": Panel(points, "accuracy", "ECE"), "b": Panel({"ls": [(0.5, 0.4)]}, "mAP", "ACE")}
    figure = plot_trade_off(panels, "title")
    first, second = (axis for axis in figure.axes if axis.get_title())
    ce, ls = first.containers
    close([ce[0].get_xdata()[0], ce[0].get_ydata()[0]], [0.9, 0.2])
    across, down = (bars.get_segments()[0] for bars in ce[2])
    close(across, [[0.9 - 0.02**0.5, 0.2], [0.9 + 0.02**0.5, 0.2]])
    close(down, [[0.9, 0.2 - 0.02**0.5], [0.9, 0.2 + 0.02**0.5]])
    assert ls.has_xerr is ls.has_yerr is False  # of a single seed nothing is known
    seeds = next(line for line in first.lines if len(line.get_xdata()) == 2)
    assert seeds.get_xdata().tolist() == [0.8, 1.0]
    assert second.containers[0][0].get_color() == ls[0].get_color() == COLOURS[1]
    assert second.get_xlabel() == "mAP (better to the right)"
    assert second.get_ylabel() == "ACE (better at the bottom)"
    assert legend_of(figure) == ["ce", "ls"]
    assert draw(figure, "").png.startswith(b"\x89PNG")
