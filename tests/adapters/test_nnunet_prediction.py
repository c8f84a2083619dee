"""What is averaged in nnU-Net's sliding window, against a slow account of it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager
from torch import nn

from segcal.adapters.nnunet.exporting import export, logits_path
from segcal.adapters.nnunet.patching import Aggregation
from segcal.adapters.nnunet.prediction import AveragingPredictor

LABELS = {"background": 0, "a": 1, "b": 2}
REGIONS = {"background": 0, "whole": [1, 2], "core": 2}
RESAMPLING = {"is_seg": False, "order": 1, "order_z": 0, "force_separate_z": None}


def plans(transpose=(0, 1, 2), patch=(8, 8)):
    backward = [list(transpose).index(i) for i in range(3)]
    return PlansManager(
        {
            "plans_name": "nnUNetPlans",
            "image_reader_writer": "SimpleITKIO",
            "transpose_forward": list(transpose),
            "transpose_backward": backward,
            "label_manager": "LabelManager",
            "configurations": {
                "2d": {
                    "architecture": {},
                    "patch_size": list(patch),
                    "spacing": [1.0, 1.0],
                    "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
                    "resampling_fn_probabilities_kwargs": RESAMPLING,
                }
            },
        }
    )


def dataset(labels):
    return {
        "labels": labels,
        "file_ending": ".nii.gz",
        "channel_names": {"0": "MR"},
        "regions_class_order": [1, 2],
    }


def network(heads, scale):
    torch.manual_seed(0)
    net = nn.Conv2d(1, heads, 3, padding=1)
    with torch.no_grad():
        net.weight *= scale
    return net


def predictor(make, labels=LABELS, folds=2, patch=(8, 8), mirror=True, scale=4.0):
    nets = [network(len(labels) - (labels is REGIONS), scale * (1 + f)) for f in range(folds)]
    built = make(
        use_mirroring=mirror, perform_everything_on_device=False,
        device=torch.device("cpu"), allow_tqdm=False,
    )  # fmt: skip
    host = plans(patch=patch)
    built.manual_initialization(
        nets[0], host, host.get_configuration("2d"),
        [{k: v.clone() for k, v in net.state_dict().items()} for net in nets],
        dataset(labels), "nnUNetTrainer", (0, 1),
    )  # fmt: skip
    built.fold_names = tuple(f"fold_{f}" for f in range(folds))
    return built


def ours(average, **kwargs):
    per_fold = kwargs.pop("per_fold", False)

    def make(**arguments):
        return AveragingPredictor(Aggregation(average, per_fold=per_fold), **arguments)

    return predictor(make, **kwargs)


def probabilities(logits, labels):
    return torch.sigmoid(logits) if labels is REGIONS else torch.softmax(logits, 0)


def slow_average(host, data, labels, average):
    """Mean over folds, windows (by their Gaussian weight) and mirrors, in float64, one by one."""
    y, x = np.mgrid[:8, :8] - 4.0
    gauss = np.exp(-(y**2 + x**2) / 2)  # sigma = 8 / 8
    inside = gauss * (np.abs(y) <= 4) * (np.abs(x) <= 4)
    weight = torch.as_tensor(inside)
    total, weights = 0.0, torch.zeros(data.shape[1:], dtype=torch.float64)
    fold_means = []
    for parameters in host.list_of_parameters:
        net = host.network.double()
        net.load_state_dict(parameters)
        total = torch.zeros((net.out_channels, *data.shape[1:]), dtype=torch.float64)
        weights.zero_()
        for z, top, left in itertools.product(
            range(data.shape[1]), range(0, data.shape[2] - 7, 4), range(0, data.shape[3] - 7, 4)
        ):
            window = data[:, z, top : top + 8, left : left + 8].double()
            voters = []
            for axes in ((), (1,), (2,), (1, 2)):
                with torch.no_grad():
                    logits = net(window.flip(axes)[None])[0].flip(axes)
                voters.append(probabilities(logits, labels) if average == "prob" else logits)
            total[:, z, top : top + 8, left : left + 8] += torch.stack(voters).mean(0) * weight
            weights[z, top : top + 8, left : left + 8] += weight
        fold_means.append(total / weights)
    mean = torch.stack(fold_means).mean(0)
    return mean if average == "prob" else probabilities(mean, labels)


@pytest.mark.parametrize("labels", [LABELS, REGIONS], ids=["labels", "regions"])
@pytest.mark.parametrize("average", ["logit", "prob"])
def test_averages_are_what_they_say(average, labels):
    data = torch.randn(1, 2, 16, 12)
    host = ours(average, labels=labels)
    result = probabilities(host.predict_logits_from_preprocessed_data(data), labels)
    expected = slow_average(host, data, labels, average)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)


def test_the_two_averages_differ_where_voters_do():
    data = torch.randn(1, 1, 16, 16)
    of_logits, of_probs = (
        torch.softmax(ours(a).predict_logits_from_preprocessed_data(data), 0)
        for a in ("logit", "prob")
    )
    assert (of_logits - of_probs).abs().max() > 0.1
    assert of_logits.amax(0).mean() > of_probs.amax(0).mean()  # a geometric mean is surer


@pytest.mark.parametrize("labels", [LABELS, REGIONS], ids=["labels", "regions"])
def test_one_voter_has_one_average(labels):
    """One window, no mirror, one fold: nothing is averaged."""
    data = torch.randn(1, 3, 8, 8)
    alone = {"labels": labels, "folds": 1, "mirror": False}
    of_logits, of_probs = (
        ours(a, **alone).predict_logits_from_preprocessed_data(data) for a in ("logit", "prob")
    )
    torch.testing.assert_close(
        probabilities(of_logits, labels), probabilities(of_probs, labels), rtol=1e-5, atol=1e-7
    )
    half = [  # and it stays so under a resampling, which is linear in logits
        probabilities(nn.functional.avg_pool2d(v, 2), labels) for v in (of_logits, of_probs)
    ]
    torch.testing.assert_close(*half, rtol=1e-5, atol=1e-7)


def test_logits_are_nnunets_but_for_half_precision():
    data = torch.randn(1, 2, 16, 12)
    result = ours("logit").predict_logits_from_preprocessed_data(data)
    stock = predictor(nnUNetPredictor).predict_logits_from_preprocessed_data(data)
    assert stock.dtype == torch.float16
    assert result.dtype == torch.float32
    # Sums of few terms up to 2^4 * weight, with 11 bits: an error of 2^-6 is generous there. The
    # smallest weights are subnormal in half precision, but only corners of the volume feel them.
    inner = (..., slice(2, -2), slice(2, -2))
    torch.testing.assert_close(stock[inner].float(), result[inner], rtol=0, atol=2**-6)


def test_folds_alone_and_together():
    data = torch.randn(1, 1, 12, 12)
    stacked = ours("prob", per_fold=True).predict_logits_from_preprocessed_data(data)
    assert stacked.shape == (3, 3, 1, 12, 12)
    probs = stacked.softmax(1)
    torch.testing.assert_close(probs[0], probs[1:].mean(0), rtol=1e-5, atol=1e-7)
    alone = ours("prob", folds=1).predict_logits_from_preprocessed_data(data)
    torch.testing.assert_close(probs[1], alone.softmax(0))


def test_output_that_is_not_finite_is_refused():
    host = ours("logit", folds=1)
    host.list_of_parameters[0]["bias"] += float("nan")
    with pytest.raises(ValueError, match="output is NaN or infinite"):
        host.predict_logits_from_preprocessed_data(torch.zeros(1, 1, 8, 8))


@pytest.mark.parametrize("labels", [LABELS, REGIONS], ids=["labels", "regions"])
@pytest.mark.parametrize("transpose", [(0, 1, 2), (2, 0, 1)])
def test_saved_logits_give_the_saved_probabilities(tmp_path, labels, transpose):
    """Through resampling, the crop that is undone, and axes that are put back."""
    host = plans(transpose)
    K, shape, crop = len(labels) - (labels is REGIONS), (6, 10, 14), ((1, 6), (2, 9), (0, 11))
    sizes = tuple(b - a for a, b in crop)
    predicted = np.random.default_rng(0).normal(size=(3, K, sizes[0], 9, 8)).astype(np.float32)
    properties = {
        "spacing": [1.0, 1.0, 1.0],
        "shape_before_cropping": shape,
        "bbox_used_for_cropping": [list(side) for side in crop],
        "shape_after_cropping_and_before_resampling": sizes,
        "sitk_stuff": {
            "spacing": (1.0, 1.0, 1.0), "origin": (0.0, 0.0, 0.0),
            "direction": (1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0),
        },
    }  # fmt: skip
    output = str(tmp_path / "case")
    for fold in ("fold_0", "fold_1"):
        (tmp_path / fold).mkdir()
    export(
        predicted, properties, host.get_configuration("2d"), host, dataset(labels), output, True,
        fold_names=("fold_0", "fold_1"), save_logits=True,
    )  # fmt: skip
    with np.load(logits_path(output)) as saved, np.load(tmp_path / "case.npz") as stock:
        logits, probs = saved["logits"], stock["probabilities"]
    assert logits.shape == probs.shape == (K, *(shape[transpose.index(i)] for i in range(3)))
    assert logits.dtype == np.float32
    np.testing.assert_allclose(
        probabilities(torch.as_tensor(logits), labels), probs, rtol=1e-5, atol=1e-7
    )
    from_logits = probabilities(torch.as_tensor(logits), labels)
    assert torch.equal(from_logits == 0, torch.as_tensor(probs == 0))  # outside the crop
    with np.load(tmp_path / "fold_1" / "case.npz") as of_fold:
        assert np.abs(of_fold["probabilities"] - probs).max() > 0.1
    assert (tmp_path / "fold_0" / "case.nii.gz").is_file()
