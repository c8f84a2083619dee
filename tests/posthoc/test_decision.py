"""Decisions against enumeration of all masks, and offsets against a plain search."""

from __future__ import annotations

import itertools
import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.metrics.dice import dice
from segcal.posthoc import decision
from segcal.posthoc.decision import (
    GRID,
    STEP,
    Offsets,
    best_expected_dice,
    decide,
    decide_argmax,
    decide_dice,
    regions_to_labels,
)
from tests.conftest import close

probabilities = st.lists(
    st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    min_size=1,
    max_size=9,
)


def masks(n):
    """All masks of n voxels, ``(2^n, n)``."""
    return np.array(list(itertools.product([0, 1], repeat=n)))


def ratios(p):
    m = masks(len(p))
    return 2 * m @ p / np.maximum(m.sum(1) + p.sum(), 1e-300)


def exact(p):
    """Expected Dice of all masks if voxels are independent; two empty ones have 1."""
    m = masks(len(p))
    weights = np.where(m == 1, p, 1 - p).prod(1)
    total = m.sum(1)[:, None] + m.sum(1)
    return np.where(total > 0, 2 * (m @ m.T) / np.maximum(total, 1), 1.0) @ weights


def softmax(x, axis=0):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@settings(deadline=None)
@given(probabilities)
def test_no_mask_has_a_larger_ratio(values):
    p = np.array(values)
    if not p.sum():
        assert np.isnan(best_expected_dice(p))
        return
    found, best = best_expected_dice(p), ratios(p).max()
    assert found == pytest.approx(best, rel=1e-12)
    mask = p > found / 2
    assert 2 * p[mask].sum() / (mask.sum() + p.sum()) == pytest.approx(best, rel=1e-12)


def test_how_near_the_ratio_is_to_the_expected_dice_of_independent_voxels():
    generator = np.random.default_rng(0)
    lost, thresholded = [], []
    for _ in range(60):
        p = generator.beta(0.6, 0.8, 9)
        values = exact(p)
        place = 2 ** np.arange(9)[::-1]
        lost.append(values.max() - values[(p > best_expected_dice(p) / 2) @ place])
        thresholded.append(values.max() - values[(p > 0.5) @ place])
    assert np.mean(lost) < 0.005
    assert np.max(lost) < 0.05
    assert np.mean(lost) < 0.2 * np.mean(thresholded)


def test_the_threshold_is_half_of_the_expected_dice():
    p = softmax(np.random.default_rng(1).normal(size=(4, 6, 7)) * 2)
    found = decide_dice(p)
    close(found.thresholds, found.expected_dice / 2)
    for k in (1, 2, 3):
        assert found.expected_dice[k - 1] == best_expected_dice(p[k])
    above = p[1:] > found.thresholds[:, None, None]
    share = np.where(above, p[1:] / found.thresholds[:, None, None], 0)
    assert np.array_equal(found.labels, np.where(above.any(0), share.argmax(0) + 1, 0))


def test_ties_stay_together_and_go_to_the_lowest_class():
    p = np.array([[0.4] * 6, [0.3] * 6, [0.3] * 6])
    found = decide_dice(p).labels
    assert np.unique(found).tolist() == [0]  # as likely to be absent
    p = np.array([[0.2] * 6, [0.4] * 6, [0.4] * 6])
    assert np.array_equal(decide_dice(p[:, :, None]).labels, np.zeros((6, 1)))
    p[:, 0] = (0, 1, 0)
    p[:, 1] = (0, 0, 1)
    assert decide_dice(p).labels.tolist() == [1, 2, 1, 1, 1, 1]


def test_a_structure_that_is_hardly_there_is_left_out():
    p = np.zeros((3, 1000))
    p[2] = 1e-4 * np.linspace(0.1, 1, 1000)
    p[1, :100] = 0.9
    p[0] = 1 - p[1:].sum(0)
    found = decide_dice(p)
    assert found.thresholds[1] == np.inf
    assert 0 < found.expected_dice[1] < 1e-3
    assert np.array_equal(found.labels, (np.arange(1000) < 100).astype(int))
    found = decide_dice(p, may_be_absent=False)
    close(found.thresholds, found.expected_dice / 2)
    assert np.array_equal(found.labels == 2, p[2] > found.thresholds[1])
    assert (found.labels[990:] == 2).all()


