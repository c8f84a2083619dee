"""Confidence by class and region: an oracle in NumPy, updates by hand, and what it is for."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.penalties.confidence import Confidence, confidence_gaps, decide, log_odds
from segcal.recipes import build
from tests.conftest import close

IGNORED = 9


def example(shape=(6, 7), k=3, n=2, seed=0, ignore=False, per_channel=False, coarse=True):
    """Logits with patches that agree, as networks have them, and labels."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, k, *shape, generator=draw, dtype=torch.float64)
    if coarse:
        logits[:, 1, ..., : max(1, shape[-1] // 2)] += 9
        logits[:, 0, ..., -2:] += 9
    classes = (0, 2, (n, k, *shape)) if per_channel else (0, k, (n, *shape))
    labels = torch.randint(*classes, generator=draw)
    if ignore:
        labels.flatten()[::5] = IGNORED
    return logits, labels


def weighted(k=3, **arguments):
    penalty = Confidence(k, **arguments)
    draw = torch.Generator().manual_seed(1)
    penalty.lam.copy_(torch.rand(penalty.lam.shape, generator=draw, dtype=torch.float64) / 3)
    return penalty


def around(at, sizes, shape):
    """Places of the patch that lie in the image."""
    steps = [range(-(s // 2), s // 2 + 1) for s in sizes]
    for step in itertools.product(*steps):
        place = tuple(a + d for a, d in zip(at, step, strict=True))
        if all(0 <= p < s for p, s in zip(place, shape, strict=True)):
            yield place


def oracle(logits, labels, lam, sizes, ignored=None, per_channel=False):
    """Value, gradient, and per group the sums of confidence and of hits, and voxels."""
    x, y = logits.numpy(), labels.numpy()
    n, k, *shape = x.shape
    table = lam.numpy()
    value, gradient, valid = 0.0, np.zeros_like(x), 0
    groups = np.zeros((3, *table.shape))
    for b in range(n):
        for c in range(k) if per_channel else (None,):
            label = y[b, c] if per_channel else y[b]
            made = (x[b, c] > 0).astype(int) if per_channel else x[b].argmax(0)
            for at in np.ndindex(*shape):
                if label[at] == ignored:
                    continue
                valid += 1
                patch = {made[p] for p in around(at, sizes, shape) if label[p] != ignored}
                row = int(len(patch) > 1)
                if per_channel:
                    row, column = row + 2 * (1 - made[at]), c
                    odds, slope = abs(x[(b, c, *at)]), {c: np.sign(x[(b, c, *at)])}
                else:
                    column = made[at]
                    rest = {j: np.exp(x[(b, j, *at)]) for j in range(k) if j != column}
                    odds = x[(b, column, *at)] - math.log(sum(rest.values()))
                    slope = {j: -e / sum(rest.values()) for j, e in rest.items()}
                    slope[column] = 1.0
                value += table[row, column] * min(odds, 30)
                for j, s in slope.items():
                    gradient[(b, j, *at)] += table[row, column] * s * (odds <= 30)
                groups[:, row, column] += (1 / (1 + np.exp(-odds)), made[at] == label[at], 1)
    return value / valid, gradient / valid, groups


CASES = [
    ((9,), 3, {}),
    ((6, 7), 3, {}),
    ((3, 5, 4), 3, {}),
    ((3, 5, 4), (1, 3, 5), {}),
    ((5, 6), 5, {}),
    ((6, 7), 1, {}),
    ((6, 7), 3, {"per_channel": True}),
    ((3, 5, 4), (1, 3, 3), {"per_channel": True}),
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("ignore", [False, True])
@pytest.mark.parametrize(("shape", "size", "options"), CASES)
def test_value_gradient_and_statistics_of_an_oracle(shape, size, options, ignore, fused):
    ignored = IGNORED if ignore else None
    logits, labels = example(shape, ignore=ignore, **options)
    logits[0, 1].flatten()[0] += 60  # beyond the clip
    penalty = weighted(kernel_size=size, ignore_index=ignored, fused=fused, **options)
    sizes = (size,) * len(shape) if isinstance(size, int) else size
    value, gradient, groups = oracle(logits, labels, penalty.lam, sizes, ignored, **options)
    x = logits.clone().requires_grad_()
    found = penalty(x, labels)
    close(found.detach(), value)
    close(torch.autograd.grad(found, x)[0], gradient)
    penalty.observe(logits, labels)
    for sums, expected in zip((penalty.confidence_sum, penalty.hits, penalty.count), groups,
                              strict=True):  # fmt: skip
        close(sums, expected)
    assert (groups[2] > 0).sum() >= 3  # among them groups without a voxel
    step = penalty.dual_step()
    close(step.constraint, (groups[0] - groups[1]) / groups[2].clip(min=1))
    assert step.count == groups[2].sum(1).tolist()


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"per_channel": True}])
@pytest.mark.parametrize("shape", [(5,), (4, 5), (3, 4, 2)])
def test_gradcheck(shape, options):
    channels = {"per_channel": options.get("per_channel", False)}
    logits, labels = example(shape, ignore=True, coarse=False, **channels)
    penalty = weighted(ignore_index=IGNORED, **options)
    assert torch.autograd.gradcheck(lambda x: penalty(x, labels), logits.requires_grad_())


def test_groups_by_hand():
    """A row of five voxels: 1 1 1 0 2, so the first two are inner."""
    logits = torch.zeros(1, 3, 5, dtype=torch.float64)
    for voxel, k in enumerate((1, 1, 1, 0, 2)):
        logits[0, k, voxel] = 4.0
    labels = torch.tensor([[1, 0, 1, 0, 2]])
    made = decide(logits, labels)
    assert made.row.flatten().tolist() == [0, 0, 1, 1, 1]
    assert made.column.flatten().tolist() == [1, 1, 1, 0, 2]
    assert made.hit.flatten().tolist() == [True, False, True, True, True]
    close(made.odds, [[[4 - math.log(2)] * 5]])
    labels[0, 3] = IGNORED  # counts in nothing: the third voxel has no other neighbour
    assert decide(logits, labels, ignore_index=IGNORED).row.flatten().tolist() == [0, 0, 0, -1, 0]


def observed(penalty, gaps, count=1000):
    """Make the pass that is under way have these gaps."""
    penalty.count.fill_(count)
    penalty.hits.fill_(count // 2)
    penalty.confidence_sum.copy_(penalty.hits + count * torch.as_tensor(gaps, dtype=torch.float64))


def test_an_update_by_hand():
    penalty = Confidence(2, eta=0.5, cap=0.2, floor=-0.1, decay=0.5)
    penalty.lam.copy_(torch.tensor([[0.1, 0.1], [0.1, -0.06]], dtype=torch.float64))
    observed(penalty, [[0.1, -0.1], [0.9, 0.02]])
    step = penalty.dual_step()
    # up; decays, then down; to the cap; decays towards 0, then up
    close(step.lam, [[0.15, 0.0], [0.2, -0.02]])
    close(step.constraint, [[0.1, -0.1], [0.9, 0.02]])
    assert step.rho == []
    assert step.step == 1
    assert step.quantity == "confidence less accuracy"
    assert step.notes == [
        "a multiplier has reached its bound: predicted class 0, outer region (0.2, gap +0.900)"
    ]
    observed(penalty, [[-1.0, -1.0], [0.0, -1.0]])
    step = penalty.dual_step()
    close(step.lam, [[-0.1, -0.1], [0.1, -0.1]])
    assert len(step.notes) == 1
    assert step.notes[0].count("-0.1, gap -1.000") == 3


def test_without_a_floor_multipliers_are_those_of_an_inequality():
    penalty = Confidence(2)
    observed(penalty, [[-0.2, 0.1], [0.0, 0.05]])
    close(penalty.dual_step().lam, [[0.0, 0.03], [0.0, 0.015]])


def test_small_groups_keep_their_multipliers():
    penalty = weighted(2, min_share=0.01)
    before = penalty.lam.clone()
    penalty.count.copy_(torch.tensor([[979, 9], [12, 0]]))
    penalty.confidence_sum.copy_(penalty.count)
    step = penalty.dual_step()
    assert (penalty.lam != before).tolist() == [[True, False], [True, False]]
    assert step.constraint == [[1.0, 1.0], [1.0, 0.0]]
    assert step.count == [988, 12]
    penalty = weighted(2, min_share=0.0)  # a group without a voxel has no gap
    penalty.count[0, 0] = penalty.confidence_sum[0, 0] = 5
    before = penalty.lam.clone()
    penalty.dual_step()
    assert (penalty.lam != before).tolist() == [[True, False], [False, False]]


def test_a_pass_without_a_voxel_changes_nothing():
    penalty = weighted(2)
    before = copy.deepcopy(penalty.state_dict())
    step = penalty.dual_step()
    assert "no voxel was observed" in step.notes[0]
    assert all(torch.equal(v, before[k]) for k, v in penalty.state_dict().items())


def test_waits_for_its_start():
    logits, labels = example()
    penalty = Confidence(3, start_epoch=2)
    penalty.lam.fill_(0.1)
    notes = []
    for left in (True, True, False):
        assert (penalty(logits, labels) == 0) == left
        penalty.observe(logits, labels)
        notes += penalty.dual_step().notes[:1]
        assert bool((penalty.lam == 0.1).all()) == left
    assert notes[:2] == ["the penalty starts after 1 more passes", "the penalty starts now"]


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"include_background": False}, [[0, 1, 1], [0, 1, 1]]),
        ({"inner_background": False}, [[0, 1, 1], [1, 1, 1]]),
        ({"inner_background": False, "per_channel": True}, [[1] * 3, [1] * 3, [0] * 3, [1] * 3]),
    ],
)
def test_groups_that_are_left_out(arguments, kept):
    logits, labels = example(per_channel=arguments.get("per_channel", False))
    part, whole = weighted(**arguments), weighted(per_channel=arguments.get("per_channel", False))
    whole.lam.mul_(torch.tensor(kept))
    close(part(logits, labels), whole(logits, labels))
    before = part.lam.clone()
    part.observe(logits, labels)
    part.dual_step()
    moved = part.lam != before
    assert moved.any()
    assert not moved[torch.tensor(kept) == 0].any()
    with pytest.raises(ValueError, match="_background False, here None"):
        whole.load_state_dict(part.state_dict())


