"""What every multi-label loss owes its users; losses are found by their configs.

An opt-out names its reason; a test for an opt-out that is not needed any more fails.
"""

from __future__ import annotations

import copy

import pytest
import torch

from segcal.components import build_component
from segcal.recipes import load_component, names
from tests.conftest import close

ACROSS_SAMPLES = "contrasts the samples of a batch"
OPT_OUT = {
    ("batch", name): ACROSS_SAMPLES
    for name in ("softmax_two_way", "two_way", "two_way_class", "two_way_lpr", "joint")
}
WITHOUT_POSTERIOR = {
    "softmax",
    "softmax_two_way",
    "two_way",
    "two_way_sample",
    "two_way_class",
    "two_way_lpr",
    "joint",
    "multi_similarity",
}
PAIRWISE = {"two_way", "two_way_sample", "two_way_class", "softmax", "softmax_two_way", "joint"}
"""Losses of which nothing is left where all labels of the batch are negative."""
COUNTS = {"positives": [3, 10, 0, 40, 25], "negatives": [37, 30, 40, 0, 15]}

pytestmark = pytest.mark.parametrize("name", names("multilabel"))


def loss(name, counts=COUNTS):
    return build_component(load_component("multilabel", name), num_classes=5, **counts)


def data(n=4, t=5, seed=0, dtype=torch.float64, scale=2.0, unknown=False):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn((n, t), generator=generator, dtype=dtype)
    targets = torch.randint(0, 2, (n, t), generator=generator)
    targets[:, 0], targets[:, 1] = 1, 0
    if unknown:
        targets[torch.rand((n, t), generator=generator) < 0.3] = -1
    return logits, targets


@pytest.mark.parametrize("unknown", [False, True])
@pytest.mark.parametrize("n", [1, 4])
def test_gradcheck(name, n, unknown):
    logits, targets = data(n, unknown=unknown)
    term = loss(name)
    assert torch.autograd.gradcheck(lambda x: term(x, targets), logits.requires_grad_())


def test_batch_is_the_mean_of_its_samples(name):
    logits, targets = data()
    term = loss(name)
    singles = torch.stack([term(logits[i : i + 1], targets[i : i + 1]) for i in range(4)])
    holds = torch.allclose(term(logits, targets), singles.mean(), rtol=1e-10)
    assert holds != (("batch", name) in OPT_OUT), OPT_OUT.get(("batch", name), "broken")


def test_permutations_of_samples_and_labels(name):
    logits, targets = data(unknown=True)
    value = loss(name)(logits, targets)
    close(loss(name)(logits.flip(0), targets.flip(0)), value)
    order = [2, 0, 4, 1, 3]
    counts = {key: [n[t] for t in order] for key, n in COUNTS.items()}
    close(loss(name, counts)(logits[:, order], targets[:, order]), value)


def test_unknown_labels_are_irrelevant(name):
    logits, targets = data(n=6, unknown=True)
    unknown = targets == -1
    assert unknown.any()
    value = loss(name)(logits, targets)
    changed = torch.where(unknown, 50.0 * logits.sign() * -1, logits).requires_grad_()
    other = loss(name)(changed, targets)
    close(other.detach(), value)
    (slope,) = torch.autograd.grad(other, changed)
    assert (slope[unknown] == 0).all()
    assert (slope[~unknown] != 0).any()


def test_a_label_unknown_everywhere_is_as_none(name):
    logits, targets = data()
    targets[:, 2] = -1
    kept = [0, 1, 3, 4]
    counts = {key: [n[t] for t in kept] for key, n in COUNTS.items()}
    close(loss(name)(logits, targets), loss(name, counts)(logits[:, kept], targets[:, kept]))
    targets[1] = -1
    rest = [0, 2, 3]
    close(loss(name)(logits, targets), loss(name)(logits[rest], targets[rest]))


@pytest.mark.parametrize("value", [0, 1, -1])
def test_one_kind_of_label_alone(name, value):
    """No positives, no negatives, nothing known: finite, and zero where nothing is compared."""
    logits, targets = data()
    logits.requires_grad_()
    for y in (torch.full_like(targets, value), torch.where(targets == value, value, -1)):
        result = loss(name)(logits, y)
        (slope,) = torch.autograd.grad(result, logits)
        assert torch.isfinite(result)
        assert torch.isfinite(slope).all()
        if value == -1 or (value == 0 and name.removesuffix("_lpr") in PAIRWISE):
            assert result == 0
            assert (slope == 0).all()


