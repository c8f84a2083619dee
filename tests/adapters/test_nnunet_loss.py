"""What is added to nnU-Net's loss, and how its trainers are found."""

# ruff: noqa: NPY002 - nnU-Net draws from the global generator
from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from segcal.adapters.nnunet import host_loss, settings
from segcal.adapters.nnunet import loss as nnunet_loss
from segcal.adapters.nnunet.best import BestCalibrated
from segcal.adapters.nnunet.discovery import ensure_env, ext_path, require_paths
from segcal.adapters.nnunet.labels import Labels
from segcal.adapters.nnunet.running import Budget
from segcal.losses.cross_entropy import CrossEntropy
from segcal.losses.focal import Focal, focal
from segcal.metrics.ece import ece
from segcal.objective import Objective
from segcal.penalties.bwcr import BWCR
from segcal.penalties.crac import CRaC
from segcal.penalties.nacl import NACL
from segcal.recipes import Recipe, load_recipe, names
from tests.conftest import close


class HostLoss(nn.Module):
    """Stands for nnU-Net's loss: takes heads and targets as nnU-Net gives them."""

    def forward(self, output, target):
        heads = output if isinstance(output, (list, tuple)) else [output]
        return sum(h.float().square().mean() for h in heads)


def labels_of(k, *, per_channel=False, ignore_index=None, channels=1):
    return Labels(k, per_channel=per_channel, ignore_index=ignore_index, channels=channels)


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
def test_penalties_see_the_full_resolution_head(deep_supervision):
    heads, targets = batch()
    penalties = Objective({"nacl": NACL(3, ignore_index=3), "crac": CRaC(3, ignore_index=3)})
    loss = nnunet_loss.PenalisedLoss(HostLoss(), labels_of(3, ignore_index=3), penalties)
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


def test_means_are_over_samples():
    loss = nnunet_loss.PenalisedLoss(HostLoss(), labels_of(2))
    for n, value in ((3, 1.0), (1, 3.0)):
        loss(torch.full((n, 2, 4), value), torch.zeros(n, 1, 4))
    assert loss.means() == {"base": (3 * 1.0 + 1 * 9.0) / 4}  # squares
    assert loss.means(lambda x: 2 * x) == {"base": 3.0}  # of two ranks with the same batches


def test_regions_and_their_ignore_mask():
    target = torch.zeros(1, 3, 4, dtype=torch.bool)
    target[0, 0, :2] = target[0, 1, 1] = target[0, 2, 3] = True  # the last is the mask
    got = labels_of(2, per_channel=True, ignore_index=7).of(target)
    assert got.tolist() == [[[1, 1, 0, 7], [0, 1, 0, 7]]]
    assert labels_of(3, per_channel=True).of(target).tolist() == target.long().tolist()
    assert labels_of(3).of(target[:, :1].to(torch.int16)).tolist() == [[1, 1, 0, 0]]


def test_ece_of_a_pass():
    heads, targets = batch()
    loss = nnunet_loss.PenalisedLoss(HostLoss(), labels_of(3, ignore_index=3))
    loss.start_pass(measuring=True)
    for scale in (1.0, 4.0):
        loss([scale * h for h in heads], targets)
    probs = torch.cat([(s * heads[0]).softmax(1) for s in (1.0, 4.0)])
    labels = targets[0][:, 0].long()
    expected = ece(probs, torch.cat([labels, labels]), ignore_index=3)
    close(loss.ece(torch.device("cpu")), expected, rtol=1e-6)
    assert expected > 0.1