def test_says_once_that_a_constraint_cannot_be_met():
    penalty = Confidence(3, cap=0.1, patience=3)
    gaps = torch.tensor([[0.0, 0.3, 0.0], [0.4, 0.2, -0.5]])
    share = torch.tensor([[500, 300, 0], [100, 50, 50]])

    def one_pass(scale=1.0):
        penalty.count.copy_(share)
        penalty.confidence_sum.copy_(share * gaps * scale)
        return penalty.dual_step().notes

    first = one_pass(5)
    assert len(first) == 1
    assert "predicted class 1, inner region (0.1, gap +1.500)" in first[0]
    for scale in (4, 3, 3, 3, 2):  # shrinks, or did a short while ago
        assert one_pass(scale) == []
    again = copy.deepcopy(penalty)
    notes = [note for _ in range(4) for note in one_pass(3)]
    assert len(notes) == 1
    assert "cannot be met for predicted class 1, inner region and 2 more" in notes[0]
    assert "gap of +0.900 does not shrink. Take a base loss without Dice" in notes[0]
    assert [note for _ in range(9) for note in one_pass(3)] == []
    resumed = Confidence(3, cap=0.1, patience=3)
    resumed.load_state_dict(again.state_dict())
    penalty = resumed
    assert [len(one_pass(3)) for _ in range(5)] == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("per_channel", [False, True])
