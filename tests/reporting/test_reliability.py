"""Diagrams draw the statistics they are given: bars, shares, numbers, and no bar without data."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from segcal.binning import BinStatistics, equal_width_statistics
from segcal.metrics.ece_floor import EceFloor
from segcal.metrics.table import CALIBRATION, calibration_of
from segcal.reporting.picture import draw
from segcal.reporting.reliability import (
    plot_case_reliability,
    plot_class_reliability,
    plot_confidence,
    plot_reliability,
)
from segcal.tally import Voxels
from tests.conftest import close

CONFIDENCE = torch.tensor([0.55, 0.65, 0.65, 0.95, 0.95, 0.95, 0.95])
HITS = torch.tensor([True, False, True, True, True, True, False])


def bars(axis, colour_of):
    """Heights of the bars with a label, by left edge."""
    (found,) = [c for c in axis.collections if c.get_label() == colour_of]
    return {round(left, 6): top - low for left, low, top in rectangles(found)}


def rectangles(collection):
    """Left edge, lower and upper end of every bar."""
    corners = [path.vertices for path in collection.get_paths()]
    return [(x[:, 0].min(), x[:, 1].min(), x[:, 1].max()) for x in corners]


def shares(axis):
    """Steps by their label."""
    return {p.get_label(): p.get_data() for p in axis.patches if p.get_label()}


def text(axis):
    return "\n".join(t.get_text() for t in axis.texts)


def test_top_label():
    statistics = equal_width_statistics(CONFIDENCE, HITS, 10)
    axis = plot_reliability({"all": statistics}).axes[0]
    assert bars(axis, "accuracy") == {0.5: 1.0, 0.6: 0.5, 0.9: 0.75}
    close(list(bars(axis, "overconfident").values()), [0.15, 0.2], atol=1e-6)
    close(list(bars(axis, "underconfident").values()), [0.45], atol=1e-6)
    assert text(axis) == f"ECE {(0.45 + 2 * 0.15 + 4 * 0.2) / 7:.4f}"


def test_what_chance_does_stands_beside_the_error():
    statistics = equal_width_statistics(CONFIDENCE, HITS, 10)
    spread = np.full(10, 0.1)
    spread[statistics.count == 0] = np.nan
    for p, said in ((0.25, "\np if calibrated 0.25"), (float("nan"), "")):
        floor = EceFloor(0.2, 0.01, 0.02, p, 0.01, spread)
        axis = plot_reliability({"all": statistics}, floors={"all": floor}).axes[0]
        assert text(axis) == f"ECE 0.2214\nfloor 0.0100, 95 % 0.0200{said}"
    low, high = (line for line in axis.lines if line.get_label() == "95 % if calibrated")
    close(low.get_ydata(), [0.354, 0.454, 0.754], atol=1e-6)
    close(high.get_ydata(), [0.746, 0.846, 1.0], atol=1e-6)


def test_the_bins_of_every_case():
    """Three cases whose accuracy in the bin of 0.65 is 1, 1 and 1/2; a bin that one case has."""
    sure = equal_width_statistics(torch.tensor([0.65, 0.65]), torch.tensor([True, True]), 10)
    mixed = equal_width_statistics(
        torch.tensor([0.65, 0.65, 0.95]), torch.tensor([True, False, False]), 10
    )
    figure = plot_case_reliability({"all": [sure, mixed, sure]}, levels=4)
    top, bottom = figure.axes[:2]
    (mesh,) = top.collections
    shades = np.ma.filled(mesh.get_array(), np.nan)
    close(shades[[2, 3], 6], [1 / 3, 2 / 3])
    close(shades[0, 9], 1.0)
    assert np.isnan(shades).sum() == 40 - 3
    (mean,) = (line for line in top.lines if line.get_label() == "mean of the cases")
    close(mean.get_xydata(), [[0.65, 2.5 / 3], [0.95, 0.0]])
    assert [top for _, _, top in rectangles(bottom.collections[0])] == [
        0,
        0,
        0,
        0,
        0,
        0,
        3,
        0,
        0,
        1,
    ]


def test_every_class_has_its_diagram():
    empty = BinStatistics(np.zeros(10, int), np.zeros(10), np.zeros(10, int))
    one = equal_width_statistics(CONFIDENCE, HITS, 10)
    figure = plot_class_reliability({"fg": [one, empty], "all": [one + one, one]}, ["a_$x", "b"])
    found = {axis.get_title(): axis for axis in figure.axes}
    assert list(found) == ["a_$x, fg", "a_$x, all", "b, fg", "b, all"]
    assert bars(found["a_$x, fg"], "frequency") == {0.5: 1.0, 0.6: 0.5, 0.9: 0.75}
    assert text(found["a_$x, all"]) == "ECE 0.2214\nn 14"
    assert text(found["b, fg"]) == "no voxels"
    drawn = [low for c in found["b, fg"].collections for _, low, _ in rectangles(c)]
    assert drawn
    assert max(drawn) < 0
    assert draw(figure, "").png.startswith(b"\x89PNG")


def test_no_bar_where_there_is_nothing():
    """Probabilities of 0 and 1 that all come true: two bars, eight blank bins, and no error."""
    p = np.array([[0.0, 0, 1, 1, 1]])
    one = Voxels(p, p[0].astype(int), bins=10).tally()["all"].classes[1]
    assert one.count.tolist() == [2, *[0] * 8, 3]
    assert np.isnan(one.accuracy[1:9]).all()
    assert np.isnan(one.confidence[1:9]).all()
    assert one.expected_error() == 0
    (axis,) = plot_class_reliability({"all": [one]}, ["organ"]).axes
    assert bars(axis, "frequency") == {0.0: 0.0, 0.9: 1.0}
    assert text(axis) == "ECE 0.0000\nn 5"


def test_numbers_on_diagrams_are_those_of_the_tables():
    p = np.random.default_rng(0).dirichlet(np.ones(3), 500).T
    y = np.random.default_rng(1).integers(0, 3, 500)
    found = Voxels(p, y).tally()
    table = calibration_of(found["all"], CALIBRATION, groups=15)
    top = plot_reliability({k: t.top for k, t in found.items()}).axes[0]
    assert text(top) == f"ECE {table['ece']:.4f}"
    classes = plot_class_reliability({k: t.classes for k, t in found.items()}, "abc").axes
    shown = [float(text(axis).split()[1]) for axis in classes]
    close(np.mean(shown), table["cece"], atol=5e-5)
    assert f"accuracy {table['accuracy']:.4f}" in text(
        plot_confidence({"all": found["all"].top_mass.statistics}).axes[0]
    )


@pytest.mark.parametrize("classes", [1, 6, 7, 15])
def test_no_class_is_lost(classes):
    one = equal_width_statistics(CONFIDENCE, HITS, 5)
    names = [str(k) for k in range(classes)]
    figure = plot_class_reliability({"fg": [one] * classes, "all": [one] * classes}, names)
    shown = [axis.get_title() for axis in figure.axes if axis.axison]
    assert sorted(shown) == sorted(f"{n}, {scope}" for n in names for scope in ("fg", "all"))


def test_confidence_of_right_and_wrong():
    fine = equal_width_statistics(CONFIDENCE, HITS, 2**16)
    figure = plot_confidence({"all": fine}, bins=10)
    (axis,) = figure.axes
    steps = shares(axis)
    close(steps["right"].edges, np.linspace(0, 1, 11), atol=1e-4)
    close(7 * steps["right"].values, [0, 0, 0, 0, 0, 1, 1, 0, 0, 3])
    close(7 * steps["wrong"].values, [0, 0, 0, 0, 0, 0, 1, 0, 0, 1])
    assert text(axis) == f"accuracy {5 / 7:.4f}\nmean confidence {5.65 / 7:.4f}"


def test_confidence_keeps_every_voxel_whatever_the_bins():
    rng = np.random.default_rng(0)
    count = rng.integers(0, 9, 100)
    hits = rng.binomial(count, 0.7)
    statistics = BinStatistics(count, count * 0.5, hits)
    for bins in (1, 7, 64, 100, 300):
        (axis,) = plot_confidence({"all": statistics}, bins=bins).axes
        steps = shares(axis)
        close(steps["right"].values.sum() * count.sum(), hits.sum())
        close(steps["wrong"].values.sum() * count.sum(), (count - hits).sum())


def test_nothing_to_draw():
    empty = BinStatistics(np.zeros(10, int), np.zeros(10), np.zeros(10, int))
    for figure in (
        plot_reliability({"a": empty}),
        plot_confidence({"a": empty}),
        plot_case_reliability({"a": [empty]}),
    ):
        assert draw(figure, "").png.startswith(b"\x89PNG")


@pytest.mark.parametrize("panels", [1, 2, 4])
def test_legend_lies_within_the_figure(panels):
    statistics = equal_width_statistics(CONFIDENCE, HITS, 10)
    figure = plot_reliability({f"scope {i}": statistics for i in range(panels)}, "title")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert {text.get_text() for text in legend.get_texts()} >= {"overconfident", "underconfident"}
