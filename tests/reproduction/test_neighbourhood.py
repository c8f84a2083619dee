"""Kernels of the published NACL program that nothing but its own numbers needs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from segcal.reproduction.neighbourhood import published_proportions
from tests.conftest import close


@pytest.mark.parametrize("kernel", ["max", "min", "median", "mode", "bilateral", "gradient"])
def test_golden(golden, kernel):
    g = golden("nacl_marginloss")
    tau = published_proportions(g["labels"], 4, kernel, image=g["image"])
    close(tau, g[f"tau_{kernel}3_l1"])
    total, ce, penalty = g[f"loss_{kernel}3_l1"]
    value = (tau - g["logits"]).abs().mean()
    close(value, penalty)
    close(F.cross_entropy(g["logits"], g["labels"]), ce)
    close(ce + 0.1 * value, total)


def test_refuses():
    labels = torch.zeros(1, 4, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="kernel: expected one of"):
        published_proportions(labels, 2, "mean")
    with pytest.raises(ValueError, match="image: this kernel weighs by intensities"):
        published_proportions(labels, 2, "gradient")
