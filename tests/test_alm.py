"""Functions and the engine against golden vectors and the update rules."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.alm import FUNCTIONS, AugmentedLagrangian, p2, p3, phr
from segcal.losses.adafocal import AdaFocal
from segcal.neighbourhood import class_proportions
from segcal.penalties.cals import CALS, CALSHR
from segcal.penalties.confidence import Confidence
from segcal.penalties.crac import CRaC
from tests.conftest import close


class Elementwise(AugmentedLagrangian):
    """Logits are the constraints; labels are the regions."""

    def constraints(self, logits, labels):
        return logits, labels


@pytest.mark.parametrize("name", ["phr", "p2", "p3", "relu"])
def test_golden_penalties(golden, name):
    g = golden("penalties")
    for row, (lam, rho) in enumerate(g["combos"]):
        z = g["z"].clone().requires_grad_()
        value, derivative = FUNCTIONS[name](z, lam, rho)
        (slope,) = torch.autograd.grad(value.sum(), z)
        close(value.detach(), g[f"{name}_value"][row])
        close(derivative.detach(), g[f"{name}_grad"][row])
        if name != "relu":  # relu has no derivative at 0; torch takes 0, the closed form lam
            close(slope, derivative.detach())


def test_values_worked_by_hand():
    z = torch.tensor([-1, -0.5, 0, 0.5, 1], dtype=torch.float64)
    for function, values, slopes in (
        (phr, [-0.25, -0.25, 0, 0.75, 2], [0, 0, 1, 2, 3]),
        (p2, [-1 / 3, -0.25, 0, 13 / 12, 11 / 3], [1 / 9, 0.25, 1, 3.5, 7]),
        (p3, [-1 / 3, -0.25, 0, 1, 3], [1 / 9, 0.25, 1, 3, 5]),
    ):
        value, slope = function(z, 1.0, 2.0)
        close(value, values)
        close(slope, slopes)


@pytest.mark.parametrize("function", [phr, p2, p3])
def test_without_rho_the_limit_not_nan(function):
    z = torch.tensor([-0.5, 0.5], requires_grad=True)
    value, slope = function(z, torch.tensor(1.0), torch.tensor(0.0))
    (grad,) = torch.autograd.grad(value.sum(), z)
    close(value.detach(), [-0.5, 0.5])
    close(slope.detach(), [1, 1])
    close(grad, [1, 1])


@pytest.mark.parametrize("function", [phr, p2, p3])
def test_finite_for_huge_constraints_in_float32(function):
    z = torch.tensor([-1e13, -1e6, 1e6, 1e13], requires_grad=True)
    value, slope = function(z, torch.tensor(1.0), torch.tensor(10.0))
    (grad,) = torch.autograd.grad(value.sum(), z)
    for x in (value, slope, grad):
        assert torch.isfinite(x).all()
    torch.testing.assert_close(grad, slope)


@settings(max_examples=100, deadline=None)
@given(
    lam=st.floats(1e-6, 1e3),
    rho=st.floats(1e-3, 1e3),
    name=st.sampled_from(["phr", "p2", "p3"]),
)
def test_axioms(lam, rho, name):
    """P' >= 0, P'(0) = lam, P(0) = 0, P' does not decrease."""
    z = torch.linspace(-3, 3, 101, dtype=torch.float64)
    tensors = torch.tensor(lam, dtype=torch.float64), torch.tensor(rho, dtype=torch.float64)
    value, slope = FUNCTIONS[name](z, *tensors)
    assert (slope >= 0).all()
    close(slope[50], lam)
    close(value[50], 0.0)
    assert (slope.diff() >= -1e-9 * slope.max()).all()


def test_multipliers_move_before_rho_grows():
    """lam 1, rho 2, h 0.5, growth 10: lam becomes 2, then rho 20; the other order gives 11."""
    alm = Elementwise(2, lambda0=1.0, rho0=2.0, rho_max=100.0, gamma=10.0, rho_period=1)
    z = torch.full((1, 2, 1), 0.5)
    regions = torch.zeros(1, 1, dtype=torch.int64)
    for lam, rho in ((2.0, 2.0), (3.0, 20.0)):  # no previous constraint in the first pass
        alm.observe(z, regions)
        step = alm.dual_step()
        close(step.lam, [[lam, lam]])
        close(step.rho, [[rho, rho]])


