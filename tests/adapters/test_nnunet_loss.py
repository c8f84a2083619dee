"""What is added to nnU-Net's loss, and how its trainers are found."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from segcal.adapters.nnunet.discovery import ensure_env, ext_path, require_paths
from segcal.adapters.nnunet.running import Budget, check_train
from segcal.objective import Objective
from segcal.penalties.crac import CRaC
from segcal.penalties.nacl import NACL
from tests.conftest import close


class HostLoss(nn.Module):
    """Stands for nnU-Net's loss: takes heads and targets as nnU-Net gives them."""

    def forward(self, output, target):
        heads = output if isinstance(output, (list, tuple)) else [output]
        return sum(h.float().square().mean() for h in heads)


@pytest.fixture(scope="module")
def trainers():
    return importlib.import_module("segcal.adapters.nnunet.trainers")  # seconds, once


def batch():
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(2, 3, 8, 8, generator=generator)
    half = torch.randn(2, 3, 4, 4, generator=generator)
    target = torch.randint(0, 3, (2, 1, 8, 8), generator=generator).to(torch.int16)
    target[0, 0, :2] = 3  # ignore label
    return [full, half], [target, target[..., ::2, ::2]]


@pytest.mark.parametrize("deep_supervision", [True, False])
def test_penalties_see_the_full_resolution_head(trainers, deep_supervision):
    heads, targets = batch()
    penalties = Objective({"nacl": NACL(3, ignore_index=3), "crac": CRaC(3, ignore_index=3)})
    loss = trainers.PenalisedLoss(HostLoss(), penalties)
    output, target = (heads, targets) if deep_supervision else (heads[0], targets[0])
    labels = targets[0][:, 0].long()
    base = HostLoss()(output, target)
    close(loss(output, target), base + penalties(heads[0], labels), rtol=1e-6)
    assert penalties.terms["crac"].count.sum() == 0  # training batches are not observed
    loss.start_pass(observing=True)
    loss(output, target)
    assert penalties.terms["crac"].count.sum() == int((labels != 3).sum())
    means = loss.means()
    assert list(means) == ["base", "nacl", "crac"]
    close(means["base"], base, rtol=1e-6)


def test_the_folder_for_nnunet_holds_one_module():
    assert [p.name for p in ext_path().iterdir() if p.name != "__pycache__"] == [
        "segcal_nnunet_trainers.py"
    ]


def test_the_users_own_trainer_folders_stay(monkeypatch):
    monkeypatch.setenv("nnUNet_extTrainer", "/mine")
    ensure_env()
    ensure_env()
    assert os.environ["nnUNet_extTrainer"].split(os.pathsep) == [str(ext_path()), "/mine"]


FIND = """
import pickle, sys
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name as find
if sys.argv[1] == "register":
    from segcal.adapters.nnunet.discovery import register
    register()
for name in ("nnUNetTrainerCRaC", "nnUNetTrainerNACL"):
    cls = find(name)
    assert cls.__module__ == "segcal.adapters.nnunet.trainers", cls.__module__
    assert pickle.loads(pickle.dumps(cls)) is cls
print("torchvision" in sys.modules)
"""


@pytest.mark.parametrize("route", ["register", "environment"])
def test_nnunet_finds_the_trainers(route, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "nnUNet_extTrainer"}
    if route == "environment":
        environment["nnUNet_extTrainer"] = str(ext_path())
    done = subprocess.run(
        [sys.executable, "-c", FIND, route], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    if route == "register":  # the search ends before nnU-Net's other trainers are imported
        assert done.stdout.splitlines()[-1] == "False"


def test_classes_are_picklable(trainers):
    for name in trainers.__all__:
        cls = getattr(trainers, name)
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert "__" not in name  # nnU-Net splits folder names there


def test_budget_needs_nnunets_attributes():
    class Trainer:
        num_epochs = 1000
        current_epoch = 7

        def on_epoch_start(self):
            self.drawn = torch.rand(1).item()

    trainer = Trainer()
    Budget(epochs=3, seed=5).apply(trainer)
    assert trainer.num_epochs == 3
    trainer.on_epoch_start()
    first = trainer.drawn
    torch.rand(10)
    trainer.on_epoch_start()
    assert trainer.drawn == first
    trainer.current_epoch = 8
    trainer.on_epoch_start()
    assert trainer.drawn != first
    with pytest.raises(AttributeError, match="no save_every any more"):
        Budget(save_every=1).apply(trainer)


def test_missing_paths_are_named(monkeypatch):
    monkeypatch.delenv("nnUNet_results", raising=False)
    with pytest.raises(ValueError, match="nnUNet_results is not set"):
        require_paths("nnUNet_results")
    monkeypatch.setenv("nnUNet_preprocessed", "/not/there")
    with pytest.raises(ValueError, match="nnUNet_preprocessed=/not/there: no such folder"):
        require_paths("nnUNet_preprocessed")


def test_a_budget_does_not_reach_several_gpus(monkeypatch, tmp_path):
    for name in ("nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, str(tmp_path))
    arguments = ["27", "2d", "0", "-num_gpus", "2"]
    check_train(arguments, Budget())
    for two in (arguments, [*arguments[:3], "-num_gpus=2"]):
        with pytest.raises(ValueError, match="-num_gpus: --epochs"):
            check_train(two, Budget(epochs=3))
    check_train([*arguments[:3], "-num_gpus", "1"], Budget(epochs=3))


def test_the_command_says_what_is_missing():
    command = Path(sys.executable).parent / "segcal"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("nnUNet_")}
    done = subprocess.run(
        [command, "nnunet", "train", "27", "2d", "0"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nnUNet_preprocessed is not set" in done.stderr
