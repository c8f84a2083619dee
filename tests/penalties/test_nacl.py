"""NACL against the published program, MONAI, gradcheck and worked examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from segcal.penalties.nacl import NACL, nacl
from tests.conftest import close


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mean3_l1", {}),
        ("mean3_l2", {"distance": "l2"}),
        ("mean5_l1", {"kernel_size": 5}),
        ("gauss3_l1", {"kernel": "svls", "padding": "replicate"}),
        ("mean3_l1_softmax", {"space": "softmax"}),
    ],
)
def test_golden_published(golden, name, options):
    g = golden("nacl_marginloss")
    total, ce, penalty = g[f"loss_{name}"]
    options = {"padding": "background", **options}
    logits = g["logits"].clone().requires_grad_()
    module = NACL(4, alpha=0.1, **options)
    loss = F.cross_entropy(logits, g["labels"]) + module(logits, g["labels"])
    close(loss.detach(), total)
    close(nacl(logits.detach(), g["labels"], **options), penalty)
    close(F.cross_entropy(logits.detach(), g["labels"]), ce)
    if f"grad_{name}" in g:
        close(torch.autograd.grad(loss, logits)[0], g[f"grad_{name}"])


@pytest.mark.parametrize("distance", ["l1", "l2"])
@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_golden_monai(golden, dim, distance):
    g = golden("nacl_monai")
    suffix = "" if dim == "2d" else "3d"
    logits, labels = g[f"logits{suffix}"].clone().requires_grad_(), g[f"labels{suffix}"]
    module = NACL(logits.shape[1], distance=distance, padding="zeros")
    loss = F.cross_entropy(logits, labels) + module(logits, labels)
    close(loss.detach(), g[f"loss_{dim}_mean_{distance}"], 1e-5, 1e-6)
    if distance == "l1":
        close(torch.autograd.grad(loss, logits)[0], g[f"grad_{dim}_mean_l1"], 1e-5, 1e-6)


@pytest.mark.parametrize("padding", ["background", "replicate", "renormalize"])
@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_golden_ignore(golden, padding, distance):
    g = golden("nacl_options")
    value = nacl(g["logits"][None], g["labels_ignore255"][None], padding=padding,
                 distance=distance, ignore_index=255)  # fmt: skip
    close(value, g[f"{distance}_mean_{padding}_ign"])


@pytest.mark.parametrize(
    ("padding", "expected"),
    [("replicate", 0.0), ("renormalize", 0.0), ("zeros", 0.124444444), ("background", 0.248888889)],
)
def test_uniform_mask_at_the_border(padding, expected):
    """5x5, all class 1, logits (0, 1): the penalty comes from the border convention alone."""
    logits = torch.zeros(1, 2, 5, 5, dtype=torch.float64)
    logits[:, 1] = 1
    value = nacl(logits, torch.ones(1, 5, 5, dtype=torch.long), padding=padding)
    close(value, expected, atol=1e-8)


@pytest.mark.parametrize("distance", ["l1", "l2"])
@pytest.mark.parametrize("space", ["logits", "softmax"])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 2)])
def test_gradcheck(shape, distance, space):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((2, 3, *shape), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (2, *shape), generator=generator)
    labels[1].flatten()[0] = -1
    module = NACL(3, distance=distance, space=space, ignore_index=-1)
    assert torch.autograd.gradcheck(lambda x: module(x, labels), logits.requires_grad_())


def test_half_precision_does_not_overflow():
    """Logits 300 in fp16, L2: each term, 89401, leaves the range of half."""
    logits = torch.full((1, 2, 4, 4), 300.0, dtype=torch.float16, requires_grad=True)
    labels = torch.ones(1, 4, 4, dtype=torch.long)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = NACL(2, distance="l2")(logits, labels)
    close(value.detach(), 0.1 * (300**2 + 299**2) / 2, rtol=1e-6)
    assert torch.isfinite(torch.autograd.grad(value, logits)[0]).all()


@pytest.mark.parametrize("ignore", [255, -100, -1])
def test_ignored_voxels_leave_penalty_and_neighbourhood(ignore):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 2, 5, 5, generator=generator)
    labels = torch.randint(0, 2, (1, 5, 5), generator=generator)
    labels[0, 2, 2] = ignore
    module = NACL(2, ignore_index=ignore)
    before = module(logits, labels)
    logits[0, :, 2, 2] = 1e4
    assert torch.equal(module(logits, labels), before)


def test_constant_weight_learns_nothing():
    module = NACL(2)
    state = {k: v.clone() for k, v in module.state_dict().items()}
    module.observe(torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.long))
    assert module.dual_step() is None
    assert module.state_dict() == state == {}
    for alpha in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="alpha"):
            NACL(2, alpha=alpha)
    with pytest.raises(ValueError, match="distance: expected one of"):
        NACL(2, distance="l3")
