"""Cross-entropy and soft Dice against torch, golden MONAI values and gradcheck."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from segcal.losses.cross_entropy import CrossEntropy, cross_entropy
from segcal.losses.dice import SoftDiceLoss, soft_dice_loss
from tests.conftest import close


def example(shape, k=3, seed=0, ignore=None):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn((2, k, *shape), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, k, (2, *shape), generator=generator)
    if ignore is not None:
        labels[torch.rand(labels.shape, generator=generator) < 0.3] = ignore
    return logits, labels


@pytest.mark.parametrize("shape", [(), (5,), (4, 5), (3, 4, 2)])
@pytest.mark.parametrize("weight", [None, [1.0, 0.5, 2.0]])
@pytest.mark.parametrize("ignore", [None, 255, -100])
def test_cross_entropy_is_torchs(shape, weight, ignore):
    logits, labels = example(shape, ignore=ignore if shape else None)
    module = CrossEntropy(3, class_weight=weight, ignore_index=ignore).double()
    expected = F.cross_entropy(
        logits,
        labels,
        weight=None if weight is None else torch.tensor(weight).double(),
        ignore_index=-100 if ignore is None else ignore,
    )
    close(module(logits, labels), expected)


def test_golden_dice_ce(golden):
    g = golden("point_losses")
    logits = g["logits"].clone().requires_grad_()
    dice, ce = SoftDiceLoss(4)(logits, g["labels"]), CrossEntropy(4)(logits, g["labels"])
    close(dice.detach(), g["monai_dice"])
    close((dice + ce).detach(), g["monai_dicece"])
    close(torch.autograd.grad(dice + ce, logits)[0], g["grad_monai_dicece"])
    close(cross_entropy(g["logits2"], g["labels2"]), g["ce2"])


@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 2)])
@pytest.mark.parametrize("loss", [cross_entropy, soft_dice_loss])
def test_gradcheck(shape, loss):
    logits, labels = example(shape, ignore=7)
    assert torch.autograd.gradcheck(
        lambda x: loss(x, labels, ignore_index=7), logits.requires_grad_()
    )


@pytest.mark.parametrize("options", [{"batch": True}, {"include_background": False}])
def test_dice_options_against_a_loop(options):
    logits, labels = example((4, 5), ignore=9)
    p, valid = torch.softmax(logits, 1), labels != 9
    groups = [[0, 1]] if options.get("batch") else [[0], [1]]
    classes = range(0 if options.get("include_background", True) else 1, 3)
    losses = []
    for group in groups:
        for k in classes:
            v = valid[group]
            pk, tk = p[group, k][v], (labels[group] == k)[v].double()
            losses.append(1 - (2 * (pk * tk).sum() + 1e-5) / (pk.sum() + tk.sum() + 1e-5))
    close(soft_dice_loss(logits, labels, ignore_index=9, **options), torch.stack(losses).mean())


def test_dice_of_rows_is_dice_of_one_image():
    logits, labels = example(())
    image = soft_dice_loss(logits.t()[None], labels[None])
    close(soft_dice_loss(logits, labels), image)


def test_absent_classes():
    logits, labels = example((4, 5))
    labels[labels == 2] = 0
    skipped = soft_dice_loss(logits, labels, skip_empty=True)
    close(
        skipped, torch.stack([_dice(logits, labels, b, k) for b in (0, 1) for k in (0, 1)]).mean()
    )
    assert soft_dice_loss(logits, torch.full_like(labels, 9), skip_empty=True, ignore_index=9) == 0


def _dice(logits, labels, b, k):
    p, t = torch.softmax(logits, 1)[b, k], (labels[b] == k).double()
    return 1 - (2 * (p * t).sum() + 1e-5) / (p.sum() + t.sum() + 1e-5)


@pytest.mark.parametrize("loss", [cross_entropy, soft_dice_loss])
def test_narrow_integers_do_not_wrap_around(loss):
    """uint8 255 is not -1, int8 -1 is not 255."""
    logits, labels = example((4, 5))
    for dtype, wrong, ignore in ((torch.uint8, 255, -1), (torch.int8, -1, 255)):
        bad = labels.to(dtype)
        bad[0, 0, 0] = wrong
        with pytest.raises(ValueError, match=rf"got \[{wrong}\] in 1 voxels"):
            loss(logits, bad, ignore_index=ignore)
        close(loss(logits, bad, ignore_index=wrong), loss(logits, bad.long(), ignore_index=wrong))


@pytest.mark.parametrize("loss", [cross_entropy, soft_dice_loss])
def test_inputs_stay_and_an_empty_batch_is_zero(loss):
    logits, labels = example((4, 5), ignore=9)
    before = logits.clone(), labels.clone()
    loss(logits, labels, ignore_index=9)
    assert torch.equal(logits, before[0])
    assert torch.equal(labels, before[1])
    empty = torch.zeros(0, 3, 4, requires_grad=True)
    value = loss(empty, torch.zeros(0, 4, dtype=torch.long))
    value.backward()
    assert value == 0


@pytest.mark.parametrize("loss", [cross_entropy, soft_dice_loss])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_for_extreme_logits_and_nothing_valid(loss, dtype):
    logits = torch.tensor([[[1e4, -1e4, 0.0]], [[-1e4, 1e4, 0.0]]]).movedim(0, 1).to(dtype)
    logits.requires_grad_()
    for labels in (torch.tensor([[0, 0, 1]]), torch.full((1, 3), 5)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(logits, labels, ignore_index=5)
        assert value.dtype == torch.float32
        (grad,) = torch.autograd.grad(value, logits)
        assert torch.isfinite(value)
        assert torch.isfinite(grad).all()
    if loss is cross_entropy:
        assert value == 0
        assert (grad == 0).all()
