"""Directed surface distances and label boxes against all pairs, k-d trees and worked examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial import KDTree

from segcal import nearest, surface
from segcal.surface import label_boxes, surface_distances
from tests.conftest import close
from tests.oracles.surface import directed_distances

WAYS = {"rows": (10**9, 10**9), "tree": (-1, -1), "both": (3, 0)}
"""Rows that are looked at before a voxel is left to the tree, and after such a voxel."""


def compare(prediction, reference, spacing_mm, expected):
    got = surface_distances(prediction, reference, spacing_mm=spacing_mm)
    directed = got.prediction_to_reference, got.reference_to_prediction
    for mine, other in zip(directed, expected, strict=True):
        close(np.sort(mine), np.sort(other))


def by_tree(prediction, reference, spacing_mm):
    points = [
        np.argwhere(m & ~ndimage.binary_erosion(m)) * spacing_mm for m in (prediction, reference)
    ]
    return [KDTree(b).query(a)[0] for a, b in (points, points[::-1])]


def ball(shape, centre, radius, spacing_mm):
    grid = np.moveaxis(np.indices(shape), 0, -1) * spacing_mm
    return np.linalg.norm(grid - np.multiply(centre, spacing_mm), axis=-1) < radius


def go(patch, way):
    for name, value in zip(("PATIENCE", "IMPATIENCE"), WAYS[way], strict=True):
        patch.setattr(nearest, name, value)


@pytest.mark.parametrize("way", WAYS)
def test_against_all_pairs(way):
    with pytest.MonkeyPatch.context() as patch:
        go(patch, way)

        @settings(max_examples=150, deadline=None)
        @given(
            shape=st.lists(st.integers(1, 7), min_size=1, max_size=3),
            seed=st.integers(0, 2**16),
            densities=st.tuples(*[st.sampled_from([0.02, 0.3, 0.9, 1])] * 2),
            mm=st.lists(st.sampled_from([0.1, 0.8, 1, 2.5, 10]), min_size=3, max_size=3),
        )
        def check(shape, seed, densities, mm):
            rng = np.random.default_rng(seed)
            p, r = (rng.random(shape) < density for density in densities)
            for mask in (p, r):  # one voxel at least
                mask[tuple(rng.integers(0, n) for n in shape)] = True
            mm = mm[: len(shape)]
            compare(p, r, mm, directed_distances(p, r, mm))

        check()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "case", ["moved", "inside", "far apart", "noise", "noise around", "islands", "whole image"]
)
def test_against_trees(case, way, monkeypatch):
    go(monkeypatch, way)
    rng, shape, mm = np.random.default_rng(0), (12, 40, 44), (2.5, 0.8, 1.1)
    reference = ball(shape, (6, 20, 20), 12, mm)
    noise = rng.random((2, *shape)) < [[[[0.4]]], [[[0.001]]]]
    prediction, reference = {
        "moved": (ball(shape, (5, 22, 21), 11, mm), reference),
        "inside": (ball(shape, (6, 20, 20), 5, mm), reference),
        "far apart": (ball(shape, (1, 38, 2), 3, mm), ball(shape, (10, 2, 40), 4, mm)),
        "noise": (noise[0], noise[0][::-1]),
        "noise around": (noise[0], ball(shape, (6, 20, 20), 3, mm)),
        "islands": (reference | noise[1], reference),
        "whole image": (np.ones(shape, bool), reference),
    }[case]
    compare(prediction, reference, mm, by_tree(prediction, reference, mm))


def test_only_voxels_that_are_far_are_left_to_the_tree(monkeypatch):
    """Of noise against two corners most, of the corners' voxels, which have noise nearby, none."""
    built = []
    monkeypatch.setattr(
        nearest, "_tree", lambda b, mm, grow=nearest._tree: built.append(b.shape) or grow(b, mm)
    )
    noise, corners = np.random.default_rng(0).random((8, 30, 30)) < 0.4, np.zeros((8, 30, 30), bool)
    corners[:, 0, 0] = corners[:, -1, -1] = True
    assert not surface_distances(noise, noise, spacing_mm=(1, 1, 1)).prediction_to_reference.any()
    assert not built
    compare(noise, corners, (1, 1, 1), by_tree(noise, corners, (1, 1, 1)))
    assert len(built) == 1


def test_both_searches_give_the_same_numbers(monkeypatch):
    """Bit for bit, with spacings that are no binary fractions; whatever the number of threads."""
    rng, mm = np.random.default_rng(1), (2.7, 0.7, 1.1)
    p, r = rng.random((2, 15, 40, 50)) < [[[[0.05]]], [[[0.001]]]]
    found = []
    for way in WAYS:
        for threads in (1, 3):
            go(monkeypatch, way)
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            monkeypatch.setattr(nearest, "ENOUGH", 1)
            monkeypatch.setattr(surface, "ENOUGH", 1)
            got = surface_distances(p, r, spacing_mm=mm)
            found.append((got.prediction_to_reference, got.reference_to_prediction))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("most", [0, 16, 10**6])
