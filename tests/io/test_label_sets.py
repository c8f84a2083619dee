"""What ``dataset.json`` says about labels, and where it contradicts itself."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.io.label_sets import label_set_of
from segcal.posthoc.decision import decide_argmax

BRATS = {"background": 0, "whole": [1, 2, 3, 4], "core": [1, 2, 3], "enhancing": [1]}


def label_set(labels, order):
    return label_set_of({"labels": labels, "regions_class_order": order}, "dataset.json")


def scores(labels):
    """DSC of every region in the label map of a perfect prediction."""
    truth = np.array(sorted(labels.values))
    sigmoids = np.stack([np.isin(truth, of) for of in labels.regions.values()]).astype(float)
    found = decide_argmax(sigmoids, class_order=labels.class_order)
    return [
        2 * np.sum(np.isin(found, of) & np.isin(truth, of))
        / (np.isin(found, of).sum() + np.isin(truth, of).sum())
        for of in labels.regions.values()
    ]  # fmt: skip


def test_an_order_that_contradicts_the_regions_is_said():
    wrong = label_set(BRATS, [1, 2, 3])
    assert wrong.contradiction() == (
        "dataset.json: 'regions_class_order' [1, 2, 3] contradicts the regions: in the label map "
        "of a perfect prediction 1 (whole, core, enhancing) becomes 3 (whole, core), 4 (whole) "
        "becomes 1 (whole, core, enhancing); [4, 2, 1] would fit, since each of these labels lies "
        "in no later region"
    )
    assert scores(wrong)[0] == 1
    assert scores(wrong)[2] == 0
    assert scores(label_set(BRATS, [4, 2, 1])) == [1, 1, 1]


@pytest.mark.parametrize("order", [[4, 2, 1], [4, 3, 1]])
def test_an_order_that_keeps_the_regions_is_silent(order):
    assert label_set(BRATS, order).contradiction() == ""


@pytest.mark.parametrize(
    ("labels", "order"),
    [
        ({"background": 0, "core": [1], "whole": [1, 2]}, [1, 2]),  # inner before outer
        ({"background": 0, "a": [1, 2], "b": [2, 3]}, [1, 2]),  # no label map holds both
        ({"background": 0, "a": [1, 2], "b": [2]}, [1, 7]),  # a label of no region
    ],
)
def test_whether_regions_survive_is_what_a_perfect_prediction_shows(labels, order):
    found = label_set(labels, order)
    assert min(scores(found)) < 1
    assert found.contradiction()


def test_no_order_is_suggested_where_none_helps():
    advice = label_set({"background": 0, "a": [1, 2], "b": [2, 3]}, [1, 2]).contradiction()
    assert "list outer regions before inner regions" in advice
    assert "cannot be stored in one label map" in advice


def test_labels_that_do_not_overlap_have_no_order_to_contradict():
    assert label_set_of({"labels": {"background": 0, "a": 1}}, "x").contradiction() == ""
