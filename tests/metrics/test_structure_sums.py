"""Sums of a structure against plain NumPy over whole arrays, and worked examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import ndimage, stats

from segcal.metrics.soft_dice_confidence import soft_dice_confidence, soft_dice_of
from segcal.metrics.structure_sums import structure_sums
from segcal.structure_counting import BLOCK

MM = (8.0, 1.5, 1.5)


def case(k=4, shape=(5, 9, 8), seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(k, 0.4), shape).transpose(3, 0, 1, 2).astype(dtype)


def sums(p, prediction, **options):
    options = {"channels": [1, 2, 3], "labels": [(1,), (2,), (3,)], "spacing_mm": MM, **options}
    return structure_sums(p, prediction, **options)


def sparse_case():
    """Most classes have probability 0 nearly everywhere, as of a hundred organs; many blocks."""
    p = np.where(case(shape=(7, 90, 60)) < 0.6, 0, 1)
    p[2, :, :, 30:] = 0
    p[0] = 1 - p[1:].sum(0)
    p[:, 3, 40:50] = case(shape=(10, 60, 1))[..., 0]
    return p.astype(np.float64)


def calm_case():
    """In most blocks no voxel is predicted as foreground, undecided, or above the level."""
    p = 0.02 * case(shape=(7, 90, 60))
    p[1, 2, 5:60, 5:50] = 0.9 * np.random.default_rng(1).random((55, 45))
    p[2, 5, 3, 3:6], p[3, 6, 80, 20:22] = (0.6, 0.54, 0.43), (0.99, 0.026)
    p[0] = 1 - p[1:].sum(0)
    return p


@pytest.mark.parametrize("some_ignored", [False, True])
@pytest.mark.parametrize("parts", [{}, {"SLAB": 1, "COPIED": BLOCK, "PIECE": 6000}, {"SLAB": 3}])
@pytest.mark.parametrize("make", [case, sparse_case, calm_case])
def test_against_whole_arrays(monkeypatch, make, parts, some_ignored):
    for name, size in parts.items():
        monkeypatch.setattr(f"segcal.metrics.structure_sums.{name}", size)
    p = make()
    labels = p.argmax(0)
    keep = np.ones(labels.shape, bool)
    keep[1, 2:5] = not some_ignored
    for k, found in zip((1, 2, 3), sums(p, labels, valid=keep), strict=True):
        q, mask = p[k], (labels == k) & keep
        rival = np.delete(p, k, 0).max(0)
        undecided = (np.abs(q - rival) <= 0.1) & keep
        assert found.mask_voxels == mask.sum()
        assert found.total == pytest.approx(q[keep].sum())
        assert found.variance == pytest.approx((q * (1 - q))[keep].sum())
        assert found.largest == q[keep].max()
        assert (found.surely, found.possibly) == (
            (q[keep] > 0.975).sum(), (q[keep] > 0.025).sum()
        )  # fmt: skip
        assert found.undecided_inside == (undecided & mask).sum()
        assert found.undecided_outside == (undecided & ~mask).sum()
        assert found.voxel_ml == pytest.approx(0.018)
        assert soft_dice_of(found.in_mask, found.total, found.mask_voxels) == pytest.approx(
            soft_dice_confidence(q[keep], mask[keep])
        )
        shell = ndimage.maximum_filter(mask, 3) & ~ndimage.minimum_filter(mask, 3) & keep
        bits = stats.entropy([q[shell], 1 - q[shell]], base=2)
        assert found.shell_entropy == pytest.approx(np.mean(bits))


def test_what_is_copied_at_a_time_does_not_change_a_bit(monkeypatch):
    """Nor do the threads: sums are added in the order of the slices."""
    p = calm_case().astype(np.float32)
    monkeypatch.setattr("segcal.metrics.structure_sums.PIECE", 6000)
    whole, before = sums(p, p.argmax(0)), torch.get_num_threads()
    monkeypatch.setattr("segcal.metrics.structure_sums.COPIED", BLOCK)
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert sums(p, p.argmax(0)) == whole
            assert sums(np.asfortranarray(p), p.argmax(0)) == whole
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tie", [0.1, 0.3])
def test_regions_of_many_blocks(tie):
    """A region is undecided where p and 1 - p differ little, however small p is elsewhere."""
    p = 0.02 * np.random.default_rng(0).random((1, 4, 60, 40))
    p[0, 0, :3, :3], p[0, 2, 1, :4], p[0, 3, 59, 39] = 0.7, 0.46, 0.39
    (found,) = sums(p, (p[0] > 0.5).astype(int), channels=[0], labels=[(1,)], regions=True, tie=tie)
    undecided = np.abs(2 * p[0] - 1) <= tie
    assert found.undecided_outside == undecided.sum() == (4 if tie == 0.1 else 5)
    assert (found.surely, found.possibly) == (0, (p > 0.025).sum())


def test_regions_are_undecided_on_their_own():
    p = np.array([0.9, 0.54, 0.47, 0.2]).reshape(1, 1, 1, 4)
    (found,) = sums(p, np.array([[[1, 1, 0, 0]]]), channels=[0], labels=[(1, 2)], regions=True)
    assert (found.undecided_inside, found.undecided_outside) == (1, 1)
    assert found.volume_swing == 0.5
    assert found.undecided_share == pytest.approx(2 / 3)


def test_the_range_is_what_one_threshold_for_all_voxels_gives():
    rng = np.random.default_rng(2)
    p = rng.beta(0.5, 0.5, (1, 3, 20, 20))
    (found,) = sums(
        p, (p[0] > 0.5).astype(int), channels=[0], labels=[(1,)], regions=True, level=0.9
    )
    volumes = [0.018 * (p > u).sum() for u in rng.random(20_000)]
    np.testing.assert_allclose(found.range_ml, np.quantile(volumes, [0.05, 0.95]), atol=0.4)


def test_what_is_absent():
    p = np.stack([np.ones((2, 3, 3)), np.zeros((2, 3, 3))])
    (found,) = sums(p, np.zeros((2, 3, 3), int), channels=[1], labels=[(1,)])
    assert (found.mask_voxels, found.total, found.volume_swing) == (0, 0, 0)
    assert math.isnan(found.shell_entropy)
    assert math.isnan(found.undecided_share)
    p = np.full((2, 2, 3, 3), 0.5)
    (found,) = sums(p, np.zeros((2, 3, 3), int), channels=[1], labels=[(1,)])
    assert found.volume_swing == math.inf
    assert found.undecided_share == 1


def test_half_precision_is_summed_exactly():
    p = np.full((2, 40, 64, 64), 0.5, np.float16)
    (found,) = sums(p, np.zeros((40, 64, 64), int), channels=[1], labels=[(1,)])
    assert found.total == 81920  # more than half precision holds
    assert found.variance == 40960


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"expected \(K, \*S\) and \(\*S\)"):
        sums(case(), np.zeros((5, 9, 7), int))
