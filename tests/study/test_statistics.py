"""Statistics of a study against scipy, numbers by hand, and simulations with a known answer."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from segcal.study.statistics import (
    Change,
    cliques,
    differences,
    duels,
    holm,
    means,
    nemenyi,
    non_inferior,
    p_value,
    pareto,
    patient_changes,
    ranks,
    resample,
)


def table(values, seeds=None, patients=None, metric="nll_all"):
    values = np.asarray(values, dtype=float)
    seeds = np.zeros(len(values), int) if seeds is None else seeds
    patients = [f"p{i:03}" for i in range(len(values))] if patients is None else patients
    index = pd.MultiIndex.from_arrays([seeds, patients], names=["seed", "patient"])
    return pd.DataFrame({metric: values}, index=index)


def one(changes, method, metric="nll_all"):
    return next(c for c in changes if (c.method, c.metric) == (method, metric))


def test_a_mean_counts_every_seed_alike():
    rows = table([1.0, 3.0, 10.0], seeds=[0, 0, 1])
    (found,) = means({"a": rows}, ["nll_all"])
    assert found.mean == pytest.approx((2 + 10) / 2)
    assert (found.patients, found.seeds) == (3, 2)
    assert found.deviation == pytest.approx(np.std([2, 10], ddof=1))


def test_a_difference_by_hand():
    base = table([1.0, 2.0, 3.0, 4.0], seeds=[0, 0, 1, 1], patients=["a", "b", "a", "b"])
    other = table([0.5, 1.5, 2.0, 3.0], seeds=[0, 0, 1, 1], patients=["a", "b", "a", "b"])
    (found,) = differences({"base": base, "other": other}, "base", ["nll_all"])
    assert found.base == pytest.approx(2.5)
    assert found.mean == pytest.approx(1.75)
    assert found.difference == pytest.approx(-0.75)
    assert found.relative == pytest.approx(-0.3)
    assert (found.patients, found.seeds) == (2, 2)
    assert (found.lower_seeds, found.higher_seeds) == (2, 0)
    # Within a seed all patients change alike, and two seeds are not drawn from: no spread at all.
    assert found.ci95 == pytest.approx((-0.75, -0.75))
    assert found.p == 0.0


def test_p_is_scipys_paired_test_over_patients():
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=12), rng.normal(0.4, 1, size=12)
    (found,) = differences({"a": table(a), "b": table(b)}, "a", ["nll_all"])
    assert found.p == pytest.approx(stats.ttest_rel(b, a).pvalue)
    assert found.p_holm == pytest.approx(found.p)
    (ranked,) = differences({"a": table(a), "b": table(b)}, "a", ["nll_all"], test="wilcoxon")
    assert ranked.p == pytest.approx(stats.wilcoxon(b, a).pvalue)


def test_a_patient_of_several_seeds_is_one_in_the_test():
    rng = np.random.default_rng(2)
    delta = rng.normal(size=(3, 8))
    seeds, patients = np.repeat([0, 1, 2], 8), [f"p{i}" for i in range(8)] * 3
    base = table(np.zeros(24), seeds, patients)
    (found,) = differences(
        {"base": base, "new": table(delta.ravel(), seeds, patients)}, "base", ["nll_all"]
    )
    assert found.p == pytest.approx(stats.ttest_1samp(delta.mean(axis=0), 0).pvalue)
    assert found.patients == 8
    assert found.p_seeds == pytest.approx(stats.ttest_1samp(delta.mean(axis=1), 0).pvalue)


def test_holm_by_hand():
    # Sorted .005 .01 .03 .04 times 4 3 2 1 = .02 .03 .06 .04, and never below one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_method_with_the_same_values_is_not_tested_twice():
    rng = np.random.default_rng(3)
    base, new, third = (table(rng.normal(size=9)) for _ in range(3))
    tables = {"base": base, "base + t": base, "new": new, "new + t": new, "third": third}
    found = differences(tables, "base", ["nll_all"])
    raw = [one(found, m).p for m in ("new", "third")]
    assert [one(found, m).p_holm for m in ("new", "third")] == pytest.approx(holm(raw))
    assert one(found, "new + t").p_holm == one(found, "new").p_holm
    assert one(found, "new + t").same_as == "new"
    assert one(found, "base + t").p_holm == 1.0
    assert one(found, "base + t").same_as == "base"


def test_the_interval_of_one_seed_is_that_of_scipys_bootstrap():
    rng = np.random.default_rng(4)
    values = rng.lognormal(size=40)
    (found,) = means({"a": table(values)}, ["nll_all"], resamples=20_000)
    expected = stats.bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(5)
    ).confidence_interval
    assert found.ci95 == pytest.approx((expected.low, expected.high), rel=0.02)


def test_seeds_are_drawn_from_three_on():
    values = np.repeat([0.0, 1.0, 5.0], 4)[:, None]
    seeds = np.repeat([0, 1, 2], 4)
    drawn = np.round(resample(values, seeds, 2000)[:, 0] * 3)
    # all ten multisets of three seeds, each patient of a seed alike
    sums = {a + b + c for a in (0, 1, 5) for b in (0, 1, 5) for c in (0, 1, 5)}
    assert set(drawn.tolist()) == {float(s) for s in sums}
    assert np.ptp(resample(values[:8], seeds[:8], 500)) == 0  # two seeds: as they are


def test_all_columns_see_the_same_draws():
    rng = np.random.default_rng(6)
    values = rng.normal(size=(12, 1))
    drawn = resample(np.hstack([values, 2 * values + 1]), np.repeat([0, 1, 2], 4), 100)
    assert drawn[:, 1] == pytest.approx(2 * drawn[:, 0] + 1)


@pytest.mark.parametrize("between", [0.0, 0.5])
def test_intervals_cover_the_truth(between):
    """Three seeds of 15 patients, the spread of the trainings none or half that of the patients."""
    rng = np.random.default_rng(7)
    runs, seeds, hit = 400, np.repeat([0, 1, 2], 15), 0
    for _ in range(runs):
        delta = 0.3 + rng.normal(size=45) + between * rng.normal(size=3)[seeds]
        low, high = np.quantile(resample(delta[:, None], seeds, 400), [0.025, 0.975])
        hit += low <= 0.3 <= high
    # Without spread of the trainings it is wide: their draws count the patients' chance again.
    # With it, three seeds show too little of it.
    assert (0.95 if between == 0 else 0.85) <= hit / runs


def test_under_the_null_one_study_in_twenty_finds_anything():
    rng = np.random.default_rng(8)
    runs, methods, found = 200, 6, 0
    for _ in range(runs):
        base = rng.normal(size=20)
        tables = {"base": table(base)}
        tables |= {f"m{i}": table(base + rng.normal(size=20)) for i in range(methods)}
        changes = differences(tables, "base", ["nll_all"], resamples=100)
        found += any(c.p_holm is not None and c.p_holm <= 0.05 for c in changes)
    # 5 % of 200 and two and a half standard deviations
    assert found / runs <= 0.05 + 2.5 * np.sqrt(0.05 * 0.95 / runs)


def test_a_direction_needs_the_test_and_the_interval():
    def change(ci95, p_holm, lower=3, higher=3):
        return Change(
            method="m", baseline="b", metric="dsc", patients=9, seeds=3, base=0.8, mean=0.8,
            difference=0.0, ci95=ci95, relative=0.0, relative_ci95=None, p=p_holm, p_holm=p_holm,
            p_seeds=None, lower_seeds=lower, higher_seeds=higher,
        )  # fmt: skip

    assert change((0.01, 0.02), 0.01).direction == 1
    assert change((-0.02, -0.01), 0.01).direction == -1
    assert change((-0.01, 0.02), 0.01).direction == 0
    assert change((0.01, 0.02), 0.06).direction == 0
    assert change((0.01, 0.02), 0.01, higher=2).direction == 0
    assert change((-0.02, -0.01), 0.01, lower=2).direction == 0
    assert change(None, None).direction == 0
    assert non_inferior(change((-0.0049, 0.02), None))
    assert not non_inferior(change((-0.0051, 0.02), None))
    assert non_inferior(change(None, None)) is None


def test_critical_differences_are_demsars():
    """Table 5 (a) of Demšar 2006: q at 5 % for 2, 5 and 10 methods."""
    for k, q in ((2, 1.960), (5, 2.728), (10, 3.164)):
        assert nemenyi(k, 14) == pytest.approx(q * np.sqrt(k * (k + 1) / (6 * 14)), rel=1e-3)


def test_ranks_are_friedmans():
    rng = np.random.default_rng(9)
    values = {m: rng.normal(shift, 1, size=11) for m, shift in (("a", 0), ("b", 1), ("c", 2))}
    found = ranks({m: table(v) for m, v in values.items()}, "nll_all", higher=False)
    by_hand = stats.rankdata(np.stack(list(values.values()), axis=1), axis=1).mean(axis=0)
    assert found.mean == pytest.approx(dict(zip(values, by_hand, strict=True)))
    assert found.p == pytest.approx(stats.friedmanchisquare(*values.values()).pvalue)
    assert found.blocks == 11
    up = ranks({m: table(v) for m, v in values.items()}, "nll_all", higher=True)
    assert up.mean["a"] == pytest.approx(4 - found.mean["a"])


def test_ranks_leave_out_patients_that_a_method_lacks():
    a, b = table([1.0, np.nan, 3.0, 1.0]), table([2.0, 1.0, 2.0, 2.0])
    found = ranks({"a": a, "b": b}, "nll_all", higher=False)
    assert found.blocks == 3
    assert found.mean == pytest.approx({"a": 4 / 3, "b": 5 / 3})
    assert found.p is None  # two methods: no Friedman test
    nothing = ranks({"a": a, "b": table([1.0], patients=["else"])}, "nll_all", higher=False)
    assert (nothing.blocks, nothing.mean, nothing.distance) == (0, {}, None)


def test_cliques():
    mean = {"a": 1.0, "b": 1.8, "c": 2.5, "d": 4.5}
    assert cliques(mean, 1.0) == [("a", "b"), ("b", "c")]
    assert cliques(mean, 5.0) == [("a", "b", "c", "d")]
    assert cliques(mean, 0.1) == []


def test_the_front_of_pareto():
    points = np.array([[0.8, 0.1], [0.9, 0.2], [0.7, 0.2], [0.9, 0.3], [np.nan, 0.0], [0.8, 0.1]])
    assert pareto(points, higher=(True, False)).tolist() == [True, True, False, False, False, True]


def test_duels_are_corrected_for_the_pairs():
    rng = np.random.default_rng(10)
    tables = {m: table(rng.normal(size=10)) for m in "abcd"}
    found = duels(tables, ["nll_all"], resamples=50)
    assert [(c.baseline, c.method) for c in found][:2] == [("a", "b"), ("a", "c")]
    assert [c.p_holm for c in found] == pytest.approx(holm([c.p for c in found]))
    assert len(found) == 6


def test_undefined_values_and_few_patients():
    a, b = table([1.0, np.nan, 2.0]), table([np.nan, 1.0, 1.0])
    (found,) = differences({"a": a, "b": b}, "a", ["nll_all"])
    assert (found.patients, found.difference, found.ci95, found.p) == (1, -1.0, None, None)
    assert found.direction == 0
    empty = differences({"a": a, "b": table([np.nan] * 3)}, "a", ["nll_all"])
    assert empty == []
    assert means({"b": table([np.nan] * 3)}, ["nll_all"]) == []
    zero, three = table([0.0, 0.0]), table([3.0, 3.0])
    (of_zero,) = differences({"a": zero, "b": three}, "a", ["nll_all"])
    assert np.isnan(of_zero.relative)
    assert of_zero.relative_ci95 is None
    assert p_value(np.array([0.0, 0.0])) == 1.0
    assert p_value(np.array([1.0, 2.0]), test="wilcoxon") is None


def test_patients_that_only_one_has_are_left_out():
    a = table([1.0, 2.0, 9.0], patients=["x", "y", "z"])
    b = table([2.0, 4.0, 0.0], patients=["x", "y", "w"])
    (found,) = differences({"a": a, "b": b}, "a", ["nll_all"])
    assert (found.patients, found.difference) == (2, 1.5)


def test_an_unknown_baseline():
    with pytest.raises(ValueError, match="baseline: expected one of a, got b"):
        differences({"a": table([1.0])}, "b", ["nll_all"])


def test_changes_of_patients_by_hand():
    """p0 falls to a quarter, p1 by a third, p2 rises; p3 has no error before, p4 no second one."""
    patients = [f"p{i}" for i in range(5)]
    base = table([0.4, 0.3, 0.1, 0.0, 0.2], patients=patients)
    rows = table([0.1, 0.2, 0.15, 0.1, np.nan], patients=patients).assign(
        dsc=[0.9, 0.5, 0.7, 0.1, 0.1]
    )
    found = patient_changes(rows, base, "nll_all")
    assert found.patients == 3
    assert found.median == pytest.approx(-1 / 3)
    assert (found.lower, found.halved) == (2, 1)
    assert found.worst_share == pytest.approx(0.2 / 0.45)
    assert found.with_dsc == pytest.approx(-1)


def test_a_patient_of_two_seeds_counts_once():
    seeds, patients = [0, 0, 1, 1, 2], ["a", "b", "a", "b", "a"]
    base = table([0.2, 0.2, 0.4, 0.2, 9.0], seeds=seeds, patients=patients)
    rows = table([0.1, 0.3, 0.2, 0.3, 0.0], seeds=[0, 0, 1, 1, 3], patients=patients)
    found = patient_changes(rows.assign(dsc=0.5), base, "nll_all")
    assert found.patients == 2
    assert found.median == pytest.approx((-0.5 + 0.5) / 2)  # a: .15 of .3; seeds 2 and 3 are alone
    assert (found.lower, found.halved) == (1, 1)
    assert np.isnan(found.with_dsc)


def test_no_patient_with_an_error():
    rows = table([0.1, np.nan]).assign(dsc=0.5)
    assert patient_changes(rows, table([0.0, 0.1]), "nll_all") is None