@pytest.mark.parametrize(("name", "padding"), [("cr_fix", "background"), ("cr_rep", "replicate")])
@pytest.mark.parametrize("period", [3, 10])
def test_golden_crac_twelve_epochs(golden, name, padding, period):
    g = golden("crac")
    alm = CRaC(4, rho_period=period, padding=padding, clamp_elementwise=True)

    def reference(x):  # published order: outer, then inner
        return torch.cat([x[1], x[0]])

    for epoch in range(12):
        close(reference(alm.lam), g[f"lambda_rs{period}_{name}"][epoch])
        close(reference(alm.rho), g[f"rho_rs{period}_{name}"][epoch])
        alm.observe(g["val_logits"][epoch], g["val_labels"])
        alm.dual_step()
        close(reference(alm.previous), g[f"constraint_rs{period}_{name}"][epoch])
    close(reference(alm.lam), g[f"lambda_rs{period}_{name}"][12])
    close(reference(alm.rho), g[f"rho_rs{period}_{name}"][12])


@pytest.mark.parametrize("average", ["all", "region"])
@pytest.mark.parametrize(
    ("padding", "ignore"),
    [("background", None), ("replicate", None), ("renormalize", None), ("replicate", 255)],
)
def test_golden_crac_options(golden, padding, average, ignore):
    g = golden("crac_options")
    key = f"{padding}_{average}" + ("_ign" if ignore else "") + "_rs3"
    labels = g["labels_ignore255" if ignore else "labels"][None]
    alm = CRaC(4, rho_period=3, padding=padding, average=average, ignore_index=ignore)
    for epoch in range(12):
        close(alm.lam, g[f"lambda_{key}"][epoch])
        close(alm.rho, g[f"rho_{key}"][epoch])
        alm.observe(g["val_logits"][epoch][None], labels)
        alm.dual_step()
        close(alm.previous, g[f"curr_{key}"][epoch])
    close(alm.lam, g[f"lambda_{key}"][12])
    close(alm.rho, g[f"rho_{key}"][12])


@pytest.mark.parametrize("average", ["all", "region"])
def test_golden_region_that_is_always_empty(golden, average):
    g = golden("crac_options")
    alm = CRaC(4, rho_period=3, average=average, padding="replicate")
    labels = torch.full((1, 8, 8), 2)
    for epoch in range(12):
        alm.observe(g["val_logits"][epoch][None], labels)
        step = alm.dual_step()
        assert step.notes == ["region 1 had no voxel in validation; its multipliers stay"]
    close(alm.lam, g[f"allinner_lambda_{average}"][12])
    close(alm.rho, g[f"allinner_rho_{average}"][12])


def _passes(alm, g, epochs):
    for epoch in epochs:
        alm.observe(g["val_logits"][epoch], g["val_labels"])
        alm.dual_step()


def test_resume_is_bitwise(golden):
    g = golden("crac")
    straight = CRaC(4, rho_period=3)
    _passes(straight, g, range(12))
    first = CRaC(4, rho_period=3)
    _passes(first, g, range(5))
    first.observe(g["val_logits"][5], g["val_labels"])  # saved in the middle of a pass
    state = copy.deepcopy(first.state_dict())
    second = CRaC(4, rho_period=3)
    second.load_state_dict(state)
    second.dual_step()
    _passes(second, g, range(6, 12))
    for name, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda: CRaC(5), "num_classes 4, here 5"),
        (lambda: CRaC(4, function="p2"), "function 'phr', here 'p2'"),
        (lambda: CRaC(4, constraint="signed"), "constraint 'abs', here 'signed'"),
        (lambda: CALS(4), "method 'CRaC', here 'CALS'"),
    ],
)
def test_a_state_of_another_penalty_is_refused(other, difference):
    saved, penalty = CRaC(4, lambda0=5.0).state_dict(), other()
    before = {name: b.clone() for name, b in penalty.named_buffers()}
    with pytest.raises(ValueError, match=difference):
        penalty.load_state_dict(saved)
    for name, buffer in penalty.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_the_score_of_the_heuristic_is_part_of_its_identity():
    with pytest.raises(ValueError, match="score 'weighted', here 'unweighted'"):
        CALSHR(4).load_state_dict(CALSHR(4, score="weighted").state_dict())


