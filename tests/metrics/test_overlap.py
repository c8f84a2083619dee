"""Dice and surface distances against golden values, worked examples and a naive oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.metrics.dice import dice
from segcal.metrics.hausdorff import assd, hausdorff
from segcal.surface import surface_distances
from tests.conftest import close
from tests.oracles.surface import directed_distances


def box(shape, *ranges):
    mask = np.zeros(shape, bool)
    mask[tuple(slice(*r) for r in ranges)] = True
    return mask


@pytest.mark.parametrize("spacing", ["iso", "sp"])
@pytest.mark.parametrize("d", [2, 3])
def test_golden(golden, d, spacing):
    g = golden("surface")
    reference, prediction = g[f"a{d}"].numpy(), g[f"b{d}"].numpy()
    mm = (1.0,) * d if spacing == "iso" else ((8, 1.5, 1.5) if d == 3 else (1.5, 1.5))
    key = f"{d}_{spacing}"
    kwargs = {"spacing_mm": mm}
    close(hausdorff(prediction, reference, **kwargs), g[f"hd_medpy_{key}"])
    close(hausdorff(prediction, reference, percentile=95, **kwargs), g[f"hd95_medpy_{key}"])
    close(assd(prediction, reference, **kwargs), g[f"assd_medpy_{key}"])
    for q, name in ((None, "hd"), (95, "hd95")):
        value = hausdorff(prediction, reference, percentile=q, definition="max_directed", **kwargs)
        close(value, g[f"{name}_monai_{key}"], 1e-5, 1e-6)
    close(dice(prediction.astype(int), reference.astype(int), 1), g[f"dc_medpy_{d}"])


def test_two_definitions_differ_by_tens_of_mm():
    reference = box((30, 30, 60), (5, 25), (5, 25), (5, 25))
    prediction = reference | box((30, 30, 60), (10, 16), (10, 16), (50, 56))
    mm = (1, 1, 1)
    close(hausdorff(prediction, reference, spacing_mm=mm), 31)
    close(hausdorff(prediction, reference, spacing_mm=mm, percentile=95), 0)
    directed = hausdorff(
        prediction, reference, spacing_mm=mm, percentile=95, definition="max_directed"
    )
    close(directed, 26.05, atol=0.005)
    close(dice(prediction.astype(int), reference.astype(int), 1), 0.98668, atol=1e-5)


@pytest.mark.parametrize(
    "spacing",
    [(10, 1.5, 0.8), [10, 1.5, 0.8], np.array([10, 1.5, 0.8]),
     tuple(np.float32(v) for v in (10, 1.5, 0.8))],
)  # fmt: skip
def test_spacing_is_in_array_order(spacing):
    reference, prediction = np.zeros((2, 4, 6, 8), bool)
    reference[1, 2, 2] = prediction[2, 2, 5] = True
    for q in (None, 95):
        value = hausdorff(prediction, reference, spacing_mm=spacing, percentile=q)
        close(value, 10.28397, rtol=1e-6)


def test_the_edge_of_the_image_is_a_boundary():
    full, inner = np.ones((5, 5), bool), box((5, 5), (1, 4), (1, 4))
    close(hausdorff(full, inner, spacing_mm=(1, 1)), math.sqrt(2))
    distances = surface_distances(full, inner, spacing_mm=(1, 1))
    assert len(distances.prediction_to_reference) == 16
    assert len(distances.reference_to_prediction) == 8
    # to the ring of 8: 12 of the outer 16 are 1 away, the corners sqrt(2); back, all 8 are 1 away
    close(assd(full, inner, spacing_mm=(1, 1)), (12 + 4 * math.sqrt(2) + 8) / 24)
    close(assd(full, inner, spacing_mm=(1, 1)), 1.06904, atol=5e-6)
    full, inner = np.ones((5, 5, 5), bool), box((5, 5, 5), (1, 4), (1, 4), (1, 4))
    close(hausdorff(full, inner, spacing_mm=(1, 1, 1)), math.sqrt(3))
    reference, prediction = box((8, 8, 8), (0, 4)), box((8, 8, 8), (0, 2))
    close(hausdorff(prediction, reference, spacing_mm=(1, 1, 1)), 2.0)


def test_both_average_surface_distances():
    reference, prediction = box((8, 8), (2, 6), (2, 6)), box((8, 8), (2, 6), (2, 8))
    close(assd(prediction, reference, spacing_mm=(1, 1)), 0.428571, atol=1e-6)
    directed = assd(prediction, reference, spacing_mm=(1, 1), definition="mean_of_means")
    close(directed, 0.395833, atol=1e-6)
    close(hausdorff(prediction, reference, spacing_mm=(1, 1)), 2.0)


@pytest.mark.parametrize("q", [None, 95])
def test_empty_masks(q):
    none, some = np.zeros((8, 8), bool), box((8, 8), (2, 4), (2, 4))
    kwargs = {"spacing_mm": (1, 1), "percentile": q}
    assert hausdorff(none, some, **kwargs) == math.inf
    assert hausdorff(some, none, **kwargs) == math.inf
    assert math.isnan(hausdorff(none, none, **kwargs))
    assert assd(none, some, spacing_mm=(1, 1)) == math.inf
    assert dice(none.astype(int), some.astype(int), 1) == 0
    assert dice(some.astype(int), none.astype(int), 1) == 0
    assert math.isnan(dice(none.astype(int), none.astype(int), 1))


def test_dice_counts_only_the_mask():
    reference, prediction = np.array([1, 1, 0, 2]), np.array([1, 0, 1, 2])
    close(dice(prediction, reference, 1), 0.5)
    close(dice(prediction, reference, 1, mask=np.array([True, True, False, True])), 2 / 3)
    assert dice(prediction, reference, 2) == 1


@settings(max_examples=50, deadline=None)
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    seed=st.integers(0, 2**16),
    density=st.sampled_from([0.1, 0.5, 0.95]),
)
def test_against_all_pairs(shape, seed, density):
    rng = np.random.default_rng(seed)
    p, r = rng.random((2, *shape)) < density
    if not p.any() or not r.any():
        return
    mm = rng.uniform(0.5, 5, len(shape))
    directed = directed_distances(p, r, mm)
    close(hausdorff(p, r, spacing_mm=mm), max(d.max() for d in directed))
    close(
        hausdorff(p, r, spacing_mm=mm, percentile=95), np.percentile(np.concatenate(directed), 95)
    )
    close(assd(p, r, spacing_mm=mm), np.concatenate(directed).mean())
    close(
        assd(p, r, spacing_mm=mm, definition="mean_of_means"), np.mean([d.mean() for d in directed])
    )


@pytest.mark.parametrize("spacing", [(1, 1), (1, 0, 1), (1, -1, 1), (1, np.nan, 1), (1, np.inf, 1)])
def test_refuses_spacing(spacing):
    mask = np.ones((2, 2, 2), bool)
    with pytest.raises(ValueError, match="spacing_mm: expected 3 positive numbers"):
        hausdorff(mask, mask, spacing_mm=spacing)


def test_refuses_label_maps_and_options():
    with pytest.raises(ValueError, match="prediction: expected a bool mask, got int64"):
        hausdorff(np.ones((2, 2), int), np.ones((2, 2), bool), spacing_mm=(1, 1))
    mask = np.ones((2, 2), bool)
    with pytest.raises(ValueError, match="definition: expected one of"):
        hausdorff(mask, mask, spacing_mm=(1, 1), definition="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one shape"):
        hausdorff(mask, np.ones((2, 3), bool), spacing_mm=(1, 1))
