"""The compiled loops of mL1-ACE have the value and the gradient of its readable version."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.binning import edge_tolerance, equal_width_index
from segcal.losses.ml1_ace import ML1ACE, _soft, ml1_ace
from segcal.sweep import bins_loops, cpu
from segcal.sweep.fused import supports, sweep
from segcal.sweep.terms import BinTerm, Together
from tests.conftest import close

BINNINGS = ("hard", "soft")
IGNORE = 99


def image(space, k=4, n=2, dtype=torch.float64, scale=4.0, seed=0):
    g = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(n, k, *space, dtype=dtype, generator=g)
    return logits, torch.randint(0, k, (n, *space), generator=g)


def both(logits, labels, **options):
    """Value and gradient of the compiled and of the readable version."""
    found = []
    for fused in (True, False):
        x = logits.clone().requires_grad_()
        value = ml1_ace(x, labels, fused=fused, **options)
        found.append((value.detach().double(), torch.autograd.grad(value, x)[0].double()))
    return found


@pytest.mark.parametrize("binning", BINNINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("space", "k"), [((1,), 2), ((513,), 4), ((9, 121), 20), ((3, 7, 53), 2), ((5, 5, 5), 4)]
)
def test_equals_the_readable_version(space, k, dtype, binning):
    logits, labels = image(space, k, dtype=dtype)
    labels.flatten()[::7] = IGNORE
    assert supports(logits, ML1ACE(k).swept())
    for bins, skip, background in itertools.product((1, 3, 20), (False, True), (False, True)):
        (value, slope), (expected, gradient) = both(
            logits, labels, bins=bins, binning=binning, ignore_index=IGNORE,
            skip_empty=skip, include_background=background,
        )  # fmt: skip
        exact = dtype == torch.float64
        close(value, expected, rtol=1e-12 if exact else 2e-5)
        largest = gradient.abs().max().item()
        close(
            slope, gradient, rtol=1e-9 if exact else 1e-4, atol=largest * (1e-12 if exact else 1e-4)
        )
        assert (slope.movedim(1, -1)[labels == IGNORE] == 0).all()


@given(
    st.integers(1, 40), st.integers(2, 6), st.integers(1, 60), st.floats(0, 30), st.integers(0, 99),
    st.sampled_from(BINNINGS),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_equals_the_readable_version_of_any_logits(bins, k, voxels, scale, seed, binning):
    logits, labels = image((voxels,), k, scale=scale, seed=seed)
    (value, slope), (expected, gradient) = both(logits, labels, bins=bins, binning=binning)
    close(value, expected, rtol=1e-10, atol=1e-13)
    if scale > 1e-3:  # equal logits may lie on a kink: of soft bins, or where a bin's gap is 0
        close(slope, gradient, rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bins", [5, 10, 15, 20, 1000])
def test_values_at_edges_fall_into_the_bins_of_the_rule(bins, dtype):
    """Of one probability: the softmax itself may differ from torch's in the last bit."""
    edge = torch.arange(bins + 1, dtype=torch.float64) / bins
    steps = torch.arange(-4, 5)[:, None] * 2.0**-25
    p = torch.cat([(edge + steps).flatten(), edge * (1 - 1e-5), edge * (1 + 1e-5)])
    p = p.clamp(0, 1).to(dtype)
    rule, buffers = bins_loops.Bins(bins, edge_tolerance(bins), False), bins_loops.bin_buffers(1)
    label = np.zeros(1, np.uint8)
    for one, expected in zip(p.numpy()[:, None], equal_width_index(p, bins).tolist(), strict=True):
        sums = np.zeros((bins_loops.LANES, bins + 1, bins_loops.SLOTS))
        bins_loops.add(one, 1, label, rule, buffers, sums.reshape(-1))
        found = sums.sum(0)
        assert found[expected].tolist() == [1, 0, one[0], 0, 0, 0]
        assert found.sum() == 1 + np.float64(one[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bins", [1, 2, 5, 20])
def test_soft_bins_of_probabilities_at_centres_edges_and_ends(bins, dtype):
    """A voxel counts once; its parts, and those of a hit, are what the two nearest bins get."""
    edge = torch.arange(2 * bins + 1, dtype=torch.float64) / (2 * bins)
    steps = torch.arange(-2, 3)[:, None] * 2.0**-24
    rule, buffers = bins_loops.Bins(bins, 0.0, True), bins_loops.bin_buffers(1)
    for p in (edge + steps).clamp(0, 1).flatten().to(dtype):
        one = p.numpy()[None]
        sums = np.zeros((bins_loops.LANES, bins + 1, bins_loops.SLOTS))
        bins_loops.add(one, 1, np.ones(1, np.uint8), rule, buffers, sums.reshape(-1))
        found = cpu._of_cells(sums.sum(0)[None, None], True)[:, 0, 0]
        expected = torch.zeros(3, bins, dtype=torch.float64)
        for index, share in _soft(p, bins):
            expected[:, index] += share * torch.tensor([1.0, p.item(), 1.0], dtype=torch.float64)
        close(found, expected, rtol=0, atol=1e-15 if dtype == torch.float64 else 3e-6)
        close(found[0].sum(), 1.0)


@pytest.mark.parametrize("binning", BINNINGS)
def test_same_bits_on_any_number_of_threads(binning):
    logits, labels = image((70, 1100), dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 2):
            torch.set_num_threads(threads)
            x = logits.clone().requires_grad_()
            value = ml1_ace(x, labels, binning=binning)
            found.append((value.detach(), *torch.autograd.grad(value, x)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_tables_of_many_classes_and_bins_are_few(monkeypatch):
    """With little room for tables a block has more stretches; sums stay what they are."""
    logits, labels = image((40000,), 5, n=1)
    bins = cpu.Bins(20, 1e-6, True)
    assert cpu._sum_blocks(logits, bins, True)[0] == 3
    expected = both(logits, labels, binning="soft")[1]
    monkeypatch.setattr(cpu, "TABLE_BYTES", 1)
    assert cpu._sum_blocks(logits, bins, True) == (1, 79)
    value, slope = both(logits, labels, binning="soft")[0]
    close(value, expected[0], rtol=1e-12)
    close(slope, expected[1], rtol=1e-8, atol=1e-14)


@pytest.mark.parametrize("binning", BINNINGS)
def test_gradcheck(binning):
    logits, labels = image((6,), 3, scale=1.0)
    draw = torch.Generator().manual_seed(1)
    by = [torch.randn(2, 3, 3, dtype=torch.float64, generator=draw) for _ in range(3)]
    by[0] *= binning == "soft"  # weights of hard bins have no slope

    def loss(*sums):
        return sum((a * b).sum() for a, b in zip(by, sums, strict=True)), *by

    term = BinTerm(3, 3, binning == "soft", loss)
    assert torch.autograd.gradcheck(
        lambda x: sweep(x, labels, Together(bins=term))[0], logits.requires_grad_()
    )
    assert torch.autograd.gradcheck(lambda x: ml1_ace(x, labels, bins=3, binning=binning), logits)


@pytest.mark.parametrize("binning", BINNINGS)
@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_promoted(half, binning):
    logits, labels = image((9, 31))
    x = logits.to(half).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = ml1_ace(x, labels, binning=binning)
    (slope,) = torch.autograd.grad(value, x)
    assert value.dtype == torch.float32
    assert slope.dtype == half
    close(value, ml1_ace(x.detach().float(), labels, binning=binning, fused=False), rtol=1e-5)


@pytest.mark.parametrize("binning", BINNINGS)
def test_what_is_not_a_number_reaches_the_value_but_not_from_ignored_voxels(binning):
    logits, labels = image((9, 31))
    labels[0, 0, 0] = IGNORE
    logits[0, :, 0, 0] = torch.nan
    (value, slope), (expected, _) = both(logits, labels, binning=binning, ignore_index=IGNORE)
    close(value, expected, rtol=1e-12)
    assert slope.isfinite().all()
    assert (slope[0, :, 0, 0] == 0).all()
    logits[1, 2, 3, 3] = torch.nan
    for skip in (False, True):
        value = ml1_ace(logits, labels, binning=binning, ignore_index=IGNORE, skip_empty=skip)
        assert value.isnan()


@pytest.mark.parametrize("binning", BINNINGS)
def test_images_without_a_valid_voxel_have_no_part(binning):
    logits, labels = image((9, 31))
    labels[0] = IGNORE
    options = {"binning": binning, "ignore_index": IGNORE}
    (value, slope), _ = both(logits, labels, **options)
    close(value, ml1_ace(logits[1:], labels[1:], **options), rtol=1e-12)
    assert (slope[0] == 0).all()
    value, slope = both(logits, torch.full_like(labels, IGNORE), **options)[0]
    assert value == 0
    assert (slope == 0).all()


def test_strides_and_second_derivatives():
    logits, labels = image((9, 31))
    expected = both(logits, labels)[1]
    value, slope = both(logits.contiguous(memory_format=torch.channels_last), labels)[0]
    close(value, expected[0], rtol=1e-12)
    close(slope, expected[1], rtol=1e-9, atol=1e-14)
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match=r"no second derivative.*fused=False"):
        torch.autograd.grad(ML1ACE(4)(logits, labels), logits, create_graph=True)
    (slope,) = torch.autograd.grad(
        ML1ACE(4, fused=False)(logits, labels), logits, create_graph=True
    )
    slope.square().sum().backward()
