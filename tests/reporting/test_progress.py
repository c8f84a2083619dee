"""The figure of a training."""

from __future__ import annotations

import json

import matplotlib.pyplot as plt
import pytest
import torch

from segcal.penalties.confidence import Confidence
from segcal.reporting.picture import draw
from segcal.reporting.progress import plot_progress


def test_figure_of_a_training():
    step = {"lam": [[0.1, 0.2], [1.0, 2.0]], "rho": [[0.1] * 2] * 2, "constraint": [[1, 2]] * 2}
    terms = {"base": 1.0, "crac": 0.1}
    records = [
        {"epoch": 0, "train": terms, "val": terms, "ece": 0.2, "crac": step},
        {"epoch": 1, "train": terms, "val": terms, "ece": None},  # no pass over volumes here
    ]
    with plt.rc_context({"font.size": 31.0}):  # as nnU-Net leaves it behind
        axes = plot_progress(records, ["background", "heart"]).axes
        assert plt.rcParams["font.size"] == 31.0
    titles = [ax.get_title() for ax in axes]
    assert titles[2:] == ["crac: multiplier", "crac: penalty parameter", "crac: constraint"]
    assert [ax.get_yscale() for ax in axes[2:]] == ["log", "log", "linear"]
    signs = {**step, "lam": [[-0.1, 0.2], [0.0, 2.0]]}  # of both signs
    both = plot_progress([{**records[0], "crac": signs}], ["background", "heart"]).axes
    assert [ax.get_yscale() for ax in both[2:]] == ["linear", "log", "linear"]
    lam = {line.get_label(): line.get_ydata()[0] for line in axes[2].lines}
    assert lam == {"background, inner": 0.1, "heart, inner": 0.2, "background, outer": 1.0,
                   "heart, outer": 2.0}  # fmt: skip
    assert len(axes[0].lines) == 4
    more = [{**r, "train": {**terms, "bwcr": 0.3}} for r in records]  # which validation lacks
    lines = plot_progress(more, ["background", "heart"]).axes[0].lines
    assert lines[-1].get_label() == "bwcr, train"
    assert len(lines) == 5
    assert max(t.get_fontsize() for ax in axes for t in (ax.title, ax.xaxis.label)) < 20


def record(classes, regions, epoch=0):
    values = [[0.1 * (k + 1) for k in range(classes)]] * regions
    step = {"lam": values, "rho": values, "constraint": values}
    return {"epoch": epoch, "train": {"base": 1.0}, "val": {"base": 1.0}, "ece": 0.2, "crac": step}


def texts(figure):
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_names_of_classes_say_the_region_only_where_there_are_two():
    assert texts(plot_progress([record(2, 1)], ["0", "_b"])) == ["0", "_b"]
    both = ["0, inner", "_b, inner", "0, outer", "_b, outer"]
    assert texts(plot_progress([record(2, 2)], ["0", "_b"])) == both
    three = plot_progress([record(1, 3)], ["0"])
    assert texts(three) == ["0, boundary", "0, near", "0, far"]
    assert [line.get_linestyle() for line in three.axes[2].lines] == ["-", "--", ":"]
    assert texts(plot_progress([record(1, 5)], ["0"]))[-1] == "0, region 4"


@pytest.mark.parametrize(
    ("regions", "shown"), [(1, []), (2, ["inner", "outer"]), (3, ["boundary", "near", "far"])]
)
def test_many_classes_get_a_colour_bar(regions, shown):
    names = [f"class {k}" for k in range(200)]
    figure = plot_progress([record(200, regions, epoch) for epoch in range(2)], names)
    assert texts(figure) == shown
    *panels, bar = figure.axes
    labels = [label.get_text() for label in bar.get_yticklabels()]
    assert (labels[0], labels[-1]) == ("0: class 0", "199: class 199")
    draw(figure, "")
    assert min(panel.get_position().width for panel in panels) > 0.15
    assert min(panel.get_position().height for panel in panels) > 0.3


def test_what_was_measured_once_or_now_and_then_is_seen():
    axes = plot_progress([record(2, 1)], ["a", "b"]).axes
    assert {line.get_marker() for axis in axes for line in axis.lines} == {"o"}
    rare = [{**record(2, 1, epoch), "ece": None if epoch % 2 else 0.1} for epoch in range(4)]
    axes = plot_progress(rare, ["a", "b"]).axes
    (ece,) = axes[1].lines
    assert (list(ece.get_xdata()), list(ece.get_ydata())) == ([0, 2], [0.1, 0.1])
    assert {line.get_marker() for line in axes[0].lines} == {""}


@pytest.mark.parametrize("rows", [2, 4])
def test_gaps_of_confidence_have_no_penalty_parameter(rows):
    """The step as the penalty reports it: no rho, gaps of both signs around a line at 0."""
    penalty = Confidence(2, per_channel=rows == 4)
    draw_from = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 4, 5, generator=draw_from)
    labels = torch.randint(0, 2, logits.shape if rows == 4 else (1, 4, 5), generator=draw_from)
    records = []
    for epoch in range(2):
        penalty.observe(logits, labels)
        step = json.loads(json.dumps(vars(penalty.dual_step())))
        records.append({**record(2, 1, epoch), "crac": {}, "confidence": step})
    figure = plot_progress(records, ["a", "b"])
    draw(figure, "")
    titles = [ax.get_title() for ax in figure.axes[2:]]
    assert titles == ["confidence: multiplier", "confidence: confidence less accuracy"]
    multipliers, gaps = figure.axes[2:]
    assert [len(ax.lines) for ax in (multipliers, gaps)] == [2 * rows, 2 * rows + 1]
    assert multipliers.get_yscale() == gaps.get_yscale() == "linear"
    names = {2: ["inner", "outer"], 4: ["in-inner", "in-outer", "out-inner", "out-outer"]}[rows]
    assert texts(figure) == [f"{channel}, {name}" for name in names for channel in ("a", "b")]
    assert len({line.get_linestyle() for line in multipliers.lines}) == rows


def test_the_legend_names_the_rows_of_the_penalty_with_most():
    both = {**record(2, 1), "confidence": record(2, 4)["crac"]}
    assert len(texts(plot_progress([both], ["a", "b"]))) == 8
    many = {**record(50, 1), "confidence": record(50, 4)["crac"]}
    assert len(texts(plot_progress([many], [f"{k}" for k in range(50)]))) == 4
    assert texts(plot_progress([record(1, 5)], ["a"]))[4] == "a, region 4"
