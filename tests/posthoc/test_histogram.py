"""Histogram binning, worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from segcal.posthoc.histogram import HistogramBinning
from tests.conftest import close
from tests.posthoc.data import wrong_logits


def logits(p):
    p = torch.tensor(p, dtype=torch.float64)
    return torch.stack([torch.log1p(-p), p.log()], 1)


P = [0.1, 0.2, 0.25, 0.3, 0.8, 0.9, 0.95, 1 - 1e-9]
Y = torch.tensor([0, 0, 1, 0, 1, 0, 1, 1])


def test_bins_of_equal_width():
    fitted = HistogramBinning(bins=4).fit(logits(P), Y)
    # (0, .25]: .1 .2 .25, (.25, .5]: .3, (.5, .75]: none, (.75, 1]: four
    probe = [0.05, 0.25, 0.4, 0.6, 0.99]
    close(fitted.apply(logits(probe))[:, 1], [1 / 3, 1 / 3, 0, 0.6, 3 / 4])
    close(fitted.apply(logits(probe))[:, 0], [2 / 3, 2 / 3, 1, 0.4, 1 / 4])


def test_bins_of_equal_mass():
    fitted = HistogramBinning(bins=4, equal_mass=True).fit(logits(P), Y)
    close(fitted.maps[0], [[0.2, 0.3, 0.9, 1], [0, 0.5, 0.5, 1]])
    close(fitted.apply(logits([0.2, 0.21, 0.9, 0.91]))[:, 1], [0, 0.5, 0.5, 1])


def test_tied_values_share_a_bin():
    p = [0.1] * 6 + [0.7, 0.8]
    y = torch.tensor([0, 0, 0, 1, 0, 1, 1, 0])
    fitted = HistogramBinning(bins=4, equal_mass=True).fit(logits(p), y)
    close(fitted.maps[0], [[0.1, 1], [1 / 3, 1 / 2]])
    assert fitted.maps[0][0, 0] > 0.1  # or rounding would part them


def test_classes_are_divided_by_their_sum():
    x, y = wrong_logits(500, 3)
    fitted = HistogramBinning(bins=5).fit(x, y)
    p = torch.softmax(x, 1).numpy()
    index = np.ceil(p * 5).astype(int) - 1
    parts = np.empty_like(p)
    for k in range(3):
        hits = (y == k).numpy()
        share = [hits[index[:, k] == m].mean() for m in range(5)]
        parts[:, k] = np.take(share, index[:, k])
    close(fitted.apply(x), parts / parts.sum(1, keepdims=True))


def test_an_empty_bin_and_a_row_of_zeros_keep_p():
    x, y = wrong_logits(30, 3)
    fitted = HistogramBinning(bins=4).fit(x, y)
    zero, empty = (np.array([[1.0], [value]]) for value in (0.0, np.nan))
    fitted.maps = [zero, zero, empty]
    p = torch.softmax(x, 1)
    close(fitted.apply(x), torch.eye(3)[[2] * 30])
    fitted.maps = [zero] * 3
    close(fitted.apply(x), p)
    fitted.maps = [empty] * 3
    close(fitted.apply(x), p)


def test_float32_falls_into_the_bins_of_float64():
    """0.2 is an edge of 5 bins, and a little more in float32."""
    x = logits([0.1, 0.2, 0.2, 0.7])
    y = torch.tensor([0, 1, 0, 1])
    wide, narrow = (HistogramBinning(bins=5).fit(z, y).maps[0] for z in (x, x.float()))
    close(wide[1][0], 1 / 3)
    close(np.nan_to_num(wide), np.nan_to_num(narrow), rtol=1e-6)


def test_the_state_has_no_nan():
    x, y = wrong_logits(30, 3)
    fitted = HistogramBinning(bins=30).fit(x, y)
    assert any(np.isnan(found).any() for found in fitted.maps)
    text = json.dumps(fitted.state(), allow_nan=False)
    close(HistogramBinning.from_state(json.loads(text)).apply(x), fitted.apply(x))


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="bins: expected 1 or more"):
        HistogramBinning(bins=0)
    x, y = wrong_logits(50, 3)
    state = HistogramBinning().fit(x, y).state()
    for damaged in ([1.0], [[0.5, 0.4], [0.1, 0.2]], [[0.5], [0.5]], [[1.0], [2.0]]):
        with pytest.raises(ValueError, match="map 0"):
            HistogramBinning.from_state({**state, "learned": {"maps": [damaged]}})
