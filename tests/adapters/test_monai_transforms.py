"""Calibration in MONAI's post-processing pipelines."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from monai.inferers import SlidingWindowInferer
from monai.transforms import AsDiscrete, Compose, EnsureTyped, Invertd, Spacingd

from segcal.adapters.monai.transforms import Calibrate, CalibrateD, Calibrated, CalibrateDict
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.posthoc.temperature import Temperature
from segcal.repair.saved import SavedCalibrator, write_calibrator
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")
K = 3
AFFINE = np.diag([1.0, 3.0, 2.0, 1.0])


def held_out(shape=(6, 5, 4), number=3, k=K):
    """Overconfident logits of several cases."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(number):
        x = torch.randn((1, k, *shape), generator=generator)
        p = torch.softmax(x, 1).movedim(1, -1).flatten(0, -2)
        found.append((3 * x, torch.multinomial(p, 1, generator=generator).view(1, *shape)))
    return found


@pytest.fixture(scope="module")
def fitted():
    return ClassRegionTemperature(strength=1e-4).fit(held_out())


@pytest.fixture
def path(tmp_path, fitted):
    names = ("background", "a", "b")
    write_calibrator(tmp_path / "calibrator.json", SavedCalibrator("class_region", fitted, names))
    return tmp_path / "calibrator.json"


@pytest.mark.parametrize("kind", [torch.as_tensor, MetaTensor, np.asarray])
def test_is_what_the_calibrator_says(fitted, path, kind):
    x = held_out()[0][0]
    expected = fitted.apply(x)[0]
    for given in (fitted, path, str(path)):
        found = Calibrate(given)(kind(x[0]))
        assert type(found) is type(kind(x[0]))
        close(torch.as_tensor(found), expected, rtol=1e-6)


def test_probabilities_stand_for_their_logits(fitted):
    x = held_out()[0][0]
    p = torch.softmax(x, 1)[0]
    close(Calibrate(fitted, from_probabilities=True)(p), fitted.apply(x)[0], rtol=1e-4)
    y = (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(x)).long()
    channels = Temperature(per_channel=True).fit(3 * x, y)
    p = torch.sigmoid(x[0])
    found = Calibrate(channels, from_probabilities=True)(p)
    close(found, channels.apply(x)[0], rtol=1e-4)


def test_half_precision_comes_out_whole(fitted):
    found = Calibrate(fitted)(MetaTensor(held_out()[0][0][0].half()))
    assert found.dtype == torch.float32
    close(found.sum(0), torch.ones(found.shape[1:]), atol=1e-6)


