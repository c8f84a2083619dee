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

from segcal import surface
from segcal.surface import label_boxes, surface_distances
from tests.conftest import close
from tests.oracles.surface import directed_distances

WAYS = {"search": 10**6, "transform": -1}
"""Search steps that make a distance transform the cheaper way."""


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


@pytest.mark.parametrize("way", WAYS)
def test_against_all_pairs(way):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surface, "ROWS_PER_VOXEL", WAYS[way])

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
    monkeypatch.setattr(surface, "ROWS_PER_VOXEL", WAYS[way])
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


def test_the_search_gives_up_where_a_transform_is_faster(monkeypatch):
    calls = []
    transform = ndimage.distance_transform_edt
    monkeypatch.setattr(
        surface.ndimage,
        "distance_transform_edt",
        lambda *args, **kwargs: calls.append(args) or transform(*args, **kwargs),
    )
    noise, corners = np.random.default_rng(0).random((8, 30, 30)) < 0.4, np.zeros((8, 30, 30), bool)
    corners[:, 0, 0] = corners[:, -1, -1] = True
    assert not surface_distances(noise, noise, spacing_mm=(1, 1, 1)).prediction_to_reference.any()
    assert not calls
    compare(noise, corners, (1, 1, 1), by_tree(noise, corners, (1, 1, 1)))
    assert len(calls) == 1  # the few voxels in the corners have noise nearby


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
