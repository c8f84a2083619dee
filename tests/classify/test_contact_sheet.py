"""Images that queries find."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.colors import same_color

from segcal.classify.contact_sheet import FRAMES, answer, draw_answers, plot_contact_sheet
from segcal.metrics.retrieval import Queries
from tests.conftest import close

NAMES = ("cat", "dog", "car")
PROBS = torch.tensor(
    [[0.9, 0.2, 0.5], [0.8, 0.1, 0.5], [0.5, 0.5, 0.5], [0.1, 0.9, 0.5]], dtype=torch.float64
)
TARGETS = torch.tensor([[1, 1, 0], [1, 0, 0], [1, -1, 1], [0, 1, 1]])
CAT_NO_DOG = Queries(torch.tensor([[True, False, False]]), torch.tensor([[False, True, False]]))


def test_an_answer_by_hand():
    """Scores .72, .72, .25, .01: the second meets it, of the third nobody knows."""
    found = answer(torch.logit(PROBS), TARGETS, NAMES, CAT_NO_DOG)
    assert found.query == "cat, not dog"
    assert found.samples[2:] == [2, 3]
    close(found.probability, [0.72, 0.72, 0.25, 0.01])
    assert [found.relevance[found.samples.index(i)] for i in range(4)] == [0, 1, -1, 0]
    assert (found.relevant, found.known) == (1, 3)
    close(found.average_precision, 0.5)  # two have the same score
    nothing = answer(torch.logit(PROBS), TARGETS * 0, NAMES, CAT_NO_DOG)
    assert nothing.relevant == 0
    assert math.isnan(nothing.average_precision)


def test_a_query_for_each_number_of_conditions():
    found = draw_answers(torch.logit(PROBS), TARGETS, NAMES, most=5)
    assert [one.query.count(",") + 1 for one in found] == [1, 2, 3]
    assert all(one.relevant >= 1 for one in found)
    assert found == draw_answers(torch.logit(PROBS), TARGETS, NAMES, most=5)
    assert not draw_answers(torch.logit(PROBS), TARGETS * 0, NAMES, most=5)  # nothing is there


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_sheet_frames_what_meets_the_query(dtype, channels):
    answers = draw_answers(torch.logit(PROBS), TARGETS, NAMES, most=2)
    values = 200 * torch.rand((4, channels, 5, 6), generator=torch.Generator().manual_seed(0))
    images = [values.to(dtype)[one.samples] for one in answers]
    figure = plot_contact_sheet(answers, images, "found")
    for row, one in zip(figure.subfigs, answers, strict=True):
        assert one.query in row.get_suptitle()
        assert len(row.axes) == 8
        for axis, relevance, p in zip(row.axes, one.relevance, one.probability, strict=False):
            assert same_color(axis.spines["left"].get_edgecolor(), FRAMES[relevance])
            assert axis.get_xlabel() == f"p = {p:.2g}"
            shown = axis.images[0].get_array()
            assert shown.shape == ((5, 6, 3) if channels == 3 else (5, 6))
            assert 0 <= shown.min() <= shown.max() <= 1
        assert not any(axis.images for axis in row.axes[4:])
