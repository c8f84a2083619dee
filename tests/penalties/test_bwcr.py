"""BWCR against the published program, its geometry, and real networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import ndimage

from segcal.losses.cross_entropy import CrossEntropy, cross_entropy
from segcal.objective import Objective
from segcal.penalties.bwcr import BWCR, boundary_weight, consistency
from segcal.penalties.nacl import NACL, nacl
from segcal.recipes import build
from tests.conftest import close


def test_golden_consistency(golden):
    g = golden("bwcr")
    everywhere = torch.ones(1, 16, 16).bool()
    value = consistency(g["z1"], g["z2"], g["lambda_default"][:1, 0], everywhere)
    close(value, g["cons_l2"], 1e-10, 1e-12)


def test_thin_objects_are_kept(golden):
    thin = golden("bwcr")["thin_mask"][None].long()
    weight = boundary_weight(thin, 2)
    close(weight[thin == 1], [1.01] * 8, 1e-6)  # two voxels thick: all on the boundary
    close(weight[0, 2, 2], 0.9 + 0.01, 1e-6)  # one voxel away


@pytest.mark.parametrize("spacing", [None, (8.0, 1.5, 1.25)])
def test_weight_by_brute_force(spacing):
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 3, (1, 5, 7, 6)))
    labels = torch.from_numpy(ndimage.median_filter(labels[0].numpy(), 3))[None]
    sampling = np.array(spacing or (1, 1, 1), dtype=float)
    weight = boundary_weight(labels, 3, radius=6.0, power=1.5, spacing=spacing)[0].double()
    points = np.argwhere(np.ones((5, 7, 6)))
    for i, j, k in points[::7]:
        best = 0.0
        for c in (1, 2):
            mask = labels[0].numpy() == c
            inside = mask[i, j, k]
            others = np.argwhere(mask != inside)
            d = np.sqrt((((others - (i, j, k)) * sampling) ** 2).sum(1)).min()
            d = max(d - sampling.min(), 0) if inside else d
            best = max(best, (max(6.0 - d, 0) / 6.0) ** 1.5)
        close(weight[i, j, k], best + 0.01, 1e-5)


def test_classes_that_are_absent_or_everywhere():
    assert (boundary_weight(torch.zeros(1, 8, 8).long(), 3) == 0.01).all()
    assert (boundary_weight(torch.ones(1, 8, 8).long(), 3) == 0.01).all()
    labels = torch.full((1, 8, 8), 255)
    labels[0, 4, 4] = 1
    assert float(boundary_weight(labels, 2, ignore_index=255)[0, 4, 4]) > 1
    with pytest.raises(ValueError, match="is an ignore_index missing"):
        boundary_weight(labels, 2)


def example(shape=(12, 10), k=3):
    generator = torch.Generator().manual_seed(0)
    first, second = (
        torch.randn(2, k, *shape, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return first, second, torch.randint(0, k, (2, *shape), generator=generator)


@pytest.mark.parametrize("shape", [(6,), (5, 4), (3, 4, 3)])
def test_gradcheck_in_both_views(shape):
    first, second, labels = example(shape)
    labels[0].flatten()[0] = 9
    bwcr = BWCR(3, alpha=0.7, ignore_index=9)
    inside = torch.rand(labels.shape, generator=torch.Generator().manual_seed(3)) < 0.8
    assert torch.autograd.gradcheck(
        lambda a, b: bwcr(a, b, labels, inside), (first.requires_grad_(), second.requires_grad_())
    )


def test_what_does_not_count():
    first, second, labels = example()
    labels[:, :3] = 255
    bwcr = BWCR(3, ignore_index=255)
    inside = torch.ones(labels.shape, dtype=torch.bool)
    inside[:, -2:] = False
    value = bwcr(first, second, labels, inside)
    changed = first.clone()
    changed[:, :, :3] = 77
    changed[:, :, -2:] = 55
    close(bwcr(changed, second, labels, inside), value)
    x = first.requires_grad_()
    nothing = bwcr(x, second, labels, torch.zeros_like(inside))
    assert nothing == 0
    assert (torch.autograd.grad(nothing, x)[0] == 0).all()
    assert BWCR(3, ignore_index=255)(first, first, labels) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    first, second, labels = example()
    a, b = ((1000 * x.sign()).to(dtype).requires_grad_() for x in (first, second))
    value = BWCR(3)(a, b, labels)
    assert value.dtype == torch.float32
    assert torch.isfinite(value)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(value, (a, b)))


def still(k=3, **options):
    """Views that do not change intensities."""
    return BWCR(k, contrast=0, brightness=0, noise=0, **options)


def smooth(shape, n=2):
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(n, 1, *shape)))
    return torch.from_numpy(ndimage.gaussian_filter(x.numpy(), (0, 0, *(3,) * len(shape)))).float()


@pytest.mark.parametrize("shape", [(40, 32), (6, 40, 32)])
def test_a_view_goes_back_to_where_it_came_from(shape):
    """Also where axes and voxels are of different sizes."""
    image = smooth(shape)
    spacing = (8.0, 1.0, 2.0)[-len(shape) :]
    bwcr = still(rotation=30, scaling=0.2, translation=0.0, spacing=spacing)
    view, other = bwcr.draw(image, torch.Generator().manual_seed(0))
    moved = view.image(image)
    assert (moved - image).abs().max() > 0.5 * image.std()
    assert not torch.equal(view.matrix, other.matrix)
    inside = view.inside(image)
    assert 0.5 < inside.float().mean() < 1
    core = inside.clone()
    for n in range(len(core)):
        core[n] = torch.from_numpy(ndimage.binary_erosion(inside[n].numpy(), iterations=2))
    error = (view.back(moved) - image).abs()[:, 0][core]
    assert error.mean() < 0.03 * image.std()  # two interpolations
    assert error.max() < 0.2 * image.std()


def test_an_angle_is_an_angle_on_any_grid():
    """A bar along x, turned by 30 degrees in mm, is as long and as thick as before."""
    spacing = (1.0, 2.0)
    image = torch.zeros(1, 1, 64, 48)
    image[..., 30:34, 16:32] = 1  # 4 mm x 32 mm
    bwcr = still(spacing=spacing, scaling=0, translation=0, rotation=30)
    view = bwcr.draw(image, torch.Generator().manual_seed(1))[0]
    moved = view.image(image)[0, 0]
    y, x = np.nonzero(moved.numpy() > 0.5)
    points = np.stack([y * spacing[0], x * spacing[1]], 1)
    spread = np.sqrt(np.linalg.eigvalsh(np.cov(points.T)))
    close(spread[1] * np.sqrt(12), 32.0, 0.1)
    close(spread[0] * np.sqrt(12), 4.0, 0.35)


def test_labels_move_with_the_image_at_every_resolution():
    labels = torch.zeros(2, 40, 40, dtype=torch.long)
    labels[:, 8:24, 12:32] = 2
    view = still(rotation=30).draw(labels[:, None].float(), torch.Generator().manual_seed(2))[0]
    moved = view.labels(labels)
    assert moved.dtype == torch.long
    assert set(moved.unique().tolist()) == {0, 2}
    agree = (view.image((labels == 2)[:, None].float())[:, 0] > 0.5) == (moved == 2)
    assert agree.float().mean() > 0.99
    coarse = view.labels(labels[:, None, ::2, ::2])  # nnU-Net's (N, 1, *S) of a lower head
    assert coarse.shape == (2, 1, 20, 20)
    assert (coarse[:, 0] == moved[:, ::2, ::2]).float().mean() > 0.93
    back = view.back(torch.nn.functional.one_hot(moved, 3).movedim(-1, 1).float())
    inside = view.inside(back)
    assert (back.argmax(1) == labels)[inside].float().mean() > 0.97


def test_intensities_change_by_view():
    image = smooth((20, 20))
    first, second = BWCR(3, rotation=0, scaling=0, translation=0).draw(image)
    a, b = first.image(image), second.image(image)
    assert 0.01 < (a - b).abs().mean() / image.std() < 1
    bwcr = BWCR(3)
    one, two = (bwcr.draw(image, torch.Generator().manual_seed(5))[0] for _ in range(2))
    assert torch.equal(one.matrix, two.matrix)
    with pytest.raises(ValueError, match="2 or 3 axes"):
        bwcr.draw(torch.zeros(1, 1, 5))


def test_thick_slices_stay_where_they_are():
    depth = torch.arange(9.0).view(1, 1, 9, 1, 1).expand(1, 1, 9, 8, 8).contiguous()
    view = still(rotation=30, scaling=0.2, translation=0.1).draw(depth)[0]
    torch.testing.assert_close(view.image(depth), depth)
    assert view.matrix[0, 2].tolist() == [0, 0, 1, 0]


def test_an_ignored_label_below_the_number_of_classes_has_no_boundary():
    labels = torch.zeros(1, 30, 30, dtype=torch.long)
    labels[:, 12:18, 12:18] = 1
    assert (boundary_weight(labels, 3, ignore_index=1) == 0.01).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_views_are_exact_under_autocast_and_of_half_images(dtype):
    image = smooth((64, 64))
    labels = (image[:, 0] > 0).long()
    view = still().draw(image, torch.Generator().manual_seed(0))[0]
    expected = view.image(image), view.labels(labels), view.inside(image), view.back(image)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = view.image(image), view.labels(labels), view.inside(image), view.back(image)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)
    half = view.image(image.to(dtype))
    assert half.dtype == dtype
    close(half, expected[0], 0.02, 0.02 * float(image.std()))


def test_a_seed_fixes_a_view_noise_included():
    image = smooth((20, 20))
    first, second = (BWCR(3).draw(image, torch.Generator().manual_seed(5))[0] for _ in range(2))
    assert torch.equal(first.image(image), second.image(image))
    assert not torch.equal(first.image(image), BWCR(3).draw(image)[0].image(image))
    with pytest.raises(ValueError, match="images: expected floating"):
        first.image(image.long())


@pytest.mark.parametrize("shape", [(0, 1, 8, 8), (2, 1, 0, 8)])
def test_an_empty_batch(shape):
    images = torch.zeros(shape)
    labels = torch.zeros(shape[0], *shape[2:], dtype=torch.long)
    total, _ = build("bwcr", 2).step(
        lambda x: torch.cat([x, x], 1).requires_grad_(), images, labels
    )
    assert total == 0
    total.backward()


def test_spacing_is_checked():
    with pytest.raises(ValueError, match="spacing: expected positive"):
        BWCR(3, spacing=(0, 1))
    with pytest.raises(ValueError, match="spacing: expected 2 values"):
        BWCR(3, spacing=(1, 1, 1)).draw(torch.zeros(1, 1, 4, 4))


def test_a_step_is_what_its_views_give(monkeypatch):
    """Labels and images of a view go with its logits; logits go back to the original frame."""
    images = smooth((24, 24))
    labels = (images[:, 0] > 0).long()
    weight = torch.tensor([[-1.0], [2.0]])

    def model(x):
        return (weight.view(1, 2, 1, 1) * x).requires_grad_()

    objective = Objective(
        {
            "ce": CrossEntropy(2),
            "nacl": NACL(2, kernel="image_l1"),
            "bwcr": BWCR(2, alpha=0.5, rotation=40),
        },
        {"ce": 1.0, "nacl": 3.0, "bwcr": 2.0},
    )
    views = objective.terms["bwcr"].draw(images)
    monkeypatch.setattr(objective.terms["bwcr"], "draw", lambda _: views)
    total, values = objective.step(model, images, labels)
    expected = 0.0
    for view in views:
        x, y = view.image(images), view.labels(labels)
        expected += cross_entropy(model(x), y)
        expected += 3 * 0.1 * nacl(model(x), y, kernel="image_l1", image=x)
    a, b = (view.back(model(view.image(images))) for view in views)
    both = views[0].inside(a) & views[1].inside(b)
    disagreement = consistency(a, b, boundary_weight(labels, 2), both)
    close(values["bwcr"], 0.5 * disagreement, 1e-6)
    close(total.detach(), (expected + 2 * 0.5 * disagreement).detach() / (2 + 2 * 0.5), 1e-6)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alpha", -1), ("radius", 0), ("power", float("nan")), ("weight_min", -0.1),
     ("rotation", 181), ("scaling", 1.0), ("noise", float("inf"))],
)  # fmt: skip
def test_refuses_at_construction(name, value):
    with pytest.raises(ValueError, match=name):
        BWCR(3, **{name: value})


def test_wrong_shapes_are_named():
    first, second, labels = example()
    with pytest.raises(ValueError, match="second: expected"):
        BWCR(3)(first, second[:1], labels)
    with pytest.raises(ValueError, match="logits: expected 4 classes"):
        BWCR(4)(first, second, labels)
    with pytest.raises(ValueError, match="inside: expected"):
        consistency(first, second, torch.ones(2, 12, 10), torch.ones(2, 12).bool())


def test_an_objective_steps_through_both_views():
    images = smooth((24, 24))
    labels = (images[:, 0] > 0).long()
    calls = []

    def model(x):
        calls.append(x)
        return torch.cat([-x, x], 1).requires_grad_()

    objective = build("bwcr", 2, bwcr={"alpha": 0.5})
    total, values = objective.step(model, images, labels)
    assert len(calls) == 2
    assert list(values) == ["cross_entropy", "bwcr"]
    close(total, (2 * values["cross_entropy"] + values["bwcr"]) / 2.5, 1e-5)
    with pytest.raises(ValueError, match=r"bwcr: compares two views.*objective\.step"):
        objective(torch.zeros(2, 2, 24, 24), labels)
    value, values = objective.eval().loss_and_terms(torch.zeros(2, 2, 24, 24), labels)
    assert list(values) == ["cross_entropy"]
    close(value, cross_entropy(torch.zeros(2, 2, 24, 24), labels))


def networks():
    from dynamic_network_architectures.architectures.unet import PlainConvUNet
    from monai.networks.nets import BasicUNet

    yield "MONAI", BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 8, 4))
    yield "nnU-Net", PlainConvUNet(
        1, 3, (4, 8, 8), torch.nn.Conv2d, 3, (1, 2, 2), 1, 2, 1, conv_bias=True,
        norm_op=torch.nn.InstanceNorm2d, nonlin=torch.nn.LeakyReLU,
    )  # fmt: skip


@pytest.mark.parametrize("which", [0, 1], ids=["monai", "nnunet"])
def test_networks_of_both_hosts_train(which, one_thread):
    """Supervised loss and disagreement both fall."""
    torch.manual_seed(0)
    _, network = list(networks())[which]
    images = smooth((32, 32), n=4)
    images = images / images.std()
    labels = (images[:, 0] > 0.5).long()
    objective = build("bwcr", 2)
    optimiser = torch.optim.Adam(network.parameters(), 1e-2)
    history = []
    for _ in range(25):
        optimiser.zero_grad()
        total, values = objective.step(network, images, labels)
        total.backward()
        optimiser.step()
        history.append(float(values["cross_entropy"]))
    assert np.mean(history[-5:]) < 0.6 * history[0]
    assert float(values["bwcr"]) > 0
