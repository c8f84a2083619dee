"""Two heads and schedules in nnU-Net's loss, network and predictions, without a training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dynamic_network_architectures.architectures.unet import PlainConvUNet, ResidualEncoderUNet
from torch import nn

from segcal.adapters.nnunet import settings
from segcal.adapters.nnunet.building import build_loss, describe_terms
from segcal.adapters.nnunet.exporting import export, logits_path
from segcal.adapters.nnunet.final_validation import resample_decision
from segcal.adapters.nnunet.host_loss import HeadLoss
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.patching import Aggregation
from segcal.adapters.nnunet.prediction import AveragingPredictor
from segcal.adapters.nnunet.trainers import TRAINERS, CalibratedTrainer, TwoHeadTrainer
from segcal.heads import add_probability_head, output_of
from segcal.recipes import Recipe, build_terms, load_recipe
from tests.adapters.test_nnunet_prediction import LABELS, REGIONS, dataset, plans
from tests.adapters.test_nnunet_sweep import WEIGHTS, compound, deep
from tests.conftest import close

K = 3
CONFIDENCE = {
    "base": {"cross_entropy": 1.0, "soft_dice": 1.0},
    "probability": {"base": {"svls": 1.0}, "penalties": {"confidence": 1.0}},
}
BOTH_CONSTRAINED = {
    "base": {"cross_entropy": 0.5, "soft_dice": 0.5},
    "penalties": {"crac": 0.5},
    "probability": {"base": {"cross_entropy": 0.5}, "penalties": {"crac": 1.0}},
}


def labels_of(ignore=None):
    return Labels(K, per_channel=False, ignore_index=ignore, channels=1)


def built(content, *, arguments=None, dice=True, supervised=True, ignore=None):
    recipe = Recipe.model_validate(content)
    host = compound(ignore=ignore)
    return build_loss(
        deep(host) if supervised else host, labels_of(ignore), recipe, settings.parts(recipe),
        arguments or {}, dice=dice,
    )  # fmt: skip


def batch(shape=(16, 12), *, ignore=None, heads=2):
    """What a network of two heads returns, and targets, in four resolutions."""
    generator = torch.Generator().manual_seed(0)
    output, targets = [], []
    for i in range(len(WEIGHTS)):
        size = [max(s >> i, 1) for s in shape]
        channels = heads * K if i == 0 else K
        logits = 3 * torch.randn(2, channels, *size, generator=generator)
        output.append(logits.requires_grad_())
        target = torch.randint(0, K, (2, 1, *size), generator=generator).to(torch.int16)
        if ignore is not None:
            target[0, 0, : (size[0] + 1) // 2] = ignore
        targets.append(target)
    return output, targets


@pytest.mark.parametrize("ignore", [None, K])
@pytest.mark.parametrize("supervised", [True, False])
@pytest.mark.parametrize("content", [CONFIDENCE, BOTH_CONSTRAINED])
def test_the_loss_is_the_sum_of_both_heads(content, supervised, ignore):
    """nnU-Net's loss of the decision in all resolutions; the rest sees the full one alone."""
    recipe = Recipe.model_validate(content)
    output, targets = batch(ignore=ignore)
    loss = built(content, supervised=supervised, ignore=ignore)
    given = (output, targets) if supervised else (output[0], targets[0])
    value = loss(*given)
    grads = torch.autograd.grad(value, output[: 3 if supervised else 1])

    decision, probability = output[0].chunk(2, 1)
    host = deep(compound(ignore=ignore)) if supervised else compound(ignore=ignore)
    of_decision = host([decision, *output[1:]], targets) if supervised else host(decision, given[1])
    labels = targets[0][:, 0].long()
    terms = build_terms(recipe, num_classes=K, ignore_index=ignore)
    unit = recipe.base["cross_entropy"]
    of_heads = {"decision": decision, "probability": probability}
    expected = of_decision
    for name in settings.parts(recipe).weights:
        seen = of_heads[name.partition("/")[0]]
        expected = expected + recipe.weights[name] / unit * terms[name](seen, labels)
    close(value, expected, rtol=1e-5)
    wanted = torch.autograd.grad(expected, output[: 3 if supervised else 1])
    for one, other in zip(grads, wanted, strict=True):
        close(one, other, rtol=1e-4, atol=1e-7)
    means = loss.means()
    assert list(means) == ["decision/base", *settings.parts(recipe).weights]
    close(means["decision/base"], of_decision, rtol=1e-5)