def test_ece_of_regions_is_that_of_every_channels_decision():
    logits = torch.tensor([[[2.0, -2.0], [2.0, 2.0]]])  # sigmoid(2) = 0.8808, (N, R, S)
    labels = torch.tensor([[[1, 0], [1, 0]]])  # three of four decisions are right
    sums = nnunet_loss.calibration(logits, labels, labels_of(2, per_channel=True))
    assert sums[0].sum() == 4
    close((sums[1] - sums[2]).abs().sum() / 4, 0.8807970779778823 - 0.75, rtol=1e-6)
    labels[0, 1, 1] = 5
    sums = nnunet_loss.calibration(logits, labels, labels_of(2, per_channel=True, ignore_index=5))
    assert sums[[0, 2]].sum(1).tolist() == [3, 3]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_ece_of_logits_that_are_not_finite(per_channel, value):
    """One overflow in half precision must not stop a training, nor look calibrated."""
    heads, targets = batch()
    layout = labels_of(3, per_channel=per_channel, ignore_index=3)
    if per_channel:
        targets = [(t == torch.arange(4).view(1, 4, 1, 1)) for t in targets]
    loss = nnunet_loss.PenalisedLoss(HostLoss(), layout)
    loss.start_pass(measuring=True)
    loss(heads, targets)
    heads[0][0, 0, :2] = value  # ignored voxels do not count
    loss(heads, targets)
    assert 0 < loss.ece(torch.device("cpu")) < 1
    heads[0][0, 0, 5] = float("nan")
    loss(heads, targets)
    assert np.isnan(loss.ece(torch.device("cpu")))


def dice_and_ce(**options):
    from nnunetv2.training.loss.compound_losses import DC_and_CE_loss
    from nnunetv2.training.loss.dice import MemoryEfficientSoftDiceLoss

    dice = {"batch_dice": False, "smooth": 1e-5, "do_bg": False, "ddp": False}
    return DC_and_CE_loss(dice, {}, dice_class=MemoryEfficientSoftDiceLoss, **options)


def test_focal_takes_the_place_of_cross_entropy():
    """On nnU-Net's own loss, ignore label included."""
    (x, _), (target, _) = batch()
    y = target[:, 0].long()
    instead = Objective({"focal": Focal(3, gamma=2.0, ignore_index=3)})
    host = dice_and_ce(ignore_label=3)
    base = host(x, target) - F.cross_entropy(x, y, ignore_index=3)  # Dice alone
    loss = host_loss.HeadLoss(host, instead, labels_of(3, ignore_index=3))
    close(loss(x, target), base + focal(x, y, gamma=2.0, ignore_index=3), rtol=1e-5)
    host_loss.without(host, "weight_dice")
    close(loss(x, target), focal(x, y, gamma=2.0, ignore_index=3), rtol=1e-6)
    with pytest.raises(AttributeError, match="DC_and_CE_loss has no weight_x any more"):
        host_loss.without(host, "weight_x")


class CrossEntropyHost(nn.Module):
    def forward(self, output, target):
        return F.cross_entropy(output, target[:, 0].long())


