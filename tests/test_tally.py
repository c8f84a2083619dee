"""Sums over the voxels of a case: equal to the metrics one by one, and they merge."""

from __future__ import annotations

import functools
import io
import itertools
import math
import operator
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.binning import (
    equal_mass_statistics,
    equal_width_index,
    equal_width_statistics,
    mean_gap,
)
from segcal.compiling import source_digest
from segcal.counting import (
    DISTANCES,
    HITS,
    PREDICTIONS,
    TOP,
    UNITS,
    cell_of,
    count_class,
    count_top,
    count_values,
    most_likely,
)
from segcal.metrics.aece import aece
from segcal.metrics.brier import brier, brier_parts
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.ece import ece, reliability
from segcal.metrics.isotonic_ece import isotonic_ece
from segcal.metrics.nll import nll
from segcal.metrics.table import CALIBRATION, calibration_of
from segcal.metrics.tace import tace
from segcal.reproduction.crac import tace_ref, tace_ref_of
from segcal.tally import FINEST, PIECE, Tally, Voxels, _widened, predicted_classes
from tests.conftest import close
from tests.oracles import calibration as oracle


def tally(p, y, **options):
    """Of every voxel of (K, n)."""
    return Voxels(p, y, **options).tally()["all"]


def numbers(tally, groups, exact=None):
    """Calibration by key, of exact groups of equal mass or of those of the cells."""
    rows = [row for row in CALIBRATION if row.is_of("all", pooled=exact is None)]
    return calibration_of(tally, rows, groups=groups, exact=exact)


def probabilities(k, n, *, scale=3.0, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(k, n)) * scale
    p = np.exp(logits - logits.max(0))
    return (p / p.sum(0)).astype(dtype), rng.integers(0, k, n)


def cases(n=5, k=3, size=4000):
    return [probabilities(k, size + 100 * i, scale=0.5 + i, seed=i) for i in range(n)]


def expected(p, y, bins=15, threshold=1e-3, **which):
    """Every number by the metric of its name."""
    p, y = p[None], y[None]
    which = {k: v[None] if k == "mask" else v for k, v in which.items()}
    diagram = reliability(p, y, bins=bins, **which)
    parts = brier_parts(p, y, bins=bins, **which)
    return {
        "accuracy": diagram.hit_sum.sum() / diagram.count.sum(),
        "ece": ece(p, y, bins=bins, **which),
        "over": diagram.overconfidence(),
        "under": diagram.underconfidence(),
        "aece": aece(p, y, bins=bins, **which),
        "ace": diagram.average_error(),
        "mce": diagram.maximum_error(),
        "cece": classwise_ece(p, y, bins=bins, **which),
        "tace": tace(p, y, bins=bins, threshold=threshold, **which),
        "nll": nll(p, y, **which),
        "brier": brier(p, y, **which),
        "brier_reliability": parts.reliability,
        "brier_resolution": parts.resolution,
        **selective(p[0], y[0], bins, **{k: v[0] if k == "mask" else v for k, v in which.items()}),
    }