def test_bands_are_measured_in_the_mm_of_the_affine():
    data = [(x, y, (1.0, 3.0, 2.0)) for x, y in held_out()]
    calibrator = ClassRegionTemperature(bands=(1.5, 2.5), strength=1e-4).fit(data)
    x = data[0][0]
    oblique = AFFINE.copy()
    oblique[:3, :3] = [[0.0, -3.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]
    for affine in (AFFINE, oblique):
        found = Calibrate(calibrator)(MetaTensor(x[0], affine=torch.as_tensor(affine)))
        close(found, calibrator.apply(x, spacing_mm=(1.0, 3.0, 2.0))[0])
    in_voxels = Calibrate(calibrator)(x[0])
    close(in_voxels, calibrator.apply(x)[0])
    assert (found - in_voxels).abs().max() > 0.01
    slices = ClassRegionTemperature(bands=(1.5, 2.5), strength=1e-4).fit(held_out((6, 5)))
    x = held_out((6, 5))[0][0]
    found = Calibrate(slices)(MetaTensor(x[0], affine=torch.as_tensor(AFFINE)))
    close(found, slices.apply(x, spacing_mm=(1.0, 3.0))[0])


def test_a_pipeline_from_windows_to_labels(path, fitted):
    torch.manual_seed(0)
    network = torch.nn.Conv3d(1, K, 3, padding=1)
    images = MetaTensor(torch.randn(1, 1, 8, 8, 8), affine=torch.as_tensor(AFFINE))
    with torch.no_grad():
        logits = SlidingWindowInferer((4, 4, 4), overlap=0.5)(images, network)
    post = Compose([Calibrate(path), AsDiscrete(argmax=True)])
    labels = pickle.loads(pickle.dumps(post))(logits[0])  # as workers get it
    assert isinstance(labels, MetaTensor)
    close(labels.affine, AFFINE)
    close(labels[0], fitted.apply(logits.as_tensor()).argmax(1)[0])


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_pipeline_that_is_inverted(path, fitted, order):
    """Probabilities come back to the grid of the image, whichever comes first."""
    before = Compose([EnsureTyped("image"), Spacingd("image", (2.0, 3.0, 2.0))])
    image = MetaTensor(torch.randn(1, 8, 4, 4), affine=torch.as_tensor(AFFINE))
    sample = before({"image": image})
    assert sample["image"].shape == (1, 4, 4, 4)
    logits = torch.cat([sample["image"] * w for w in (0.0, 1.0, -2.0)])
    sample["pred"] = MetaTensor(logits, meta=sample["image"].meta)
    calibrate = Calibrated("pred", path)
    inverted = Invertd("pred", before, orig_keys="image", nearest_interp=False)
    post = [calibrate, inverted] if order == "before" else [inverted, calibrate]
    found = Compose(post)(sample)["pred"]
    assert found.shape == (K, 8, 4, 4)
    close(found.affine, AFFINE)
    close(found.sum(0), torch.ones(8, 4, 4), rtol=1e-5)
    if order == "before":
        expected = Invertd("pred", before, orig_keys="image", nearest_interp=False)(
            {**sample, "pred": MetaTensor(fitted.apply(logits[None])[0], meta=sample["pred"].meta)}
        )["pred"]
        close(found, expected)


def test_a_bundle_builds_it(path, fitted):
    parser = ConfigParser({
        "bundle_root": str(path.parent),
        "postprocessing": {"_target_": "Compose", "transforms": [
            {"_target_": "segcal.adapters.monai.transforms.Calibrated", "keys": "pred",
             "calibrator": "$@bundle_root + '/calibrator.json'", "from_probabilities": False},
        ]},
    })  # fmt: skip
    x = held_out()[0][0]
    found = parser.get_parsed_content("postprocessing")({"pred": x[0], "image": 1})
    close(found["pred"], fitted.apply(x)[0])
    assert found["image"] == 1
    assert CalibrateD is CalibrateDict is Calibrated


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(1, K, 4, 4), r"key 'pred': img: expected floating, channel-first logits"
         r" \(3, \*S\) of one sample, as in the fit, got torch.float32 \(1, 3, 4, 4\)"),
        (torch.zeros(K, 4, 4, dtype=torch.long), r"key 'pred'.*got torch.int64 \(3, 4, 4\)"),
        (torch.full((K, 4, 4), 1 / K), r"key 'pred'.*got channels that sum to 1.*from_prob"),
    ],
)  # fmt: skip
def test_what_is_wrong_names_the_key(fitted, given, message):
    with pytest.raises(ValueError, match=message):
        Calibrated("pred", fitted)({"pred": given})


def test_what_is_not_a_probability_is_refused(fitted):
    calibrate = Calibrated("pred", fitted, from_probabilities=True, allow_missing_keys=True)
    assert calibrate({}) == {}
    with pytest.raises(ValueError, match=r"key 'pred': probs: expected values in \[0, 1\]"):
        calibrate({"pred": torch.full((K, 4), 2.0)})
    padded = torch.full((K, 4), 1 / K)
    padded[:, 0] = 0
    with pytest.raises(ValueError, match=r"sums of 0 to 1; Invertd pads.*before"):
        calibrate({"pred": padded})


def test_what_is_no_calibrator_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json: not a calibrator"):
        Calibrate(tmp_path / "a.json")
    with pytest.raises(ValueError, match="Temperature is not fitted yet"):
        Calibrate(Temperature())
    with pytest.raises(ValueError, match="expected a path or a Calibrator, got int"):
        Calibrate(3)