def test_rows_and_columns_without_positives_or_negatives(name):
    logits, targets = data(n=6)
    targets[0], targets[1], targets[2] = 0, 1, -1
    targets[:, 3], targets[:, 4] = 1, 0
    assert_finite(loss(name), logits, targets)
    for y in (torch.zeros(4, 5), torch.ones(4, 5)):  # zero logits of an untrained head
        assert_finite(loss(name), torch.zeros(4, 5), y)


@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (3, 1), (1, 1)])
def test_degenerate_batches(name, shape):
    logits, targets = data(max(shape[0], 1), 5, dtype=torch.float32)
    logits, targets = logits[: shape[0], : shape[1]], targets[: shape[0], : shape[1]]
    counts = {key: n[: shape[1]] for key, n in COUNTS.items()}
    value = assert_finite(loss(name, counts), logits, targets)
    if not shape[0]:
        assert value == 0


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1e3), (torch.bfloat16, 1e3), (torch.float16, 6e4), (torch.float32, 1e4),
     (torch.float32, 0.0)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("right", [True, False])
def test_extreme_logits(name, dtype, size, right):
    _, targets = data(dtype=torch.float32)
    x = size * (2 * targets - 1) * (1 if right else -1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = assert_finite(loss(name), x.to(dtype), targets)
    assert value.dtype == torch.float32


def assert_finite(term, logits, targets):
    logits = logits.clone().requires_grad_()
    value = term(logits, targets)
    (slope,) = torch.autograd.grad(value, logits)
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    return value.detach()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float16, torch.float32])
def test_inputs_stay_as_they_are(name, dtype):
    logits, targets = data(unknown=True)
    y = targets.to(dtype)
    before = logits.clone(), y.clone()
    close(loss(name)(logits, y), loss(name)(logits, targets))
    assert torch.equal(logits, before[0])
    assert torch.equal(y, before[1])
    known = targets.clamp(min=0)
    close(loss(name)(logits, known.bool()), loss(name)(logits, known))


def test_half_precision_agrees(name):
    logits, targets = data(dtype=torch.float32, unknown=True)
    for dtype in (torch.float16, torch.bfloat16):
        x = logits.to(dtype).requires_grad_()
        value = loss(name)(x, targets)
        close(value.detach(), loss(name)(x.detach().float(), targets))
        assert torch.autograd.grad(value, x)[0].dtype == dtype


def test_state_dict_round_trip(name):
    logits, targets = data()
    term = loss(name)
    other = loss(name, {"positives": [1] * 5, "negatives": [2] * 5})
    other.load_state_dict(copy.deepcopy(term.state_dict()))
    assert torch.equal(other(logits, targets), term(logits, targets))


def test_wrong_input_is_named(name):
    logits, targets = data()
    for x, y, message in (
        (logits.long(), targets, r": expected floating \(B, T\)"),
        (logits[0], targets[0], r": expected floating \(B, T\)"),
        (logits, targets[:, :3], "targets: expected 0, 1 or -1 like"),
        (logits, targets + 1, r"targets: expected 0, 1 or -1 .*got \[2\] in"),
        (logits, targets.to(torch.uint8) * 255, r"targets: .*got \[255\] in"),
        (logits, targets * 0.9, "targets: expected 0, 1 or -1 "),
    ):
        with pytest.raises(ValueError, match=message):
            loss(name)(x, y)


def test_the_posterior_or_why_there_is_none(name):
    logits, _ = data(n=50)
    term = loss(name)
    if name in WITHOUT_POSTERIOR:
        for method in (term.probabilities, term.log_odds):
            with pytest.raises(ValueError, match=r"no posterior.*temperature scaling"):
                method(logits)
        assert not term.bijective
        return
    p = term.probabilities(logits)
    assert p.shape == logits.shape
    assert ((p >= 0) & (p <= 1)).all()
    close(p, torch.sigmoid(term.log_odds(logits)))
    assert term.probabilities(logits.half()).dtype == torch.float32
    rising = torch.linspace(-40, 40, 2001, dtype=torch.float64)[:, None].expand(-1, 5)
    steps = term.log_odds(rising).diff(dim=0)
    if term.bijective:
        assert (steps > 0).all()
    else:  # everything up to the margin is at -inf, and phi(1) is below 1
        assert torch.isneginf(term.log_odds(rising)[:100]).all()
        assert (steps[steps.isfinite()] >= 0).all()
        assert (steps[950:1250] > 0).all()