def test_shards_sum_up_to_the_whole(per_channel):
    """Two processes with uneven shares agree with one; a process without a voxel has its say."""
    logits, labels = example(n=5, ignore=True, per_channel=per_channel)
    options = {"per_channel": per_channel, "ignore_index": IGNORED}
    whole, ranks = weighted(**options), [weighted(**options) for _ in range(3)]
    for first, last, rank in ((0, 1, ranks[0]), (1, 5, ranks[1])):
        rank.observe(logits[first:last], labels[first:last])
    whole.observe(logits, labels)
    packed = []
    for rank in ranks:
        copy.deepcopy(rank).dual_step(lambda x: packed.append(x) or x)
    steps = [rank.dual_step(lambda x: sum(packed)) for rank in ranks]
    expected = whole.dual_step()
    for rank, step in zip(ranks, steps, strict=True):
        close(rank.lam, whole.lam, rtol=1e-14)
        close(step.constraint, expected.constraint)
        assert step.count == expected.count
        assert torch.equal(rank.lam, ranks[0].lam)
    assert packed[0].dtype == torch.float64


def test_state_continues_bit_for_bit_and_says_what_it_is():
    penalty = weighted(per_channel=True, kernel_size=5)
    logits, labels = example(per_channel=True)
    penalty.observe(logits, labels)
    penalty.dual_step()
    penalty.observe(2 * logits, labels)
    other = Confidence(3, per_channel=True, kernel_size=5)
    other.load_state_dict(copy.deepcopy(penalty.state_dict()))
    assert vars(other.dual_step()) == vars(penalty.dual_step())
    for key, value in penalty.state_dict().items():
        assert torch.equal(value, other.state_dict()[key])
    with pytest.raises(ValueError, match="per_channel True, here False"):
        Confidence(3).load_state_dict(penalty.state_dict())
    with pytest.raises(ValueError, match="method 'CRaC', here 'Confidence'"):
        Confidence(3).load_state_dict(build("penalties/crac", 3).terms["crac"].state_dict())


