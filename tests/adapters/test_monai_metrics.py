"""Metrics in MONAI's form: MONAI's own values by its convention, segcal's functions by default."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from monai import metrics as theirs
from monai.data import MetaTensor, decollate_batch, list_data_collate
from monai.networks.utils import one_hot

from segcal.adapters.monai.metrics import (
    ASSDMetric,
    ClasswiseECEMetric,
    DSCMetric,
    ECEMetric,
    HausdorffMetric,
    NSDMetric,
    TACEMetric,
)
from segcal.metrics.calibration_error import calibration_error
from segcal.metrics.classwise_ece import classwise_ece
from segcal.metrics.dice import dice
from segcal.metrics.ece import ece
from segcal.metrics.hausdorff import assd, hausdorff, nsd
from segcal.metrics.tace import tace
from tests.ranks import in_two_processes

K = 4
REDUCTIONS = ("none", "mean", "sum", "mean_batch", "sum_batch", "mean_channel", "sum_channel")
SPACINGS = {2: (0.7, 2.5), 3: (5.0, 0.8, 1.5)}


def label_maps(axes=3, seed=0):
    """Predictions and references ``(5, 1, *S)``; label 3 is missed, wrongly found, in neither."""
    generator = torch.Generator().manual_seed(seed)
    shape = (5, 1, *(7, 9, 8)[:axes])
    p, y = (torch.randint(0, K, shape, generator=generator) for _ in range(2))
    p[0][p[0] == 3], y[1][y[1] == 3] = 0, 0
    p[2][p[2] == 3], y[2][y[2] == 3] = 0, 0
    p[4], y[4] = 0, 0  # nothing at all
    return p, y


def probabilities(axes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (3, K, *(6, 7, 5)[:axes])
    p = torch.softmax(2 * torch.randn(shape, generator=generator), 1)
    return p, torch.randint(0, K, (3, 1, *shape[2:]), generator=generator)


def one_hots(p, y):
    return one_hot(p, K), one_hot(y, K)


def quietly(metric, *args, **kwargs):
    """MONAI warns of each empty structure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return metric(*args, **kwargs)


def close(actual, expected, rtol=1e-10, atol=1e-12):
    """Equal NaN and inf included."""
    torch.testing.assert_close(
        *(torch.as_tensor(x, dtype=torch.float64) for x in (actual, expected)),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
    )


def same(ours, monais):
    close(ours, monais, rtol=1e-5, atol=1e-6)  # float32 inside MONAI


