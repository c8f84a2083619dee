"""Logits of probabilities: a round trip, and a floor where there is nothing to take a log of."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.posthoc.links import floor_of, floored_share, logits_of


def test_logits_of_probabilities():
    p = torch.tensor([[0.0, 1e-30, 0.25, 1.0], [1.0, 1.0, 0.75, 0.0]])
    torch.testing.assert_close(logits_of(p, regions=False).softmax(0), p, rtol=1e-5, atol=1e-37)
    logits = logits_of(p, regions=True)
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(torch.sigmoid(logits), p, rtol=1e-5, atol=1e-7)
    assert logits[0, 2] == pytest.approx(-np.log(3))
    assert floored_share(p) == 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("regions", [False, True])
def test_ends_are_finite_and_come_back(dtype, regions):
    p = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 0.5]], dtype=dtype)
    logits = logits_of(p, regions=regions)
    assert torch.isfinite(logits).all()
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    back = torch.sigmoid(logits) if regions else logits.softmax(0)
    torch.testing.assert_close(back, p.to(back), rtol=0, atol=2 * torch.finfo(dtype).eps)
    assert 0 < floor_of(dtype) <= 2.0**-24