def selective(p, y, bins, mask=None, ignore_index=None):
    """Risk over coverage of single voxels, whose confidences are tied within a cell."""
    keep = np.ones(y.shape, bool) if mask is None else mask & (y != ignore_index)
    confidence, wrong = p.max(0)[keep].astype(np.float64), (p.argmax(0) != y)[keep].astype(float)
    cells = bins * -(-FINEST // bins)
    area = oracle.aurc(np.ceil(confidence * cells - 1e-6), wrong)
    return {"aurc": area, "aurc_excess": area - oracle.aurc(-wrong, wrong)}


def agree(found, wanted):
    """All numbers as of single voxels; a voxel at the edge of a cell may be tied with either."""
    assert found.keys() == wanted.keys()
    for key, value in found.items():
        of_cells = key.startswith("aurc")
        close(
            value, wanted[key], rtol=1e-3 if of_cells else 1e-11, atol=1e-3 if of_cells else 1e-12
        )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("scale", [1, 6, 40])  # 40: most values saturate or vanish
@pytest.mark.parametrize(("bins", "threshold"), [(15, 1e-3), (10, 0.01), (7, 0.3), (1, 0.0)])
def test_equals_the_metrics(dtype, scale, bins, threshold):
    p, y = probabilities(4, 3000, scale=scale, dtype=dtype)
    p[:, :200] = np.array([1, 0, 0, 0])[:, None]  # exact zeros and ones
    p[:, 200:300] = 0.25  # ties
    fg, half = y != 0, np.arange(3000) % 2 == 0
    labels = np.where(np.arange(3000) % 7 == 0, 9, y)
    voxels = Voxels(
        p,
        labels,
        {"fg": fg, "half": half, "all": None},
        ignore_index=9,
        bins=bins,
        threshold=threshold,
    )
    tallies = voxels.tally()
    groups = voxels.equal_mass_groups(tallies, bins)
    for scope, mask in (("fg", fg), ("half", half), ("all", np.ones_like(fg))):
        wanted = expected(p, labels, bins, threshold, mask=mask, ignore_index=9)
        found = numbers(tallies[scope], bins, groups[scope])
        agree(found, wanted)
        reference = tace_ref(p[None], labels[None], bins=bins, threshold=threshold,
                             mask=mask[None], ignore_index=9)  # fmt: skip
        close(tace_ref_of(tallies[scope]), reference, rtol=1e-11)
    everything = reliability(p[None], labels[None], bins=bins, ignore_index=9)
    assert (tallies["all"].top.count == everything.count).all()
    assert (tallies["all"].top.hit_sum == everything.hit_sum).all()


@settings(max_examples=80, deadline=None)
@given(
    values=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=80),
    groups=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_groups_are_exact_and_the_bound_of_the_histogram_holds(values, groups, seed):
    p = np.array(values, np.float32)[None]
    hits = np.random.default_rng(seed).random(len(values)) < 0.5
    voxels = Voxels(p, hits.astype(int), threshold=0.0)
    tallies = voxels.tally()
    _, _, of_one = voxels.equal_mass_groups(tallies, groups)["all"]
    kept = torch.from_numpy(p[0] > 0)
    exact = equal_mass_statistics(
        torch.from_numpy(p[0]).double()[kept], torch.from_numpy(hits)[kept], groups
    )
    close(of_one.count, exact.count, rtol=0)
    close(of_one.hit_sum, exact.hit_sum, atol=1e-9)
    close(of_one.confidence_sum, exact.confidence_sum, atol=1e-9)
    histogram = tallies["all"].class_mass[1]
    difference = abs(histogram.groups(groups).expected_error() - exact.expected_error())
    assert not difference > histogram.error_bound(groups) + 1e-9  # NaN: nothing above 0


def test_ties_are_shared_exactly_and_add_nothing_to_the_bound():
    """Where all are tied every cut lies in their cell, and each counted as if it could be wrong."""
    rng = np.random.default_rng(0)
    y = (rng.random(1001) < 0.5).astype(int)
    for confidence in (1.0, 0.9, 5 / 6):
        p = np.stack([np.full(1001, 1 - confidence), np.full(1001, confidence)])
        parts = [tally(p[:, i::2], y[i::2]) for i in range(2)]
        found = numbers(parts[0] + parts[1], 15)
        assert found["aece_bound"] == 0
        close(found["aece"], aece(p[None], y[None]))
    mixed = np.where(rng.random(1001) < 0.5, 0.91, 0.91 + 1e-6)  # of one cell, and not tied
    found = numbers(tally(np.stack([1 - mixed, mixed]), y), 15)
    assert 0 < found["aece_bound"] <= 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0.6, 0.6000001, 0.600001, 0.7, 0.9999999, 1.0]), min_size=1),
    st.integers(0, 99),
    st.integers(1, 20),
)
def test_the_bound_of_the_top_label_holds(values, seed, groups):
    top = np.array(values)
    p = np.stack([1 - top, top])
    y = np.random.default_rng(seed).integers(0, 2, len(top))
    voxels = Voxels(p, y)
    tallies = voxels.tally()
    exact = voxels.equal_mass_groups(tallies, groups, [TOP])["all"][0]
    histogram = tallies["all"].top_mass
    bound = histogram.error_bound(groups)
    assert bound <= 1
    difference = histogram.groups(groups).expected_error() - exact.expected_error()
    assert abs(difference) <= bound + 1e-9


