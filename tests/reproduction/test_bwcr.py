"""BWCR against its published program."""

from __future__ import annotations

import pytest
import torch

from segcal.penalties.bwcr import BWCR
from segcal.recipes import build
from segcal.reproduction.bwcr import PublishedBWCR
from tests.conftest import close


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lambda_default", {}),
        ("lambda_R5_drop10", {"radius": 5, "weight_min": 0.1}),
        ("lambda_alp2", {"power": 2}),
    ],
)
def test_golden_weights(golden, name, options):
    g = golden("bwcr")
    weight = PublishedBWCR(4, **options).weight(g["labels"][:, 0])
    close(weight, g[name][:, 0], 1e-5, 1e-6)


def test_golden_thin_objects(golden):
    g = golden("bwcr")
    weight = PublishedBWCR(2).weight(g["thin_mask"][None].long())
    close(weight, g["thin_lambda"][None], 1e-5, 1e-6)


def test_golden_consistency(golden):
    g = golden("bwcr")
    bwcr = PublishedBWCR(g["z1"].shape[1])
    value = bwcr(g["z1"], g["z2"], g["labels"][:1, 0])
    close(value, g["cons_l2"], 1e-6)


def test_the_sum_is_divided_by_all_voxels():
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 1, 3, 8, 8, generator=draw, dtype=torch.float64)
    labels = torch.zeros(1, 8, 8, dtype=torch.long)
    labels[:, 2:6, 2:6] = 1
    labels[0, 0, 0] = 9
    inside = torch.ones(1, 8, 8).bool()
    inside[..., 4:] = False
    published, ours = PublishedBWCR(3, alpha=0.7, ignore_index=9), BWCR(3, ignore_index=9)
    square = (first - second).square().mean(1) * published.weight(labels)
    expected = 0.7 * square[inside & (labels != 9)].sum() / 64
    close(published(first, second, labels, inside), expected)
    ours.weight = published.weight
    close(0.7 * ours(first, second, labels, inside), expected * 64 / 31)
    nothing = published(first, second, labels, ~inside & inside)
    assert nothing == 0


def test_weights_in_mm_and_of_what_has_no_boundary():
    labels = torch.zeros(3, 8, 8, dtype=torch.long)
    labels[0, 2:6, 2:6] = 1
    labels[1] = 1
    weight = PublishedBWCR(2, spacing=(3.0, 3.0), radius=10.0).weight(labels)
    close(weight[0, 0, 0], 0.01 + (10 - 9) / 10, 1e-6)  # 6 sqrt(2) mm, rounded up
    assert (weight[1:] == weight.min()).all()


def test_the_recipe_has_it():
    assert isinstance(build("bwcr_published", 3).terms["bwcr_published"], PublishedBWCR)
