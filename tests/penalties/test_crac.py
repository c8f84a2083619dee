"""CRaC against the published program, gradcheck and properties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from segcal.alm import FUNCTIONS
from segcal.penalties.crac import CRaC, from_reference
from segcal.recipes import build
from tests.conftest import close
from tests.oracles.neighbourhood import distance_to_another_class, proportions_and_outer


@pytest.mark.parametrize(("name", "padding"), [("cr_fix", "background"), ("cr_rep", "replicate")])
def test_golden_single_call(golden, name, padding):
    g = golden("crac")
    for penalty in ("phr", "p2", "p3"):
        crac = CRaC(4, padding=padding, function=penalty, lambda0=0.01)
        crac.lam.copy_(from_reference(g["get_lambda"]))
        crac.rho.copy_(from_reference(g["get_rho"]))
        logits = g["logits"].clone().requires_grad_()
        z, region = crac.constraints(logits, g["labels"])
        close(z.detach(), g[f"h_{name}"])
        assert torch.equal(region[:, None].int(), g[f"outer_mask_{name}"])
        value = crac(logits, g["labels"])
        close(value.detach(), g[f"get_{penalty}_{name}"][0])
        close(z.mean().detach(), g[f"get_{penalty}_{name}"][1])
        if penalty == "phr":
            (grad,) = torch.autograd.grad(value, logits)
            close(grad, g[f"get_grad_{name}"])


@pytest.mark.parametrize("padding", ["background", "replicate", "renormalize"])
@pytest.mark.parametrize("ignore", [None, 255])
def test_golden_options(golden, padding, ignore):
    g = golden("crac_options")
    suffix = padding + ("_ign" if ignore else "")
    crac = CRaC(4, padding=padding, ignore_index=ignore)
    crac.lam.copy_(g["get_lambda"])
    crac.rho.copy_(g["get_rho"])
    labels = g["labels_ignore255" if ignore else "labels"][None]
    close(crac(g["logits"][None], labels), g[f"penalty_{suffix}"])


def example(shape, seed=0, k=3, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((2, k, *shape), generator=generator, dtype=dtype)
    labels = torch.randint(0, k, (2, *shape), generator=generator)
    return logits, labels


def weighted(k=3, **kwargs):
    crac = CRaC(k, **kwargs)
    crac.lam.copy_(torch.rand(2, k, generator=torch.Generator().manual_seed(1)) + 0.1)
    return crac


@pytest.mark.filterwarnings("ignore:function relu")
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("penalty", sorted(FUNCTIONS))
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 2)])
def test_gradcheck(shape, penalty, fused):
    logits, labels = example(shape)
    labels[0].flatten()[0] = 255
    crac = weighted(function=penalty, lambda0=0.01, ignore_index=255, fused=fused)
    assert torch.autograd.gradcheck(lambda x: crac(x, labels), logits.requires_grad_())


def test_closed_form_gradient():
    """(lam + rho z) sign(l - t) / (N K R) for PHR."""
    logits, labels = example((6, 7))
    crac = weighted()
    logits.requires_grad_()
    (grad,) = torch.autograd.grad(crac(logits, labels), logits)
    z, region = crac.constraints(logits.detach(), labels)
    lam, rho = crac.lam.t()[:, region].movedim(0, 1), crac.rho.t()[:, region].movedim(0, 1)
    from segcal.neighbourhood import class_proportions

    margin = torch.where(region == 0, 5.0, 1.0).double()[:, None]
    target = margin * class_proportions(labels, 3, dtype=torch.float64)
    close(grad, (lam + rho * z) * (logits.detach() - target).sign() / (2 * 42 * 3 * 2))


def test_ignored_voxels_do_not_matter():
    logits, labels = example((6, 7))
    labels[:, 2:4, 1:3] = 255
    crac = weighted(ignore_index=255)
    value = crac(logits, labels)
    changed = logits.clone()
    changed[:, :, 2:4, 1:3] += 100
    close(crac(changed, labels), value)
    for c, x in ((crac, logits), (other := weighted(ignore_index=255), changed)):
        c.observe(x, labels)
        c.dual_step()
    assert torch.equal(crac.lam, other.lam)
    close(crac.count.sum(), 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    logits, labels = example((6, 7), dtype=torch.float32)
    half = (100 * logits).to(dtype)
    crac = weighted()
    expected = crac(half.double(), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = crac(half.requires_grad_(), labels)
        crac.observe(half.detach(), labels)
    assert value.dtype == torch.float32
    close(value.detach(), expected, rtol=1e-5)
    (grad,) = torch.autograd.grad(value, half)
    assert torch.isfinite(grad).all()
    step = crac.dual_step()
    assert torch.isfinite(torch.tensor(step.lam)).all()


def test_nothing_valid_gives_zero_with_zero_gradient():
    logits, labels = example((4, 4))
    logits.requires_grad_()
    value = weighted(ignore_index=9)(logits, torch.full_like(labels, 9))
    (grad,) = torch.autograd.grad(value, logits)
    assert value == 0
    assert (grad == 0).all()


def test_class_permutation():
    logits, labels = example((6, 7))
    crac, permuted = weighted(), weighted()
    order = torch.tensor([2, 0, 1])
    permuted.lam.copy_(crac.lam[:, order])
    rank = torch.argsort(order)
    close(permuted(logits[:, order], rank[labels]), crac(logits, labels))


def test_a_slice_is_a_volume_of_depth_one_and_a_batch_its_elements():
    logits, labels = example((6, 7))
    crac = weighted()
    deep = weighted(kernel_size=(1, 3, 3))
    close(deep(logits[:, :, None], labels[:, None]), crac(logits, labels))
    singles = [crac(logits[i : i + 1], labels[i : i + 1]) for i in range(2)]
    close(crac(logits, labels), sum(singles) / 2)


def test_with_nonnegative_constraints_multipliers_only_grow(golden):
    g = golden("crac")
    crac = CRaC(4)
    for epoch in range(12):
        before = crac.lam.clone()
        crac.observe(g["val_logits"][epoch], g["val_labels"])
        crac.dual_step()
        assert (crac.lam >= before).all()


def test_a_one_sided_constraint():
    """A signed constraint holds a logit from one side only; z may be negative, lam may fall."""
    labels = torch.zeros(1, 3, 3, dtype=torch.long)
    crac = CRaC(2, constraint="signed")
    crac.lam.fill_(0.2)
    for value, pulled in ((-9.0, True), (9.0, False)):  # the targets are 5 and 0
        logits = torch.full((1, 2, 3, 3), value, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(crac(logits, labels), logits)
        assert (slope != 0).all() == pulled
    crac.observe(torch.full((1, 2, 3, 3), 9.0), labels)
    crac.dual_step()
    assert (crac.lam[0] < 0.2).all()
    both = CRaC(2)(torch.full((1, 2, 3, 3), 9.0), labels)
    assert both > 0


def test_published_order():
    assert from_reference(torch.tensor([1, 2, 3, 4])).tolist() == [[3, 4], [1, 2]]
    with pytest.raises(ValueError, match=r"expected \(2K,\)"):
        from_reference(torch.zeros(3))


def test_wrong_shapes_are_named():
    crac = CRaC(3)
    logits = torch.zeros(2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"labels: expected \(N, \*S\) = \(2, 4, 5\)"):
        crac(logits, torch.zeros(2, 1, 4, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="expected 3 classes on axis 1, got shape"):
        crac(torch.zeros(2, 4, 4, 5), torch.zeros(2, 4, 5, dtype=torch.long))
    with pytest.raises(ValueError, match="labels: expected integers"):
        crac(logits, torch.zeros(2, 4, 5))
    labels = torch.zeros(2, 4, 5, dtype=torch.long)
    labels[0, 0, 0] = 255
    with pytest.raises(ValueError, match=r"got \[255\] in 1 voxels; is an ignore_index missing"):
        crac(logits, labels)


def by_hand(crac, logits, labels):
    """(1 / N K R) times the sum of P, one voxel at a time."""
    z, region = crac.constraints(logits, labels)
    total, n = 0.0, 0
    for at in (region >= 0).nonzero().tolist():
        batch, *place = at
        r = int(region[tuple(at)])
        for k in range(crac.num_classes):
            lam, rho = float(crac.lam[r, k]), float(crac.rho[r, k])
            total += float(FUNCTIONS[crac.function](z[(batch, k, *place)], lam, rho)[0])
        n += 1
    return total / (n * crac.num_classes * 2)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("function", ["phr", "p2"])
def test_the_mean_over_voxels_and_what_is_counted(function, fused):
    logits, labels = example((6, 7))
    labels[:, :3] = 1
    labels[0, 2, 2] = 255
    crac = weighted(function=function, ignore_index=255, fused=fused)
    close(crac(logits, labels), by_hand(crac, logits, labels))
    crac.observe(logits, labels)
    _, region = crac.constraints(logits, labels)
    assert crac.count[:, 0].tolist() == [int((region == r).sum()) for r in range(2)]
    assert (crac.count > 0).all()


BANDS = (1, 3)


def sparse(shape=(2, 13, 14), k=3):
    """A few squares of label 1 and 2 in a large background, so that every band is found."""
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn((shape[0], k, *shape[1:]), generator=generator, dtype=torch.float64)
    labels = torch.zeros(shape, dtype=torch.long)
    labels[:, 2:5, 2:4] = 1
    labels[0, 3:5, 4:6] = 2
    labels[1, 7, 7:9] = 9
    return logits, labels


def test_bands_against_a_loop():
    """Value, gradient and multipliers of PHR from distances and proportions of their own."""
    logits, labels = sparse()
    crac = CRaC(3, bands=BANDS, ignore_index=9, lambda0=0.2, rho0=0.4)
    assert crac.margins == (1.0, 3.0, 5.0)
    crac.lam.copy_(torch.rand(3, 3, generator=torch.Generator().manual_seed(1)) + 0.1)
    margins, before = np.array(crac.margins), crac.lam.numpy().copy()
    valid = labels.numpy() != 9
    region, tau = [], []
    for label_map in labels.numpy():
        distance = distance_to_another_class(label_map, np.array([True, True]), 9)
        region.append(np.digitize(distance, BANDS, right=True))
        tau.append(proportions_and_outer(label_map, 3, (3, 3), "mean", "replicate", 9)[0])
    region, tau = np.stack(region), np.stack(tau)
    u = logits.numpy() - margins[region][:, None] * tau
    z, lam = np.abs(u), np.moveaxis(before[region], -1, 1)
    n = valid.sum()
    value = ((lam * z + 0.2 * z**2) * valid[:, None]).sum() / (n * 3 * 3)
    x = logits.clone().requires_grad_()
    found = crac(x, labels)
    close(found.detach(), value)
    slope = (lam + 0.4 * z) * np.sign(u) * valid[:, None] / (n * 3 * 3)
    close(torch.autograd.grad(found, x)[0], slope)
    crac.observe(logits, labels)
    step = crac.dual_step()
    inside = [(region == r) & valid for r in range(3)]
    assert step.count == [int(i.sum()) for i in inside]
    assert min(step.count) > 0
    grown = [[z[:, k][i].sum() / n for k in range(3)] for i in inside]
    close(crac.lam, before + 0.4 * np.array(grown))


def test_bands_that_are_the_two_regions():
    """One band of reach 1 is inner and outer, in the other order."""
    logits, labels = sparse()
    one, two = CRaC(3, bands=[1], ignore_index=9), CRaC(3, ignore_index=9)
    two.lam.copy_(torch.rand(2, 3, generator=torch.Generator().manual_seed(1)))
    one.lam.copy_(two.lam.flip(0))
    close(one(logits, labels), two(logits, labels))
    for penalty in (one, two):
        penalty.observe(logits, labels)
        penalty.dual_step()
    close(one.lam, two.lam.flip(0))


def test_bands_of_the_users_and_states_of_others():
    crac = build("crac_bands", 3, crac_bands={"bands": [2, 4, 6], "margins": [0, 1, 2, 3]})
    assert crac.terms["crac_bands"].margins == (0, 1, 2, 3)
    assert crac.terms["crac_bands"].lam.shape == (4, 3)
    state = CRaC(3, bands=(1, 4)).state_dict()
    with pytest.raises(ValueError, match=r"bands \[1, 4\], here \[1, 3\]"):
        CRaC(3, bands=BANDS).load_state_dict(state)
    with pytest.raises(ValueError, match=r"bands \[1, 4\], here None; num_regions 3, here 2"):
        CRaC(3).load_state_dict(state)
    for options, message in (
        ({"bands": (1, 1)}, r"bands: expected ascending whole distances .* got \[1, 1\]"),
        ({"bands": ()}, r"bands: expected ascending whole distances"),
        ({"bands": BANDS, "margins": (1, 5)}, r"margins: expected 3 finite numbers, .* got \[1, 5"),
        ({"margins": (1, 5)}, r"margins: need bands, which are not given"),
    ):
        with pytest.raises(ValueError, match=message):
            CRaC(3, **options)


def test_bands_per_channel():
    """Every channel is a problem of two classes with bands of its own."""
    logits, labels = sparse()
    channels = torch.stack([labels == 1, labels >= 1], 1).long()
    whole = CRaC(2, bands=BANDS, per_channel=True)
    z, region = whole.constraints(logits[:, :2], channels)
    for k in range(2):
        one = CRaC(2, bands=BANDS)
        both = torch.stack([torch.zeros_like(logits[:, 0]), logits[:, k]], 1)
        expected, own = one.constraints(both, channels[:, k])
        close(z[:, k], expected[:, 1])
        assert torch.equal(region[:, k], own)


PROBABILITY = [
    {"target": target, "per_channel": per_channel}
    for target in ("tau", "smoothed")
    for per_channel in (False, True)
]


def one_hot(labels, k=3):
    return (labels.unsqueeze(1) == torch.arange(k).view(1, -1, 1, 1)).long()


@pytest.mark.parametrize("function", ["phr", "p2"])
@pytest.mark.parametrize("options", PROBABILITY)
def test_probability_space_gradcheck(options, function):
    logits, labels = example((4, 5))
    labels = one_hot(labels) if options["per_channel"] else labels
    labels[0, ..., 0, 0] = 255
    crac = weighted(space="probability", ignore_index=255, function=function, **options)
    assert torch.autograd.gradcheck(lambda x: crac(x, labels), logits.requires_grad_())


@pytest.mark.parametrize("options", PROBABILITY)
def test_probability_space_by_hand(options):
    """The distance of softmax or sigmoid to a distribution; margins do not matter."""
    logits, labels = example((6, 7))
    labels[:, :3] = 1
    classes, per_channel = one_hot(labels), options["per_channel"]
    y = classes if per_channel else labels
    weight = torch.full((3, 3), 1 / 9, dtype=torch.float64)
    if options["target"] == "smoothed":  # a Gaussian around a centre that has half of all
        axis = torch.exp(-0.5 * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
        weight = axis[:, None] * axis
        weight[1, 1] = 0
        weight /= 2 * weight.sum()
        weight[1, 1] = 0.5
    around = torch.nn.functional.pad(classes.double(), (1, 1, 1, 1), mode="replicate")
    around = around.flatten(0, 1).unsqueeze(1)
    target = torch.nn.functional.conv2d(around, weight.view(1, 1, 3, 3)).view(logits.shape)
    p = logits.sigmoid() if per_channel else logits.softmax(1)
    crac = weighted(space="probability", margin_inner=7.0, **options)
    z, region = crac.constraints(logits, y)
    close(z, (p - target).abs())
    assert torch.equal(region, CRaC(3, per_channel=per_channel).constraints(logits, y)[1])
    if not per_channel:
        close(crac(logits, y), by_hand(crac, logits, y))
    signed = weighted(space="probability", constraint="signed", **options)
    close(signed.constraints(logits, y)[0], target - p)


def test_probability_space_learns_and_says_what_it_is():
    logits, labels = example((6, 7))
    crac = CRaC(3, space="probability", target="smoothed", rho0=8.0, average="region")
    assert crac.swept() is None
    for _ in range(2):
        crac.observe(logits, labels)
        crac.dual_step()
    assert (crac.lam[1] > 1e-6).all()
    with pytest.raises(ValueError, match="space 'probability', here None; target 'smoothed'"):
        CRaC(3).load_state_dict(crac.state_dict())
    with pytest.raises(ValueError, match="target 'smoothed', here 'tau'"):
        CRaC(3, space="probability").load_state_dict(crac.state_dict())
    assert "space" not in CRaC(3).identity()  # as states of before have it
    with pytest.raises(ValueError, match="space: expected one of"):
        CRaC(3, space="softmax")
    with pytest.raises(ValueError, match=r"target: expected one of \('tau',\), got 'smoothed'"):
        CRaC(3, target="smoothed")
    with pytest.raises(ValueError, match="target: expected one of"):
        CRaC(3, space="probability", target="svls")


def test_in_probability_space_the_optimum_is_the_target():
    """Alone it brings probabilities to tau."""
    _, labels = example((6, 7))
    crac = CRaC(3, space="probability", rho0=8.0)
    logits = torch.zeros(2, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.05)
    first = float(crac(logits, labels).detach())
    for _ in range(400):
        optimiser.zero_grad()
        crac(logits, labels).backward()
        optimiser.step()
    assert float(crac(logits, labels).detach()) < 1e-2 * first