def test_values_on_the_edges_of_bins_and_cells():
    edges = np.arange(16) / 15
    p1 = np.concatenate([edges, np.nextafter(edges, 2), np.nextafter(edges[1:], -1), edges + 5e-8])
    p1 = np.clip(p1, 0, 1)
    y = (np.arange(len(p1)) % 3 == 0).astype(int)
    for dtype in (np.float32, np.float64):
        p = np.stack([1 - p1, p1]).astype(dtype)
        one = tally(p, y)
        for k in range(2):
            wanted = equal_width_statistics(torch.from_numpy(p[k]), torch.from_numpy(y == k), 15)
            assert (one.classes[k].count == wanted.count).all()


@pytest.mark.parametrize("bins", [15, 35, 50, 100, 333, 1000])
def test_float32_and_float64_fall_into_the_same_bins(bins):
    """Numbers on edges, beside them and anywhere, and on the threshold of TACE."""
    rng = np.random.default_rng(bins)
    edges = np.arange(bins + 1) / bins
    near = np.spacing(edges.astype(np.float32)).astype(float) * rng.uniform(-4, 4, bins + 1)
    p = np.concatenate([edges, np.clip(edges + near, 0, 1), rng.random(5000), np.full(500, 1e-3)])
    p = np.stack([1 - p, p])
    y = (rng.random(p.shape[1]) < p[1] ** 2).astype(int)
    wide, narrow = (p.astype(dtype) for dtype in (np.float64, np.float32))
    tallies = [tally(x, y, bins=bins) for x in (wide, narrow)]
    for a, b in zip(*(t.classes + t.kept for t in tallies), strict=True):
        assert (a.count == b.count).all()
        assert (a.hit_sum == b.hit_sum).all()
    for x, found in zip((wide, narrow), tallies, strict=True):
        for k in range(2):
            own = equal_width_index(torch.from_numpy(x[k]), bins)
            assert (np.bincount(own, minlength=bins) == found.classes[k].count).all()
    assert equal_width_index(torch.from_numpy(edges[1:]), bins).tolist() == list(range(bins))
    exact = [
        [tace(x[None], y[None]), *Voxels(x, y).equal_mass_groups({"all": t}, 15)["all"][1:]]
        for x, t in zip((wide, narrow), tallies, strict=True)
    ]
    for value, *groups in exact:
        close(mean_gap(groups), value)
        close(value, exact[0][0], rtol=1e-5)


def test_half_precision_sums():
    """200,000 confidences of .75: their sum is beyond float16, their error is 0."""
    p = np.full((1, 200_000), 0.75, np.float16)
    y = (np.arange(200_000) < 150_000).astype(int)
    found = numbers(tally(np.concatenate([1 - p, p]), y, bins=10), 10)
    assert (found["ece"], found["cece"], found["accuracy"]) == (0, 0, 0.75)


def test_no_batch_is_taken_for_logits():
    """Whatever comes with them, values mean the same, and sums do not depend on the batch."""
    y = np.array([1, 0, 1])
    for values in ([-1.0, 0.0, 1.0], [-1.0]):
        with pytest.raises(ValueError, match="softmax"):
            tally(np.array([values]), y[: len(values)])
    for p in (np.array([0.0, 1.0]), 1 / (1 + np.exp([1.0, 0.0, -1.0]))):
        label = y[-len(p) :]
        whole = tally(p[None], label, bins=10)
        parts = [tally(p[None, i : i + 1], label[i : i + 1], bins=10) for i in range(len(p))]
        assert (functools.reduce(operator.add, parts).cells == whole.cells).all()
    close(whole.classes[1].expected_error(), 0.5)  # (.731 + .5 + .269) / 3


