"""What every loss and penalty owes its users; methods are found by their configs.

An opt-out names its reason; a test for an opt-out that is not needed any more fails.
"""

from __future__ import annotations

import copy
from difflib import get_close_matches

import pytest
import torch

from segcal.components import accepted_arguments, build_component, target
from segcal.recipes import load_component, names
from segcal.term import CAPABILITIES, Term
from tests.conftest import close

OTHER_INTERFACE = {
    "bwcr": "compares the logits of two views; see penalties/test_bwcr.py",
    "bwcr_published": "compares the logits of two views; see reproduction/test_bwcr.py",
}
METHODS = [
    (kind, name)
    for kind in ("losses", "penalties")
    for name in names(kind)
    if name not in OTHER_INTERFACE
]
QUADRATIC = "a double sum over the voxels of the batch"
OPT_OUT = {
    ("batch", "mmce"): QUADRATIC,
    (
        "depth",
        "svls",
    ): "a 3-D Gaussian spreads half its weight over other neighbours than a 2-D one",
}

pytestmark = [
    pytest.mark.parametrize(("kind", "name"), METHODS),
    pytest.mark.filterwarnings("ignore:function (p3|relu)"),
]


def method(kind, name, k=3, **arguments):
    """Build it, with multipliers that are felt."""
    term = build_component(load_component(kind, name), num_classes=k, **arguments)
    for buffer_name, buffer in term.named_buffers():
        if buffer_name == "lam":
            generator = torch.Generator().manual_seed(5)
            drawn = torch.rand(buffer.shape, generator=generator, dtype=buffer.dtype)
            highest = term.ranges()["lam"][1]  # a state beyond it is refused
            buffer.copy_(0.1 + min(1.0, highest - 0.1) * drawn)
    return term


def data(shape=(4, 5), k=3, n=2, seed=0, dtype=torch.float64, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((n, k, *shape), generator=generator, dtype=dtype)
    labels = torch.randint(0, k, (n, *shape), generator=generator)
    return logits, labels


def check_opt_out(contract, name, holds):
    """Fail if a contract is broken without an opt-out, or kept with one."""
    assert holds != ((contract, name) in OPT_OUT), OPT_OUT.get((contract, name), "broken")


def agree(a, b):
    return bool(torch.allclose(a, b, rtol=1e-10, atol=1e-12))


def test_declares_what_its_constructor_takes(kind, name):
    """A capability that an argument sets is the one that hosts read."""
    options = accepted_arguments(target(load_component(kind, name)))
    assert isinstance(method(kind, name), Term)
    assert method(kind, name, ignore_index=9).ignore_index == 9
    for flag, other in (("include_background", False), ("per_channel", True)):
        assert getattr(method(kind, name), flag) is not other
        if flag in options:
            assert getattr(method(kind, name, **{flag: other}), flag) is other


def test_declares_nothing_that_hosts_do_not_read(kind, name):
    """``need_image = True`` would be set, and never seen."""
    for attribute in vars(method(kind, name)):
        near = get_close_matches(attribute, CAPABILITIES, 1, cutoff=0.8)
        assert not near or attribute in CAPABILITIES, f"{attribute}: is {near[0]} meant?"


@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 2, 4)])
def test_gradcheck(kind, name, shape):
    logits, labels = data(shape)
    labels.flatten()[0] = 9
    term = method(kind, name, ignore_index=9)
    assert torch.autograd.gradcheck(lambda x: term(x, labels), logits.requires_grad_())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_shows_in_the_value(kind, name, bad):
    """Mixed precision skips a step whose loss is not finite, and goes on; an exception ends it."""
    logits, labels = data(dtype=torch.float32)
    logits[0, 1, 2, 2] = bad
    assert not method(kind, name)(logits, labels).isfinite()


def test_batch_equals_its_elements(kind, name):
    logits, labels = data()
    term = method(kind, name)
    singles = [term(logits[i : i + 1], labels[i : i + 1]) for i in range(2)]
    check_opt_out("batch", name, agree(term(logits, labels), sum(singles) / 2))


def test_a_slice_is_a_volume_of_depth_one(kind, name):
    logits, labels = data()
    term = method(kind, name)
    deep = term(logits[:, :, None], labels[:, None])
    check_opt_out("depth", name, agree(term(logits, labels), deep))


def test_permutations_of_the_batch(kind, name):
    logits, labels = data()
    term = method(kind, name)
    close(term(logits.flip(0), labels.flip(0)), term(logits, labels))