def test_two_views_are_those_of_the_objective():
    """A batch of twice the samples gives what two calls of the model give."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 1, 9, 8, generator=generator)
    labels = torch.randint(0, 3, (2, 9, 8), generator=generator)
    model = nn.Conv2d(1, 3, 3, padding=1)
    objective = Objective({"ce": CrossEntropy(3), "bwcr": BWCR(3, alpha=0.5)}, {"bwcr": 2.0})
    torch.manual_seed(3)
    expected, values = objective.step(model, images, labels)
    loss = nnunet_loss.PenalisedLoss(
        CrossEntropyHost(), labels_of(3), None, (2.0, "bwcr", BWCR(3, alpha=0.5))
    )
    torch.manual_seed(3)
    seen = loss.prepare(images)
    assert seen.shape == (4, 1, 9, 8)
    close(loss(model(seen), labels[:, None]).double(), expected.double(), rtol=1e-5)
    close(list(loss.means().values()), [values["ce"], values["bwcr"]], rtol=1e-5)
    loss.eval()
    assert loss.prepare(images) is images  # validation compares no views
    close(loss(model(images), labels[:, None]), F.cross_entropy(model(images), labels), rtol=1e-6)


def test_views_move_the_labels_of_a_cascade_without_changing_them():
    images = torch.rand(2, 3, 8, 8)
    images[:, 1:] = (images[:, 1:] > 0.5).float()  # one-hot labels of the stage before
    loss = nnunet_loss.PenalisedLoss(
        CrossEntropyHost(), labels_of(3, channels=1), None, (1.0, "bwcr", BWCR(3))
    )
    seen = loss.prepare(images)
    assert set(seen[:, 1:].unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(seen[:2, :1], images[:, :1])


def test_half_precision():
    """As under autocast: logits in half, targets int16."""
    heads, targets = batch()
    penalties = Objective({"crac": CRaC(3, ignore_index=3)})
    loss = nnunet_loss.PenalisedLoss(HostLoss(), labels_of(3, ignore_index=3), penalties)
    loss.start_pass(measuring=True, observing=True)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = [(300 * h).to(dtype).requires_grad_() for h in heads]
            value = loss(output, targets)
        value.backward()
        assert value.dtype == torch.float32
        assert value.isfinite()
        assert output[0].grad.isfinite().all()
    assert all(map(torch.isfinite, torch.tensor(list(loss.means().values()))))


PARTS = {
    "fl": ({"focal": 1.0}, {}),
    "svls": ({"svls": 1.0}, {}),
    "ls": ({"label_smoothing": 1.0}, {}),
    "flsd": ({"flsd": 1.0}, {}),
    "crac": ({}, {"crac": 1.0}),
    "ecp": ({}, {"entropy": 1.0}),
    "acls": ({}, {"acls": 1.0}),
    "ml1_ace": ({}, {"ml1_ace": 1.0}),  # a third each of Dice, cross-entropy and this
    "ml1_ace_soft": ({}, {"ml1_ace_soft": 1.0}),
    "mmce": ({}, {"mmce": 0.1}),
    "dice_ce": ({}, {}),
}


@pytest.mark.parametrize("name", PARTS)
def test_places_of_a_recipes_terms(name):
    parts = settings.parts(load_recipe(name))
    assert (parts.instead, parts.added) == PARTS[name]


def test_every_recipe_with_a_name_is_two_trainers(trainers):
    short = [r.trainer for r in map(load_recipe, names("recipes")) if r.trainer]
    assert len(set(short)) == len(short)
    assert {"FL", "FLSD", "LS", "SVLS", "ECP", "LogitNorm", "MbLS"} <= set(short)
    assert {"NACL", "BWCR", "CALS", "CALSHR", "CRaC", "mL1ACE", "mL1ACESoft"} <= set(short)
    expected = {f"nnUNetTrainer{s}{suffix}" for s in short for suffix in ("", "_CE")}
    assert set(trainers.__all__) == expected
    assert trainers.nnUNetTrainerCRaC.dice
    assert not trainers.nnUNetTrainerCRaC_CE.dice


@pytest.mark.parametrize("one", [1, [1], "1"])
def test_channels_are_named_however_nnunet_takes_a_label(trainers, one):
    labels = {"b": 2, "background": 0, "a": one, "ignore": 3}
    assert trainers._channel_names(labels, regions=False) == ["background", "a", "b"]
    regions = {"background": 0, "core": 2, "whole": [1, 2], "ignore": 3}
    assert trainers._channel_names(regions, regions=True) == ["core", "whole"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"nalc": {"alpha": 1}}, "unknown nalc; this trainer takes crac, multiplier_source, vol"),
        ({"multiplier_source": "test"}, "multiplier_source: Input should be 'val_patches', 'fix"),
        ({"volumes_every": 0}, "volumes_every: Input should be greater than or equal to 1"),
        ({"crac": 3.0}, "crac: expected arguments by name"),
        (["crac"], r"expected an object, got \['crac'\]"),
    ],
)
def test_settings_that_are_refused(content, message):
    with pytest.raises(ValueError, match=message):
        settings.read_settings(content, settings.parts(load_recipe("crac")))


def test_terms_of_other_trainers_are_left_to_them():
    content = {"crac": {"margin_inner": 3.0}, "nacl": {"alpha": 1}, "epochs": 7, "iterations": 9}
    for name, arguments in (("crac", {"margin_inner": 3.0}), ("nacl", {"alpha": 1})):
        placed = settings.parts(load_recipe(name))
        got, _, of_terms = settings.read_settings(content, placed)
        assert of_terms == {name: arguments}
        assert settings.of_other_trainers(content, placed) == [{"crac": "nacl"}.get(name, "crac")]
        assert (got.epochs, got.iterations) == (7, 9)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ({"crac": {"margin_inner": 3.0}, "nacl": {}}, ""),
        ({"multiplier_source": "volumes"}, ""),
        ({"crac": {"margin_iner": 3.0}}, "takes no margin_iner; it takes num_classes"),
        ({"nacl": {"alpha": -1.0}, "crac": {}}, "alpha"),
        ({"crc": {}}, "iterations; is crac meant?"),
        ({"epochs": 0}, "epochs: Input should be greater than or equal to 1"),
        (3, "expected an object, got 3"),
    ],
)
def test_what_is_wrong_with_a_block_of_the_plans(content, problem):
    found = settings.problem_of_block(content)
    assert problem in found
    assert bool(problem) == bool(found)


def test_nnunet_weighs_dice_like_cross_entropy():
    recipe = Recipe(base={"cross_entropy": 1.0, "soft_dice": 2.0})
    with pytest.raises(ValueError, match="weighs them alike, the recipe has 2 and 1"):
        settings.parts(recipe)


def test_settings():
    crac = {"margin_inner": 3.0, "weight": 0.5}
    content = {"crac": crac, "multiplier_source": "volumes", "volumes_every": 2}
    placed = settings.parts(load_recipe("crac"))
    got, weighed, arguments = settings.read_settings(content, placed)
    assert arguments == {"crac": {"margin_inner": 3.0}}
    assert placed == settings.Parts({}, {"crac": 1.0})
    assert weighed == settings.Parts({}, {"crac": 0.5})
    assert weighed.formula(dice=True) == "Dice + cross-entropy + 0.5 crac"
    assert (got.multiplier_source, got.volumes_every, got.deep_supervision) == ("volumes", 2, True)


def test_best_calibrated_epoch_has_a_dice_near_the_best():
    best = BestCalibrated(tolerance=0.02)
    nan = float("nan")
    epochs = [  # ECE, Dice, chosen
        (0.01, 0.10, True),  # the first
        (0.05, 0.50, True),  # the first finds nothing, compared with this
        (0.04, 0.49, True),  # nearly as good, better calibrated
        (0.001, 0.30, False),  # calibrated, but finds less
        (nan, 0.90, False),
        (0.06, nan, False),
        (0.06, 0.89, True),  # the chosen one is now far below the best Dice
        (0.06, 0.90, False),  # not better
    ]
    assert [best.update(e, d) for e, d, _ in epochs] == [c for *_, c in epochs]
    assert (best.ece, best.dice, best.top_dice) == (0.06, 0.89, 0.90)


def test_no_epoch_is_best_calibrated_that_finds_nothing():
    best = BestCalibrated()
    assert not best.update(0.001, 0.0)
    assert not best.update(0.001, 0.04)  # below the floor
    assert not best.update(0.001, 0.30, collapsed=True)
    assert best.update(0.2, 0.30)
    assert not best.update(0.1, 0.30, collapsed=True)
    assert best.update(0.1, 0.30)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=3))
def test_tiles_keep_every_voxel_once(axes):
    from segcal.adapters.nnunet.sources import tiles

    shape, patch = zip(*axes, strict=True)
    seen = torch.zeros(shape, dtype=torch.long)
    for place, keep in tiles(shape, patch):
        assert tuple(s.stop - s.start for s in place) == patch
        pairs = zip(place, keep, strict=True)
        index = tuple(slice(p.start + k.start, p.start + k.stop) for p, k in pairs)
        assert all(0 <= i.start < i.stop <= n for i, n in zip(index, shape, strict=True))
        seen[index] += 1
    assert (seen == 1).all()


def test_patches_depend_on_their_seed_alone():
    from segcal.adapters.nnunet.sources import patches

    class Loader:
        def generate_train_batch(self):
            return np.random.rand()

    np.random.seed(7)
    expected = np.random.rand(3).tolist()
    np.random.seed(7)
    drawn = [np.random.rand()]
    first = list(patches(Loader(), 3, (0, 1)))
    drawn += [np.random.rand()]
    again = list(patches(Loader(), 3, (0, 1)))
    drawn += [np.random.rand()]
    assert drawn == expected  # nnU-Net's own drawing is not moved
    assert first == again
    assert len(set(first)) == 3
    assert not set(first) & set(patches(Loader(), 3, (0, 2)))


def test_calibration_cases_are_of_their_own():
    from segcal.adapters.nnunet.sources import calibration_cases

    assert calibration_cases({"train": ["a"], "val": ["b"]}, ["a"], ["b"]) == []
    assert calibration_cases({"calib": ["c"]}, ["a"], ["b"]) == ["c"]
    with pytest.raises(ValueError, match='"calib" cases are also in train or val: a, b;'):
        calibration_cases({"calib": ["c", "b", "a"]}, ["a"], ["b"])
    with pytest.raises(ValueError, match='"calib" is empty'):
        calibration_cases({"calib": []}, ["a"], ["b"])


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
import multiprocessing, pickle, sys
from nnunetv2.utilities.find_objects import recursive_find_trainer_class_by_name as find
if sys.argv[1] == "register":
    from segcal.adapters.nnunet.discovery import ensure_env
    from segcal.adapters.nnunet.registration import register
    register()
    ensure_env()
for short in sys.argv[2].split(","):
    cls = find("nnUNetTrainer" + short)
    assert cls.__module__ == "segcal.adapters.nnunet.trainers", cls.__module__
    assert pickle.loads(pickle.dumps(cls)) is cls
with multiprocessing.get_context("spawn").Pool(1) as pool:  # as nnU-Net does on several GPUs
    assert pool.apply(find, (cls.__name__,)) is cls
print("torchvision" in sys.modules)
"""