def test_multipliers_are_of_their_head():
    output, targets = batch()
    logits, labels = output[0].detach(), targets[0][:, 0].long()
    loss = built(BOTH_CONSTRAINED)
    assert loss.learns
    assert loss.joined is not None  # nnU-Net's cross-entropy shares a sweep with the decision's
    loss.start_pass(observing=True, measuring=True)
    with torch.no_grad():
        loss.eval()(output, targets)
    steps = loss.dual_step()
    terms = build_terms(Recipe.model_validate(BOTH_CONSTRAINED), num_classes=K)
    for name, half in zip(("decision/crac", "probability/crac"), logits.chunk(2, 1), strict=True):
        terms[name].observe(half, labels)
        step = terms[name].dual_step()
        assert steps[name].lam == step.lam
    assert steps["decision/crac"].lam != steps["probability/crac"].lam
    p, predicted = logits[:, K:].softmax(1).max(1)
    gap = (p - (predicted == labels).float()).mean().abs()
    assert loss.ece(torch.device("cpu")) >= gap - 1e-6  # of the probability head
    other = built(BOTH_CONSTRAINED)
    other.load_learned_state(loss.learned_state())
    state = other.learned_state()
    assert {"terms.decision/crac.lam", "terms.probability/crac.lam"} <= set(state)
    for name, value in loss.learned_state().items():
        assert torch.equal(state[name], value)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_learned_state({})


def test_ece_is_that_of_the_probability_head():
    output, targets = batch()
    one = built({"base": {"cross_entropy": 1.0, "soft_dice": 1.0}}, supervised=False)
    two = built(CONFIDENCE, supervised=False)
    for loss, seen in ((one, output[0][:, K:]), (two, output[0])):
        loss.start_pass(measuring=True)
        loss(seen, targets[0])
    assert one.ece(torch.device("cpu")) == two.ece(torch.device("cpu")) > 0


def test_two_heads_and_two_views_are_refused():
    content = {**CONFIDENCE, "penalties": {"bwcr": 1.0}}
    with pytest.raises(ValueError, match="decision/bwcr: comparing two views does not work with"):
        built(content)


def test_places_of_the_terms_of_two_heads():
    placed = settings.parts(load_recipe("two_heads_confidence"))
    assert not placed.instead
    assert placed.probability
    assert all(name.startswith("probability/") for name in placed.probability)
    both = settings.parts(Recipe.model_validate(BOTH_CONSTRAINED))
    assert (both.instead, both.added) == ({}, {"decision/crac": 1.0})
    assert both.probability == {"probability/cross_entropy": 1.0, "probability/crac": 2.0}
    assert both.formula(dice=True) == (
        "decision: Dice + cross-entropy + crac; probability: cross_entropy + 2 crac"
    )
    svls = settings.parts(Recipe.model_validate({**CONFIDENCE, "base": {"svls": 1.0}}))
    assert svls.instead == {"decision/svls": 1.0}


@pytest.mark.parametrize("name", ["probability/confidence", "confidence"])
def test_settings_by_plain_or_full_name(name):
    placed = settings.parts(Recipe.model_validate(CONFIDENCE))
    content = {name: {"cap": 0.2, "weight": 0.5}, "multiplier_source": "volumes"}
    _, weighed, arguments = settings.read_settings(content, placed)
    assert arguments == {"probability/confidence": {"cap": 0.2}}
    assert weighed.probability == {"probability/svls": 1.0, "probability/confidence": 0.5}
    described = describe_terms(Recipe.model_validate(CONFIDENCE), weighed, arguments, labels_of())
    assert described["probability/confidence"]["cap"] == 0.2
    loss = built(CONFIDENCE, arguments=arguments)
    assert loss.probability.terms["probability/confidence"].bounds[1] == 0.2


