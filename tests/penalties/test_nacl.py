"""NACL against the published program, MONAI, gradcheck and worked examples."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from segcal.neighbourhood import class_proportions
from segcal.penalties.nacl import NACL, nacl
from segcal.recipes import build
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


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("imgprop_l1", "image_l1"),
        ("imgprop_l2", "image_l2"),
        ("gauss3s2_l2", "svls"),
    ],
)
def test_golden_kernels(golden, name, kernel):
    g = golden("nacl_marginloss")
    options = {"kernel": kernel, "padding": "background"}
    if kernel == "svls":
        options = {"kernel": kernel, "sigma": 2.0, "distance": "l2"}
    module = NACL(4, alpha=0.1, **options)
    image = g["image"] if module.needs_image else None
    tau = class_proportions(
        g["labels"], 4, image=image, **{k: v for k, v in options.items() if k != "distance"}
    )
    close(tau, g[f"tau_{name}"])
    total, _, penalty = g[f"loss_{name}"]
    value = module(g["logits"], g["labels"], image)
    close(value, 0.1 * penalty)
    close(F.cross_entropy(g["logits"], g["labels"]) + value, total)


def by_voxel(labels, image, kernel, h, ignore):
    """Proportions with weights by intensity, one voxel and neighbour at a time (2-D, replicate)."""
    height, width = labels.shape
    tau = torch.zeros(3, height, width, dtype=torch.float64)
    for i in range(height):
        for j in range(width):
            if labels[i, j] == ignore:
                continue
            for a in (-1, 0, 1):
                for b in (-1, 0, 1):
                    y, x = min(max(i + a, 0), height - 1), min(max(j + b, 0), width - 1)
                    d = image[:, y, x] - image[:, i, j]
                    weight = {
                        "image_l1": math.exp(-float(d.abs().mean()) / h),
                        "image_l2": math.exp(-float(d.square().mean()) / h**2),
                    }[kernel]
                    if labels[y, x] != ignore:
                        tau[labels[y, x], i, j] += weight
            tau[:, i, j] /= tau[:, i, j].sum()
    return tau


@pytest.mark.parametrize("kernel", ["image_l1", "image_l2"])
def test_kernels_by_intensity_against_loops(kernel):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (1, 6, 5), generator=generator)
    labels[0, 2, 2] = 255
    image = torch.randn(1, 2, 6, 5, generator=generator, dtype=torch.float64)
    tau = class_proportions(labels, 3, kernel=kernel, image=image, bandwidth=0.7, ignore_index=255)
    close(tau[0], by_voxel(labels[0], image[0], kernel, 0.7, 255))


@pytest.mark.parametrize("shape", [(9,), (5, 6), (3, 4, 5)])
@pytest.mark.parametrize("kernel", ["image_l1", "image_l2"])
@pytest.mark.parametrize("padding", ["replicate", "background", "renormalize"])
def test_proportions_by_intensity(shape, kernel, padding):
    """They sum to 1; on a flat image they are those without an image; one label stays one-hot."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (2, *shape), generator=generator)
    image = torch.randn(2, 1, *shape, generator=generator)
    options = {"kernel": kernel, "padding": padding}
    tau = class_proportions(labels, 3, image=image, **options)
    close(tau.sum(1), torch.ones(2, *shape))
    flat = class_proportions(labels, 3, image=torch.zeros_like(image), **options)
    close(flat, class_proportions(labels, 3, padding=padding))
    if padding != "background":
        one = class_proportions(torch.ones_like(labels), 3, image=image, **options)
        assert (one[:, 1] > 1 - 1e-12).all()
    far = class_proportions(labels, 3, image=1e4 * image, **options)
    assert torch.isfinite(far).all()
    close(far.sum(1), torch.ones(2, *shape))


def test_an_image_that_is_missing_or_does_not_fit():
    logits, labels = torch.randn(1, 3, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long)
    module = NACL(3, kernel="image_l2")
    with pytest.raises(ValueError, match="image: this kernel weighs by intensities"):
        module(logits, labels)
    with pytest.raises(ValueError, match=r"image: expected \(N, C, \*S\) for labels \(1, 4, 4\)"):
        module(logits, labels, torch.zeros(1, 4, 4))
    with pytest.raises(ValueError, match="image: expected finite"):
        module(logits, labels, torch.full((1, 1, 4, 4), float("nan")))
    with pytest.raises(ValueError, match="bandwidth: expected a positive"):
        NACL(3, kernel="image_l2", bandwidth=0.0)
    with pytest.raises(ValueError, match="kernel: expected one of"):
        NACL(3, kernel="median")


def test_an_objective_hands_the_image_on():
    logits, labels = torch.randn(1, 3, 4, 4), torch.randint(0, 3, (1, 4, 4))
    image = torch.randn(1, 1, 4, 4)
    objective = build("nacl", 3, nacl={"kernel": "image_l1"})
    _, values = objective.loss_and_terms(logits, labels, image)
    close(values["nacl"], 0.1 * nacl(logits, labels, kernel="image_l1", image=image))
    with pytest.raises(ValueError, match="image: this kernel"):
        objective(logits, labels)


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