def test_more_distinct_values_than_are_told_apart(monkeypatch):
    p, y = probabilities(3, 5000, dtype=np.float32)
    voxels = Voxels(p, y)
    tallies = voxels.tally()
    told_apart = voxels.equal_mass_groups(tallies, 15)["all"]
    monkeypatch.setattr("segcal.tally.REFINED", 0)
    for a, b in zip(told_apart, voxels.equal_mass_groups(tallies, 15)["all"], strict=True):
        close(a.hit_sum, b.hit_sum)
        close(a.confidence_sum, b.confidence_sum)


def test_one_channel_is_that_of_label_one():
    p, y = probabilities(2, 4000, dtype=np.float32)
    both, one = Voxels(np.stack([1 - p[1], p[1]]), y), Voxels(p[1:], y)
    a, b = both.tally(), one.tally()
    assert (a["all"].cells == b["all"].cells).all()
    for x, z in zip(both.equal_mass_groups(a, 15)["all"], one.equal_mass_groups(b, 15)["all"],
                    strict=True):  # fmt: skip
        assert (x.hit_sum == z.hit_sum).all()


def test_threads_do_not_change_a_bit():
    p, y = probabilities(3, 3 * PIECE + 5, dtype=np.float32)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            voxels = Voxels(p, y)
            tallies = voxels.tally()
            groups = voxels.equal_mass_groups(tallies, 15)
            found.append(numbers(tallies["all"], 15, groups["all"]))
            assert (predicted_classes(p) == p.argmax(0)).all()
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


