"""SegcalLoss: MONAI's layouts and options around segcal's objectives."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from monai.data import MetaTensor
from monai.losses import DeepSupervisionLoss, DiceCELoss, NACLLoss
from monai.networks.utils import one_hot
from torch.nn.modules.loss import _Loss

from segcal.adapters.monai.losses import SegcalLoss
from segcal.losses.cross_entropy import CrossEntropy
from segcal.objective import Objective
from segcal.recipes import build
from tests.conftest import close

K = 4
SHAPES = {2: (9, 7), 3: (6, 5, 7)}


def batch(axes=2, seed=0, n=2, k=K):
    """Logits ``(N, K, *S)`` and label indices ``(N, 1, *S)`` with areas of one class."""
    generator = torch.Generator().manual_seed(seed)
    shape = SHAPES[axes]
    logits = 3 * torch.randn(n, k, *shape, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, k, (n, 1, *shape), generator=generator)
    labels[:, :, :4, :4] = 1
    return logits, labels


def value_and_gradient(loss, logits, target):
    x = logits.clone().requires_grad_()
    value = loss(x, target)
    return value.detach(), torch.autograd.grad(value, x)[0]


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("distance", ["l1", "l2"])
def test_nacl_is_that_of_monai(axes, distance):
    logits, labels = batch(axes)
    theirs = NACLLoss(classes=K, dim=axes, distance_type=distance, alpha=0.3)
    # its filter in float64, in which it is told from ours by nothing but rounding
    theirs.svls_layer.filter = torch.full_like(theirs.svls_layer.filter.double(), 3.0**-axes)
    theirs.svls_layer.register_forward_pre_hook(lambda layer, arguments: (arguments[0].double(),))
    ours = SegcalLoss(
        "nacl_published",
        num_classes=K,
        nacl={"padding": "zeros", "alpha": 0.3, "distance": distance},
    )
    expected = value_and_gradient(theirs, logits, labels[:, 0])
    for target in (labels, labels.float(), labels[:, 0], one_hot(labels, K)):
        value, gradient = value_and_gradient(ours, logits, target)
        close(value, expected[0])
        close(gradient, expected[1])


@pytest.mark.parametrize("include_background", [True, False])
def test_dice_ce_is_that_of_monai(include_background):
    logits, labels = batch(3)
    theirs = DiceCELoss(softmax=True, to_onehot_y=True, include_background=include_background)
    options = {"include_background": include_background, "to_onehot_y": True}
    if include_background:
        ours = SegcalLoss("dice_ce", num_classes=K, **options)
    else:
        objective = build("dice_ce", K, include_background=False)
        ours = SegcalLoss(objective, to_onehot_y=True)
        other = SegcalLoss("dice_ce", num_classes=K, **options)
        close(other(logits, labels), ours(logits, labels))
    expected = value_and_gradient(theirs, logits, labels)
    for found, wanted in zip(value_and_gradient(ours, logits, labels), expected, strict=True):
        close(found, wanted, rtol=1e-6, atol=1e-9)  # MONAI's one-hot is float32


def test_what_comes_in_and_out():
    """MetaTensors in, plain tensor with gradient out; arguments by MONAI's names; unchanged."""
    logits, labels = batch()
    loss = SegcalLoss("crac", num_classes=K, to_onehot_y=True)
    assert isinstance(loss, _Loss)
    assert loss.reduction == "mean"
    leaf = MetaTensor(logits.clone()).requires_grad_()
    target = MetaTensor(labels.float(), affine=torch.eye(4))
    value = loss(input=leaf, target=target)
    assert type(value) is torch.Tensor
    assert value.shape == ()
    value.backward()
    expected = value_and_gradient(build("crac", K), logits, labels[:, 0])
    close(value.detach(), expected[0])
    close(leaf.grad, expected[1])
    assert torch.equal(target.as_tensor(), labels.float())


