"""Which labels of many have a diagram."""

from __future__ import annotations

import math

import pandas as pd

from segcal.reporting import report
from segcal.reporting.report import _mean_error, _worst_labels
from tests.conftest import close


def test_of_many_labels_the_worst_have_diagrams(monkeypatch):
    """In the order of the labels; those without an error come last."""
    monkeypatch.setattr(report, "MOST_CLASSES", 3)
    assert _worst_labels({"a": 0.1, "b": None, "c": 0.0}) == ["a", "b", "c"]
    errors = {"a": 0.1, "b": None, "c": math.nan, "d": 0.0, "e": 0.3, "f": 0.2}
    assert _worst_labels(errors) == ["a", "e", "f"]
    assert _worst_labels({"a": math.inf, **dict.fromkeys("bc", 0.5), "d": None}) == ["a", "b", "c"]


def test_mean_error_is_relative():
    close(_mean_error(pd.Series([1.0, 4.0]), pd.Series([2.0, 2.0])), 1.5 / 2)
    assert math.isnan(_mean_error(pd.Series(dtype=float), pd.Series(dtype=float)))