def test_all_zeros_and_certain_masks():
    p = np.zeros((3, 4, 5))
    p[0] = 1
    found = decide_dice(p)
    assert not found.labels.any()
    assert np.isnan(found.expected_dice).all()
    p[:, 1] = np.array([0, 0, 1])[:, None]
    found = decide_dice(p)
    assert np.array_equal(found.labels[1], [2] * 5)
    assert found.labels.sum() == 10
    assert found.expected_dice[1] == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_precision(dtype):
    p = softmax(np.random.default_rng(2).normal(size=(3, 8, 9)) * 2).astype(dtype)
    found = decide_dice(p)
    same = decide_dice(p.astype(np.float64))
    assert np.array_equal(found.labels, same.labels)
    close(found.thresholds, same.thresholds, rtol=1e-12)
    assert np.array_equal(decide(torch.from_numpy(p), "dice"), found.labels)
    assert np.array_equal(decide(p, "argmax"), p.argmax(0))


def test_labels_follow_the_channels():
    p = softmax(np.random.default_rng(3).normal(size=(4, 200)) * 2)
    order = [0, 3, 1, 2]
    assert np.array_equal(np.array(order)[decide_dice(p[order]).labels], decide_dice(p).labels)


def test_pieces_are_one(monkeypatch):
    generator = np.random.default_rng(4)
    p = softmax(generator.normal(size=(3, 40, 90)) * 2)
    y = generator.integers(0, 3, (2, 40, 90))
    whole, fitted = decide_dice(p), Offsets().fit([(p, y[0]), (p, y[1])])
    monkeypatch.setattr(decision, "PIECE", 1)
    close(decide_dice(p).thresholds, whole.thresholds, rtol=1e-14)
    assert np.array_equal(decide_dice(p).labels, whole.labels)
    assert Offsets().fit([(p, y[0]), (p, y[1])]).state() == fitted.state()


def test_regions():
    p = np.array([(0.9, 0.8, 0.2), (0.6, 0.7, 0.9), (0.45, 0.3, 0.1), (0.2, 0.1, 0.05)]).T
    assert decide(p, "argmax", class_order=(1, 2, 3)).tolist() == [2, 3, 0, 0]
    found = decide_dice(p, class_order=(1, 2, 3))
    close(found.expected_dice, [best_expected_dice(channel) for channel in p])
    assert np.array_equal(found.labels, regions_to_labels(p, (1, 2, 3), found.thresholds))
    assert found.labels.tolist() == [2, 3, 1, 0]


def test_memory():
    p = softmax(np.random.default_rng(5).normal(size=(5, 2_000_000)).astype(np.float32))
    tracemalloc.start()
    decide_dice(p)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.6 * p.nbytes