def test_terms_are_told_apart():
    logits, labels = batch()
    loss = SegcalLoss("nacl", num_classes=K)
    total, values = loss.loss_and_terms(logits, labels)
    assert list(values) == ["cross_entropy", "soft_dice", "nacl"]
    close(total, sum(values.values()))
    assert not any(v.requires_grad for v in values.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.bool])
def test_one_hot_in_any_type(dtype):
    logits, labels = batch()
    loss = SegcalLoss("crac", num_classes=K)
    close(loss(logits, one_hot(labels, K).to(dtype)), loss(logits, labels))


def test_ignored_voxels():
    """As a class, as a number that is no class, of indices and of channels."""
    logits, labels = batch()
    for ignored in (2, 255, -1):
        loss = SegcalLoss("crac", num_classes=K, ignore_index=ignored)
        assert loss.ignore_index == ignored
        indices = labels.clone()
        indices[:, :, 5:] = ignored
        hot = one_hot(torch.where(indices == ignored, 0, indices), K)
        hot = torch.where(indices == ignored, 0, hot)
        if ignored == 2:
            hot[:, 2:3][indices == 2] = 1
        expected = build("crac", K, ignore_index=ignored)(logits, indices[:, 0])
        for target in (indices, indices.float(), hot):
            close(loss(logits, target), expected)


def test_channels_that_overlap():
    logits, _ = batch(k=3)
    channels = (torch.rand(logits.shape, generator=torch.Generator().manual_seed(1)) > 0.5).float()
    loss = SegcalLoss("crac", num_classes=3, per_channel=True)
    assert loss.per_channel
    expected = build("crac", 3, per_channel=True)(logits, channels.long())
    close(loss(logits, channels), expected)
    exclusive = SegcalLoss("crac", num_classes=3)
    with pytest.raises(ValueError, match=r"belong to several classes.*per_channel=True"):
        exclusive(logits, channels)


def test_indices_become_channels():
    """As MONAI's to_onehot_y with sigmoid; without it, indices are not taken for channels."""
    logits, labels = batch()
    loss = SegcalLoss("nacl", num_classes=K, per_channel=True, to_onehot_y=True)
    expected = build("nacl", K, per_channel=True)(logits, one_hot(labels, K).long())
    close(loss(logits, labels), expected)
    with pytest.raises(ValueError, match="say to_onehot_y=True"):
        SegcalLoss("nacl", num_classes=K, per_channel=True)(logits, labels)
    ignoring = SegcalLoss("nacl", num_classes=K, per_channel=True, to_onehot_y=True, ignore_index=9)
    labels[0, :, 3:5] = 9
    hot = one_hot(torch.where(labels == 9, 0, labels), K).long()
    hot = torch.where(labels == 9, 9, hot)
    close(ignoring(logits, labels), build("nacl", K, per_channel=True, ignore_index=9)(logits, hot))


def test_a_single_channel():
    logits, labels = batch(k=1)
    labels = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)).round()
    expected = build("nacl", 1, per_channel=True)(logits, labels.long())
    close(SegcalLoss("nacl", num_classes=1, per_channel=True)(logits, labels), expected)
    loss = SegcalLoss("nacl", num_classes=1, per_channel=True, to_onehot_y=True)
    with pytest.warns(UserWarning, match="single channel prediction, `to_onehot_y=True` ignored"):
        close(loss(logits, labels), expected)