def test_half_precision_leaves_the_state_alone():
    penalty = Confidence(3).half()
    assert {b.dtype for b in penalty.buffers()} == {torch.float64, torch.int64, torch.bool}
    logits, labels = example()
    penalty.lam.fill_(0.2)
    for dtype in (torch.float16, torch.bfloat16):
        x = (10 * logits).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = penalty(x, labels)
            penalty.observe(x.detach(), labels)
        assert value.dtype == torch.float32
        close(value.detach(), penalty(x.detach().double(), labels), rtol=1e-5)
        assert torch.isfinite(torch.autograd.grad(value, x)[0]).all()
    assert np.isfinite(penalty.dual_step().lam).all()


@pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"per_channel": True}], ids=["fused", "readable", "channels"]
)
@pytest.mark.parametrize("largest", [0.0, 31.0, 1e10, 3e38])
def test_finite_for_all_finite_logits(largest, options):
    """Ties, all log-odds beyond the clip, and differences that float32 cannot hold."""
    logits, labels = example(coarse=False, per_channel=options.get("per_channel", False))
    x = (largest * logits.sign()).float().requires_grad_()
    penalty = weighted(**options)
    value = penalty(x, labels)
    slope = torch.autograd.grad(value, x)[0]
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    assert abs(value) <= 30 * 0.34
    penalty.observe(x.detach(), labels)
    assert np.isfinite(penalty.dual_step().lam).all()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_do_not_reach_the_multipliers(bad, fused):
    logits, labels = example()
    penalty = weighted(fused=fused)
    before = copy.deepcopy(penalty.state_dict())
    logits[0, 1, 2, 2] = bad
    with pytest.raises(ValueError, match="not finite in a validation batch"):
        penalty.observe(logits, labels)
    assert all(torch.equal(v, before[k]) for k, v in penalty.state_dict().items())
    assert torch.isnan(penalty(torch.full_like(logits, math.nan), labels))


def test_log_odds_of_any_class():
    logits = 3 * torch.randn(2, 4, 5, dtype=torch.float64)
    p = logits.softmax(1)
    for k in range(4):
        close(log_odds(logits, torch.full((2, 5), k)), (p / (1 - p)).log()[:, k])
    sure = torch.tensor([[[50.0], [0.0]]])
    close(log_odds(sure, torch.zeros(1, 1, dtype=torch.long)), [[50.0]])
    close(confidence_gaps(torch.tensor([1.5, 0.0]), torch.tensor([1, 0]), torch.tensor([2, 0])),
          [0.25, 0.0])  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.floats(0.6, 0.999), st.floats(0, 0.3))
def test_a_sure_voxel_ends_at_its_posterior_less_the_multiplier(q, lam):
    """Cross-entropy with a soft label q plus lam times the log-odds: p = q - lam if that is > 1/2.

    Below, the prediction would turn, and p stays at 1/2, where the two sides meet.
    """
    penalty = Confidence(2, kernel_size=1)
    penalty.lam.fill_(lam)
    label = torch.zeros(1, 1, dtype=torch.long)
    target = torch.tensor([[[q], [1 - q]]], dtype=torch.float64)

    def slope(margin):
        x = torch.tensor([[[margin], [0.0]]], dtype=torch.float64, requires_grad=True)
        loss = -(target * x.log_softmax(1)).sum() + penalty(x, label)
        return float(torch.autograd.grad(loss, x)[0][0, 0, 0])

    low, high = 1e-9, 20.0
    for _ in range(80):  # the loss is convex in the margin
        middle = (low + high) / 2
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    assert 1 / (1 + math.exp(-low)) == pytest.approx(max(q - lam, 0.5), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_without_multipliers_there_is_no_penalty(seed, per_channel):
    logits, labels = example((4, 3), seed=seed, per_channel=per_channel)
    x = logits.requires_grad_()
    value = Confidence(3, per_channel=per_channel)(x, labels)
    assert value == 0
    assert (torch.autograd.grad(value, x)[0] == 0).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(-0.1, 0.0), st.floats(0.05, 0.5))
