"""Class proportions and regions against golden vectors, a naive oracle and properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.neighbourhood import class_proportions, distance_bands, outer_region
from tests.conftest import close
from tests.oracles.neighbourhood import distance_to_another_class, proportions_and_outer

PADDINGS = ("replicate", "background", "renormalize", "zeros")


@pytest.mark.parametrize("padding", ["replicate", "background", "renormalize"])
@pytest.mark.parametrize("kernel", ["mean", "svls"])
@pytest.mark.parametrize("ignore", [None, 255])
def test_golden_tau_2d(golden, padding, kernel, ignore):
    g = golden("nacl_options")
    labels = g["labels" if ignore is None else "labels_ignore255"][None]
    tau = class_proportions(
        labels, 4, kernel=kernel, padding=padding, ignore_index=ignore, dtype=torch.float64
    )
    close(tau[0], g[f"tau2d_{kernel}_{padding}" + ("" if ignore is None else "_ign")])


@pytest.mark.parametrize("padding", ["replicate", "background", "renormalize"])
def test_golden_3d(golden, padding):
    g = golden("nacl_options")
    labels = g["labels3d"][None]
    tau = class_proportions(labels, 3, padding=padding)
    close(tau[0], g[f"tau3d_mean_{padding}"])
    assert torch.equal(outer_region(labels, padding=padding)[0].long(), g[f"outer3d_{padding}"])


@pytest.mark.parametrize("padding", ["replicate", "background", "renormalize"])
@pytest.mark.parametrize("ignore", [None, 255])
def test_golden_crac_options(golden, padding, ignore):
    g = golden("crac_options")
    labels = g["labels" if ignore is None else "labels_ignore255"][None]
    suffix = "" if ignore is None else "_ign"
    outer = outer_region(labels, padding=padding, ignore_index=ignore)
    assert torch.equal(outer[0].long(), g[f"outer_{padding}{suffix}"])
    tau = class_proportions(labels, 4, padding=padding, ignore_index=ignore)
    close(tau[0], g[f"tau_{padding}{suffix}"])


def test_golden_published_code(golden):
    g = golden("nacl_marginloss")
    for kernel, padding, size, name in (
        ("mean", "background", 3, "mean3_l1"),
        ("mean", "background", 5, "mean5_l1"),
        ("svls", "replicate", 3, "gauss3_l1"),
    ):
        tau = class_proportions(
            g["labels"], 4, kernel=kernel, padding=padding, kernel_size=size, dtype=torch.float64
        )
        close(tau, g[f"tau_{name}"])
    m = golden("nacl_monai")
    for dim, labels in (("2d", m["labels"]), ("3d", m["labels3d"])):
        tau = class_proportions(labels, m[f"tau_{dim}_mean"].shape[1], padding="zeros")
        close(tau, m[f"tau_{dim}_mean"], 1e-5, 1e-6)


def test_golden_region_mask(golden):
    g = golden("crac_region_mask")
    for padding, name in (("background", "mask_exact_zero"), ("replicate", "mask_exact_replicate")):
        assert torch.equal(outer_region(g["labels"], padding=padding).int(), g[name])


def test_every_small_patch_is_classified_exactly():
    """All two-value 3x3 patches over labels 0..4, and random ones of three to five values."""
    patches = []
    for a, b in itertools.combinations(range(5), 2):
        for bits in range(512):
            patches.append([a if bits >> i & 1 else b for i in range(9)])
    patches += np.random.default_rng(0).integers(0, 5, (5000, 9)).tolist()
    x = torch.tensor(patches).view(-1, 3, 3)
    mixed = torch.tensor([len(set(p)) > 1 for p in patches])
    assert torch.equal(outer_region(x)[:, 1, 1], mixed)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    sizes=st.lists(st.sampled_from([1, 3, 5]), min_size=3, max_size=3),
    kernel=st.sampled_from(["mean", "svls"]),
    padding=st.sampled_from(PADDINGS),
    ignore=st.sampled_from([None, 255, -1]),
    seed=st.integers(0, 2**16),
)
def test_agrees_with_the_naive_oracle(shape, sizes, kernel, padding, ignore, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, shape)
    if ignore is not None:
        labels[rng.random(shape) < 0.3] = ignore
    size = tuple(sizes[: len(shape)])
    expected_tau, expected_outer = proportions_and_outer(labels, 3, size, kernel, padding, ignore)
    x = torch.as_tensor(labels)[None]
    kwargs = {"kernel_size": size, "padding": padding, "ignore_index": ignore}
    tau = class_proportions(x, 3, kernel=kernel, dtype=torch.float64, **kwargs)[0]
    close(tau, expected_tau)
    assert torch.equal(outer_region(x, **kwargs)[0], torch.as_tensor(expected_outer))
    if ignore != -1:
        assert torch.equal(outer_region(x.byte(), **kwargs)[0], torch.as_tensor(expected_outer))
    if padding != "zeros":
        valid = torch.as_tensor(labels != ignore if ignore is not None else labels >= 0)
        close(tau.sum(0)[valid], torch.ones(int(valid.sum())))


def test_border_conventions_on_a_uniform_mask():
    """5x5 of class 1: proportion of class 1 at corner, edge, centre."""
    labels = torch.ones(1, 5, 5, dtype=torch.int64)
    places = ((0, 0), (0, 2), (2, 2))
    expected = {
        "replicate": (1, 1, 1),
        "renormalize": (1, 1, 1),
        "background": (4 / 9, 6 / 9, 1),
        "zeros": (4 / 9, 6 / 9, 1),
    }
    for padding, values in expected.items():
        tau = class_proportions(labels, 2, padding=padding)[0]
        close([tau[1][p] for p in places], values)
        other = tau[0][places[0]]
        close(other, 5 / 9 if padding == "background" else 0.0)
    half = labels.clone()
    half[:, :2] = 0
    tau = class_proportions(half, 2)[0, 1]
    close(tau[:, 2], [0, 1 / 3, 2 / 3, 1, 1])


def test_a_slice_is_a_volume_of_depth_one():
    labels = torch.randint(0, 4, (2, 9, 7), generator=torch.Generator().manual_seed(0))
    for padding in PADDINGS:
        flat = class_proportions(labels, 4, padding=padding)
        deep = class_proportions(labels[:, None], 4, kernel_size=(1, 3, 3), padding=padding)
        assert torch.equal(flat, deep[:, :, 0])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kernel_size": 2}, "kernel_size: expected an odd"),
        ({"kernel_size": (3, 3, 3)}, "kernel_size"),
        ({"padding": "reflect"}, "padding: expected one of"),
        ({"kernel": "box"}, "kernel: expected one of"),
        ({"ignore_index": 7}, "labels: expected 0 to 1 or ignore_index 7"),
    ],
)
def test_refuses(kwargs, message):
    with pytest.raises(ValueError, match=message):
        class_proportions(torch.full((1, 4, 4), 5), 2, **kwargs)


@pytest.mark.parametrize("shape", [(30,), (9, 11), (3, 5, 8)])
@pytest.mark.parametrize("ignore", [None, 9])
@pytest.mark.parametrize("flat", [False, True])
def test_bands_of_distance_against_a_loop(shape, ignore, flat):
    """Sparse labels, so that some voxels are far; along the first axis not if flat."""
    generator = np.random.default_rng(0)
    label_map = (generator.random(shape) < 0.03) * generator.integers(1, 3, shape)
    if ignore is not None:
        label_map[generator.random(shape) < 0.2] = ignore
    looked = np.array([not flat, *[True] * (len(shape) - 1)])
    kernel = [3 if along else 1 for along in looked]
    band = distance_bands(
        torch.from_numpy(label_map)[None], (1, 2, 4), kernel_size=kernel, ignore_index=ignore
    )[0].numpy()
    expected = np.digitize(
        distance_to_another_class(label_map, looked, ignore), (1, 2, 4), right=True
    )
    assert (band == expected)[label_map != ignore].all()
    assert flat or len(np.unique(expected)) > 2


@pytest.mark.parametrize("padding", PADDINGS)
def test_a_reach_of_one_is_the_outer_region(padding):
    labels = torch.randint(0, 2, (2, 7, 9), generator=torch.Generator().manual_seed(0))
    labels[0] = 1
    band = distance_bands(labels, (1,), padding=padding)
    assert torch.equal(band == 0, outer_region(labels, padding=padding))
    for reaches in ((), (0, 1), (2, 2), (3, 1), (1.5,), (True,)):
        with pytest.raises(ValueError, match="bands: expected ascending whole distances"):
            distance_bands(labels, reaches)