@pytest.mark.parametrize(
    ("target", "to_onehot_y"), [("indices", True), ("indices", False), ("one-hot", False)]
)
def test_deep_supervision(target, to_onehot_y):
    """Labels are picked, not mixed, where they are made smaller; every head has its penalty."""
    logits, labels = batch(3)
    heads = [logits.float(), logits.float()[..., ::2, ::2, ::2], logits.float()[..., ::3, ::3, ::3]]
    y = labels.float() if target == "indices" else one_hot(labels, K).float()
    loss = SegcalLoss("crac", num_classes=K, to_onehot_y=to_onehot_y)
    leaves = [h.clone().requires_grad_() for h in heads]
    value = DeepSupervisionLoss(loss, weights=[1.0, 0.5, 0.25])(leaves, y)
    value.backward()
    expected = torch.zeros(())
    for weight, leaf in zip((1.0, 0.5, 0.25), heads, strict=True):
        # centre of the cell that a voxel stands for
        index = [
            ((torch.arange(n) + 0.5) * m / n).long()
            for n, m in zip(leaf.shape[2:], labels.shape[2:], strict=True)
        ]
        small = labels[:, 0][:, index[0]][:, :, index[1]][:, :, :, index[2]]
        expected = expected + weight * build("crac", K)(leaf, small)
    close(value.detach(), expected, rtol=1e-6)
    assert all((leaf.grad != 0).any() for leaf in leaves)
    with pytest.raises(ValueError, match=r"put this loss into .*DeepSupervisionLoss"):
        loss(leaves, y)


def test_observe_takes_the_first_head():
    logits, labels = batch()
    one, many = (SegcalLoss("crac", num_classes=K) for _ in range(2))
    one.observe(MetaTensor(logits), labels)
    many.observe([logits, logits[..., ::2, ::2]], labels.float())
    assert one.dual_step() == many.dual_step()


def test_learns_as_its_objective_does():
    loss, objective = SegcalLoss("crac", num_classes=K, to_onehot_y=True), build("crac", K)
    for epoch in range(3):
        logits, labels = batch(seed=epoch)
        loss.observe(logits, labels)
        objective.observe(logits, labels[:, 0])
        assert loss.dual_step() == objective.dual_step()
    close(loss(logits, labels), objective(logits, labels[:, 0]))
    assert loss.dual_step()["crac"].notes == [
        "no voxel was observed in validation; nothing is updated"
    ]


def test_a_pass_that_is_broken_off_leaves_nothing():
    for recipe in ("crac", "cals", "cals_hr"):
        broken, whole = (SegcalLoss(recipe, num_classes=K) for _ in range(2))
        broken.observe(*batch(seed=7))
        broken.start_pass()
        for loss in (broken, whole):
            loss.observe(*batch(seed=1))
        assert broken.dual_step() == whole.dual_step()