SMALL = st.sampled_from([1, 3, 64])
CONFIDENCES = st.lists(
    st.one_of(
        st.floats(0, 1, width=32),
        st.floats(0, 2**-16, width=32),
        st.integers(0, 30).map(lambda i: i / 30),  # edges of 15 bins
        st.sampled_from([1e-3, 0.0010000001, -1e-4, 1.0005]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=30, deadline=None)
@given(values=CONFIDENCES, seed=st.integers(0, 99), piece=SMALL, threads=st.integers(1, 3))
def test_order_pieces_and_threads_do_not_matter(values, seed, piece, threads):
    rng = np.random.default_rng(seed)
    n = len(values)
    p = np.stack([values, rng.permutation(values), rng.random(n)]).astype(np.float32)
    y, fg = rng.integers(0, 3, n), rng.random(n) < 0.5
    order, before = rng.permutation(n), torch.get_num_threads()

    def found(p, y, fg):
        voxels = Voxels(p, y, {"fg": fg, "all": None})
        tallies = voxels.tally()
        return tallies, voxels.equal_mass_groups(tallies, 4)

    wanted, wanted_groups = found(p, y, fg)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segcal.tally.PIECE", piece)
        try:
            torch.set_num_threads(1)
            one_by_one, _ = found(p, y, fg)
            torch.set_num_threads(threads)
            together, _ = found(p, y, fg)
            moved, moved_groups = found(p[:, order], y[order], fg[order])
        finally:
            torch.set_num_threads(before)
    for scope in ("fg", "all"):
        assert together[scope].nll_sum == one_by_one[scope].nll_sum
        assert together[scope].brier_sum == one_by_one[scope].brier_sum
        assert (together[scope].cells == wanted[scope].cells).all()
        assert (moved[scope].cells == wanted[scope].cells).all()
        close(moved[scope].nll_sum, wanted[scope].nll_sum, rtol=1e-12)
        close(moved[scope].brier_sum, wanted[scope].brier_sum, rtol=1e-12, atol=1e-14)
        for a, b in zip(moved_groups[scope], wanted_groups[scope], strict=True):
            assert all((getattr(a, k) == getattr(b, k)).all() for k in vars(a))


@settings(max_examples=30, deadline=None)
@given(values=CONFIDENCES, seed=st.integers(0, 99), cut=st.integers(0, 60))
def test_tallies_of_parts_add_up_in_any_way(values, seed, cut):
    rng = np.random.default_rng(seed)
    p = np.stack([values, rng.permutation(values)]).astype(np.float32)
    y = rng.integers(0, 2, len(values))
    parts = [tally(p[:, i], y[i]) for i in (slice(cut), slice(cut, cut + 5), slice(cut + 5, None))]
    whole = tally(p, y)
    for a, b, c in itertools.permutations(parts):
        assert (((a + b) + c).cells == whole.cells).all()
        assert ((a + (b + c)).cells == whole.cells).all()
        close((a + b + c).nll_sum, whole.nll_sum, rtol=1e-12)
        close((a + b + c).brier_sum, whole.brier_sum, rtol=1e-12, atol=1e-14)


@settings(max_examples=60, deadline=None)
@given(values=CONFIDENCES, bins=st.sampled_from([1, 7, 15]), seed=st.integers(0, 99))
def test_cells_hold_what_they_are_said_to(values, bins, seed):
    """By Python's numbers, a prediction at a time."""
    y = np.random.default_rng(seed).integers(0, 2, len(values))
    p = np.stack([values, values[::-1]]).astype(np.float32)
    found = tally(p, y, bins=bins)
    fine = bins * -(-FINEST // bins)
    step, edge = UNITS // fine, int(cell_of(1e-3, bins, fine // bins))
    wanted = np.zeros((3, fine + 1, 3), dtype=object)
    for two, label in zip(p.T.astype(float).tolist(), y, strict=True):
        top = two.index(max(two))
        for channel, v, hit in ((TOP, two[top], top == label), *((1 + k, two[k], k == label)
                                                                 for k in range(2))):  # fmt: skip
            cell = int(cell_of(v, bins, fine // bins))
            assert cell // (fine // bins) == equal_width_index(torch.tensor([v]), bins).item()
            slot = fine if channel != TOP and cell == edge and v > np.float32(1e-3) else cell
            wanted[channel, slot, PREDICTIONS] += 1
            wanted[channel, slot, HITS] += bool(hit)
            wanted[channel, slot, DISTANCES] += int(round(Fraction(v) * UNITS) - cell * step)
    assert (found.cells == wanted).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(2**-17, 1, width=32), min_size=1, max_size=60))
def test_sums_of_confidences_are_exact(values):
    found = tally(np.array([values, np.zeros(len(values))], np.float32), np.zeros(len(values), int))
    cells = found.cells[TOP].astype(object)
    index = np.arange(found.fine + 1)
    units = (cells[:, PREDICTIONS] * index * (UNITS // found.fine) + cells[:, DISTANCES]).sum()
    assert Fraction(int(units), UNITS) == sum(map(Fraction, values))


def test_tallies_of_other_voxels_are_refused():
    """Lists of values are as long as the tallies say; nothing is written behind their ends."""
    p, y = np.full((3, 5000), 1 / 3, np.float32), np.zeros(5000, int)
    few = Voxels(p[:, :50], y[:50]).tally()
    with pytest.raises(ValueError, match="tallies: expected all"):
        Voxels(p, y).equal_mass_groups(few, 15)


@pytest.mark.parametrize("loop", [count_class, count_top, count_values, most_likely])
def test_what_is_kept_of_a_loop_depends_on_all_its_sources(loop):
    assert source_digest("segcal.counting") in loop._cache._cache_file._source_stamp


def test_most_likely_classes():
    p = np.array([[0.3, 0.5, 0.1], [0.3, 0.2, 0.1], [0.4, 0.3, 0.8]], np.float16)
    p[:, 0] = 1 / 3
    assert predicted_classes(p).tolist() == [0, 0, 2]
    assert predicted_classes(p).dtype == np.uint8
    many = np.zeros((300, 2), np.float32)
    many[299, 0] = 1
    assert predicted_classes(many).tolist() == [299, 0]


def test_pieces_are_those_of_numpy():
    """Float16 of any layout, byte order and access; the last piece is shorter than the others."""
    p = np.random.default_rng(0).random((3, 2 * PIECE + 5)).astype(np.float16)
    p[:, :3] = [[0, 1, np.float16(6e-8)]] * 3
    locked = p.copy()
    locked.setflags(write=False)
    for given_as in (p, np.asfortranarray(p), p.astype(">f2"), locked, p[::-1, ::-1]):
        pieces = [of[:, at : at + PIECE].copy() for of, at in _widened(given_as, range(3))]
        assert np.array_equal(np.concatenate(pieces, 1), given_as.astype(np.float32))
        assert np.array_equal(predicted_classes(given_as), given_as.argmax(0))


def test_the_sum_over_cases_is_the_whole():
    whole_p = np.concatenate([p for p, _ in cases()], axis=1)
    whole_y = np.concatenate([y for _, y in cases()])
    parts = [tally(p, y) for p, y in cases()]
    pooled = functools.reduce(operator.add, parts)
    found, wanted = numbers(pooled, 15), expected(whole_p, whole_y)
    apart = {"aece", "tace", "aece_bound", "ece_isotonic"}
    agree(
        {k: v for k, v in found.items() if k not in apart},
        {k: v for k, v in wanted.items() if k not in apart},
    )
    assert abs(found["aece"] - wanted["aece"]) <= found["aece_bound"] + 1e-12
    assert found["aece_bound"] < 0.01
    close(found["tace"], wanted["tace"], atol=2e-4)
    close(found["ece_isotonic"], isotonic_ece(whole_p[None], whole_y[None]), atol=1e-4)
    backwards = functools.reduce(operator.add, reversed(parts))
    assert (backwards.cells == pooled.cells).all()


def test_through_files():
    pooled = functools.reduce(operator.add, (tally(p, y) for p, y in cases()))
    buffer = io.BytesIO()
    np.savez(buffer, **pooled.to_arrays())
    buffer.seek(0)
    with np.load(buffer, allow_pickle=False) as archive:
        arrays = dict(archive)
    again = Tally.from_arrays(arrays)
    assert numbers(again, 15) == numbers(pooled, 15)
    assert (again + pooled).voxels == 2 * pooled.voxels
    with pytest.raises(ValueError, match="cells missing"):
        Tally.from_arrays({k: v for k, v in arrays.items() if k != "cells"})
    with pytest.raises(ValueError, match="do not fit"):
        Tally.from_arrays({**arrays, "index": arrays["index"] + 10**9})


def test_what_cannot_be_added():
    (p, y), *_ = cases()
    with pytest.raises(ValueError, match=r"\(3, 15, 0\.001\) and \(3, 15, 0\.01\)"):
        tally(p, y) + tally(p, y, threshold=0.01)
    with pytest.raises(ValueError, match="cannot add"):
        tally(p, y) + tally(p, y, bins=10)


def test_nothing_is_nan_and_does_not_change_a_sum():
    (p, y), *_ = cases()
    voxels = Voxels(p, np.full_like(y, 9), {"all": None, "none": y < 0}, ignore_index=9)
    tallies = voxels.tally()
    groups = voxels.equal_mass_groups(tallies, 15)
    for scope in ("all", "none"):
        assert all(np.isnan(v) for v in numbers(tallies[scope], 15, groups[scope]).values())
        assert np.isnan(tace_ref_of(tallies[scope]))
    one = tally(p, y)
    assert numbers(one + tallies["all"], 15) == numbers(one, 15)
    empty = tally(np.zeros((3, 0)), np.zeros(0, int))
    assert empty.voxels == 0


@pytest.mark.parametrize(
    ("p", "y", "options", "message"),
    [
        (np.full((2, 4), 3.0), np.zeros(4, int), {}, "softmax"),
        (np.full((2, 4), np.nan), np.zeros(4, int), {}, "softmax"),
        (np.full((2, 4), 0.5), np.full(4, 2), {}, "labels: expected 0 to 1"),
        (np.full((2, 4), 0.5), np.full(4, -1), {}, "labels: expected 0 to 1"),
        (np.full((2, 4), 0.5), np.zeros(3, int), {}, r"probs float64 \(2, 4\) and labels"),
        (np.full((2, 4), 1), np.zeros(4, int), {}, "expected floating"),
        (np.full((2, 4), 0.5), np.zeros(4), {}, "integer"),
        (np.full((2, 4), 0.5), np.zeros(4, int), {"a": np.ones(4)}, "scope a: expected bool"),
        (np.full((2, 4), 0.5), np.zeros(4, int), {}, None),
        (np.full((2, 4), 0.5), np.zeros(4, int), dict.fromkeys("abcdefghi"), "at most 7"),
    ],
)
def test_refuses(p, y, options, message):
    if message is None:
        for wrong in ({"bins": 0}, {"threshold": 1.5}):
            with pytest.raises(ValueError, match="bins, threshold"):
                Voxels(p, y, **wrong)
        return
    with pytest.raises(ValueError, match=message):
        Voxels(p, y, options or None).tally()


@pytest.mark.slow
def test_thirty_million_voxels_against_an_oracle():
    """Perfectly calibrated: float32 counters would say 0.0137."""
    rng = np.random.default_rng(0)
    n = 30_000_000
    confidence = rng.uniform(0.5, 1.0, n)
    labels = (rng.random(n) >= confidence).astype(np.int64)
    narrow = confidence.astype(np.float32).astype(np.float64)  # which decides on the bin
    index = np.clip(np.ceil(narrow * 15 - 1e-6).astype(np.int64) - 1, 0, 14)
    expected = sum(
        abs(float(confidence[index == m].sum() - (labels[index == m] == 0).sum()))
        for m in range(15)
    )
    for dtype in (np.float64, np.float32):
        pieces = range(0, n, 10**7)
        pooled = functools.reduce(
            operator.add,
            (
                tally(np.stack([c, 1 - c]), labels[i : i + 10**7])
                for i in pieces
                for c in [confidence[i : i + 10**7].astype(dtype)]
            ),
        )
        found = numbers(pooled, 15)
        if dtype is np.float64:
            close(found["ece"], expected / n, rtol=0, atol=1e-12)
        assert found["ece"] < 3e-4
        assert found["aece"] < 4e-4


def test_as_many_zones_as_there_can_be():
    rng = np.random.default_rng(0)
    p, y = probabilities(3, 20_000, dtype=np.float32)
    masks = {str(i): rng.random(20_000) < 0.5 for i in range(7)}  # 127 combinations and none
    voxels = Voxels(p, y, masks)
    tallies = voxels.tally()
    groups = voxels.equal_mass_groups(tallies, 15)
    for name, mask in masks.items():
        found, wanted = numbers(tallies[name], 15, groups[name]), expected(p, y, mask=mask)
        agree(found, wanted)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("k", "early"), [(1, (1,)), (1, (0,)), (2, ()), (4, (2, 0)), (4, range(4))]
)
def test_classes_counted_early_and_scopes_widened_later(dtype, k, early, monkeypatch):
    """Voxels leave their zones, also for zones that nobody was in, and the sums are the same."""
    monkeypatch.setattr("segcal.tally.PIECE", 500)
    p, y = probabilities(max(k, 2), 4000, dtype=dtype)
    p, labels = p[-k:], np.where(np.arange(4000) % 9 == 0, 7, y)
    rng = np.random.default_rng(k)
    some, more, last = (rng.random(4000) < share for share in (0.1, 0.3, 0.6))
    few = np.arange(4000) < 600
    final = {"some": some | more | last, "few": few, "none": some & last}
    at_once = Voxels(p, labels, final, ignore_index=7)
    wanted = at_once.tally()
    later = Voxels(p, labels, {"some": some, "few": few, "none": few & ~few}, ignore_index=7)
    for i, c in enumerate(early):
        later.count_class(c)
        if i == 0:
            later.widen("some", more)
    later.widen("some", more | last)
    later.widen("none", some & last)
    found = later.tally()
    groups, same = (v.equal_mass_groups(of, 15) for v, of in ((later, found), (at_once, wanted)))
    for scope, one in wanted.items():
        assert (found[scope].cells == one.cells).all()
        assert (found[scope].extremes == one.extremes).all()
        assert (found[scope].nll_sum, found[scope].brier_sum) == (one.nll_sum, one.brier_sum)
        for a, b in zip(groups[scope], same[scope], strict=True):
            assert (a.confidence_sum == b.confidence_sum).all()
            assert (a.hit_sum == b.hit_sum).all()


def test_a_wrong_value_is_refused_early_too():
    p, y = probabilities(3, 50, dtype=np.float32)
    p[1, 7] = np.nan
    voxels = Voxels(p, y)
    voxels.count_class(0)
    with pytest.raises(ValueError, match="softmax"):
        voxels.count_class(1)


@pytest.mark.parametrize("spread", [1e-4, 1.0])
def test_the_second_pass_looks_at_many_and_at_few(spread):
    """Where confidences lie close together, many are in the cells that a cut goes through."""
    rng = np.random.default_rng(0)
    p = (1 - spread * rng.random(200_000) / 2).astype(np.float32)
    y = (rng.random(len(p)) > p).astype(int)
    both = np.stack([p, 1 - p])
    voxels = Voxels(both, y)
    groups = voxels.equal_mass_groups(voxels.tally(), 15)["all"]
    exact = equal_mass_statistics(torch.from_numpy(p).double(), torch.from_numpy(y == 0), 15)
    for of in groups[:2]:  # the top label is class 0
        close(of.confidence_sum, exact.confidence_sum, rtol=1e-12)
        close(of.hit_sum, exact.hit_sum, atol=1e-6)


@pytest.mark.parametrize("least", [0.0, 1e-30, 1e-5, 0.99])
def test_the_likelihood_is_the_sum_of_the_logarithms(least):
    """Products of many likelihoods stay within the range of normal numbers."""
    rng = np.random.default_rng(0)
    own = np.where(rng.random(30_000) < 0.5, least, 1 - 1e-9 * rng.random(30_000))
    p, y = np.stack([own, 1 - own]), np.zeros(30_000, int)
    exact = -math.fsum(math.log(max(value, 1e-12)) for value in own)
    close(tally(p, y).nll_sum, exact, rtol=1e-12)


def test_labels_of_wide_types():
    p, _ = probabilities(3, 3, dtype=np.float32)
    for wrong in (2**32 + 1, -(2**32), 3):
        with pytest.raises(ValueError, match="labels: expected 0 to 2"):
            tally(p, np.array([0, 1, wrong]))
    found = tally(p, np.array([0, 1, 2], np.uint64))
    assert found.cells.tolist() == tally(p, np.array([0, 1, 2], np.int8)).cells.tolist()


def test_brain_floats():
    p, y = probabilities(3, 500, dtype=np.float32)
    half = torch.from_numpy(p).bfloat16()
    close(numbers(tally(half, y), 15)["ece"], ece(half[None], y[None]))


def test_cells_of_many_classes_are_shared_by_the_threads():
    """The cells of 60 classes take far more than these probabilities, and there is one set."""
    p, y = probabilities(60, 2 * PIECE + 5, dtype=np.float32)
    before = torch.get_num_threads()
    found, peaks = [], []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            voxels = Voxels(p, y)
            tracemalloc.start()
            found.append(voxels.tally()["all"])
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    finally:
        torch.set_num_threads(before)
    assert peaks[1] < 1.5 * peaks[0]
    assert (found[0].cells == found[1].cells).all()
    assert found[0].nll_sum == found[1].nll_sum


@pytest.mark.parametrize("k", [1, 2, 5, 254, 255, 256])
def test_more_threads_than_channels_and_labels_of_any_type(k):
    """Threads that share a channel count into cells of their own; every type means the same."""
    p, y = probabilities(max(2, k), 700, dtype=np.float32)
    p = p[1:] if k == 1 else p
    before, found = torch.get_num_threads(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("segcal.tally.PIECE", 50)
        patch.setattr("segcal.tally.FINEST", 64)  # so that cells are smaller than probabilities
        try:
            for threads, kind in ((1, np.int64), (3, np.uint8), (8, np.int16), (8, np.uint32)):
                torch.set_num_threads(threads)
                found.append(tally(p, y.astype(kind)))
        finally:
            torch.set_num_threads(before)
    for other in found[1:]:
        assert (other.cells == found[0].cells).all()
        assert (other.extremes == found[0].extremes).all()
        assert other.nll_sum == found[0].nll_sum
    assert found[0].voxels == 700
