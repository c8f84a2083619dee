"""The bundle: MONAI's own command trains on phantoms, and what it leaves can be used."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from monai.bundle import run
from monai.networks.nets import UNet

import segcal
from segcal.adapters.monai.losses import SegcalLoss
from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset
from segcal.io.probabilities import read_probabilities
from segcal.io.volumes import read_volume
from segcal.io.yaml import config_root

pytest.importorskip("fire")

BUNDLE = config_root() / "bundle"
SIZES = {"channels": [4, 8], "strides": [2]}
SMALL = {
    "patch_size": [32, 32, 8],
    "num_workers": 0,
    **{f"network_def#{name}": value for name, value in SIZES.items()},
}


def read(name):
    return yaml.safe_load((BUNDLE / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Data set, output folder and what the command printed: two epochs on five phantoms."""
    folder = tmp_path_factory.mktemp("bundle")
    data, out = folder / "data", folder / "out"
    settings = PhantomSettings(shape=(8, 32, 32))
    write_phantom_dataset(data, train=5, test=1, settings=settings)
    options = {"bundle_root": out, "dataset_dir": data, "epochs": 2, **SMALL}
    command = [sys.executable, "-m", "monai.bundle", "run"]
    command += ["--config_file", BUNDLE / "train.yaml", "--meta_file", BUNDLE / "metadata.json"]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    return data, out, printed


def settings_of(data, out, **options):
    # what evaluates its expressions is MONAI, which says so
    return {"bundle_root": str(out), "dataset_dir": str(data), **SMALL, **options}


def test_trains(trained):
    """Multipliers are learned, reported, and saved with the update of their epoch."""
    _, out, printed = trained
    for metric in ("dsc", "ece", "ece_foreground", "crac_lambda_mean", "crac_rho_mean"):
        assert printed.count(f"{metric}: ") >= 2, printed
    assert "before this update" not in printed
    state = torch.load(out / "models" / "checkpoint_epoch=2.pt", weights_only=True)
    assert set(state) == {"network", "optimizer", "lr_scheduler", "loss", "trainer"}
    loss = SegcalLoss("crac", num_classes=4)
    loss.load_state_dict(state["loss"])
    crac = loss.objective.terms["crac"]
    assert int(crac.step) == 2
    assert (crac.lam > 1e-6).all()
    best = torch.load(out / "models" / "best.pt", weights_only=True)
    assert int(best["loss"]["objective.terms.crac.step"]) in (1, 2)


@pytest.mark.filterwarnings("ignore:parsing config_file:UserWarning")
def test_goes_on(trained, tmp_path, one_thread):
    data, out, _ = trained
    checkpoint = out / "models" / "checkpoint_epoch=2.pt"
    options = settings_of(data, tmp_path, epochs=3, resume=str(checkpoint))
    run(config_file=str(BUNDLE / "train.yaml"), **options)
    state = torch.load(tmp_path / "models" / "checkpoint_epoch=3.pt", weights_only=True)
    assert int(state["loss"]["objective.terms.crac.step"]) == 3
    assert state["trainer"]["iteration"] == 6


@pytest.mark.filterwarnings("ignore:parsing config_file:UserWarning")
@pytest.mark.parametrize(("score", "kept"), [(0.99, True), (-0.5, False)])
def test_the_best_is_replaced_by_a_better_one_only(trained, tmp_path, one_thread, score, kept):
    data, out, _ = trained
    models = tmp_path / "models"
    models.mkdir()
    best = torch.load(out / "models" / "best.pt", weights_only=True)
    ((_, name),) = best["checkpointer"]["_saved"]
    torch.save({**best, "checkpointer": {"_saved": [(score, name)]}}, models / "best.pt")
    before = (models / "best.pt").read_bytes()
    checkpoint = out / "models" / "checkpoint_epoch=2.pt"
    options = settings_of(data, tmp_path, epochs=3, resume=str(checkpoint))
    run(config_file=str(BUNDLE / "train.yaml"), **options)
    assert ((models / "best.pt").read_bytes() == before) == kept


@pytest.mark.filterwarnings("ignore:parsing config_file:UserWarning")
def test_writes_probabilities(trained, one_thread):
    """Softmax of the best network, in the geometry of the image, for segcal evaluate."""
    data, out, _ = trained
    run(
        config_file=str(BUNDLE / "inference.yaml"),
        meta_file=str(BUNDLE / "metadata.json"),
        **settings_of(data / "imagesTs", out),
    )
    image = read_volume(data / "imagesTs" / "phantom_006_0000.nii.gz")
    written = out / "predictions" / "phantom_006.nii.gz"
    found = read_probabilities(written, image.geometry, num_classes=4)
    network = UNet(spatial_dims=3, in_channels=1, out_channels=4, num_res_units=2, **SIZES).eval()
    state = torch.load(out / "models" / "best.pt", weights_only=True)
    network.load_state_dict(state["network"])
    x = np.transpose(image.array)  # MONAI's x, y, z
    x = torch.as_tensor((x - x.mean()) / x.std(), dtype=torch.float32)[None, None]
    with torch.no_grad():
        expected = network(x).softmax(1)[0].numpy().transpose(0, 3, 2, 1)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_training_and_inference_agree():
    train, inference, metadata = (
        read("train.yaml"),
        read("inference.yaml"),
        json.loads((BUNDLE / "metadata.json").read_text(encoding="utf-8")),
    )
    for name in ("network_def", "patch_size", "num_classes", "in_channels"):
        assert train[name] == inference[name]
    assert train["load"][1] == inference["preprocessing"]["transforms"][1]
    data = metadata["network_data_format"]
    assert data["inputs"]["image"]["num_channels"] == train["in_channels"]
    assert data["outputs"]["pred"]["num_channels"] == train["num_classes"]
    assert len(data["outputs"]["pred"]["channel_def"]) == train["num_classes"]
    assert metadata["required_packages_version"]["segcal"] == segcal.__version__
    assert len(train["network_def"]["channels"]) == len(train["network_def"]["strides"]) + 1
    assert all(size % 8 == 0 for size in train["patch_size"])
