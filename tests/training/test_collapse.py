"""Collapse to background is noticed, an absent class is not one."""

from __future__ import annotations

from segcal.training.collapse import CollapseWatch


def test_three_passes_in_a_row():
    watch = CollapseWatch(3, patience=3)
    assert watch.update([100, 0, 5], [90, 10, 5]) == []
    assert watch.update([100, 0, 5], [90, 10, 5]) == []
    assert watch.update([100, 0, 5], [90, 10, 5]) == [1]
    assert watch.update([100, 0, 0], [90, 10, 5]) == [1]
    assert watch.update([95, 5, 0], [90, 10, 5]) == []
    assert watch.update([95, 5, 0], [90, 10, 5]) == [2]


def test_a_class_that_is_not_there_has_not_collapsed():
    watch = CollapseWatch(3, patience=2)
    for _ in range(5):
        assert watch.update([100, 0, 3], [97, 0, 3]) == []
    assert watch.update([100, 0, 0], [100, 0, 0]) == []


def test_regions_have_no_background():
    watch = CollapseWatch(2, patience=2, background=False)
    assert watch.update([0, 5], [9, 5]) == []
    assert watch.update([0, 0], [9, 5]) == [0]
    assert watch.update([0, 0], [9, 5]) == [0, 1]


def test_it_is_news_when_other_classes_collapse():
    watch = CollapseWatch(3, patience=3)
    names = ("background", "liver", "spleen")
    assert watch.news([], names) == ""
    told = watch.news([1], names)
    assert told.startswith("liver labelled in validation but not predicted for 3 epochs or more: ")
    assert watch.news([1], names) == ""
    assert watch.news([1, 2], names).startswith("liver, spleen labelled")
    assert watch.news([], names) == ""
    assert watch.news([2], names).startswith("spleen labelled")