def shifted(seed, shift, size=(24, 24), k=3, noise=1.0):
    """Labels drawn from a softmax, and that softmax with structures shifted."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(k, *size)) * noise
    x[0] += 1
    true = softmax(x)
    y = (true.cumsum(0) < generator.random(size)).sum(0).clip(max=k - 1)
    return softmax(x + np.reshape([0, *shift], (k, *[1] * len(size)))), y


def mean_dsc(cases, decided, number):
    values = [dice(decided(p), y, c) for p, y in cases for c in range(1, number)]
    return np.nanmean(values)


def test_masks_of_calibrated_probabilities_have_a_larger_dice():
    for noise, gain in ((0.5, 0.1), (1, 0.03), (2, 0.003)):
        cases = [shifted(seed, (0, 0), noise=noise) for seed in range(20)]
        dice_rule = mean_dsc(cases, lambda p: decide(p, "dice"), 3)
        assert dice_rule > mean_dsc(cases, decide_argmax, 3) + gain


def test_structures_that_are_segmented_too_small_grow():
    cases = [shifted(seed, (-2, -1), noise=3) for seed in range(6)]
    others = [shifted(seed, (-2, -1), noise=3) for seed in range(10, 14)]
    found = Offsets().fit(cases)
    facts = found.facts
    assert facts["taken"]
    assert found.values[0] == 0
    assert min(found.values[1:]) > 0.5
    close(facts["dsc_before"], mean_dsc(cases, decide_argmax, 3), rtol=1e-12)
    close(facts["dsc_after"], mean_dsc(cases, found.apply, 3), rtol=1e-12)
    assert facts["dsc_after"] > facts["dsc_before"] + 0.05
    assert facts["gain"] > max(0.05, facts["gain_error"])
    assert mean_dsc(others, found.apply, 3) > mean_dsc(others, decide_argmax, 3) + 0.05
    assert np.array_equal(decide(cases[0][0], found), found.apply(cases[0][0]))


@pytest.mark.parametrize("ignore_index", [None, 2])
def test_one_structure_is_searched_exhaustively(ignore_index):
    cases = [shifted(seed, (-1,), k=2, noise=2) for seed in range(4)]
    if ignore_index:
        for _, y in cases:
            y[:5] = ignore_index
    found = Offsets().fit(cases, ignore_index)

    def score(step):
        values = []
        for p, y in cases:
            decided = (np.log(p[1]) + STEP * step > np.log(p[0])).astype(int)
            values.append(dice(decided, y, 1, mask=y != ignore_index if ignore_index else None))
        return np.mean(values)

    scores = [score(step) for step in GRID]
    close(found.facts["dsc_after"], max(scores), rtol=1e-12)
    close(found.values[1], STEP * GRID[np.argmax(scores)])
    assert found.facts["voxels"] == sum(int((y < 2).sum()) for _, y in cases)


def test_rows_count_what_every_offset_decides():
    p, y = shifted(3, (-1, 0.5, 1), k=4, noise=2)
    cases = decision._Cases.of([decision._rows_of(p.reshape(4, -1), y.reshape(-1), None)])
    generator = np.random.default_rng(0)
    for _ in range(20):
        m = np.r_[0, generator.integers(GRID[0], GRID[-1] + 1, 3)]
        decided = (np.log(p) + STEP * m[:, None, None]).argmax(0)
        expected = [[dice(decided, y, c) for c in (1, 2, 3)]]
        close(cases.dsc(m), expected, rtol=1e-12)
        for c in (1, 2, 3):
            along = cases.along(m, c, cases.winners(m))
            close(along[:, :, np.flatnonzero(m[c] == GRID)[0]], expected, rtol=1e-12)


def test_certain_voxels_become_counts():
    p = np.full((2, 1000), 1e-6)
    p[0, :600] = p[1, 600:] = 1 - 1e-6
    p[:, 0] = 0  # padding
    y = (np.arange(1000) >= 500).astype(int)
    facts = Offsets().fit([(p.astype(np.float16), y)]).facts
    assert (facts["rows"], facts["voxels"]) == (3, 1000)


def test_cases_that_disagree_leave_argmax():
    cases = [
        shifted(seed, (sign, sign), noise=3) for seed, sign in enumerate((-2, 2, -1.5, 1.5, -1, 1))
    ]
    found = Offsets().fit(cases)
    assert not found.facts["taken"]
    assert found.values == [0, 0, 0]
    assert found.facts["dsc_after"] == found.facts["dsc_before"]
    assert any("they are not used" in text for text in found.facts["notes"])
    assert np.array_equal(found.apply(cases[0][0]), decide_argmax(cases[0][0]))


def test_perfect_cases_stay():
    cases = [(np.eye(3)[y].T * 0.9 + 0.1 / 3, y) for y in np.arange(60).reshape(3, 20) % 3]
    found = Offsets().fit(cases)
    assert found.values == [0, 0, 0]
    assert found.facts["dsc_before"] == 1


def test_one_case_tells_nothing_of_others():
    found = Offsets().fit([shifted(0, (-2, -2))])
    assert found.values == [0, 0, 0]
    assert found.facts["gain"] is None
    assert any("one patient" in text for text in found.facts["notes"])
    json.dumps(found.state(), allow_nan=False)


def test_a_structure_that_never_occurs_keeps_its_place():
    cases = [shifted(seed, (-2, -1), noise=3) for seed in range(5)]
    cases = [(p, np.where(y == 2, 0, y)) for p, y in cases]
    found = Offsets().fit(iter(cases))
    assert found.facts["taken"]
    assert found.values[1] > 0
    assert found.values[2] == 0
    assert any("structure 2: in no" in text for text in found.facts["notes"])
    nothing = Offsets().fit([(p, 0 * y) for p, y in cases])
    assert nothing.values == [0, 0, 0]
    json.dumps(nothing.state(), allow_nan=False)


def test_offsets_of_regions():
    generator = np.random.default_rng(6)
    cases = []
    for _ in range(5):
        x = generator.normal(size=(2, 20, 20)) * 3
        y = (generator.random(x.shape) < 1 / (1 + np.exp(-x))).astype(int)
        cases.append((1 / (1 + np.exp(-x + np.reshape([2, 0], (2, 1, 1)))), y))
    found = Offsets(per_channel=True).fit(cases)
    assert found.facts["taken"][0]
    assert found.values[0] > 1
    assert abs(found.values[1]) < 1
    p = cases[0][0]
    decided = found.apply(p, class_order=(1, 2))
    inside = np.log(p / (1 - p)) + np.reshape(found.values, (2, 1, 1)) > 0
    assert np.array_equal(decided, np.where(inside[1], 2, np.where(inside[0], 1, 0)))
    values = [
        dice((np.log(p / (1 - p)) + o > 0)[c].astype(int), y[c], 1)
        for p, y in cases
        for c, o in enumerate(found.values)
    ]
    close(found.facts["dsc_after"], np.mean(values), rtol=1e-12)


@pytest.mark.parametrize("per_channel", [False, True])
def test_state_is_json_and_continues_identically(per_channel):
    cases = [shifted(seed, (-2, -1), noise=3) for seed in range(3)]
    order = (1, 2, 3) if per_channel else None
    if per_channel:
        cases = [(p, np.eye(3, dtype=int)[y].transpose(2, 0, 1)) for p, y in cases]
    found = Offsets(per_channel=per_channel).fit(cases)
    again = Offsets.from_state(json.loads(json.dumps(found.state(), allow_nan=False)))
    assert again.state() == found.state()
    p = cases[0][0]
    assert np.array_equal(decide(p, again, class_order=order), decide(p, found, class_order=order))
    assert Offsets(per_channel=per_channel).fit(iter(cases)).state() == found.state()


def test_what_does_not_fit_is_refused():
    p, y = shifted(0, (-1, 0))
    found = Offsets().fit([(p, y), shifted(1, (-1, 0))])
    state = found.state()
    for wrong, message in (
        (lambda: decide(p, "median"), "rule: expected one of"),
        (lambda: decide(y, "argmax"), "expected floating"),
        (lambda: decide(p, "argmax", class_order=(1, 2)), "class_order: expected a label for each"),
        (lambda: decide(p[:1], "dice"), "at least 2 classes"),
        (lambda: decide(5 * p, "dice"), r"expected values in \[0, 1\]"),
        (lambda: decide(np.nan * p, "dice"), "NaN and inf are refused"),
        (lambda: Offsets().apply(p), "not fitted"),
        (lambda: found.apply(p[:2]), r"expected \(3, \*S\)"),
        (lambda: found.apply(p, class_order=(1, 2, 3)), "class_order: expected one with"),
        (lambda: Offsets().fit([]), "at least one"),
        (lambda: Offsets().fit([(p, y), (p[:2], y.clip(max=1))]), "case 1: 2 classes"),
        (lambda: Offsets().fit([(p, y[1:])]), "case 0: labels: expected integers"),
        (lambda: Offsets().fit([(p, y + 1)]), "case 0: labels: expected 0 to 2"),
        (lambda: Offsets().fit([(np.nan * p, y)]), "case 0: probs"),
        (lambda: Offsets.from_state(None), "expected a dict"),
        (lambda: Offsets.from_state({**state, "version": 0}), "version 0"),
        (lambda: Offsets.from_state({**state, "learned": {}}), "damaged"),
        (lambda: Offsets.from_state({**state, "learned": {"values": [0, 1]}}), "damaged"),
        (lambda: Offsets.from_state({**state, "learned": {"values": [1, 0, 0]}}), "damaged"),
        (lambda: Offsets.from_state({**state, "learned": {"values": [0, "a", 0]}}), "damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            wrong()


def test_cases_of_a_patient_are_left_out_together():
    """Two cases of each patient, alike but for a voxel: the folds are those of the patients."""
    rng = np.random.default_rng(4)
    once = []
    for _ in range(6):
        x = rng.normal(size=(2, 300))
        x[1] -= 1.5  # the structure is segmented too small
        p = np.exp(x) / np.exp(x).sum(0)
        once.append((p, (rng.random(300) < 1 / (1 + np.exp(-x[1] + x[0] - 1))).astype(int)))
    twice = [pair for pair in once for _ in range(2)]
    owners = [i // 2 for i in range(12)]
    by_patient = Offsets().fit(twice, owners=owners)
    single = Offsets().fit(once)
    assert by_patient.values == single.values
    for key in ("gain", "gain_error", "folds", "taken"):
        assert by_patient.facts[key] == pytest.approx(single.facts[key])
    assert Offsets().fit(twice).facts["folds"] == 5
    assert Offsets().fit(twice, owners=[7] * 12).values == [0, 0]
    with pytest.raises(ValueError, match="owners: expected 12, one a case, got 2"):
        Offsets().fit(twice, owners=[0, 1])