@pytest.mark.parametrize("shape", [(1, 1, 90), (1, 3, 70), (9, 1, 40), (6, 50, 60)])
def test_the_tree_holds_every_voxel_once(shape, most, monkeypatch):
    """Boxes are as tight as what they hold, and every voxel is below one cell."""
    monkeypatch.setattr(nearest, "MOST_CELLS", max(most, 1))
    mask = np.random.default_rng(2).random(shape) < 0.02
    mask[0, 0, 0] = mask[-1, -1, -1] = True
    rows = surface._surface(mask)
    tree = nearest._tree(rows, (2.0, 1.0, 1.0))
    expected = np.argwhere(mask)  # single voxels are all surface
    assert sorted(tree.voxels.tolist()) == expected.tolist()
    held = [0] * len(tree.box)
    for node, (first, stop) in enumerate(tree.child):
        assert first < stop
        if node < tree.leaves:
            inside = tree.voxels[first:stop].repeat(2, 1)
            low, high = inside[:, ::2].min(0), inside[:, 1::2].max(0)
        else:
            assert stop <= node
            for child in range(first, stop):
                held[child] += 1
            low, high = tree.box[first:stop, ::2].min(0), tree.box[first:stop, 1::2].max(0)
        assert tree.box[node].tolist() == np.stack([low, high], 1).ravel().tolist()
    assert held == [1] * (len(held) - 1) + [0]


def test_single_voxels():
    p, r = np.zeros((2, 5, 6, 7), bool)
    p[0, 0, 0], r[4, 5, 6] = True, True
    expected = [math.sqrt(10**2 + 5**2 + 3**2)]
    compare(p, r, (2.5, 1, 0.5), (expected, expected))
    compare(p, p, (2.5, 1, 0.5), ([0], [0]))
    line = np.array([False, True, False, False, True])
    compare(line, line[::-1], (3,), ([3, 3], [3, 3]))


def test_empty_masks():
    some, none = np.ones((3, 4), bool), np.zeros((3, 4), bool)
    for p, r in ((some, none), (none, some), (none, none)):
        got = surface_distances(p, r, spacing_mm=(1, 1))
        assert (got.prediction_empty, got.reference_empty) == (not p.any(), not r.any())
        assert got.prediction_to_reference.size == got.reference_to_prediction.size == 0
    assert surface_distances(none[:0], none[:0], spacing_mm=(1, 1)).prediction_empty


def test_an_axis_of_length_1_takes_no_part():
    square = np.ones((5, 5), bool)
    for one, mm in (
        (square, (1, 1)), (square[None], (9, 1, 1)), (square[:, None], (1, 9, 1)),
        (square[..., None], (1, 1, 9)),
    ):  # fmt: skip
        assert surface_distances(one, one, spacing_mm=mm).prediction_to_reference.size == 16
    assert (
        surface_distances(square[:1], square[:1], spacing_mm=(1, 1)).reference_to_prediction.size
        == 2
    )
    slab = np.zeros((3, 5, 5), bool)
    slab[1] = True  # one slice of an image of three
    assert surface_distances(slab, slab, spacing_mm=(1, 1, 1)).prediction_to_reference.size == 25


def test_any_layout_of_the_masks():
    rng, mm = np.random.default_rng(1), (3, 1, 2)
    p, r = rng.random((2, 6, 7, 8)) < 0.3
    expected = directed_distances(p, r, mm)
    fixed = p.copy()
    fixed.flags.writeable = False
    other_bytes = (p * np.uint8(255)).view(bool)
    every_second = np.repeat(p, 2, axis=2)[:, :, ::2]
    for same in (np.asfortranarray(p), fixed, other_bytes, every_second, torch.from_numpy(p)):
        compare(same, r, mm, expected)
    compare(p[::-1, :, ::-1], r[::-1, :, ::-1], mm, expected)
    compare(p.transpose(2, 0, 1), r.transpose(2, 0, 1), (2, 3, 1), expected)


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([np.uint8, np.int16, np.int64]),
)
def test_label_boxes(shape, seed, dtype):
    rng = np.random.default_rng(seed)
    maps = rng.choice([0, 0, 0, 0, 2, 3, 100], (2, *shape)).astype(dtype)
    boxes = label_boxes(maps, [3, 2, 7, 100])
    assert set(boxes) == {2, 3, 7, 100}
    for label, box in boxes.items():
        used = np.argwhere((maps == label).any(0))
        if len(used):
            ends = zip(used.min(0), used.max(0) + 1, strict=True)
            assert box == tuple(slice(a, b) for a, b in ends)
        else:
            assert box == (slice(0, 0),) * len(shape)


def test_a_label_cut_to_its_box_keeps_its_distances():
    maps = np.random.default_rng(2).integers(0, 4, (2, 5, 6, 7))
    maps[:, 1:, 2:4] = 0
    boxes = label_boxes(maps, range(1, 6))
    assert all(s.stop - s.start != 1 for box in boxes.values() for s in box)
    for label, box in boxes.items():
        p, r = maps == label
        whole = surface_distances(p, r, spacing_mm=(2, 1, 1))
        cut = surface_distances(p[box], r[box], spacing_mm=(2, 1, 1))
        for name, value in vars(whole).items():
            assert np.array_equal(getattr(cut, name), value), name


def test_label_boxes_of_odd_maps():
    labels = np.array([[0, 5], [5, 70000]])
    expected = {5: (slice(0, 2), slice(0, 2)), 70000: (slice(1, 2), slice(1, 2))}
    for odd in (labels.astype(">i4"), labels.astype(np.uint64), labels.T, torch.tensor(labels)):
        assert label_boxes([odd], [5, 70000]) == expected
    # labels that do not fit the type of the map
    assert label_boxes([np.array([0, 255], np.uint8)], [-1, 511]) == {
        -1: (slice(0, 0),),
        511: (slice(0, 0),),
    }
    for wrong in ([labels == 5], [labels * 1.0], [labels, labels[:1]], [np.array(5)]):
        with pytest.raises(ValueError, match="label_maps: expected integers, one shape"):
            label_boxes(wrong, [5])
