"""Checkpoints are read as data, and become stock ones; what a warm start refuses."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nnunetv2.training.logging.nnunet_logger import MetaLogger
from nnunetv2.training.nnUNetTrainer import nnUNetTrainer as searched_first  # noqa: N813
from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer
from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

from segcal.adapters.nnunet.checkpoints import plain, read_checkpoint
from segcal.adapters.nnunet.sharing import as_stock, export_model
from segcal.adapters.nnunet.warmstart import _results_elsewhere, _started, unlike, warmstart
from segcal.posthoc.temperature import Temperature
from segcal.repair.saved import SavedCalibrator, read_calibrator, write_calibrator

INIT = {
    "plans": {
        "plans_name": "nnUNetPlans",
        "dataset_name": "Dataset901_Phantom",
        "transpose_forward": [0, 1, 2],
        "configurations": {
            "2d": {"architecture": {"n_stages": 3}, "patch_size": [8, 8], "batch_size": 2},
            "2d_crac": {"inherits_from": "2d", "batch_size": 4, "segcal": {"crac": {}}},
        },
    },
    "configuration": "2d",
    "fold": 0,
    "dataset_json": {"labels": {"background": 0, "a": 1}, "channel_names": {"0": "MR"}},
}


def checkpoint(**changes):
    return {
        "network_weights": {"w": torch.ones(2)},
        "optimizer_state": {"state": {}, "param_groups": []},
        "grad_scaler_state": None,
        "logging": {"mean_fg_dice": [np.float32(0.5), np.float64(0.75)]},
        "_best_ema": np.float64(0.5),
        "current_epoch": 2,
        "init_args": {**INIT, "segcal": {"version": "1", "state": {"lam": torch.ones(1)}}},
        "trainer_name": "nnUNetTrainerCRaC",
        "inference_allowed_mirroring_axes": (0, 1),
        **changes,
    }


def test_checkpoint_of_numpy_scalars_becomes_plain(tmp_path):
    path = tmp_path / "checkpoint.pth"
    torch.save(checkpoint(), path)
    with pytest.raises(Exception, match="numpy"):
        torch.load(path, weights_only=True)
    read = read_checkpoint(path)
    assert read["logging"] == {"mean_fg_dice": [0.5, 0.75]}
    assert type(read["logging"]["mean_fg_dice"][0]) is type(read["_best_ema"]) is float
    assert read["inference_allowed_mirroring_axes"] == (0, 1)
    torch.save(as_stock(read), path)
    stock = torch.load(path, weights_only=True)
    assert stock["trainer_name"] == "nnUNetTrainer"
    assert "segcal" not in stock["init_args"]
    assert stock["segcal"]["trainer_name"] == "nnUNetTrainerCRaC"
    assert stock["segcal"]["training"]["state"]["lam"].tolist() == [1.0]
    assert "optimizer_state" not in stock
    assert "grad_scaler_state" not in stock
    assert "segcal" in read["init_args"]  # what was given is left as it was
    assert "optimizer_state" in read


def test_a_warm_start_needs_no_more_than_what_is_exported(tmp_path):
    torch.save(as_stock(checkpoint()), tmp_path / "checkpoint.pth")
    weights = {"w": torch.nn.Parameter(torch.ones(2))}
    new = SimpleNamespace(optimizer=torch.optim.SGD(weights.values(), 0.1), my_init_kwargs=INIT)
    started = _started(read_checkpoint(tmp_path / "checkpoint.pth"), new, "nnUNetTrainerCRaC", 1)
    assert (started["current_epoch"], started["grad_scaler_state"]) == (1, None)
    assert started["optimizer_state"] == new.optimizer.state_dict()


def test_plain_keeps_the_rest():
    assert plain({"a": (np.int64(1), [np.bool_(True)]), "b": "c"}) == {"a": (1, [True]), "b": "c"}
    tensor = torch.ones(1)
    assert plain([tensor])[0] is tensor


class Runs:
    def __reduce__(self):
        return (Path.touch, (Path("it_ran"),))


def test_checkpoint_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(checkpoint(extra=Runs()), "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth: holds more than tensors and numbers"):
        read_checkpoint(Path("evil.pth"))
    assert not Path("it_ran").exists()


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "checkpoint.pth"
    with pytest.raises(ValueError, match="no such file"):
        read_checkpoint(path)
    torch.save(checkpoint(), path)
    whole = path.read_bytes()
    for size in (0, 100, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="not a whole checkpoint"):
            read_checkpoint(path)
    torch.save({"model": 1}, path)
    with pytest.raises(ValueError, match="not a checkpoint of nnU-Net v2"):
        read_checkpoint(path)


ARCHITECTURE = {
    "network_class_name": "dynamic_network_architectures.architectures.unet.PlainConvUNet",
    "arch_kwargs": {
        "n_stages": 3, "features_per_stage": [2, 4, 4], "conv_op": "torch.nn.modules.conv.Conv2d",
        "kernel_sizes": [[3, 3]] * 3, "strides": [[1, 1], [2, 2], [2, 2]],
        "n_conv_per_stage": [1, 1, 1], "n_conv_per_stage_decoder": [1, 1], "conv_bias": True,
        "norm_op": "torch.nn.modules.instancenorm.InstanceNorm2d", "norm_op_kwargs": {},
        "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
    },
    "_kw_requires_import": ["conv_op", "norm_op", "nonlin"],
}  # fmt: skip


class OwnNetworkTrainer(nnUNetTrainer):
    @staticmethod
    def build_network_architecture(*args, **kwargs):
        return torch.nn.Identity()


@pytest.fixture
def model(tmp_path):
    """Folder of an untrained model of a small U-Net, and a way to save its checkpoint."""
    init = deepcopy(INIT)
    init["plans"]["configurations"]["2d"]["architecture"] = ARCHITECTURE
    manager = PlansManager(init["plans"])
    network = nnUNetTrainer.build_network_architecture(
        manager, manager.get_configuration("2d"), 1, 2, enable_deep_supervision=True
    )
    folder = tmp_path / "model"
    (folder / "fold_3").mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(init["plans"]))
    (folder / "dataset.json").write_text(json.dumps(init["dataset_json"]))

    def save(**changes):
        content = checkpoint(network_weights=network.state_dict(), init_args=init)
        torch.save({**content, **changes}, folder / "fold_3" / "checkpoint_final.pth")

    save()
    for place in ("fold_3/validation", "fold_3"):
        (folder / place).mkdir(exist_ok=True)
        (folder / place / "summary.json").write_text(
            '{"reference_file": "/home/me/patient.nii.gz"}'
        )
    return folder, save


def test_model_is_copied_under_the_name_that_nnunet_looks_for(model, tmp_path):
    folder, _ = model
    target = export_model(folder, tmp_path / "shared")
    dataset, name = "Dataset901_Phantom", "nnUNetTrainer__nnUNetPlans__2d"
    assert target == tmp_path / "shared" / dataset / name
    files = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    assert files == ["dataset.json", "fold_3/checkpoint_final.pth", "plans.json"]
    assert target.stat().st_mode & 0o055 == 0o055  # others may read it


def test_calibrators_go_along_for_the_stock_trainer(model, tmp_path):
    folder, _ = model
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((1, 2, 9, 9), generator=generator)
    labels = torch.bernoulli(torch.softmax(logits, 1)[:, 1], generator=generator).long()
    record = {"trainer": "nnUNetTrainerCRaC", "configuration": "2d", "members": 1}
    saved = SavedCalibrator(
        "temperature", Temperature().fit(3 * logits, labels), ("background", "a"), model=record,
        fitted_on={"predictions": "/home/me/fold_3/validation", "references": "/home/me/labelsTr"},
    )  # fmt: skip
    for place in (folder, folder / "fold_3"):
        write_calibrator(place / "calibrator.json", saved)
    target = export_model(folder, tmp_path / "shared")
    for place in (target, target / "fold_3"):
        copy = read_calibrator(place / "calibrator.json")
        assert copy.model == {**record, "trainer": "nnUNetTrainer"}
        assert copy.calibrator.state() == saved.calibrator.state()
        assert copy.fitted_on == {"predictions": "validation", "references": "labelsTr"}
    assert not any(b"/home/me" in p.read_bytes() for p in target.rglob("*") if p.is_file())
    (folder / "calibrator.json").write_text("{}")
    with pytest.raises(ValueError, match="not a calibrator"):
        export_model(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.filterwarnings("ignore::FutureWarning")  # nnU-Net looks into all it ships
def test_model_of_another_network_is_not_exported(model, tmp_path, monkeypatch):
    folder, save = model
    shared = tmp_path / "shared"
    save(trainer_name="nnUNetTrainerOfNobody")
    with pytest.raises(ValueError, match="nnUNetTrainerOfNobody, which is not found here"):
        export_model(folder, shared)
    monkeypatch.setattr(searched_first, "OwnNetworkTrainer", OwnNetworkTrainer, raising=False)
    save(trainer_name="OwnNetworkTrainer")
    with pytest.raises(ValueError, match="OwnNetworkTrainer builds a network of its own"):
        export_model(folder, shared)
    save()
    wider = folder / "plans.json"
    wider.write_text(wider.read_text().replace("[2, 4, 4]", "[2, 4, 8]"))
    with pytest.raises(ValueError, match="weights do not fit the network of"):
        export_model(folder, shared)
    assert not shared.exists()


def test_folders_that_are_no_model(tmp_path):
    with pytest.raises(ValueError, match=r"holds no plans\.json"):
        export_model(tmp_path, tmp_path / "shared")
    for name in ("plans.json", "dataset.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="no fold_X/checkpoint_final"):
        export_model(tmp_path, tmp_path / "shared")
    assert not (tmp_path / "shared").exists()
    (tmp_path / "fold_0").mkdir()
    with pytest.raises(ValueError, match="is its training finished"):
        warmstart(tmp_path / "fold_0", "901", "2d", 0, "nnUNetTrainerCRaC")


@pytest.mark.parametrize(
    ("place", "key", "value", "said"),
    [
        ("dataset_json", "labels", {"background": 0, "b": 1}, "labels: labels was {'background"),
        ("dataset_json", "channel_names", {"0": "CT"}, "labels: channel_names was"),
        ("plans", "transpose_forward", [2, 0, 1], "plans: transpose_forward was [0, 1, 2]"),
        ("2d", "patch_size", [16, 16], "configuration: patch_size was [8, 8], is [16, 16]"),
        ("2d", "architecture", {"n_stages": 4}, "configuration: architecture was"),
        (None, "fold", 1, "it was trained on fold 0, whose training cases fold 1 validates on"),
    ],
)
def test_warm_start_refuses_what_differs(place, key, value, said):
    new = deepcopy(INIT)
    places = {None: new, "2d": new["plans"]["configurations"]["2d"]}
    places.get(place, new.get(place))[key] = value
    (sentence,) = unlike(INIT, new)
    assert sentence.startswith(said)


@pytest.mark.parametrize("enabled", ["1", None])
def test_the_trainer_that_a_warm_start_asks_leaves_nothing(monkeypatch, enabled):
    """No folder, and no run of W&B."""
    monkeypatch.setenv("nnUNet_results", "/mine")
    if enabled is None:
        monkeypatch.delenv("nnUNet_wandb_enabled", raising=False)
    else:
        monkeypatch.setenv("nnUNet_wandb_enabled", enabled)
    with _results_elsewhere():
        folder = Path(os.environ["nnUNet_results"])
        assert MetaLogger(str(folder), False).loggers == []
    assert not folder.exists()
    assert os.environ["nnUNet_results"] == "/mine"
    assert os.environ.get("nnUNet_wandb_enabled") == enabled


def test_warm_start_accepts_what_only_trains_otherwise():
    assert unlike(INIT, {**INIT, "configuration": "2d_crac", "fold": "0"}) == []