def test_a_plain_name_means_the_terms_of_both_heads():
    placed = settings.parts(Recipe.model_validate(BOTH_CONSTRAINED))
    content = {"crac": {"margin_inner": 3.0}, "decision/crac": {"margin_outer": 2.0}}
    _, _, arguments = settings.read_settings(content, placed)
    assert arguments == {
        "decision/crac": {"margin_inner": 3.0, "margin_outer": 2.0},
        "probability/crac": {"margin_inner": 3.0},
    }


def scheduled(schedule, **content):
    base = {"base": {"cross_entropy": 1.0, "soft_dice": 1.0}}
    return built({**base, **content, "schedule": schedule})


RAMP = {"from": 1, "to": 0, "start": 0.2, "end": 0.6}


@pytest.mark.parametrize("penalties", [{}, {"crac": 1.0}], ids=["alone", "joined"])
@pytest.mark.parametrize("name", ["soft_dice", "cross_entropy"])
def test_a_schedule_weighs_nnunets_own_loss(name, penalties):
    output, targets = batch(heads=1)
    loss = scheduled({name: RAMP}, penalties=penalties)
    whole, other = deep(compound()), deep(compound())
    attribute = settings.HOSTS_OWN[name]
    setattr(other.loss, attribute, 0)
    crac = build_terms(
        Recipe.model_validate({"base": {"cross_entropy": 1.0}, "penalties": {"crac": 1.0}}),
        num_classes=K,
    )["crac"]
    added = crac(output[0], targets[0][:, 0].long()) if penalties else 0.0
    for progress, factor in ((0.0, 1.0), (0.3, 0.75), (0.5, 0.25), (0.9, 0.0)):
        assert loss.advance(progress) == {name: pytest.approx(factor)}
        rest = other(output, targets)
        expected = rest + factor * (whole(output, targets) - rest) + added
        close(loss(output, targets), expected, rtol=1e-5)


def test_a_hand_over_to_what_stands_in_cross_entropys_place():
    output, targets = batch(heads=1)
    schedule = {"soft_dice": RAMP, "svls": {"from": 0, "to": 1, "start": 0.2, "end": 0.6}}
    loss = built({"base": {"soft_dice": 1.0, "svls": 1.0}, "schedule": schedule})
    assert isinstance(loss.host.loss, HeadLoss)
    assert loss.advance(0.3) == {"soft_dice": pytest.approx(0.75), "svls": pytest.approx(0.25)}
    loss(output, targets)
    loss.advance(1.0)
    svls = build_terms(Recipe(base={"svls": 1.0}), num_classes=K)["svls"]
    expected = sum(
        w * svls(x, y[:, 0].long()) for w, x, y in zip(WEIGHTS, output, targets, strict=True) if w
    )
    close(loss(output, targets), expected, rtol=1e-5)


def test_nothing_left_of_nnunets_loss():
    """All weights 0 is no tensor in nnU-Net."""
    output, targets = batch(heads=1)
    loss = scheduled({"soft_dice": RAMP, "cross_entropy": RAMP})
    loss.advance(1.0)
    value = loss(output, targets)
    value.backward()
    assert value == 0
    assert loss.means() == {"base": 0.0}


def test_schedules_of_two_heads_and_what_they_waited_for():
    output, targets = batch()
    schedule = {
        "probability/crac": {"from": 0, "to": 1, "end": 0.2, "dice": 0.5},
        "decision/soft_dice": RAMP,
    }
    first = built({**BOTH_CONSTRAINED, "schedule": schedule})
    assert first.advance(0.1, dice=0.4)["probability/crac"] == 0
    assert first.advance(0.2, dice=0.6)["probability/crac"] == 0
    second = built({**BOTH_CONSTRAINED, "schedule": schedule})
    second.load_learned_state(first.learned_state())
    values = [x.advance(0.3) for x in (first, second)]
    assert values[0] == values[1]
    assert values[0]["probability/crac"] == pytest.approx(1.0)  # half way to 2
    assert values[0]["decision/soft_dice"] == pytest.approx(0.75)
    close(first(output, targets), second(output, targets))
    without = built(BOTH_CONSTRAINED)
    assert without.advance(0.3) == {}
    assert "began" not in without.learned_state()


