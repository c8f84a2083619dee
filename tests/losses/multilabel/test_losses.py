"""Multi-label losses against published programs, loops from the formulas, and worked examples."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from segcal.losses.multilabel.asymmetric import Asymmetric, asymmetric
from segcal.losses.multilabel.bce import BCE, bce, frequency_weights
from segcal.losses.multilabel.classes import OfClasses
from segcal.losses.multilabel.joint import joint
from segcal.losses.multilabel.lpr import LPR
from segcal.losses.multilabel.multi_similarity import multi_similarity
from segcal.losses.multilabel.softmax import Softmax, softmax
from segcal.losses.multilabel.spa import SPA, spa
from segcal.losses.multilabel.two_way import TwoWay, two_way
from tests.conftest import close
from tests.oracles import multilabel as oracle

TEMPERATURES = [(4, 1), (1, 1), (2, 0.5)]


def grad(loss, logits):
    x = logits.clone().requires_grad_()
    return torch.autograd.grad(loss(x), x)[0]


def example(seed, n=6, t=5, scale=2.0):
    rng = np.random.default_rng(seed)
    v = scale * rng.standard_normal((n, t))
    y = rng.choice([-1, 0, 1], (n, t), p=[0.2, 0.5, 0.3])
    y[rng.random(n) < 0.15] = rng.choice([-1, 0, 1])
    y[:, rng.random(t) < 0.15] = rng.choice([-1, 0, 1])
    return torch.as_tensor(v), torch.as_tensor(y)


@pytest.mark.parametrize(("t_pos", "t_neg"), TEMPERATURES)
def test_golden_two_way(golden, t_pos, t_neg):
    g = golden("twoway")
    x, y, key = g["logits"], g["targets"], f"_Tp{t_pos}_Tn{t_neg}"
    t = {"temperature_pos": float(t_pos), "temperature_neg": float(t_neg)}
    close(two_way(x, y, **t), g["masked_total" + key])
    close(two_way(x, y, **t), g["ref" + key])
    close(grad(lambda z: two_way(z, y, **t), x), g["ref_grad" + key])
    close(two_way(x, y, average="paper", **t), g["paper_total" + key])
    for i in range(8):  # a single sample is its own mean
        close(two_way(x[[i]], y[[i]], along="sample", **t), g["sample" + key][i])
    for c in range(6):
        close(two_way(x[:, [c]], y[:, [c]], along="class", **t), g["class" + key][c])
    both = [two_way(x, y, along=along, **t) for along in ("sample", "class")]
    close(sum(both), two_way(x, y, **t))
    close(joint(x, y, **t), g["joint" + key])
    for i in range(8):
        close(multi_similarity(x[[i]], y[[i]], **t), g["multisim_sample" + key][i])


def test_golden_two_way_options(golden):
    g = golden("twoway")
    x, y = g["logits"], g["targets"]
    for i in range(8):
        close(two_way(x[[i]], y[[i]], bias=2.0, along="sample"), g["sample_bias2_Tp4_Tn1"][i])
        close(softmax(x[[i]], y[[i]]), g["softmax_ml_sample"][i])
    for c in range(6):
        close(softmax(x[:, [c]], y[:, [c]], along="class"), g["softmax_ml_class"][c])
    close(two_way(x + 7, y), g["ref_shift7_Tp4_Tn1"])
    close(two_way(x + 7, y), two_way(x, y))
    close(bce(x, y, reduction="none"), g["bce_elementwise"])
    counts = g["targets"].sum(1)
    close(softmax(x, y), g["softmax_ml_sample"][counts > 0].mean())


@pytest.mark.parametrize("options", [(0, 4, 0.05), (1, 4, 0.05), (0, 2, 0), (2, 2, 0)])
def test_golden_asymmetric(golden, options):
    g = golden("asl")
    x, y = g["logits"], g["targets"]
    gamma_pos, gamma_neg, margin = options
    key = f"gp{gamma_pos}_gn{gamma_neg}_m{margin}"
    given_ = {"gamma_neg": gamma_neg, "gamma_pos": gamma_pos, "margin": margin, "reduction": "sum"}
    close(asymmetric(x, y, **given_), g[f"sum_{key}"])
    close(grad(lambda z: asymmetric(z, y, **given_), x), g[f"grad_{key}"])
    detached = grad(lambda z: asymmetric(z, y, detach_weight=True, **given_), x)
    close(detached, g[f"grad_detached_{key}"])


def test_golden_spa(golden):
    g = golden("spa_lpr_phi")
    for triple, l_pos, l_neg in zip(g["params"].tolist(), g["l_pos"], g["l_neg"], strict=True):
        v = g["v"][:, None]
        sides = {"positive": triple[:3], "negative": triple[3:], "reduction": "none"}
        close(spa(v, torch.ones_like(v), **sides)[:, 0], l_pos)
        close(spa(v, torch.zeros_like(v), **sides)[:, 0], l_neg)
    per_sample = [spa(x[None], y[None]) for x, y in zip(g["logits"], g["targets"], strict=True)]
    close(torch.stack(per_sample), g["spa_sample"])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(TEMPERATURES))
def test_loops_agree(seed, temperatures):
    x, y = example(seed)
    v, labels = x.tolist(), y.tolist()
    vt, labels_t = x.T.tolist(), y.T.tolist()
    t_pos, t_neg = temperatures
    t = {"temperature_pos": t_pos, "temperature_neg": t_neg}
    for average in ("valid", "paper"):
        expected = [
            oracle.two_way_rows(a, b, t_pos, t_neg, average, 0.5)
            for a, b in ((v, labels), (vt, labels_t))
        ]
        close(two_way(x, y, average=average, bias=0.5, **t), sum(expected), rtol=1e-9)
        close(two_way(x, y, average=average, bias=0.5, along="sample", **t), expected[0], rtol=1e-9)
        close(two_way(x, y, average=average, bias=0.5, along="class", **t), expected[1], rtol=1e-9)
    close(joint(x, y, bias=0.5, **t), oracle.joint(v, labels, t_pos, t_neg, 0.5), rtol=1e-9)
    close(multi_similarity(x, y, **t), oracle.multi_similarity(v, labels, t_pos, t_neg), rtol=1e-9)
    close(softmax(x, y), oracle.softmax_rows(v, labels))
    close(softmax(x, y, along="both"), oracle.softmax_rows(v, labels)
          + oracle.softmax_rows(vt, labels_t))  # fmt: skip
    for gammas in ((4.0, 0.0, 0.05), (2.0, 2.0, 0.0), (0.5, 0.5, 0.2), (0.0, 0.0, 0.0)):
        value = asymmetric(x, y, gamma_neg=gammas[0], gamma_pos=gammas[1], margin=gammas[2])
        close(value, oracle.asymmetric(v, labels, *gammas), rtol=1e-9)
    sides = ((2.0, 1.5, 0.3), (5.0, 3.0, 1.0))
    close(spa(x, y, positive=sides[0], negative=sides[1]), oracle.spa(v, labels, *sides), rtol=1e-9)
    w_pos, w_neg = torch.rand(2, 5, generator=torch.Generator().manual_seed(seed % 99))
    weighted = bce(x, y, positive_weight=w_pos.double(), negative_weight=w_neg.double())
    close(weighted, oracle.bce(v, labels, w_pos.tolist(), w_neg.tolist()), rtol=1e-9)


def test_special_cases_are_binary_cross_entropy():
    x, y = example(3)
    known = y >= 0
    expected = F.binary_cross_entropy_with_logits(x[known], y[known].double())
    close(bce(x, y), expected)
    close(asymmetric(x, y, gamma_neg=0, gamma_pos=0, margin=0), expected)
    close(spa(x, y, positive=(1, 1, 0), negative=(1, 1, 0)), expected)


@pytest.mark.parametrize("loss", [bce, asymmetric, spa])
def test_reductions(loss):
    x, y = example(4)
    y[0] = -1
    each = loss(x, y, reduction="none")
    assert each.shape == y.shape
    assert (each[y == -1] == 0).all()
    close(loss(x, y, reduction="sum"), each.sum())
    close(loss(x, y), each.sum() / (y >= 0).sum())
    close(loss(x, y, class_reduction="sum"), each.sum() / (y >= 0).any(1).sum())
    with pytest.raises(ValueError, match="class_reduction: expected one of"):
        loss(x, y, class_reduction="max")
    with pytest.raises(ValueError, match="reduction: expected one of"):
        loss(x, y, reduction="max")


def test_frequency_weights():
    positives, negatives = torch.tensor([10, 1, 0, 100, 999]), torch.tensor([30, 999, 100, 0, 1])
    w_pos, w_neg = frequency_weights(positives, negatives)
    close(w_pos, [2.0, 50.0, 0.0, 0.5, 500 / 999])  # 40 / 20; 1000 / 2 is clipped
    close(w_neg, [2 / 3, 500 / 999, 0.5, 0.0, 50.0])
    w_pos, w_neg = frequency_weights(positives, negatives, scheme="pos_weight")
    close(w_pos, [3.0, 50.0, 0.0, 0.02, 0.02])
    close(w_neg, [1.0, 1.0, 1.0, 0.0, 1.0])


def test_balanced_weights_weigh_both_sides_alike():
    y = torch.tensor([[1, 0], [0, 0], [0, 1], [0, -1], [0, 1], [0, 1]])
    module = BCE("balanced", positives=(y == 1).sum(0), negatives=(y == 0).sum(0))
    x = torch.zeros(6, 2, dtype=torch.float64)
    slope = grad(lambda z: module(z, y), x)
    close(slope.sum(0), [0.0, 0.0])
    assert set(module.state_dict()) == {"positive_weight", "negative_weight"}


def test_the_weights_of_bce_are_undone_in_its_posterior():
    """The minimiser of the weighted risk at a posterior maps back to that posterior."""
    module = BCE("balanced", positives=[5, 50, 0], negatives=[95, 50, 100])
    eta = torch.tensor([0.02, 0.3, 0.7], dtype=torch.float64)
    w_pos, w_neg = module.positive_weight, module.negative_weight
    v = torch.log(w_pos[:2] * eta[:2] / (w_neg[:2] * (1 - eta[:2])))
    v = torch.cat([v, torch.logit(eta[2:])])  # never positive in training: left as it is
    close(module.probabilities(v[None])[0], eta)


def test_buckets_are_processes_with_a_batch_each():
    x, y = example(5, n=10)
    expected = torch.stack([two_way(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]).mean()
    close(two_way(x, y, bucket_size=4), expected)
    close(two_way(x, y, bucket_size=10), two_way(x, y))
    assert (two_way(x, y, bucket_size=4) - two_way(x, y)).abs() > 1e-3
    close(TwoWay(bucket_size=4)(x, y), expected)


def test_two_way_worked_example():
    """Temperatures 1: softplus(log(e^1 + e^3) - 2) = log(1 + e^-1 + e)."""
    x = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    y = torch.tensor([[1, 0, 0]])
    expected = math.log(1 + math.exp(-1) + math.exp(1))
    one = {"temperature_pos": 1.0, "temperature_neg": 1.0}
    close(two_way(x, y, along="sample", **one), expected)
    close(joint(x, y, **one), expected)
    # T_P -> 0 takes the smallest positive, so the second one has no part
    x2 = torch.tensor([[2.0, 9.0, 1.0]], dtype=torch.float64)
    value = two_way(x2, torch.tensor([[1, 1, 0]]), temperature_pos=1e-3, along="sample")
    close(value, math.log(1 + math.exp(-1)), rtol=1e-9)


@pytest.mark.parametrize(("t_pos", "t_neg"), [(0, 0), (0, 1), (4, 0)])
def test_temperature_0_is_the_maximum(t_pos, t_neg):
    x = torch.tensor([[2.0, 9.0, 1.0, -3.0], [0.5, -1.0, 4.0, 0.0]], dtype=torch.float64)
    y = torch.tensor([[1, 1, 0, 0], [0, 1, 0, -1]])
    t = {"temperature_pos": t_pos, "temperature_neg": t_neg}

    def side(values, temperature):
        if temperature == 0:
            return max(values)
        return temperature * math.log(sum(math.exp(v / temperature) for v in values))

    # (positives with their sign turned, negatives); label 3 has no positive anywhere
    samples = [((-2.0, -9.0), (1.0, -3.0)), ((1.0,), (0.5, 4.0))]
    classes = [((-2.0,), (0.5,)), ((-9.0, 1.0), ()), ((), (1.0, 4.0)), ((), (-3.0,))]

    def mean(rows):
        values = [
            math.log1p(math.exp(side(p, t_pos) + side(n, t_neg))) if p and n else 0.0
            for p, n in rows
        ]
        return sum(values) / sum(bool(p) for p, _ in rows)

    close(two_way(x, y, along="sample", **t), mean(samples))
    close(two_way(x, y, along="class", **t), mean(classes))
    close(two_way(x, y, **t), mean(samples) + mean(classes))
    everything = ((-2.0, -9.0, 1.0), (1.0, -3.0, 0.5, 4.0))
    close(joint(x, y, **t), math.log1p(math.exp(side(everything[0], t_pos)
                                                + side(everything[1], t_neg))))  # fmt: skip
    both = [
        math.log1p(math.exp(side(p, t_pos))) + math.log1p(math.exp(side(n, t_neg)))
        for p, n in samples
    ]
    close(multi_similarity(x, y, **t), sum(both) / 2)
    for loss in (two_way, joint, multi_similarity):
        x.requires_grad_()
        assert torch.autograd.gradcheck(lambda z: loss(z, y, **t), x)  # noqa: B023
        near = {name: value or 1e-4 for name, value in t.items()}  # no jump at 0
        close(loss(x, y, **near).detach(), loss(x, y, **t).detach(), rtol=1e-6)


def test_temperature_0_shares_ties_and_stays_finite():
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[1, 0, 0, 0]])
    hard = {"temperature_pos": 0.0, "temperature_neg": 0.0}
    value = two_way(x, y, along="sample", **hard)
    (slope,) = torch.autograd.grad(value, x)
    s = 1 / (1 + math.exp(-2.0))  # of 3 - 1
    close(slope, [[-s, s / 2, s / 2, 0.0]])
    for targets in (torch.zeros(1, 4), torch.ones(1, 4), torch.full((1, 4), -1)):
        value = two_way(x, targets, **hard)
        assert value == 0
        assert (torch.autograd.grad(value, x)[0] == 0).all()
    assert two_way(torch.zeros(0, 4), torch.zeros(0, 4), **hard) == 0
    assert two_way(torch.zeros(4, 0), torch.zeros(4, 0), **hard) == 0


def test_of_classes_the_loss_of_samples_is_cross_entropy():
    """One label a sample and temperatures 1: log(1 + sum_n exp(x_n - x_p)), section 4.4."""
    x, _ = example(5, n=7)
    classes = torch.tensor([0, 4, 2, 2, 1, 3, 0])
    one_hot = F.one_hot(classes, 5)
    one = {"temperature_pos": 1.0, "temperature_neg": 1.0}
    close(two_way(x, one_hot, along="sample", **one), F.cross_entropy(x, classes))
    loss = OfClasses(TwoWay(along="sample", **one))
    close(loss(x, classes), F.cross_entropy(x, classes))
    close(OfClasses(TwoWay())(x, classes), two_way(x, one_hot))
    with pytest.raises(ValueError, match=r"labels: expected \(N, \*S\)"):
        loss(x, one_hot)
    with pytest.raises(ValueError, match="labels: "):
        loss(x, classes + 1)


def test_no_positive_in_the_batch_is_zero():
    x = torch.zeros(4, 5, requires_grad=True)
    for loss in (two_way, joint, softmax):
        value = loss(x, torch.zeros(4, 5))
        (slope,) = torch.autograd.grad(value, x)
        assert value == 0
        assert (slope == 0).all()


def test_a_negative_within_the_margin_is_left_alone():
    x = torch.tensor([[-6.0, -2.9, math.log(0.05 / 0.95), 0.0]], requires_grad=True)
    value = asymmetric(x, torch.zeros(1, 4), gamma_neg=0.5, reduction="none")
    (slope,) = torch.autograd.grad(value.sum(), x)
    assert (value[0, [0]] == 0).all()
    assert (slope[0, [0]] == 0).all()
    assert (value[0, [1, 3]] > 0).all()
    assert torch.isfinite(slope).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_logits(dtype):
    """Where sigmoid is 0 or 1 in float32, the logarithms still are right."""
    x = torch.tensor([[200.0, -200.0]], dtype=dtype)
    wrong, right = torch.tensor([[0, 1]]), torch.tensor([[1, 0]])
    for gamma in (0.0, 0.5, 2.0):
        focal = {"gamma_neg": gamma, "gamma_pos": gamma, "margin": 0.0}
        close(asymmetric(x, wrong, **focal), 200.0)
        close(asymmetric(x, right, **focal), 0.0)
        close(grad(lambda z: asymmetric(z, wrong, **focal), x), [[0.5, -0.5]])  # noqa: B023
    # with a margin a negative costs -(1 - m)^4 log m at most
    close(asymmetric(x, torch.tensor([[0, -1]])), -(0.95**4) * math.log(0.05), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TwoWay(-1.0), "temperature_pos, temperature_neg: expected numbers of at least 0"),
        (lambda: TwoWay(1.0, math.inf), "temperature_neg"),
        (lambda: TwoWay(along="rows"), "along: expected one of"),
        (lambda: TwoWay(average="all"), "average: expected one of"),
        (lambda: TwoWay(bucket_size=0), "bucket_size: expected at least 1, got 0"),
        (lambda: Softmax("rows"), "along: expected one of"),
        (lambda: Asymmetric(-1.0), "gamma_neg, gamma_pos: expected numbers >= 0"),
        (lambda: Asymmetric(margin=1.0), "margin: expected 0 <= margin < 1, got 1"),
        (lambda: SPA(negative=(0, 3, 1)), r"negative: expected \(zeta, k, b\)"),
        (lambda: SPA(positive=(1, 1)), r"positive: expected \(zeta, k, b\)"),
        (lambda: BCE("balanced"), "scheme 'balanced' needs the counts"),
        (lambda: BCE("rare", positives=[1], negatives=[1]), "scheme: expected one of"),
        (lambda: BCE("balanced", positives=[1, 2], negatives=[1]), "expected counts >= 0"),
        (lambda: BCE("balanced", positives=[-1], negatives=[1]), "expected counts >= 0"),
        (lambda: LPR(BCE(), -1.0), "weight: expected a number >= 0, got -1"),
        (lambda: LPR(BCE(), link="phi"), "link: expected one of"),
        (lambda: LPR(TwoWay()), 'link: TwoWay has no finite log-odds.*link="identity"'),
        (lambda: LPR(Asymmetric()), 'link: Asymmetric has no finite log-odds.*link="identity"'),
    ],
)
def test_wrong_options_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
