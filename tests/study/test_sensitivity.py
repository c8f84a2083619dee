"""Recipes that differ in one number, and the papers' numbers."""

from __future__ import annotations

import pytest

from segcal.study.published import load_published
from segcal.study.sensitivity import families, flatten

BASE = {"cross_entropy": {"weight": 1.0}, "nacl": {"weight": 1.0, "args": {"alpha": 0.1, "k": 3}}}


def variant(alpha=0.1, k=3, weight=1.0):
    return {
        "cross_entropy": {"weight": 1.0},
        "nacl": {"weight": weight, "args": {"alpha": alpha, "k": k}},
    }


def test_leaves():
    assert flatten({"a": {"b": [1, {"c": "x"}]}, "d": None}) == {
        "a.b.0": 1,
        "a.b.1.c": "x",
        "d": None,
    }


def test_a_family_differs_in_one_number():
    terms = {"big": variant(1.0), "nacl": variant(), "small": variant(0.01), "other": variant(k=5),
             "dice": {"cross_entropy": {"weight": 1.0}}, "unknown": {}}  # fmt: skip
    (found,) = families(terms)
    assert found.argument == "nacl.args.alpha"
    assert found.name == "nacl.alpha"
    assert found.values == {"small": 0.01, "nacl": 0.1, "big": 1.0}
    assert list(found.values) == ["small", "nacl", "big"]


def test_two_values_are_no_curve():
    assert families({"a": variant(1.0), "b": variant(2.0)}) == []
    assert families({"a": variant(1.0), "b": variant(1.0), "c": variant(2.0)}) == []
    assert families({}) == []


def test_a_recipe_may_belong_to_two_families():
    terms = {"m": variant(), "a1": variant(0.2), "a2": variant(0.3), "w1": variant(weight=2.0),
             "w2": variant(weight=3.0)}  # fmt: skip
    assert {f.name: len(f.values) for f in families(terms)} == {"nacl.alpha": 3, "nacl.weight": 3}


def test_the_papers_numbers():
    published = load_published()
    acdc, flare = published.tables
    assert acdc.rows["crac"] == (0.877, 1.72, 0.057, 0.058)
    assert flare.rows["nacl"] == (0.868, 5.12, 0.033, 0.031)
    assert acdc.belongs_to(["acdc_15", "hippocampus"]) == ["acdc_15"]
    assert all(column.difference for table in published.tables for column in table.columns)
    assert len(acdc.protocol) >= 5


def test_a_row_that_is_too_short(tmp_path):
    path = tmp_path / "published.yaml"
    path.write_text(
        "tables:\n  - {title: a, source: b, sets: [c], protocol: [],\n"
        "     columns: [{paper: DSC, ours: dsc, difference: none}], rows: {ce: [1, 2]}}\n"
        "claims: []\n"
    )
    with pytest.raises(ValueError, match=r"rows\.ce: expected 1 numbers, got 2"):
        load_published(path)
