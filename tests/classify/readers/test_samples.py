"""Which samples train, validate and test; long tails."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.classify.readers.samples import Samples, long_tailed, split


def samples(targets, **kwargs) -> Samples:
    targets = np.asarray(targets)
    names = tuple("abcdefghij"[: targets.shape[1] if targets.ndim == 2 else targets.max() + 1])
    return Samples(np.arange(len(targets), dtype=np.float32)[:, None], targets, names, **kwargs)


def test_every_class_gives_its_share():
    given = samples(np.repeat([0, 1, 2], [10, 20, 5]))
    parts = split(given, validation=0.2, test=0.4, seed=3)
    table = [np.bincount(parts[given.targets == k], minlength=3).tolist() for k in range(3)]
    assert table == [[4, 2, 4], [8, 4, 8], [2, 1, 2]]  # rounded down: test 4, 8, 2; val 2, 4, 1


def test_what_the_data_set_says_stays_and_validation_is_taken_from_training():
    said = np.repeat([0, 2], [10, 4])
    parts = split(samples([0, 1] * 7, parts=said), validation=0.2, test=0.5, seed=0)
    assert (parts[10:] == 2).all()
    assert np.bincount(parts[:10]).tolist() == [8, 2]  # one of each class
    whole = np.repeat([0, 1, 2], [5, 4, 5])
    assert (
        split(samples([0, 1] * 7, parts=whole), validation=0.5, test=0.5, seed=0) == whole
    ).all()


def test_test_samples_alone_are_said():
    """Slices of cases that are for testing beside others of which nothing is said."""
    given = samples(
        np.zeros((12, 2), int), parts=np.repeat([-1, 2], [9, 3]), groups=np.repeat(range(4), 3)
    )
    parts = split(given, validation=0.4, test=0.3, seed=1)
    assert (parts[9:] == 2).all()
    assert sorted(np.bincount(parts[:9]).tolist()) == [3, 6]  # one group of three validates


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=6, max_size=12),
    seed=st.integers(0, 1000),
    multilabel=st.booleans(),
)
def test_groups_are_never_parted(sizes, seed, multilabel):
    groups = np.repeat(range(len(sizes)), sizes)
    targets = np.zeros((len(groups), 2), int) if multilabel else np.arange(len(groups)) % 2
    parts = split(samples(targets, groups=groups), validation=0.2, test=0.2, seed=seed)
    for group in range(len(sizes)):
        assert len(set(parts[groups == group])) == 1
    count = int(0.2 * len(sizes))
    assert [len(set(groups[parts == p])) for p in (1, 2)] == [count, count]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=6, max_size=12),
    folds=st.integers(2, 5),
    seed=st.integers(0, 1000),
)
def test_every_sample_tests_in_one_fold(sizes, folds, seed):
    """Also those that the data set would only test; groups stay together."""
    groups = np.repeat(range(len(sizes)), sizes)
    said = np.where(groups < 2, 2, -1)
    given = samples(np.arange(len(groups)) % 2, groups=groups, parts=said)
    parts = np.stack(
        [split(given, validation=0.2, test=0.5, seed=seed, fold=(k, folds)) for k in range(folds)]
    )
    assert ((parts == 2).sum(0) == 1).all()
    for row in parts:
        assert all(len(set(row[groups == group])) == 1 for group in range(len(sizes)))
        assert len(set(groups[row == 1])) == int(0.2 * len(sizes))
        assert abs(len(set(groups[row == 2])) - len(sizes) / folds) < 1


def test_a_group_that_the_data_set_parts_is_refused():
    groups, parts = np.repeat(np.arange(10), 2), np.full(20, -1)
    parts[:3] = 2  # one patient whole, of another one sample
    samples = Samples(np.zeros((20, 1)), np.arange(20) % 2, ("a", "b"), parts, groups)
    with pytest.raises(ValueError, match=r"1 groups \(patients\) have samples in several parts"):
        split(samples, validation=0.2, test=0.2, seed=0)


def test_split_depends_on_its_seed_alone():
    given = samples(np.arange(60) % 3)
    first, again, other = (split(given, validation=0.2, test=0.2, seed=seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


@pytest.mark.parametrize(
    ("shares", "parts", "message"),
    [
        ((0.2, 0.5), None, r"validation of 4; raise validation \(0\.2\)"),
        ((0.2, 0.2), None, r"validation, test of 4; raise test \(0\.2\) and validation \(0\.2\)"),
        ((0.5, 0.5), None, r"train of 4; lower test \(0\.5\) or validation \(0\.5\)"),
        ((0.5, 0.5), np.array([-1, 2, -1, 2]), "validation of 4; raise validation"),
        ((0.5, 0.5), np.array([1, 2, 1, 2]), "train of 4; the data set itself .*none is for train"),
        ((0.5, 0.5), np.full(4, 2), "train, validation of 4; the data set itself"),
    ],
)
def test_an_empty_part_is_refused(shares, parts, message):
    validation, test = shares
    with pytest.raises(ValueError, match=f"no sample for {message}"):
        split(samples([0, 0, 1, 1], parts=parts), validation=validation, test=test, seed=0)


def test_long_tail():
    """Classes 0, 1, 2 of 100, 64, 100 samples at ratio 16: 64, 64 / 4, 64 / 16."""
    classes = np.repeat([0, 1, 2], [100, 64, 100])
    kept = long_tailed(classes, 3, 16.0, seed=0)
    assert np.bincount(classes[kept]).tolist() == [64, 16, 4]
    assert (np.diff(kept) > 0).all()
    with pytest.raises(ValueError, match="class 3 has no training sample"):
        long_tailed(classes, 4, 16.0, seed=0)


@pytest.mark.parametrize(
    ("targets", "kwargs", "message"),
    [
        (np.array([0, 3]), {"names": ("a", "b")}, "classes 0 to 1, got 0 to 3"),
        (np.array([-1, 0, 1]), {"names": ("a", "b")}, "classes 0 to 1, got -1 to 1"),
        (np.array([0, 0]), {"names": ("a",)}, "two classes .one alone cannot be learnt., got a"),
        (np.zeros((2, 0)), {"names": ()}, "at least one label, got none"),
        (np.array([0, 1]), {"names": ("a", "a")}, "each once; got 'a' twice"),
        (np.zeros((2, 2)), {"names": ("a", "a")}, "each once; got 'a' twice"),
        (np.array([[0, 2], [1, 0]]), {}, "targets 0, 1 or -1"),
        (np.array([0, 1]), {"inputs": np.array([[1.0], [np.nan]])}, "NaN"),
        (np.array([0, 1, 1]), {"inputs": np.zeros((2, 1))}, "a target of each"),
        (np.array([0, 1]), {"groups": np.zeros(3)}, "a group of each"),
    ],
)
def test_inconsistent_samples_are_refused(targets, kwargs, message):
    given = {"inputs": np.zeros((len(targets), 1)), "names": ("a", "b"), **kwargs}
    with pytest.raises(ValueError, match=f"file.npz: .*{message}"):
        Samples(targets=targets, **given).check("file.npz")


def test_test_samples_of_those_that_validate():
    """Of each class 8 of 10 test; those that train stay."""
    targets = np.arange(40) % 2
    parts = np.repeat([0, 1], 20)
    samples = Samples(np.zeros((40, 1), np.float32), targets, ("a", "b"), parts)
    given = {"validation": 0.2, "test": 0.8, "seed": 0}
    found = split(samples, **given, test_from="validation")
    assert (found[:20] == 0).all()
    for kind in (0, 1):
        assert np.bincount(found[20:][targets[20:] == kind]).tolist() == [0, 2, 8]
    said = split(replace(samples, parts=np.repeat([0, 1, 2], [20, 10, 10])), **given,
                 test_from="validation")  # fmt: skip
    assert np.bincount(said).tolist() == [20, 10, 10]
    with pytest.raises(ValueError, match="test_from: the data set names no validation samples"):
        split(replace(samples, parts=None), **given, test_from="validation")