def test_state_is_saved_without_pickles():
    """Everything that is learned is in the state, and torch.load needs to trust nothing."""
    loss = SegcalLoss("crac", num_classes=K, crac={"rho_period": 1})
    for epoch in range(2):
        loss.observe(*batch(seed=epoch))
        loss.dual_step()
    file = io.BytesIO()
    torch.save({"loss": loss.state_dict()}, file)
    file.seek(0)
    resumed = SegcalLoss("crac", num_classes=K, crac={"rho_period": 1})
    resumed.load_state_dict(torch.load(file, weights_only=True)["loss"])
    for epoch in (2, 3):
        for one in (loss, resumed):
            one.observe(*batch(seed=epoch))
        assert loss.dual_step() == resumed.dual_step()
    assert resumed.objective.terms["crac"].step == 4
    with pytest.raises(ValueError, match="not a state of this CRaC"):
        SegcalLoss("crac", num_classes=K + 1).load_state_dict(loss.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    """Inside autocast it computes in float32: logits of 300 have squares beyond fp16."""
    logits, labels = batch()
    half = (100 * logits).to(dtype)
    loss = SegcalLoss("crac", num_classes=K)
    expected, gradient = value_and_gradient(loss, half.float(), labels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value, found = value_and_gradient(loss, half, labels)
    assert value.dtype == torch.float32
    assert found.dtype == dtype
    close(value, expected)
    close(found, gradient.to(dtype))
    assert expected > 300


def test_follows_its_input_to_another_device():
    loss = SegcalLoss("crac", num_classes=K)
    with pytest.raises(RuntimeError):  # nothing can be computed there
        loss(*(x.to("meta") for x in batch()))
    assert {b.device.type for b in loss.buffers()} == {"meta"}


def shaped(*shape):
    return torch.zeros(2, *shape)


@pytest.mark.parametrize(
    ("options", "target", "message"),
    [
        ({"to_onehot_y": True}, shaped(K, 9, 7), "for a one-hot target say to_onehot_y=False"),
        ({}, shaped(3, 9, 7), r"label indices \(2, 1, 9, 7\) or one-hot \(2, 4, 9, 7\)"),
        ({}, shaped(K, 9, 8), r"or one-hot \(2, 4, 9, 7\) like input, got \(2, 4, 9, 8\)"),
        ({}, shaped(1, 9, 8), r"labels: expected \(N, \*S\) = \(2, 9, 7\)"),
        ({}, shaped(1, 9, 7) + 0.5, "label indices, got values that are not whole"),
        ({}, shaped(1, 9, 7) + float("nan"), "label indices, got values that are not whole"),
        ({}, shaped(1, 9, 7) + K, "expected 0 to 3, got .4."),
        ({}, shaped(K, 9, 7) + 0.25, "one-hot channels, got values that are not whole"),
        ({}, shaped(K, 9, 7) + 2, "one-hot channels of 0 and 1"),
        ({}, shaped(K, 9, 7) + 1, "126 voxels belong to several classes"),
        ({}, shaped(K, 9, 7), "126 voxels belong to no class"),
        ({"ignore_index": 1}, shaped(K, 9, 7), "126 voxels belong to no class"),
    ],
)
def test_refuses_targets(options, target, message):
    logits, _ = batch()
    with pytest.raises(ValueError, match=message):
        SegcalLoss("crac", num_classes=K, **options)(logits, target)


def test_refuses_probabilities_once():
    logits, labels = batch()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        loss = SegcalLoss("crac", num_classes=K)
        with pytest.raises(ValueError, match="expected logits, got channels that sum to 1"):
            loss(logits.to(dtype).softmax(1), labels)
    loss = SegcalLoss("crac", num_classes=K)
    loss(logits, labels)
    assert torch.isfinite(loss(logits.softmax(1), labels))


@pytest.mark.parametrize(
    ("objective", "options", "message"),
    [
        ("crac", {}, "num_classes: needed to build 'crac'"),
        ("carc", {"num_classes": K}, "no recipe, penalty or loss is called 'carc'"),
        ("crac", {"num_classes": K, "reduction": "sum"}, "reduction: expected 'mean', got 'sum'"),
        ("crac", {"num_classes": K, "reduction": "none"}, "reduction: expected 'mean'"),
        ("crac", {"num_classes": K, "softmax": True}, "arguments belong to a term"),
        ("ce", {"num_classes": K, "include_background": False}, "cannot leave class 0 out"),
        ("bwcr", {"num_classes": K}, "bwcr: needs two views of a batch"),
        (
            "nacl",
            {"num_classes": K, "nacl": {"kernel": "image_l1"}},
            "nacl: needs the image",
        ),
    ],
)
def test_refuses_options(objective, options, message):
    with pytest.raises(ValueError, match=message):
        SegcalLoss(objective, **options)


def test_refuses_options_of_an_objective_that_is_there():
    objective = build("crac", K, ignore_index=9)
    assert SegcalLoss(objective).ignore_index == 9
    for options, message in (
        ({"num_classes": K}, "num_classes: cannot be set for a ready-made objective"),
        ({"include_background": False}, "include_background: cannot be set"),
        ({"per_channel": True, "crac": {"rho0": 1.0}}, "per_channel, crac: cannot be set"),
        ({"ignore_index": 255}, "ignore_index: 255 here, 9 in the objective"),
    ):
        with pytest.raises(ValueError, match=message):
            SegcalLoss(objective, **options)


def test_importing_it_is_quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SegcalLoss("nacl", num_classes=K)


def test_losses_of_other_libraries_do_not_disagree():
    theirs = torch.nn.CrossEntropyLoss(ignore_index=3)
    loss = SegcalLoss(Objective({"ours": CrossEntropy(4, ignore_index=3), "theirs": theirs}))
    assert loss.ignore_index == 3
    assert SegcalLoss(Objective({"theirs": theirs})).ignore_index is None
