"""Factors on weights that change while training goes on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.dice import SoftDiceLoss
from segcal.objective import Objective
from segcal.recipes import Recipe, build, load_recipe
from segcal.schedule import Ramp, generalisation_gap
from tests.conftest import close


def test_a_ramp_is_a_straight_line():
    ramp = Ramp(1.0, 0.0, 0.1, 0.5)
    assert [ramp.at(p) for p in (0, 0.1, 0.3, 0.5, 1)] == [1, 1, pytest.approx(0.5), 0, 0]
    assert Ramp(0.0, 2.0, 0.0, 0.0).at(0.0) == 2.0  # a step
    assert Ramp(0.0, 2.0, 0.5, 0.5).at(0.49) == 0.0


def test_a_ramp_may_wait_for_the_dice():
    ramp = Ramp(1.0, 0.0, 0.1, 0.2, dice=0.8)
    assert ramp.at(0.9) == 1.0
    assert ramp.at(0.5, began=0.45) == 1.0
    assert ramp.at(0.6, began=0.45) == pytest.approx(0.5)
    assert ramp.at(0.8, began=0.45) == 0.0


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_ramp_stays_between_its_ends(first, last, a, b, progress):
    ramp = Ramp(first, last, min(a, b), max(a, b))
    low, high = sorted((first, last))
    assert low * (1 - 1e-12) <= ramp.at(progress) <= high * (1 + 1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first": -1.0}, "from: expected a finite factor"),
        ({"last": math.inf}, "to: expected a finite factor"),
        ({"start": 0.6, "end": 0.5}, "start, end"),
        ({"end": 1.5}, "start, end"),
        ({"dice": 0.0}, "dice: expected"),
    ],
)
def test_ramps_that_do_not_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        Ramp(**arguments)


def objective(**ramp):
    terms = {"ce": CrossEntropy(3), "dice": SoftDiceLoss(3)}
    return Objective(terms, {"dice": 2.0}, {"dice": Ramp(**ramp)})


def test_an_objective_weighs_by_its_schedule():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, 6, generator=generator)
    labels = torch.randint(0, 3, (2, 5, 6), generator=generator)
    made = objective(start=0.2, end=0.4)
    for progress, factor in ((0.0, 1.0), (0.3, 0.5), (0.4, 0.0), (1.0, 0.0)):
        in_force = made.advance(progress)
        assert in_force == {"dice": pytest.approx(2 * factor)}
        total, values = made.loss_and_terms(logits, labels)
        close(total, values["ce"] + 2 * factor * values["dice"])
    assert made.weights == {"ce": 1.0, "dice": 2.0}


def test_what_a_schedule_waited_for_is_in_the_state():
    first = objective(start=0.0, end=0.2, dice=0.7)
    assert first.advance(0.1, dice=0.69) == {"dice": 2.0}
    assert first.advance(0.2, dice=0.71) == {"dice": 2.0}
    assert first.advance(0.3, dice=0.5) == {"dice": pytest.approx(1.0)}  # it is not taken back
    second = objective(start=0.0, end=0.2, dice=0.7)
    second.load_state_dict(first.state_dict())
    assert second.advance(0.3) == {"dice": pytest.approx(1.0)}


def test_without_a_schedule_the_state_is_as_it_was():
    assert "began" not in Objective({"ce": CrossEntropy(3)}).state_dict()


def test_schedules_of_recipes(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: {cross_entropy: 1.0, soft_dice: 1.0}\n"
        "schedule: {soft_dice: {from: 1, to: 0, start: .1, end: .5}}\n"
    )
    made = build(path, num_classes=3)
    assert made.advance(0.3) == {"soft_dice": pytest.approx(0.5)}
    recipe = load_recipe(path)
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    path.write_text("base: {cross_entropy: 1.0}\nschedule: {soft_dice: {to: 0}}\n")
    with pytest.raises(ValueError, match="has no term soft_dice; it has cross_entropy"):
        load_recipe(path)
    path.write_text("base: {cross_entropy: 1.0}\nschedule: {cross_entropy: {start: 2}}\n")
    with pytest.raises(ValueError, match="start, end: expected shares of the epochs"):
        load_recipe(path)


def test_a_ramp_may_follow_the_generalisation_gap():
    ramp = Ramp(0.0, 2.0, gap=(0.25, 0.75))
    assert [ramp.at(0.7, gap=g) for g in (0.0, 0.25, 0.375, 0.75, 0.9)] == [0, 0, 0.5, 2, 2]
    assert ramp.at(0.0) == 2.0  # nobody tells it
    both = {"gap": (0.0, 0.5)}
    for wrong in (
        {"gap": (0.5, 0.5)}, {"gap": (0.1, 1.5)}, {"gap": (-0.1, 0.5)}, {**both, "end": 0.3},
        {**both, "dice": 0.8},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="gap: "):
            Ramp(0.0, 1.0, **wrong)


def test_how_far_validation_lies_behind():
    assert generalisation_gap(0.1, 0.4) == pytest.approx(0.75)
    assert generalisation_gap(0.5, 0.4) == generalisation_gap(0.0, 0.0) == 0.0
    assert generalisation_gap(-0.5, 0.1) == 1.0
    assert math.isnan(generalisation_gap(math.nan, 0.4))
    assert math.isnan(generalisation_gap(0.4, math.nan))


def test_the_gap_is_a_running_mean_in_the_state():
    first = objective(first=0.0, last=1.0, gap=(0.0, 0.5))
    assert first.advance(0.0) == {"dice": 2.0}  # nobody has told
    first.see_gap(0.0)
    assert first.advance(0.0) == {"dice": 0.0}
    first.see_gap(0.2)
    first.see_gap(math.nan)  # an epoch that did not validate
    assert first.advance(0.1) == {"dice": pytest.approx(2 * 0.06 / 0.5)}
    first.see_gap(0.4)
    second = objective(first=0.0, last=1.0, gap=(0.0, 0.5))
    second.load_state_dict(first.state_dict())
    assert second.advance(0.5) == {"dice": pytest.approx(2 * (0.7 * 0.06 + 0.3 * 0.4) / 0.5)}
    other = objective(start=0.2)
    other.see_gap(0.3)  # nothing goes by it
    assert "schedules.gap" not in other.state_dict()


def test_a_recipe_may_follow_the_gap():
    made = build("confidence", num_classes=3)
    made.see_gap(0.3)
    assert made.advance(0.3) == {
        "ml1_ace_soft": pytest.approx(0.5),
        "confidence": pytest.approx(0.5),
    }
    assert made.in_force["cross_entropy"] == 1.0


def test_notes_of_what_does_not_act_say_so():
    logits = torch.zeros(1, 3, 4, 4)
    logits[:, 1] = 3.0
    labels = torch.full((1, 4, 4), 2)  # confident, and always wrong
    notes = {}
    for gap in (0.0, 0.5):
        made = build("confidence", num_classes=3)
        made.see_gap(gap)
        made.advance(0.0)
        notes[gap] = []
        for _ in range(20):
            made.start_pass()
            made.observe(logits, labels)
            step = made.dual_step()["confidence"]
            notes[gap] += step.notes
        assert step.lam[0][1] > 0
    assert notes[0.0] == [
        f"{note}; its weight is 0 now, so it has no effect" for note in notes[0.5]
    ]
    assert "bound" in notes[0.5][0]