since_monai_1_6 = pytest.mark.skipif(
    not hasattr(theirs, "CalibrationErrorMetric"),
    reason="MONAI 1.5 has neither ignored voxels nor this metric",
)
PAIRS = {
    "dice": (
        lambda **o: DSCMetric(convention="monai", **o),
        lambda **o: theirs.DiceMetric(**o),
    ),
    "hausdorff": (
        lambda **o: HausdorffMetric(convention="monai", **o),
        lambda **o: theirs.HausdorffDistanceMetric(**o),
    ),
    "hd95": (
        lambda **o: HausdorffMetric(convention="monai", percentile=95, **o),
        lambda **o: theirs.HausdorffDistanceMetric(percentile=95, **o),
    ),
    "hd0": (
        lambda **o: HausdorffMetric(convention="monai", percentile=0, **o),
        lambda **o: theirs.HausdorffDistanceMetric(percentile=0, **o),
    ),
    "assd": (
        lambda **o: ASSDMetric(convention="monai", **o),
        lambda **o: theirs.SurfaceDistanceMetric(symmetric=True, **o),
    ),
    "nsd": (
        lambda **o: NSDMetric(convention="monai", tolerance_mm=1.5, **o),
        lambda **o: theirs.SurfaceDiceMetric(
            class_thresholds=[1.5] * (K if o["include_background"] else K - 1), **o
        ),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("include_background", [False, True])
def test_monais_values_of_masks(name, axes, include_background):
    ours, monais = (make(include_background=include_background) for make in PAIRS[name])
    p, y = one_hots(*label_maps(axes))
    spacing = {} if name == "dice" else {"spacing": SPACINGS[axes]}
    rows = ours(p, y, **spacing)
    expected = quietly(monais, p, y, **spacing)
    assert torch.isnan(expected).any()
    same(rows, expected)
    for reduction in REDUCTIONS:
        same(ours.aggregate(reduction), monais.aggregate(reduction))


@since_monai_1_6
def test_monais_values_without_spacing_and_of_ignored_voxels():
    p, y = label_maps()
    for ignore_index, reference in ((None, one_hot(y, K)), (2, one_hot(y, K))):
        options = {"include_background": True, "ignore_index": ignore_index}
        for name in ("dice", "hd95", "assd", "nsd"):
            ours, monais = (make(**options) for make in PAIRS[name])
            same(ours(one_hot(p, K), reference), quietly(monais, one_hot(p, K), reference))


@since_monai_1_6
@pytest.mark.parametrize("reduction", ["expected", "average", "maximum"])
@pytest.mark.parametrize("include_background", [False, True])
def test_monais_values_of_calibration(reduction, include_background):
    options = {"include_background": include_background, "calibration_reduction": reduction}
    ours = ClasswiseECEMetric(convention="monai", **options)
    monais = theirs.CalibrationErrorMetric(**options)
    assert ours.bins == monais.num_bins
    p, y = probabilities()
    p[0] = (p[0] * 20).round() / 20  # on the edges
    channels = one_hot(y, K)
    channels[1, :, 0] = 0  # no label: negatives of every class
    same(ours(p, channels), monais(p, channels))
    for over in REDUCTIONS:
        same(ours.aggregate(over), monais.aggregate(over))


@pytest.mark.parametrize("axes", [2, 3])
def test_rows_are_those_of_the_functions(axes):
    p, y = label_maps(axes)
    mm = SPACINGS[axes]

    def rows(function):
        return [
            [function(a[0].numpy() == k, b[0].numpy() == k) for k in range(1, K)]
            for a, b in zip(p, y, strict=True)
        ]

    given = {"spacing_mm": mm}
    pairs = [
        (HausdorffMetric(num_classes=K), lambda a, b: hausdorff(a, b, **given)),
        (
            HausdorffMetric(num_classes=K, percentile=95),
            lambda a, b: hausdorff(a, b, percentile=95, **given),
        ),
        (
            HausdorffMetric(num_classes=K, percentile=95, definition="max_directed"),
            lambda a, b: hausdorff(a, b, percentile=95, definition="max_directed", **given),
        ),
        (ASSDMetric(num_classes=K), lambda a, b: assd(a, b, **given)),
        (
            ASSDMetric(num_classes=K, definition="mean_of_means"),
            lambda a, b: assd(a, b, definition="mean_of_means", **given),
        ),
        (
            NSDMetric(num_classes=K, tolerance_mm=1.5),
            lambda a, b: nsd(a, b, tolerance_mm=1.5, **given),
        ),
    ]
    for metric, function in pairs:
        expected = np.array(rows(function))
        assert np.isnan(expected).any()
        close(metric(p, y, spacing=mm), expected, rtol=0, atol=0)
    assert np.isinf(rows(pairs[0][1])).any()
    close(DSCMetric(num_classes=K)(p, y), rows(lambda a, b: dice(a, b, 1)), rtol=0, atol=0)


def test_calibration_rows_are_those_of_the_functions():
    p, y = probabilities()
    y[0, 0, :2] = 255
    cases = [(a[None].double(), b) for a, b in zip(p, y, strict=True)]
    options = {"ignore_index": 255}
    pairs = [
        (ECEMetric(**options), lambda a, b: [ece(a, b, **options)]),
        (ECEMetric(bins=7, **options), lambda a, b: [ece(a, b, bins=7, **options)]),
        (
            ECEMetric(foreground_only=True, **options),
            lambda a, b: [ece(a, b, mask=b != 0, **options)],
        ),
        (TACEMetric(bins=9, **options), lambda a, b: [tace(a, b, bins=9, **options)]),
        (
            ClasswiseECEMetric(calibration_reduction="maximum", **options),
            lambda a, b: calibration_error(a, b, bins=15, reduction="maximum", **options),
        ),
    ]
    for metric, function in pairs:
        close(metric(p.double(), y), np.array([function(a, b) for a, b in cases]))
    metric = ClasswiseECEMetric(**options)
    metric(p.double(), y)
    expected = np.mean([classwise_ece(a, b, **options) for a, b in cases])
    close(metric.aggregate(), expected)


@pytest.mark.parametrize("reduction", ["expected", "average", "maximum"])
def test_pooled_over_cases(reduction):
    """Cases of different sizes, in batches and lists: the error of all their voxels together."""
    p, y = probabilities()
    options = {"calibration_reduction": reduction, "pooled": True}
    top, classes = ECEMetric(**options), ClasswiseECEMetric(**options)
    for metric in (top, classes):
        metric(p[:2].double(), y[:2])
        metric([p[2, :, :3].double()], [y[2, :, :3]])
    flat_p = torch.cat([p[0].flatten(1), p[1].flatten(1), p[2, :, :3].flatten(1)], 1)[None].double()
    flat_y = torch.cat([y[0].flatten(), y[1].flatten(), y[2, :, :3].flatten()])[None]
    expected = calibration_error(flat_p, flat_y, bins=15, reduction=reduction)
    close(classes.aggregate("none")[0], expected)
    close(classes.aggregate(), expected.mean())
    if reduction == "expected":
        close(top.aggregate(), ece(flat_p, flat_y))
    assert top.get_buffer().shape == (3, 1, 15, 3)
    assert top.get_buffer().dtype == torch.float64
    assert top.get_buffer()[..., 0].sum() == flat_y.numel()


def test_pooled_sums_go_beyond_float32():
    """2^26 voxels of confidence .5, half of them right, and 4 cases of one that is wrong."""
    rows = torch.tensor([[2.0**26, 2.0**25, 2.0**25], *[[1.0, 0.5, 0.0]] * 4]).double()
    metric = ECEMetric(pooled=True, bins=1)
    metric.extend(rows[:, None, None])
    close(metric.aggregate(), 4 * 0.5 / (2**26 + 4), atol=0)


def rank_main(rank, data, folder):
    dist.init_process_group("gloo")
    try:
        p, y = map(torch.from_numpy, data)
        share = slice(0, 2) if rank == 0 else slice(2, 3)
        found = []
        for metric in (ECEMetric(pooled=True), ClasswiseECEMetric()):
            metric(p[share], y[share])
            found.append(metric.aggregate())
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_two_ranks_are_one_process(tmp_path):
    p, y = probabilities()
    p = p.double()  # handed over: a softmax rounds otherwise on another number of threads
    in_two_processes(rank_main, (p.numpy(), y.numpy()), str(tmp_path))
    for i, metric in enumerate((ECEMetric(pooled=True), ClasswiseECEMetric())):
        metric(p, y)
        for rank in (0, 1):
            assert torch.load(tmp_path / f"{rank}.pt")[i] == metric.aggregate()


def test_layouts_agree():
    """Label indices, one-hot, lists of decollated tensors, MetaTensors, floats, other channels."""
    p, y = label_maps()
    mm = SPACINGS[3]
    expected = HausdorffMetric(num_classes=K)(p, y, spacing=mm)
    hot_p, hot_y = one_hots(p, y)
    for a, b in (
        (hot_p, hot_y),
        (hot_p, y),
        (p, hot_y),
        (hot_p.bool(), y.float()),
        (hot_p, y.int()),
    ):
        close(HausdorffMetric()(a, b, spacing=mm), expected)
    metas = list_data_collate(
        [{"p": MetaTensor(a), "y": MetaTensor(b)} for a, b in zip(hot_p, y, strict=True)]
    )
    close(HausdorffMetric()(metas["p"], metas["y"], spacing=mm), expected)
    items = decollate_batch(metas)
    lists = [i["p"] for i in items], [i["y"] for i in items]
    rows = HausdorffMetric()(*lists, spacing=mm)
    close(rows, expected)
    assert type(rows) is torch.Tensor
    background = HausdorffMetric(include_background=True)(hot_p, y, spacing=mm)
    close(background[:, 1:], expected)
    binary = HausdorffMetric()(p == 1, (y == 1).float(), spacing=mm)
    close(binary, expected[:, :1])


def test_spacings():
    p, y = label_maps()
    hot = one_hot(p, K)
    mm = SPACINGS[3]
    expected = HausdorffMetric()(hot, y, spacing=mm)
    per_case = [mm] * len(y)
    for given in (np.array(mm, np.float32).tolist(), torch.tensor(mm), (5, 0.8, 1.5), per_case):
        close(HausdorffMetric()(hot, y, spacing=given), expected, rtol=1e-6)
        close(HausdorffMetric(spacing=given)(hot, y), expected, rtol=1e-6)
    close(HausdorffMetric(spacing=(9, 9, 9))(hot, y, spacing=mm), expected)
    close(HausdorffMetric(spacing=2)(hot, y), 2 * HausdorffMetric()(hot, y, spacing=1.0))
    doubled = [mm, *[tuple(2 * s for s in mm)] * (len(y) - 1)]
    twice = HausdorffMetric()(list(hot), list(y), spacing=doubled)
    close(twice[0], expected[0])
    close(twice[1:], 2 * expected[1:])
    affines = [torch.diag(torch.tensor([*s, 1.0])) for s in doubled]
    metas = [MetaTensor(b, affine=a) for b, a in zip(y, affines, strict=True)]
    close(HausdorffMetric(spacing="meta")(list(hot), metas), twice, rtol=1e-6)
    batch = list_data_collate([{"y": m} for m in metas])["y"]
    close(HausdorffMetric(spacing="meta")(hot, batch), twice, rtol=1e-6)
    for given, message in (
        (None, "none is given"),
        ((1, 1), "expected a number, 3 of them"),
        ("mm", "expected one of"),
        ("meta", "needs y or y_pred to be MetaTensors"),
        ((1, 0, 1), "3 positive numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            HausdorffMetric()(hot, y, spacing=given)


@pytest.mark.parametrize(
    "spacing",
    [(10, 1.5, 0.8), [10, 1.5, 0.8], np.array([10, 1.5, 0.8]),
     tuple(np.float32(v) for v in (10, 1.5, 0.8))],
)  # fmt: skip
def test_spacing_is_in_the_order_of_the_axes(spacing):
    p, y = torch.zeros(2, 1, 1, 4, 6, 8)
    y[..., 1, 2, 2] = p[..., 2, 2, 5] = 1
    for percentile in (None, 95):
        for convention in ("segcal", "monai"):
            metric = HausdorffMetric(percentile=percentile, convention=convention)
            close(metric(p, y, spacing=spacing), [[math.hypot(10, 3 * 0.8)]], rtol=1e-6)


def test_false_alarms_and_absent_structures():
    p, y = torch.zeros(2, 2, 1, 8, 8)
    p[0, :, 2:4, 2:4] = 1  # the second is empty in both
    for metric, alarm in ((DSCMetric(), 0.0), (HausdorffMetric(spacing=1), math.inf)):
        rows = metric(p, y)
        assert rows[0].item() == alarm
        assert rows[1].isnan()
        assert metric.aggregate() == alarm
    monai = DSCMetric(convention="monai")  # which does not see the first
    assert monai(p, y).isnan().all()


def test_two_errors_of_a_binary_problem():
    """Of the probability of label 1, which is never right, and of the most likely label."""
    p = torch.tensor([[[0.8, 0.2], [0.2, 0.8]]], dtype=torch.float64)
    y = torch.zeros(1, 1, 2, dtype=torch.long)
    close(ClasswiseECEMetric(bins=10)(p, y)[0, 1], 0.5)
    close(ECEMetric(bins=10)(p, y), [[0.3]])


def test_ignored_voxels_do_not_matter():
    p, y = label_maps()
    y[:, :, 2] = 255
    other = p.clone()
    other[:, :, 2] = 1
    options = {"ignore_index": 255, "num_classes": K}
    metrics = [
        DSCMetric(**options),
        HausdorffMetric(spacing=1.0, **options),
        ASSDMetric(spacing=1.0, **options),
        NSDMetric(spacing=1.0, tolerance_mm=1, **options),
    ]
    hot = torch.where(y == 255, 0, one_hot(torch.where(y == 255, 0, y), K))
    for metric in metrics:
        expected = metric(p, y)
        close(metric(other, y), expected)
        close(metric(p, hot), expected)  # one-hot: no label where it is ignored
    probs, labels = probabilities()
    ignored = labels.clone()
    ignored[:, :, 1] = 255
    expected = (
        torch.cat([probs[:, :, :1], probs[:, :, 2:]], 2),
        torch.cat([labels[:, :, :1], labels[:, :, 2:]], 2),
    )
    for make in (ECEMetric, ClasswiseECEMetric, TACEMetric):
        close(make(ignore_index=255)(probs, ignored), make()(*expected))


def test_aggregate_and_reset():
    """Rows (1, 0.5) and (NaN, 0.25): what is undefined leaves the mean and is counted."""
    metric = DSCMetric(get_not_nans=True)
    with pytest.raises(ValueError, match="DSCMetric: no case to aggregate"):
        metric.aggregate()
    nan = float("nan")
    rows = torch.tensor([[1.0, 0.5], [nan, 0.25], [nan, nan]], dtype=torch.float64)
    metric.extend(rows)
    expected = {
        "none": (rows, [[1, 1], [0, 1], [0, 0]]),
        "mean": ((0.75 + 0.25) / 2, 2),
        "sum": (1.75, 3),
        "mean_batch": ([1.0, 0.375], [1, 2]),
        "sum_batch": ([1.0, 0.75], [1, 2]),
        "mean_channel": ([0.75, 0.25, nan], [2, 1, 0]),
        "sum_channel": ([1.5, 0.25, 0.0], [2, 1, 0]),
    }
    for reduction, (value, count) in expected.items():
        for found, right in zip(metric.aggregate(reduction), (value, count), strict=True):
            close(found, right)
    metric.reset()
    metric.extend(rows[2:])
    value, count = metric.aggregate()
    assert torch.isnan(value)  # MONAI's own reduction gives 0 here
    assert count == 0
    monai = HausdorffMetric(convention="monai", get_not_nans=True)
    monai.extend(rows[2:])
    assert monai.aggregate() == (0, 0)


def test_missed_structure_shows_in_the_mean():
    p, y = torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 8, 8)
    y[:, :, 2:5, 2:5] = 1
    p[0, :, 2:5, 3:6] = 1  # the second is missed
    ours = HausdorffMetric(percentile=95, spacing=1)
    monai = HausdorffMetric(percentile=95, convention="monai")
    assert ours(p, y).tolist() == [[1.0], [float("inf")]]
    assert ours.aggregate() == float("inf")
    monai(p, y)
    assert monai.aggregate() == 1.0


def test_sigmoid_channels():
    """Overlapping channels, and one channel alone: each is calibrated for itself."""
    p = torch.tensor([[[0.9, 0.2], [0.9, 0.4]]], dtype=torch.float64)
    y = torch.tensor([[[1, 0], [1, 1]]])
    rows = ClasswiseECEMetric(bins=10)(p, y)
    close(rows, [[(0.1 + 0.2) / 2, (0.1 + 0.6) / 2]])
    for include_background in (True, False):
        one = ClasswiseECEMetric(bins=10, include_background=include_background)
        close(one(p[:, :1], y[:, :1]), rows[:, :1])
    close(ClasswiseECEMetric(include_background=False, bins=10)(p, y), rows[:, 1:])
    with pytest.raises(ValueError, match="use ClasswiseECEMetric for channels that overlap"):
        ECEMetric()(p, y)
    with pytest.raises(ValueError, match="at least 2 classes, got 1 channel"):
        TACEMetric()(p[:, :1], y[:, :1])


def test_tolerances_per_class():
    p, y = label_maps()
    hot = one_hot(p, K)
    rows = [NSDMetric(tolerance_mm=t, spacing=1)(hot, y) for t in (0.5, 1, 2)]
    found = NSDMetric(tolerance_mm=(0.5, 1, 2), spacing=1)(hot, y)
    close(found, torch.stack([r[:, c] for c, r in enumerate(rows)], 1))
    with pytest.raises(ValueError, match=r"tolerance_mm: expected one, or 3 \(class by class\)"):
        NSDMetric(tolerance_mm=[1.0] * K, spacing=1)(hot, y)


@pytest.mark.parametrize(
    ("make", "p", "y", "message"),
    [
        (DSCMetric, torch.rand(1, K, 4, 4), torch.zeros(1, 1, 4, 4), "masks of 0 and 1"),
        (DSCMetric, torch.full((1, 1, 4, 4), 2), torch.zeros(1, 1, 4, 4), "num_classes says"),
        (DSCMetric, torch.zeros(1, K, 4, 4), torch.full((1, 1, 4, 4), 0.5), "whole numbers"),
        (DSCMetric, torch.zeros(1, K, 4, 4), torch.full((1, 1, 4, 4), 9), "expected 0 to 3"),
        (DSCMetric, torch.zeros(1, K, 4, 4), torch.zeros(1, 3, 4, 4), "or 4 channels"),
        (DSCMetric, torch.zeros(1, K, 4, 4), torch.zeros(1, 1, 1, 4), "one shape after them"),
        (DSCMetric, torch.zeros(2, K, 4, 4), torch.zeros(1, 1, 4, 4), "as many cases in both"),
        (DSCMetric, torch.zeros(2, K, 4, 4), None, "no y"),
        (ECEMetric, torch.randn(1, K, 4, 4) - 5, torch.zeros(1, 1, 4, 4), "need a softmax"),
        (ClasswiseECEMetric, 5 * torch.ones(1, K, 4), torch.zeros(1, 1, 4), "need a softmax"),
        (ECEMetric, torch.zeros(1, K, 4, 4).long(), torch.zeros(1, 1, 4, 4), "probabilities of K"),
    ],
)
def test_refuses(make, p, y, message):
    with pytest.raises(ValueError, match=message):
        make()(p, y)


def test_options_are_checked_at_once():
    for make, options in (
        (DSCMetric, {"reduction": "median"}),
        (DSCMetric, {"convention": "medpy"}),
        (ECEMetric, {"calibration_reduction": "mean"}),
    ):
        with pytest.raises(ValueError, match="expected one of"):
            make(**options)
    metric = DSCMetric()
    metric(torch.ones(1, 1, 4), torch.ones(1, 1, 4))
    with pytest.raises(ValueError, match="reduction: expected one of"):
        metric.aggregate("median")


def test_half_precision_probabilities():
    p, y = probabilities()
    for make in (ECEMetric, ClasswiseECEMetric, TACEMetric):
        close(make()(p.half(), y), make()(p.half().float(), y))


def test_key_metric_of_an_evaluator():
    from monai.engines import SupervisedEvaluator
    from monai.handlers import IgniteMetricHandler, from_engine
    from monai.transforms import Activationsd, AsDiscreted, Compose, CopyItemsd

    p, y = probabilities()
    batches = [
        {"image": p[:2].log(), "label": y[:2].float()},
        {"image": p[2:].log(), "label": y[2:].float()},
    ]
    evaluator = SupervisedEvaluator(
        device=torch.device("cpu"),
        val_data_loader=batches,
        network=torch.nn.Identity(),
        postprocessing=Compose(
            [
                Activationsd(keys="pred", softmax=True),
                CopyItemsd(keys="pred", names="mask"),
                AsDiscreted(keys="mask", argmax=True, to_onehot=K),
            ]
        ),
        key_val_metric={
            "ece": IgniteMetricHandler(
                ECEMetric(pooled=True), output_transform=from_engine(["pred", "label"])
            )
        },
        additional_metrics={
            "hd95": IgniteMetricHandler(
                HausdorffMetric(percentile=95, spacing=SPACINGS[3]),
                output_transform=from_engine(["mask", "label"]),
            )
        },
        metric_cmp_fn=lambda now, best: now < best,
    )
    evaluator.run()
    flat = p.movedim(1, 0).flatten(1)[None], y.flatten()[None]
    close(evaluator.state.metrics["ece"], ece(*flat), rtol=1e-5)
    hd95 = HausdorffMetric(percentile=95, num_classes=K)
    hd95(p.argmax(1, keepdim=True), y, spacing=SPACINGS[3])
    close(evaluator.state.metrics["hd95"], hd95.aggregate())
    close(evaluator.state.metric_details["hd95"], hd95.get_buffer())
