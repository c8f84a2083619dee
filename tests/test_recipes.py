"""Configs: every shipped one builds, wrong ones say what is wrong."""

from __future__ import annotations

import pytest
import torch

from segcal.components import Component, build_component
from segcal.penalties.crac import CRaC
from segcal.recipes import Recipe, build, load_component, load_recipe, names
from tests.conftest import close


@pytest.mark.parametrize("kind", ["losses", "penalties"])
def test_every_component_builds_and_is_finite(kind):
    for name in names(kind):
        term = build_component(load_component(kind, name), num_classes=3, ignore_index=255)
        if getattr(term, "two_views", False):
            continue  # another interface, see penalties/test_bwcr.py
        logits = torch.randn(2, 3, 6, 5, requires_grad=True)
        labels = torch.randint(0, 3, (2, 6, 5))
        labels[0, 0] = 255
        value = term(logits, labels)
        value.backward()
        assert torch.isfinite(value)
        assert torch.isfinite(logits.grad).all()


def test_every_recipe_builds():
    for name in names("recipes"):
        objective = build(name, num_classes=3, ignore_index=255)
        channels = 3 * objective.num_heads
        images, labels = torch.randn(1, channels, 6, 5), torch.randint(0, 3, (1, 6, 5))
        total, values = objective.step(lambda x: 2 * x, images, labels)
        assert torch.isfinite(total)
        assert list(values) == list(objective.terms)
        assert load_recipe(name).summary


def test_a_method_alone():
    for name, terms in (
        ("crac", ["cross_entropy", "soft_dice", "crac"]),
        ("penalties/crac", ["crac"]),
        ("margin", ["margin"]),
        ("losses/focal", ["focal"]),
    ):
        assert list(build(name, num_classes=3).terms) == terms
    for name in ("losses/crac", "CRaC", "penalties/no", ""):
        with pytest.raises(ValueError, match=r"is called .*recipes .*; penalties .*nacl.*; losses"):
            build(name, num_classes=3)
    with pytest.raises(ValueError, match="margin_inner: arguments belong to a term"):
        build("crac", num_classes=3, margin_inner=3.0)
    with pytest.raises(ValueError, match="ignore_index: expected an integer"):
        build("crac", num_classes=3, ignore_index="255")


def test_a_penalty_costs_nothing_when_it_has_no_weight():
    logits, labels = torch.randn(1, 3, 6, 5), torch.randint(0, 3, (1, 6, 5))
    plain = build("dice_ce", num_classes=3)(logits, labels)
    without = build("nacl", num_classes=3, nacl={"alpha": 0.0})(logits, labels)
    close(without, plain, rtol=1e-6)


def test_overrides():
    objective = build("crac", num_classes=3, crac={"margin_inner": 3.0, "gamma": 1.5})
    assert objective.terms["crac"].margins == (3.0, 1.0)
    assert objective.terms["crac"].gamma == 1.5
    with pytest.raises(ValueError, match=r"CRaC: takes no alpha; it takes .*margin_inner.*gamma"):
        build("crac", num_classes=3, crac={"alpha": 1})
    with pytest.raises(ValueError, match="has no term nacl; it has cross_entropy, soft_dice, crac"):
        build("crac", num_classes=3, nacl={})
    with pytest.raises(ValueError, match=r"NACL: .*'<=' not supported"):
        build("nacl", num_classes=3, nacl={"alpha": "0.1"})
    assert build("crac", num_classes=3, crac={"ignore_index": 7}).terms["crac"].ignore_index == 7
    with pytest.raises(ValueError, match="ignore_index is 7 in the config but 9 here"):
        build("crac", num_classes=3, ignore_index=9, crac={"ignore_index": 7})
    with pytest.raises(ValueError, match=r"is called 'crak', and it is no YAML file.*crac"):
        build("crak", num_classes=3)


def test_a_recipe_of_the_users(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("base: {cross_entropy: 1.0}\npenalties: {crac: 0.5}\n")
    objective = build(path, num_classes=3)
    assert objective.weights == {"cross_entropy": 1.0, "crac": 0.5}
    assert isinstance(objective.terms["crac"], CRaC)
    path.write_text("base: {cross_entropy: much}\npenalty: {}\n")
    with pytest.raises(
        ValueError, match=r"mine\.yaml: base\.cross_entropy: .*penalty: unknown; .*penalties"
    ):
        load_recipe(path)
    path.write_text("base: [")
    with pytest.raises(ValueError, match="not a YAML file"):
        load_recipe(path)


def test_arguments_in_a_recipe(tmp_path):
    crac = build("crac_published", num_classes=3).terms["crac"]
    assert crac.padding == "background"
    assert crac.clamp_elementwise
    assert build("crac_published", num_classes=3, crac={"padding": "zeros"}).terms[
        "crac"
    ].padding == "zeros"  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text("base: {cross_entropy: 1.0}\nargs: {crac: {margin_inner: 3.0}}\n")
    with pytest.raises(ValueError, match="has no term crac"):
        build(path, num_classes=3)


def test_only_known_targets_are_built():
    with pytest.raises(ValueError, match="only targets below"):
        Component(target="os.system", args={"command": "true"})
    with pytest.raises(ValueError, match="cannot be found"):
        build_component(Component(target="segcal.penalties.crac.CRaK"))
    torchs = build_component(Component(target="torch.nn.CrossEntropyLoss"), num_classes=3)
    assert isinstance(torchs, torch.nn.CrossEntropyLoss)  # takes no num_classes, is given none
    with pytest.raises(ValueError, match="needs num_classes"):
        build_component(Component(target="segcal.penalties.crac.CRaC"))
    with pytest.raises(ValueError, match="Field required"):
        Recipe.model_validate({})


def test_an_argument_may_be_a_component():
    spec = {
        "target": "segcal.losses.multilabel.lpr.LPR",
        "args": {
            "base": {
                "target": "segcal.losses.multilabel.bce.BCE",
                "args": {"scheme": "balanced"},
            },
            "weight": 0.5,
        },
    }
    counts = {"positives": [1, 3], "negatives": [3, 1]}
    built = build_component(Component.model_validate(spec), **counts)
    close(built.base.positive_weight, [2.0, 2 / 3])
    assert built.weight == 0.5
    for inner, message in (
        ({"target": "os.system"}, "only targets below"),
        ({"target": "segcal.losses.multilabel.bce.No"}, "cannot be found"),
        ({"target": "segcal.losses.multilabel.bce.BCE", "args": {"gamma": 1}}, "takes no gamma"),
        ({"target": "segcal.losses.multilabel.bce.BCE", "extra": 1}, "extra"),
    ):
        spec["args"]["base"] = inner
        with pytest.raises(ValueError, match=message):
            build_component(Component.model_validate(spec))