def test_a_state_without_identity_is_refused():
    state = CRaC(4).state_dict()
    del state["_extra_state"]
    with pytest.raises(ValueError, match="lam: the state of an older segcal"):
        CRaC(4).load_state_dict(state)


@pytest.mark.parametrize("value", [-5.0, -0.1, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("penalty", "name"),
    [
        (CRaC(4), "lam"), (CRaC(4), "rho"), (CRaC(4), "previous"), (CALSHR(4), "lam"),
        (Confidence(4), "lam"), (AdaFocal(4, gamma_bounds=(-0.05, 20), switch=0.01), "gamma"),
    ],
    ids=["crac lam", "crac rho", "crac previous", "cals_hr lam", "confidence lam", "adafocal"],
)  # fmt: skip
def test_values_out_of_range_are_refused(penalty, name, value):
    """Nothing is loaded; of what has no bounds, what is not finite is refused alone."""
    state = copy.deepcopy(penalty.state_dict())
    state[name].view(-1)[-1] = value
    if name == "previous" and math.isfinite(value):
        penalty.load_state_dict(state)
        return
    before = getattr(penalty, name).clone()
    with pytest.raises(ValueError, match=rf"{name}: expected (finite )?numbers.*, got "):
        penalty.load_state_dict(state)
    assert torch.equal(getattr(penalty, name), before)


def test_a_state_that_was_in_single_precision_is_loaded():
    """1e-6, the lower bound, is a little less there."""
    state = {
        name: v.float() if v.is_floating_point() else v for name, v in CRaC(4).state_dict().items()
    }
    CRaC(4).load_state_dict(state)


@pytest.mark.parametrize(
    "other",
    [None, 3, "crac", {"method": "CRaC"}, torch.ones(3), torch.tensor([91, 93], dtype=torch.uint8)],
)
def test_an_extra_state_of_another_type_is_refused(other):
    state = {**CRaC(4).state_dict(), "_extra_state": other}
    with pytest.raises(ValueError, match="_extra_state: expected what segcal saves of a CRaC"):
        CRaC(4).load_state_dict(state)


def test_a_state_of_another_version_is_refused(monkeypatch):
    state = CRaC(4).state_dict()
    monkeypatch.setattr("segcal.term.STATE_VERSION", 3)
    with pytest.raises(ValueError, match=r"of this version: 2, here 3\. .* CRaC anew"):
        CRaC(4).load_state_dict(state)


def test_a_region_seen_late_has_no_previous_constraint(golden):
    g = golden("crac")
    alm = CRaC(4, rho_period=1)
    inner_only = torch.zeros(1, 8, 8, dtype=torch.int64)
    for _ in range(3):
        alm.observe(g["val_logits"][0], inner_only)
        alm.dual_step()
    assert (alm.rho[0] > 0.1).any()
    close(alm.rho[1], [0.1] * 4)
    alm.observe(g["val_logits"][0], g["val_labels"])
    alm.dual_step()
    close(alm.rho[1], [0.1] * 4)  # first pass of the outer region: nothing to compare with
    assert (alm.lam[1] > 1e-6).all()
    alm.observe(g["val_logits"][0], g["val_labels"])
    alm.dual_step()
    assert (alm.rho[1] > 0.1).all()


def test_sums_over_ranks_not_means(golden):
    """Uneven ranks (one sees 1 case, one sees 2) agree with a single process."""
    g = golden("crac")
    cases = [(g["val_logits"][i], g["val_labels"]) for i in range(3)]
    one = CRaC(4)
    for case in cases:
        one.observe(*case)
    ranks = [CRaC(4), CRaC(4)]
    ranks[0].observe(*cases[0])
    for case in cases[1:]:
        ranks[1].observe(*case)
    packed = []
    for rank in ranks:
        copy.deepcopy(rank).dual_step(lambda v: packed.append(v.clone()) or v)
    for rank in ranks:
        rank.dual_step(lambda _: packed[0] + packed[1])
        close(rank.lam, one.lam if one.step else _stepped(one).lam, rtol=1e-14)
        assert torch.equal(rank.lam, ranks[0].lam)


def _stepped(alm):
    alm.dual_step()
    return alm


def test_an_empty_pass_changes_nothing(golden):
    g = golden("crac")
    alm = CRaC(4, rho_period=1, ignore_index=255)
    _passes(alm, g, range(2))
    before = copy.deepcopy(alm.state_dict())
    alm.dual_step()
    alm.observe(g["val_logits"][0], torch.full((1, 8, 8), 255))
    step = alm.dual_step()
    assert step.count == [0, 0]
    for name, value in alm.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_nonfinite_logits_do_not_reach_the_multipliers(golden):
    g = golden("crac")
    alm = CRaC(4)
    alm.observe(g["val_logits"][0], g["val_labels"])
    before = copy.deepcopy(alm.state_dict())
    _, region = alm.constraints(g["val_logits"][0], g["val_labels"])
    for r in (0, 1):  # whichever region the bad voxel is in, the other's sums stay, too
        bad = g["val_logits"][0].clone()
        i, j = (region[0] == r).nonzero()[0]
        bad[0, 1, i, j] = float("nan")
        with pytest.raises(ValueError, match="not finite in a validation batch"):
            alm.observe(bad, g["val_labels"])
        for name, value in alm.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_start_epoch(golden):
    g = golden("crac")
    alm = CRaC(4, start_epoch=2, lambda0=0.5)
    reference = CRaC(4, lambda0=0.5)
    logits = g["logits"].clone().requires_grad_()
    for note in ("the penalty starts after 1 more passes", "the penalty starts now"):
        value = alm(logits, g["labels"])
        (slope,) = torch.autograd.grad(value, logits)
        assert value == 0
        assert (slope == 0).all()
        alm.observe(g["val_logits"][0], g["val_labels"])
        step = alm.dual_step()
        assert step.notes == [note]
        assert torch.equal(alm.lam, reference.lam)
    close(alm(logits, g["labels"]), reference(logits, g["labels"]))
    alm.observe(g["val_logits"][0], g["val_labels"])
    assert alm.dual_step().notes == []
    assert (alm.lam > 0.5).all()


REGION_0 = torch.zeros(1, 1, dtype=torch.int64)


def one_pass(alm, z):
    alm.observe(torch.full((1, 2, 1), z, dtype=torch.float64), REGION_0)
    alm.dual_step()
    return float(alm.lam[0, 0]), float(alm.rho[0, 0])


def test_lambda_and_rho_stay_in_their_bounds():
    alm = Elementwise(
        2, lambda0=1.0, rho0=1.0, rho_max=1.5, gamma=1.2, rho_period=1, lambda_bounds=(0.5, 4.0)
    )
    got = [one_pass(alm, 2.0) for _ in range(4)]
    assert [lam for lam, _ in got] == [3, 4, 4, 4]
    close([rho for _, rho in got], [1, 1.2, 1.44, 1.5])
    for _ in range(5):
        lam, _ = one_pass(alm, -3.0)
    assert lam == 0.5


def test_rho_grows_where_a_constraint_turned_positive():
    """After a satisfied pass (z < 0) the comparison is with 0; a satisfied pass never triggers."""
    alm = Elementwise(2, rho0=1.0, gamma=2.0, rho_period=1)
    rhos = [one_pass(alm, z)[1] for z in (-1.0, -0.5, 0.1, 0.05, 0.0)]
    assert rhos == [1, 1, 2, 2, 2]


def test_clamp_elementwise_cuts_each_derivative():
    plain, clamped = (
        Elementwise(2, lambda0=1.0, rho0=1.0, lambda_bounds=(1e-6, 4.0), clamp_elementwise=c)
        for c in (False, True)
    )
    z = torch.tensor([[[9.0, 0.0], [9.0, 0.0]]], dtype=torch.float64)
    for alm, lam in ((plain, 4.0), (clamped, 2.5)):  # means of (10, 1) and of (4, 1), then a clip
        alm.observe(z, torch.zeros(1, 2, dtype=torch.int64))
        alm.dual_step()
        assert float(alm.lam[0, 0]) == lam


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_state_keeps_its_types_in_a_model_of_another(golden, dtype):
    g = golden("crac")
    model = torch.nn.ModuleDict({"net": torch.nn.Linear(2, 2), "penalty": CRaC(4)}).to(dtype)
    assert model["net"].weight.dtype == dtype
    reference = CRaC(4)
    for alm in (model["penalty"], reference):
        _passes(alm, g, range(3))
    for name, value in reference.state_dict().items():
        assert torch.equal(model["penalty"].state_dict()[name], value), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_heuristic_keeps_its_types_in_a_model_of_another(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = 6 * torch.randn(2, 3, 40, 40, generator=generator)
    labels = torch.randint(0, 3, (2, 40, 40), generator=generator)
    steps = []
    for term in (CALSHR(3, margin=3.0), CALSHR(3, margin=3.0).to(dtype)):
        for _ in range(2):
            term.observe(logits, labels)
            steps.append(term.dual_step())
    assert steps[:2] == steps[2:]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("fused", [True, False])
def test_the_heuristic_does_not_take_nan_for_no_excess(bad, fused):
    logits = torch.zeros(1, 3, 4)
    logits[0, 1, 2] = bad
    term = CALSHR(3, fused=fused)
    with pytest.raises(ValueError, match="not finite in a validation batch"):
        term.observe(logits, torch.zeros(1, 4, dtype=torch.int64))
    assert int(term.count) == 0


def test_p3_from_a_tiny_start_is_warned_of():
    with pytest.warns(UserWarning, match="function p3 multiplies its multipliers"):
        CRaC(3, function="p3")


def test_relu_which_never_raises_a_multiplier_is_warned_of():
    with pytest.warns(UserWarning, match=r"stay at lambda0 = 0\.3 or fall; use phr"):
        CRaC(3, function="relu", lambda0=0.3)


@pytest.mark.parametrize("fused", [True, False])
def test_a_constraint_on_its_target_but_for_rounding_does_not_raise_rho(fused):
    labels = torch.randint(0, 3, (1, 9, 9), generator=torch.Generator().manual_seed(0))
    alm = CRaC(
        3, margin_inner=7.3, margin_outer=7.3, constraint="signed", rho_period=1, gamma=2.0,
        fused=fused,
    )  # fmt: skip
    onto = 7.3 * class_proportions(labels, 3)
    for _ in range(4):
        alm.observe(onto.float(), labels)
        step = alm.dual_step()
    assert max(map(max, step.constraint)) < 1e-6
    close(alm.rho, torch.full_like(alm.rho, 0.1))


def test_a_multiplier_that_runs_away_is_said_early_and_with_the_remedy():
    alm = Elementwise(2, rho0=1.0)
    z = torch.full((1, 2, 1), 90.0)
    regions = torch.zeros(1, 1, dtype=torch.int64)
    notes = []
    for _ in range(3):
        alm.observe(z, regions)
        notes.append(alm.dual_step().notes)
    assert "a multiplier reached 10: the constraint may be one that cannot be met" in notes[0][0]
    assert "Where Dice falls, lower rho0, the margins or the weight of the penalty" in notes[0][0]
    assert "a multiplier reached 100" in notes[1][0]
    assert notes[2] == []


@pytest.mark.parametrize(
    "kwargs",
    [
        {"function": "p4"},
        {"average": "none"},
        {"rho0": 0.0},
        {"rho0": 11.0},
        {"gamma": 0.5},
        {"tau": 0.0},
        {"rho_period": 0},
        {"lambda_bounds": (0.0, 1.0)},
        {"lambda0": 1e7},
        {"gamma": float("nan")},
        {"padding": "reflect"},
        {"kernel_size": 2},
        {"kernel_size": True},
        {"margin_inner": float("nan")},
        {"constraint": "both"},
        {"constraint": "equality"},
        {"constraint": "upper"},
        {"function": "equality"},
        {"start_epoch": -1},
        {"lambda0": float("nan")},
    ],
)
def test_refuses_at_construction(kwargs):
    with pytest.raises(ValueError, match=list(kwargs)[-1]):
        CRaC(3, **kwargs)
