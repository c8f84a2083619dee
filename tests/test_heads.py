"""Two heads: the layer, its state, and the objective of both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from segcal.heads import (
    TwoHeadLayer,
    add_probability_head,
    both_heads,
    head_layer,
    one_head,
    output_of,
    split_heads,
)
from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.objective import Objective, TwoHeads
from segcal.penalties.bwcr import BWCR
from segcal.penalties.crac import CRaC
from segcal.recipes import Recipe, build, load_recipe
from segcal.schedule import Ramp
from tests.conftest import close


def network(outputs=3):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, outputs, 1)
    return nn.Sequential(*layers).double()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 6, 5, 7, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 3, (2, 5, 7), generator=generator)


def test_channels_are_split_in_the_middle(batch):
    logits, _ = batch
    decision, probability = split_heads(logits)
    close(decision, logits[:, :3])
    close(probability, logits[:, 3:])
    for wrong in (logits[:, :5], logits[:, :0], logits[0, 0, 0]):
        with pytest.raises(ValueError, match="build the network with"):
            split_heads(wrong)


def test_a_second_head_begins_as_the_first():
    plain = network()
    x = torch.randn(2, 1, 8, 9, dtype=torch.float64)
    expected = plain(x)
    layer = add_probability_head(plain, 3)
    assert isinstance(layer, TwoHeadLayer)
    for head in split_heads(plain(x)):
        close(head, expected)
    with torch.no_grad():
        layer.probability.bias += 1
    for output, found in (("decision", expected), ("probability", expected + 1)):
        layer.output = output
        close(plain(x), found)
    with pytest.raises(ValueError, match="has two heads already"):
        add_probability_head(plain, 3)


def test_the_last_layer_of_these_channels_is_found():
    nested = nn.ModuleDict({"low": nn.Conv2d(4, 3, 1), "top": nn.Sequential(nn.Conv2d(4, 3, 1))})
    add_probability_head(nested, 3)
    assert isinstance(nested["low"], nn.Conv2d)
    assert isinstance(nested["top"][0], TwoHeadLayer)
    with pytest.raises(ValueError, match="holds no convolution or linear layer with 5"):
        add_probability_head(network(), 5)
    with pytest.raises(ValueError, match="holds no convolution"):
        add_probability_head(nn.Conv2d(4, 3, 1), 3)  # in no network, so it cannot be replaced


def test_the_state_of_one_head_is_that_of_a_plain_network():
    two = network()
    layer = add_probability_head(two, 3)
    with torch.no_grad():
        layer.probability.weight.mul_(2)
    x = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    decision, probability = split_heads(two(x))
    for head, expected in (("decision", decision), ("probability", probability)):
        plain = network()
        plain.load_state_dict(one_head(two.state_dict(), head))
        close(plain(x), expected)
    with pytest.raises(ValueError, match="head: expected one of"):
        one_head(two.state_dict(), "both")
    with pytest.raises(ValueError, match="network of two heads"):
        one_head(network().state_dict(), "decision")


def objective():
    decision = Objective({"ce": CrossEntropy(3), "dice": SoftDiceLoss(3)}, {"dice": 0.5})
    return TwoHeads(decision, Objective({"ce": CrossEntropy(3), "crac": CRaC(3)}))


def test_both_heads_are_summed_up(batch):
    logits, labels = batch
    made = objective()
    total, values = made.loss_and_terms(logits, labels)
    names = ["decision/ce", "decision/dice", "probability/ce", "probability/crac"]
    assert list(values) == list(made.weights) == list(made.terms) == list(made.declared()) == names
    first, second = logits[:, :3], logits[:, 3:]
    expected = [
        CrossEntropy(3)(first, labels), SoftDiceLoss(3)(first, labels),
        CrossEntropy(3)(second, labels), CRaC(3)(second, labels),
    ]  # fmt: skip
    for value, found in zip(expected, values.values(), strict=True):
        close(found, value)
    close(total, expected[0] + 0.5 * expected[1] + expected[2] + expected[3])
    close(made.step(lambda x: x, logits, labels)[0], total)
    assert (made.num_heads, Objective({"ce": CrossEntropy(3)}).num_heads) == (2, 1)
    close(made.by_head(logits)[1], second)


def test_logits_of_one_head_are_refused(batch):
    logits, labels = torch.randn(2, 4, 5, 7), batch[1]
    made = build("two_heads_confidence", num_classes=4)
    for call in (made, made.observe):
        with pytest.raises(ValueError, match=r"expected \(N, 8, \*S\), the 4 channels of the dec"):
            call(logits, labels)


def test_gradients_do_not_cross(batch):
    logits, labels = batch
    logits = logits.clone().requires_grad_()
    objective()(logits, labels).backward()
    alone = logits.detach()[:, 3:].clone().requires_grad_()
    (CrossEntropy(3)(alone, labels) + CRaC(3)(alone, labels)).backward()
    close(logits.grad[:, 3:], alone.grad)


def test_multipliers_are_of_their_head(batch):
    logits, labels = batch
    made, alone = objective(), CRaC(3)
    made.start_pass()
    made.observe(logits, labels)
    steps = made.dual_step()
    alone.observe(logits[:, 3:], labels)
    assert list(steps) == ["probability/crac"]
    assert steps["probability/crac"].lam == alone.dual_step().lam
    again = objective()
    again.load_state_dict(copy.deepcopy(made.state_dict()))
    close(again(logits, labels), made(logits, labels))


def test_schedules_of_heads(batch):
    decision = Objective({"ce": CrossEntropy(3)}, schedules={"ce": Ramp(1.0, 0.0)})
    made = TwoHeads(decision, Objective({"ce": CrossEntropy(3)}))
    assert made.advance(0.25) == {"decision/ce": 0.75}
    total, values = made.loss_and_terms(*batch)
    close(total, 0.75 * values["decision/ce"] + values["probability/ce"])


def test_two_views_have_no_form_with_two_heads():
    with pytest.raises(ValueError, match="decision/bwcr: compares two views"):
        TwoHeads(
            Objective({"ce": CrossEntropy(3), "bwcr": BWCR(3)}), Objective({"ce": CrossEntropy(3)})
        )


def test_recipes_of_two_heads(tmp_path, batch):
    path = tmp_path / "two.yaml"
    path.write_text(
        "base: {cross_entropy: 1.0, soft_dice: 0.5}\n"
        "probability: {base: {cross_entropy: 2.0}, penalties: {crac: 1.0}}\n"
        "args: {crac: {margin_inner: 3.0}}\n"
        "schedule: {probability/cross_entropy: {from: 0, to: 1, end: .5}}\n"
    )
    recipe = load_recipe(path)
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    assert recipe.weights == {
        "decision/cross_entropy": 1.0, "decision/soft_dice": 0.5,
        "probability/cross_entropy": 2.0, "probability/crac": 1.0,
    }  # fmt: skip
    made = build(path, num_classes=3, crac={"margin_outer": 0.5}, ignore_index=9)
    assert isinstance(made, TwoHeads)
    assert made.terms["probability/crac"].margins == (3.0, 0.5)
    assert {term.ignore_index for term in made.declared().values()} == {9}
    assert made.advance(0.25) == {"probability/cross_entropy": pytest.approx(1.0)}
    # a name without its head is that of both
    both = build(path, num_classes=3, cross_entropy={"class_weight": [1.0, 2.0, 3.0]})
    weighed = [t for n, t in both.terms.items() if n.endswith("cross_entropy")]
    assert all(term.class_weight is not None for term in weighed)
    assert len(weighed) == 2
    with pytest.raises(ValueError, match=r"has no term nacl; it has decision/cross_entropy"):
        build(path, num_classes=3, nacl={})
    close(made(*batch), sum(made._objectives()[h](z, batch[1]) for h, z in
          zip(("decision", "probability"), split_heads(batch[0]), strict=True)))  # fmt: skip


def test_what_a_network_returns_for_a_while():
    plain = network()
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    assert head_layer(plain) is None
    with output_of(plain, "both"):  # one head: nothing to say
        assert plain(x).shape[1] == 3
    layer = add_probability_head(plain, 3, output="decision")
    assert head_layer(torch.compile(plain)) is layer
    with output_of(plain, "both"):
        assert plain(x).shape[1] == 6
    with pytest.raises(RuntimeError, match="channels"), output_of(plain, "both"):
        plain(x[:, [0, 0]])
    assert layer.output == "decision"


def test_the_state_of_one_head_is_that_of_both():
    one, two = network(), network()
    with torch.no_grad():
        one[2].weight += 1
    add_probability_head(two, 3)
    state = both_heads(one.state_dict(), two)
    two.load_state_dict(state)
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    for head in split_heads(two(x)):
        close(head, one(x))
    assert state["2.decision.weight"].data_ptr() != state["2.probability.weight"].data_ptr()
    again = both_heads(two.state_dict(), two)
    assert list(again) == list(two.state_dict())