def test_a_schedule_of_two_views():
    loss = scheduled({"bwcr": RAMP}, penalties={"bwcr": 2.0})
    assert loss.advance(0.3) == {"bwcr": pytest.approx(1.5)}
    assert loss.weight == pytest.approx(1.5)


def unet(kind, dims, stages=3):
    conv = {2: nn.Conv2d, 3: nn.Conv3d}[dims]
    norm = {2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[dims]
    torch.manual_seed(0)
    convs = {PlainConvUNet: "n_conv_per_stage", ResidualEncoderUNet: "n_blocks_per_stage"}[kind]
    return kind(
        input_channels=1, n_stages=stages, features_per_stage=[4, 6, 8][:stages], conv_op=conv,
        kernel_sizes=3, strides=[1, 2, 2][:stages], num_classes=K, deep_supervision=True,
        n_conv_per_stage_decoder=1, conv_bias=True, norm_op=norm, norm_op_kwargs={"affine": True},
        nonlin=nn.LeakyReLU, **{convs: 1},
    ).eval()  # fmt: skip


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("kind", [PlainConvUNet, ResidualEncoderUNet])
def test_the_full_resolution_of_nnunets_networks_gets_the_second_head(kind, dims):
    network = unet(kind, dims)
    x = torch.randn(1, 1, *(16,) * dims)
    with torch.no_grad():
        expected = network(x)
        layer = add_probability_head(network, K, output="decision")
        assert layer is network.decoder.seg_layers[-1]
        for one, other in zip(network(x), expected, strict=True):
            assert torch.equal(one, other)
        layer.probability.bias += 1
        with output_of(network, "both"):
            full, *rest = network(x)
            close(full, torch.cat([expected[0], expected[0] + 1], 1), rtol=1e-5, atol=1e-5)
            for one, other in zip(rest, expected[1:], strict=True):
                assert torch.equal(one, other)
            network.decoder.deep_supervision = False
            assert network(x).shape[1] == 2 * K


def test_a_compiled_network_follows_what_is_asked_of_it():
    """nnU-Net compiles the network before it is asked for both heads."""
    network = unet(PlainConvUNet, 2)
    add_probability_head(network, K, output="decision")
    compiled = torch.compile(network, backend="eager")
    x = torch.randn(1, 1, 16, 16)
    with torch.no_grad():
        for output, channels in (("both", 2 * K), ("decision", K), ("both", 2 * K)):
            with output_of(compiled, output):
                assert compiled(x)[0].shape[1] == channels


def test_trainers_of_two_heads():
    assert issubclass(TRAINERS["nnUNetTrainerTwoHeadsConfidence"], TwoHeadTrainer)
    assert issubclass(TRAINERS["nnUNetTrainerTwoHeadsConfidence_CE"], TwoHeadTrainer)
    for name in ("CRaC", "Confidence"):
        one = TRAINERS[f"nnUNetTrainer{name}"]
        assert issubclass(one, CalibratedTrainer)
        assert not issubclass(one, TwoHeadTrainer)


def of_two_heads(channels, fold):
    torch.manual_seed(fold)
    network = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1))
    layer = add_probability_head(network, channels, output="decision")
    with torch.no_grad():
        layer.decision.weight *= 4
        layer.probability.weight.copy_(torch.randn(layer.probability.weight.shape))
    return network


def predictor(networks, labels, average, *, per_fold=False):
    made = AveragingPredictor(
        Aggregation(average, per_fold=per_fold), use_mirroring=True,
        perform_everything_on_device=False, device=torch.device("cpu"), allow_tqdm=False,
    )  # fmt: skip
    host = plans()
    made.manual_initialization(
        networks[0], host, host.get_configuration("2d"),
        [{k: v.clone() for k, v in net.state_dict().items()} for net in networks],
        dataset(labels), "nnUNetTrainer", (0, 1),
    )  # fmt: skip
    made.fold_names = tuple(f"fold_{f}" for f in range(len(networks)))
    return made


