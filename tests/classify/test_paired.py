"""Losses against a baseline, paired over seeds."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from segcal.classify.paired import paired_changes
from tests.conftest import close


def table(**columns) -> pd.DataFrame:
    length = len(next(iter(columns.values())))
    return pd.DataFrame(columns, index=pd.Index(range(length), name="seed"), dtype=float)


def test_with_the_same_samples_it_is_the_paired_t_test():
    rng = np.random.default_rng(0)
    base, other = rng.normal(size=6), rng.normal(0.5, size=6)
    (found,) = paired_changes({"ce": table(ece=base), "ls": table(ece=other)}, "ce", ["ece"])
    expected = stats.ttest_rel(other, base)
    close([found.difference, found.p], [(other - base).mean(), expected.pvalue], rtol=1e-9)
    close(found.ci95, tuple(expected.confidence_interval(0.95)), rtol=1e-9)
    assert (found.seeds, found.higher) == (6, int((other > base).sum()))


def test_new_samples_for_every_seed_enlarge_the_variance():
    """1/J + n_test / n_train: with 5 seeds and a third, by 8/3, so that |t| falls by its root."""
    base, other = table(nll=[0.0] * 5), table(nll=[1.0, 2.0, 3.0, 4.0, 5.0])
    (found,) = paired_changes({"ce": base, "ls": other}, "ce", ["nll"], redrawn=1 / 3)
    t = 3 / (np.sqrt(2.5) * np.sqrt(1 / 5 + 1 / 3))
    close(found.p, 2 * stats.t.sf(t, 4), rtol=1e-9)
    half = stats.t.ppf(0.975, 4) * 3 / t
    close(found.ci95, (3 - half, 3 + half), rtol=1e-9)


def test_p_is_corrected_for_the_number_of_methods():
    tables = {"ce": table(ece=[0, 0, 0], nll=[0, 0, 0]),
              "ls": table(ece=[1, 2, 3], nll=[1, 1, 1]),
              "fl": table(ece=[1, 2, 9], nll=[-1, 0, 1])}  # fmt: skip
    ls, fl, sure, undecided = paired_changes(tables, "ce", ["ece", "nll"])
    close(ls.p_holm, 2 * ls.p)
    close(fl.p_holm, max(fl.p, ls.p_holm))
    assert (sure.p, sure.p_holm, sure.direction, sure.ci95) == (0.0, 0.0, 1, (1.0, 1.0))
    assert (undecided.p, undecided.direction) == (1.0, 0)
    assert (undecided.lower, undecided.higher) == (1, 1)


def test_seeds_that_one_of_them_lacks_are_left_out():
    base = table(ece=[0.1, 0.2, np.nan])
    other = table(ece=[0.2, 0.4, 0.1]).iloc[1:]
    (found,) = paired_changes({"ce": base, "ls": other}, "ce", ["ece", "ace"])
    assert (found.seeds, found.ci95, found.p, found.direction) == (1, None, None, 0)
    close(found.difference, 0.2)
    assert paired_changes({"ce": base, "ls": table(ece=[np.nan] * 3)}, "ce", ["ece"]) == []
    with pytest.raises(ValueError, match="baseline: expected one of ce, got 'bce'"):
        paired_changes({"ce": base}, "bce", ["ece"])


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-1, 1), min_size=2, max_size=8),
    shift=st.floats(-3, 3),
    redrawn=st.floats(0, 1),
)
def test_a_shift_of_both_changes_nothing(values, shift, redrawn):
    base = np.linspace(0, 1, len(values))
    one, two = (
        paired_changes(
            {"a": table(x=base + s), "b": table(x=base + values + s)}, "a", ["x"], redrawn=redrawn
        )[0]
        for s in (0.0, shift)
    )
    close(two.difference, one.difference, atol=1e-12)
    close(two.ci95, one.ci95, atol=1e-6)
    assert one.ci95[0] <= one.difference <= one.ci95[1]
