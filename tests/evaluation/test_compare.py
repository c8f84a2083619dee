"""Intervals over cases and paired differences between methods."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from segcal.evaluation.compare import (
    as_records,
    case_table,
    compare,
    interval,
    paired,
    shared_means,
)
from segcal.reporting.comparison import plot_comparison
from segcal.reporting.picture import draw
from tests.conftest import close


def table(values, **columns):
    names = [f"case{i}" for i in range(len(values))]
    return pd.DataFrame({"ece_all": values, **columns}, index=pd.Index(names, name="case"))


def test_interval():
    values = np.random.default_rng(0).normal(3, 2, 60)
    low, high = interval(values, 4000)
    error = values.std(ddof=1) / np.sqrt(60)
    close([low, high], [values.mean() - 1.96 * error, values.mean() + 1.96 * error], atol=0.12)
    assert interval(values, 4000) == (low, high)  # the same every time
    assert interval(values[:1], 100) is None
    assert interval(values, 0) is None
    same = interval(np.full(5, 0.25), 100)
    assert same == (0.25, 0.25)


@pytest.mark.parametrize("resamples", [1, 7, 1000, 2500])
@pytest.mark.parametrize("cases", [2, 3, 40])
def test_interval_is_that_of_scipy(cases, resamples):
    values = np.random.default_rng(cases).normal(0.8, 0.1, cases)
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = stats.bootstrap(  # which warns of the standard error of a single resample
            (values,), np.mean, n_resamples=resamples, confidence_level=0.95,
            method="percentile", batch=1000, rng=np.random.default_rng(3),
        ).confidence_interval  # fmt: skip
    close(interval(values, resamples, seed=3), found, rtol=1e-14)


def test_coverage_of_the_interval():
    """Of intervals of samples whose mean is 0, about 95 % hold 0."""
    rng = np.random.default_rng(1)
    found = [interval(rng.normal(size=40), 400, seed=i) for i in range(200)]
    held = np.mean([low <= 0 <= high for low, high in found])
    assert 0.88 <= held <= 0.99


def test_differences_are_paired_by_case():
    rng = np.random.default_rng(0)
    base = rng.uniform(0, 1, 30)
    a = table(base, **{"dsc": 0.5 + 0 * base, "dsc/1": base, "voxels_all": base})
    b = table(base - 0.01 + 0.001 * rng.normal(size=30), dsc=0.5 + 0 * base)
    b = b.sample(frac=1, random_state=0)  # another order
    ece, dsc = compare({"stock": a, "ours": b})
    assert (ece.metric, ece.method, ece.baseline, ece.n) == ("ece_all", "ours", "stock", 30)
    close(ece.mean, (b["ece_all"].sort_index() - a["ece_all"].sort_index()).mean())
    assert ece.ci95[0] < -0.01 < ece.ci95[1] < 0
    close(ece.p_wilcoxon, stats.wilcoxon(paired(a, b, "ece_all")).pvalue)
    assert ece.p_wilcoxon < 1e-5
    assert (dsc.mean, dsc.p_wilcoxon) == (0.0, None)  # no difference anywhere
    json.dumps(as_records([ece, dsc]), allow_nan=False)


def test_cases_that_are_missing_or_undefined_do_not_count():
    a = table([0.1, 0.2, np.nan, 0.4, np.inf])
    b = table([0.2, 0.3, 0.4]).rename(index={"case0": "other"})
    (difference,) = compare({"a": a, "b": b})
    assert difference.n == 1
    close(difference.mean, 0.1)
    assert difference.ci95 is None
    assert difference.p_wilcoxon is None
    (nothing,) = compare({"a": a, "b": table([np.nan])})
    assert (nothing.n, nothing.mean) == (0, None)
    with pytest.raises(ValueError, match="at least two methods"):
        compare({"a": a})


def test_case_table_and_plot():
    a, b = table([0.1, 0.2], dsc=[0.8, 0.9]), table([0.2, 0.1], dsc=[0.7, 0.9])
    rows = case_table({"a": a, "b": b})
    assert rows.loc[("case1", "b"), "ece_all"] == 0.1
    assert list(rows.index.get_level_values("case")) == ["case0", "case0", "case1", "case1"]
    figure = plot_comparison(compare({"a": a, "b": b}))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["ECE all (better to the left)", "DSC (better to the right)"]
    assert figure.axes[0].get_yticklabels()[0].get_text() == "b"
    assert plot_comparison([]).axes


def test_shared_means_are_of_the_same_cases():
    """c has no ECE at all (label maps), b lacks the second case: DSC is over 3, ECE over 2."""
    a = table([0.1, 0.2, 0.6], dsc=[0.9, 0.8, 0.7])
    b = table([0.3, np.nan, 0.5], dsc=[0.6, 0.6, 0.9])
    c = table([np.nan] * 3, dsc=[0.5, 0.5, 0.5]).drop(columns="ece_all")
    found = {(m.metric, m.method): m for m in shared_means({"a": a, "b": b, "c": c}, ["dsc"])}
    assert {m.n for m in found.values()} == {3}
    close([found["dsc", k].mean for k in "abc"], [0.8, 0.7, 0.5])
    assert found["dsc", "a"].ci95 == interval(a["dsc"].to_numpy(), 2000)
    errors = shared_means({"a": a, "b": b, "c": c}, ["ece_all"], resamples=0)
    assert [(m.method, m.n, m.ci95) for m in errors] == [("a", 2, None), ("b", 2, None)]
    close([m.mean for m in errors], [0.35, 0.4])


def test_shared_means_without_a_shared_case():
    a, b = table([0.1, np.nan]), table([np.nan, 0.2])
    found = shared_means({"a": a, "b": b}, ["ece_all"])
    assert [(m.n, m.mean, m.ci95) for m in found] == [(0, None, None)] * 2


def test_names_of_methods_are_no_formulas():
    rows = table([0.1, 0.2, 0.3])
    figure = plot_comparison(compare({"$a": rows, r"$\x$": rows + 0.1}, resamples=0))
    draw(figure, "differences")
    assert r"$\x$" in [text.get_text() for text in figure.axes[0].get_yticklabels()]