def test_permutations_of_the_classes(kind, name):
    logits, labels = data()
    order = torch.tensor([2, 0, 1])
    term, permuted = method(kind, name), method(kind, name)
    for buffer_name, buffer in permuted.named_buffers():
        if buffer_name == "lam":
            buffer.copy_(buffer[..., order])
    rank = torch.argsort(order)
    close(permuted(logits[:, order], rank[labels]), term(logits, labels))


@pytest.mark.parametrize("ignore", [255, -1, -100])
def test_ignored_voxels_are_irrelevant(kind, name, ignore):
    logits, labels = data()
    labels[:, 1:3, 1:3] = ignore
    term, other = (method(kind, name, ignore_index=ignore) for _ in range(2))
    changed = logits.clone()
    changed[:, :, 1:3, 1:3] += 50 * torch.tensor([1.0, -1, 0])[:, None, None]
    changed.requires_grad_()
    value = other(changed, labels)
    close(value.detach(), term(logits, labels))
    (slope,) = torch.autograd.grad(value, changed)
    assert (slope[:, :, 1:3, 1:3] == 0).all()
    term.observe(logits, labels)
    other.observe(changed.detach(), labels)
    term.dual_step()
    other.dual_step()
    for key, tensor in term.named_buffers():
        close(dict(other.named_buffers())[key], tensor)


def test_nothing_valid_is_zero_or_finite(kind, name):
    logits, labels = data()
    logits.requires_grad_()
    for y, x in ((torch.full_like(labels, 9), logits), (labels[:0], logits[:0])):
        value = method(kind, name, ignore_index=9)(x, y)
        (slope,) = torch.autograd.grad(value, x)
        assert torch.isfinite(value)
        assert (slope == 0).all()
        if name != "soft_dice":  # 0 / 0 with smoothing: Dice of nothing is 1, the loss 0
            assert value == 0


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 5), (5, 1), (1, 1, 4), (1,)], ids=lambda s: "x".join(map(str, s))
)
@pytest.mark.parametrize("label", [0, 2, None])
def test_degenerate_images(kind, name, shape, label):
    logits, labels = data(shape, dtype=torch.float32)
    if label is not None:
        labels = torch.full_like(labels, label)
    assert_finite(method(kind, name), logits, labels)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1e3), (torch.bfloat16, 1e3), (torch.float32, 1e4), (torch.float32, 0.0)],
    ids=str,
)
def test_extreme_logits(kind, name, dtype, size):
    logits, labels = data(dtype=torch.float32)
    x = (size * logits.sign()).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = assert_finite(method(kind, name), x, labels)
    assert value.dtype == torch.float32


def assert_finite(term, logits, labels):
    logits = logits.clone().requires_grad_()
    value = term(logits, labels)
    (slope,) = torch.autograd.grad(value, logits)
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    return value


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_inputs_stay_as_they_are(kind, name, dtype):
    logits, labels = data()
    labels = labels.to(dtype)
    labels[:, 1] = 9
    before = logits.clone(), labels.clone()
    term = method(kind, name, ignore_index=9)
    close(term(logits, labels), method(kind, name, ignore_index=9)(logits, labels.long()))
    term(logits, labels)
    term.observe(logits, labels)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])


def test_state_dict_round_trip_continues_identically(kind, name):
    """Saved in the middle of a pass, with rho about to grow."""
    options = accepted_arguments(target(load_component(kind, name)))
    term = method(kind, name, **({"rho_period": 4} if "rho_period" in options else {}))
    for seed in range(3):
        step(term, seed)
    term.observe(*data(seed=9, scale=8.0))
    other = method(kind, name, **({"rho_period": 4} if "rho_period" in options else {}))
    other.load_state_dict(copy.deepcopy(term.state_dict()))
    for seed in range(3, 6):
        values = [step(t, seed) for t in (term, other)]
        assert torch.equal(*values)
    for key, tensor in term.named_buffers():
        assert torch.equal(dict(other.named_buffers())[key], tensor), key


def step(term, seed):
    logits, labels = data(seed=seed, scale=8.0)
    value = term(logits, labels)
    term.observe(logits, labels)
    term.dual_step()
    return value


def test_two_classes_and_wrong_classes(kind, name):
    logits, labels = data(k=2)
    assert_finite(method(kind, name, k=2), logits, labels)
    with pytest.raises(ValueError, match="expected 3 classes on axis 1"):
        method(kind, name)(logits, labels)
    with pytest.raises(ValueError, match="labels: expected"):
        method(kind, name, k=2)(logits, labels + 5)


def test_classification(kind, name):
    """Rows instead of images, for the methods that need no neighbours."""
    logits, labels = data(())
    term = method(kind, name)
    if hasattr(term, "kernel_size"):
        with pytest.raises(ValueError, match="1 to 3 spatial axes"):
            term(logits, labels)
    else:
        assert_finite(term, logits, labels)