def test_multipliers_stay_within_their_bounds_and_follow_the_gap(seed, floor, cap):
    penalty = Confidence(3, floor=floor, cap=cap, eta=1.0)
    for turn in range(3):
        logits, labels = example(seed=seed + turn)
        penalty.observe(logits, labels)
        before = penalty.lam.clone()
        gap = torch.tensor(penalty.dual_step().constraint)
        assert ((penalty.lam >= floor) & (penalty.lam <= cap)).all()
        assert ((penalty.lam - before) * gap >= 0).all()


def test_training_closes_the_gap():
    """Logits of one confidence, right in 80 % of the voxels of validation: p ends near .8."""
    draw = torch.Generator().manual_seed(0)
    labels = (torch.rand(1, 4000, generator=draw) < 0.2).long()
    penalty = Confidence(2, kernel_size=1, cap=0.5)
    margin = torch.full((), 6.0, requires_grad=True)  # overfitted: training labels are all class 0
    optimiser = torch.optim.SGD([margin], lr=2.0)
    for _ in range(60):
        for _ in range(40):
            logits = torch.stack([margin.expand(1, 4000), torch.zeros(1, 4000)], 1)
            training = torch.nn.functional.cross_entropy(logits, torch.zeros_like(labels))
            loss = training + penalty(logits, labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        penalty.observe(logits.detach(), labels)
        step = penalty.dual_step()
    accuracy = 1 - float(labels.double().mean())
    assert abs(step.constraint[0][0]) < 0.01
    assert float(torch.sigmoid(margin.detach())) == pytest.approx(accuracy, abs=0.01)
    close(penalty.lam[0, 0], 1 - accuracy, rtol=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eta": 0}, "eta: expected a positive number, got 0"),
        ({"eta": math.nan}, "eta: expected"),
        ({"cap": 0}, "floor, cap: expected floor <= 0 < cap, got 0.0 and 0"),
        ({"cap": math.inf}, "floor, cap"),
        ({"floor": 0.1}, "floor, cap"),
        ({"floor": -math.inf}, "floor, cap"),
        ({"decay": 1.1}, "decay: expected a number from 0 to 1, got 1.1"),
        ({"decay": -0.1}, "decay"),
        ({"min_share": 1}, "min_share: expected at least 0 and below 1, got 1"),
        ({"min_share": -1e-3}, "min_share"),
        ({"start_epoch": -1}, "start_epoch: expected >= 0, got -1"),
        ({"patience": 0}, "patience: expected >= 1, got 0"),
        ({"kernel_size": 2}, "kernel_size: expected an odd"),
        ({"per_channel": True, "include_background": False}, "no channel is the background"),
        ({"num_classes": 1}, "num_classes: expected at least 2, got 1"),
        ({"num_classes": 0, "per_channel": True}, "num_classes: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Confidence(**{"num_classes": 3, **arguments})


def test_wrong_batches_are_named():
    logits, labels = example()
    penalty = Confidence(3)
    with pytest.raises(ValueError, match="expected 3 classes on axis 1"):
        penalty(logits[:, :2], labels)
    with pytest.raises(ValueError, match="labels: expected"):
        penalty.observe(logits, labels + 5)
    with pytest.raises(ValueError, match="kernel_size: expected one number or 2"):
        Confidence(3, kernel_size=(3, 3, 3))(logits, labels)


def test_any_number_of_classes():
    logits, labels = example((4, 5), k=300, n=1)
    labels[0, 0] = 299
    for ignored in (None, 7):
        penalty = Confidence(300, ignore_index=ignored)
        penalty.lam.fill_(0.1)
        value = penalty(logits, labels)
        penalty.observe(logits, labels)
        assert penalty.count.sum() == (labels != 7).sum() if ignored else 20
        assert torch.isfinite(value)