@pytest.mark.parametrize("labels", [LABELS, REGIONS], ids=["labels", "regions"])
@pytest.mark.parametrize("average", ["logit", "prob"])
def test_each_head_is_averaged_for_itself(average, labels):
    channels = len(labels) - (labels is REGIONS)
    networks = [of_two_heads(channels, fold) for fold in (0, 1)]
    data = torch.randn(1, 2, 12, 16, generator=torch.Generator().manual_seed(3))
    host = predictor(networks, labels, average, per_fold=True)
    assert host.heads == 2
    found = host.predict_logits_from_preprocessed_data(data)
    assert found.shape == (3, 2 * channels, 2, 12, 16)
    assert networks[0][0].output == "decision"  # as it was
    for number, head in enumerate(("decision", "probability")):
        alone = [nn.Sequential(getattr(of_two_heads(channels, fold)[0], head)) for fold in (0, 1)]
        one = predictor(alone, labels, average, per_fold=True)
        assert one.heads == 1
        expected = one.predict_logits_from_preprocessed_data(data)
        half = found[:, number * channels : (number + 1) * channels]
        torch.testing.assert_close(half, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("labels", [LABELS, REGIONS], ids=["labels", "regions"])
@pytest.mark.parametrize("save_probabilities", [True, False])
def test_what_is_written_of_two_heads(tmp_path, labels, save_probabilities):
    from segcal.io.volumes import read_volume

    channels = len(labels) - (labels is REGIONS)
    looks = 3 * torch.randn(2, 2 * channels, 2, 5, 6, generator=torch.Generator().manual_seed(1))
    host = plans()
    properties = {
        "sitk_stuff": {
            "spacing": (1.0,) * 3,
            "origin": (0.0,) * 3,
            "direction": tuple(np.eye(3).ravel()),
        },
        "spacing": [1.0, 1.0, 1.0],
        "shape_before_cropping": (3, 5, 6),
        "bbox_used_for_cropping": [[1, 3], [0, 5], [0, 6]],
        "shape_after_cropping_and_before_resampling": (2, 5, 6),
    }
    content = dataset(labels)
    (tmp_path / "fold_0").mkdir()

    def write(values, place, **options):
        place.mkdir(exist_ok=True)
        export(
            values, properties, host.get_configuration("2d"), host, content, str(place / "a"),
            **options,
        )  # fmt: skip
        return read_volume(place / "a.nii.gz").array

    (tmp_path / "both" / "fold_0").mkdir(parents=True)
    (tmp_path / "both" / "logits").mkdir()
    mask = write(
        looks, tmp_path / "both", save_probabilities=save_probabilities, save_logits=True,
        fold_names=["fold_0"],
    )  # fmt: skip
    for look, place in ((0, tmp_path / "both"), (1, tmp_path / "both" / "fold_0")):
        written = read_volume(place / "a.nii.gz").array
        decision = write(looks[look, :channels], tmp_path / f"decision{look}")
        np.testing.assert_array_equal(written, decision)
        alone = tmp_path / f"probability{look}"
        of_probability = write(looks[look, channels:], alone, save_probabilities=True)
        assert (of_probability != decision).any()
        if save_probabilities:
            arrays = [np.load(p / "a.npz")["probabilities"] for p in (place, alone)]
            np.testing.assert_array_equal(*arrays)
        else:
            assert not (place / "a.npz").exists()
    assert mask.shape == (3, 5, 6)
    logits = np.load(logits_path(str(tmp_path / "both" / "a")))["logits"]
    np.testing.assert_allclose(logits[:, 1:], looks[0, channels:], rtol=1e-5, atol=1e-5)


def test_a_cascade_is_shown_the_decision(monkeypatch):
    from segcal.adapters.nnunet import final_validation

    shown = []
    monkeypatch.setattr(final_validation, "resample_and_save", lambda *a: shown.append(a))
    resample_decision(torch.arange(6.0), "shape", "file")
    (arguments,) = shown
    assert arguments[0].tolist() == [0.0, 1.0, 2.0]
    assert arguments[1:] == ("shape", "file")


def test_schedules_stand_among_what_a_checkpoint_was_trained_with():
    content = {**CONFIDENCE, "schedule": {"decision/soft_dice": RAMP}}
    recipe = Recipe.model_validate(content)
    described = describe_terms(recipe, settings.parts(recipe), {}, labels_of())
    assert described["decision/soft_dice"] == {
        "schedule": {"first": 1.0, "last": 0.0, "start": 0.2, "end": 0.6, "dice": None, "gap": None}
    }