@pytest.mark.parametrize("route", ["register", "environment"])
def test_nnunet_finds_the_trainers(route, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "nnUNet_extTrainer"}
    if route == "environment":
        environment["nnUNet_extTrainer"] = str(ext_path())
    done = subprocess.run(
        [sys.executable, "-c", FIND, route, "CRaC,mL1ACE_CE"],
        capture_output=True,
        text=True,
        env=environment,
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
        local_rank = 0

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
    for attribute in ("current_epoch", "local_rank"):
        setattr(trainer, attribute, getattr(trainer, attribute) + 1)
        trainer.on_epoch_start()
        assert trainer.drawn != first
        first = trainer.drawn
    with pytest.raises(AttributeError, match="no save_every any more"):
        Budget(save_every=1).apply(trainer)


def test_missing_paths_are_named(monkeypatch):
    monkeypatch.delenv("nnUNet_results", raising=False)
    with pytest.raises(ValueError, match="nnUNet_results is not set"):
        require_paths("nnUNet_results")
    monkeypatch.setenv("nnUNet_preprocessed", "/not/there")
    with pytest.raises(ValueError, match="nnUNet_preprocessed=/not/there: no such folder"):
        require_paths("nnUNet_preprocessed")


def test_the_command_says_what_is_missing():
    command = Path(sys.executable).parent / "segcal"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("nnUNet_")}
    done = subprocess.run(
        [command, "nnunet", "train", "27", "2d", "0"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 2
    assert "nnUNet_preprocessed is not set" in done.stderr
