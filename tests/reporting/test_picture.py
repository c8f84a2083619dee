"""Names in figures are shown as they are written, whatever they hold."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from segcal.binning import BinStatistics
from segcal.classify.curves import plot_curves, plot_multipliers, plot_retrieval
from segcal.classify.study_report import TrialResult, plot_metrics
from segcal.evaluation.compare import Difference
from segcal.reporting.comparison import plot_comparison
from segcal.reporting.picture import draw
from segcal.reporting.progress import plot_progress
from segcal.reporting.reliability import plot_class_reliability, plot_confidence, plot_reliability
from segcal.reporting.worst import plot_case

NAMES = ["US$_$", r"c $\frac$", "_hidden", "n" * 60, "$y_1$"]
TITLE = r"_$ of $\frac$ " + "and so on " * 6
PENALTY = {"lam": [[0.01, 0.1, 0.2, 0.3, 0.4]], "rho": [[0.1] * 5], "constraint": [[-1.0] * 5]}
LOG = [{"epoch": epoch, "ece": 0.1 / (epoch + 1), "crac": PENALTY} for epoch in range(3)]
TERMS = {"train": {"_base$_$": 1.0}, "val": {"_base$_$": 2.0}}
STATISTICS = BinStatistics(np.array([2, 3]), np.array([0.5, 2.5]), np.array([1, 2]))


def runs():
    run = TrialResult("set", "ce", 0, False, ("a",), {}, 0, (), {}, {}, "nll", 0.1, [])
    return {name: [(run, {"metrics": {"ece": 0.1, "nll": None}})] for name in NAMES}


def case():
    reference = np.arange(60).reshape(2, 5, 6) % 6
    names = dict(enumerate(NAMES, 1))
    spacing_mm = (1.0, 1.0, 1.0)
    return plot_case(reference, 0 * reference, None, names=names, spacing_mm=spacing_mm, title="a$")


def comparison():
    differences = [Difference("ece", name, NAMES[1], 3, 0.1, (0.0, 0.2), 0.5) for name in NAMES]
    return plot_comparison(differences)


FIGURES = {
    "curves": lambda: plot_curves({n: [LOG, LOG] for n in NAMES}, "ece", "ECE", log=True),
    "multipliers": lambda: plot_multipliers({n: [LOG] for n in NAMES}, NAMES, TITLE),
    "retrieval": lambda: plot_retrieval(
        {n: [{"1": 0.5, "2": 0.4}] for n in NAMES}, {n: n for n in NAMES}, TITLE
    ),
    "progress": lambda: plot_progress([{**r, **TERMS} for r in LOG], NAMES),
    "metrics": lambda: plot_metrics(runs(), multilabel=False, title=TITLE),
    "reliability": lambda: plot_reliability(dict.fromkeys(NAMES, STATISTICS), TITLE),
    "classes": lambda: plot_class_reliability({"": [STATISTICS] * 5}, NAMES, TITLE),
    "confidence": lambda: plot_confidence(dict.fromkeys(NAMES, STATISTICS), TITLE),
    "case": case,
    "comparison": comparison,
}


def words(figure):
    """What a figure says, without the lines' ends."""
    texts = [text for text in figure.findobj(Text) if text.get_visible()]
    return ["".join(text.get_text().split()) for text in texts], texts


@pytest.mark.parametrize("of", FIGURES)
def test_every_name_is_shown_as_it_is(of):
    figure = FIGURES[of]()
    assert draw(figure, "").png.startswith(b"\x89PNG")
    said, texts = words(figure)
    for name in NAMES:
        assert any("".join(name.split()) in one for one in said), name
    formulas = [
        text.get_text() for text in texts if "$" in text.get_text() and text.get_parse_math()
    ]
    assert all(one.startswith(r"$\mathdefault{") for one in formulas)  # numbers of log axes
    FigureCanvasAgg(figure).draw()
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert min(box.x0, box.y0) >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_numbers_of_log_axes_are_formulas_and_long_titles_have_lines():
    figure = Figure(figsize=(4, 3), layout="constrained")
    axis = figure.subplots()
    axis.plot([0.01, 1.0])
    axis.set_yscale("log")
    figure.suptitle("seven letters " * 6)
    draw(figure, "")
    shown = [label for label in axis.get_yticklabels() if label.get_text()]
    assert shown
    assert all(label.get_parse_math() for label in shown)
    assert not axis.title.get_parse_math()
    assert [len(line) for line in figure.get_suptitle().split("\n")] == [33, 35, 13]
    (title,) = figure.texts
    assert title.get_window_extent().width <= figure.bbox.width
