"""Real nnU-Net with two heads: train, kill, resume, predict, export, calibrate, start warm."""

from __future__ import annotations

import json
import signal
import sys

import numpy as np
import pytest
import torch

from segcal.adapters.nnunet.discovery import ext_path
from segcal.io.volumes import read_volume
from segcal.repair.saved import read_calibrator
from tests.adapters.nnunet_commands import BIN, BUDGET, RUN, TRAIN
from tests.adapters.test_nnunet_training import DIES, prediction_arguments
from tests.alike import TABLES, differences

pytestmark = pytest.mark.slow

TRAINER = "nnUNetTrainerTwoHeadsConfidence"
SEGCAL = (BIN / "segcal", "nnunet")


@pytest.fixture(scope="module")
def trained(workspace):
    """A finished training, calibrated by its validation: the folder of its fold."""
    workspace.run(*TRAIN, "-tr", TRAINER, "--seed", 1, *BUDGET, "--calibrate")
    return workspace.root / "results" / RUN.format(TRAINER)


def checkpoint(folder):
    return torch.load(folder / "checkpoint_final.pth", weights_only=False)


def probabilities(path):
    with np.load(path) as file:
        return file["probabilities"]


def test_both_heads_are_trained(workspace, trained):
    records = workspace.records(TRAINER)
    assert [r["epoch"] for r in records] == [0, 1, 2, 3]
    terms = {"decision/base", "probability/svls", "probability/confidence"}
    assert set(records[0]["train"]) == set(records[0]["val"]) == terms
    lam = np.array([r["probability/confidence"]["lam"] for r in records])
    assert (lam >= 0).all()
    assert lam[-1].max() > 0
    content = checkpoint(trained)
    state = content["init_args"]["segcal"]["state"]
    assert state["terms.probability/confidence.lam"].tolist() == lam[-1].tolist()
    weights = content["network_weights"]
    heads = [weights[f"decoder.seg_layers.1.{h}.weight"] for h in ("decision", "probability")]
    assert heads[0].shape == heads[1].shape == (4, 4, 1, 1)
    assert not torch.equal(*heads)  # they were, when the training began
    assert weights["decoder.seg_layers.0.weight"].shape == (4, 8, 1, 1)  # of lower resolution
    assert "decision: Dice + cross-entropy; probability: svls + confidence" in log_of(trained)


def log_of(folder):
    return "".join(path.read_text() for path in sorted(folder.glob("training_log_*.txt")))


def test_killed_and_resumed_equals_uninterrupted(workspace, trained):
    results = workspace.root / "resumed_heads"
    environment = {"nnUNet_results": str(results)}
    command = (*TRAIN, "-tr", TRAINER, "--seed", 1, *BUDGET)
    killed = (sys.executable, "-c", DIES, *command[1:])
    workspace.fail(*killed, code=-signal.SIGKILL, **environment)
    assert len(workspace.records(TRAINER, "resumed_heads")) == 2
    workspace.run(*command, "--c", **environment)
    records = [workspace.records(TRAINER, root) for root in ("resumed_heads", "results")]
    assert not differences(*records, **TABLES)
    folds = (results / RUN.format(TRAINER), trained)
    assert not differences(*(checkpoint(fold)["network_weights"] for fold in folds))


@pytest.fixture(scope="module")
def exported(workspace, trained):
    """Stock models of both heads."""
    found = {}
    for head in ("decision", "probability"):
        shared = workspace.root / f"of_{head}"
        workspace.run(*SEGCAL, "export", trained.parent, shared, "--head", head)
        found[head] = (shared / RUN.format("nnUNetTrainer")).parent
    return found


def test_predictions_are_those_of_the_stock_models_of_both_heads(workspace, trained, exported):
    arguments = prediction_arguments(workspace)
    ours = workspace.root / "two_heads"
    raw = ["--calibrator", "none"]  # there is one of the training
    workspace.run(
        *SEGCAL, "predict", "-o", ours, *arguments, "-tr", TRAINER, *raw, "--save-logits",
        "--per-fold",
    )  # fmt: skip
    stock = {}
    for head, model in exported.items():
        stock[head] = workspace.root / f"by_{head}"
        workspace.run(
            *SEGCAL, "predict-from-modelfolder", "-o", stock[head], "-i", arguments[1],
            "-m", model, "-f", 0, *raw, *arguments[-6:],
        )  # fmt: skip
    assert json.loads((ours / "segcal_predict.json").read_text())["heads"] == 2
    names = sorted(p.stem for p in ours.glob("*.npz"))
    assert len(names) == 2
    for name in names:
        p = probabilities(ours / f"{name}.npz")
        np.testing.assert_array_equal(p, probabilities(stock["probability"] / f"{name}.npz"))
        np.testing.assert_array_equal(p, probabilities(ours / "fold_0" / f"{name}.npz"))
        with np.load(ours / "logits" / f"{name}.npz") as file:
            softmax = torch.softmax(torch.as_tensor(file["logits"]), 0)
        np.testing.assert_allclose(softmax, p, rtol=1e-5, atol=1e-7)
        masks = [read_volume(x / f"{name}.nii.gz").array for x in (ours, stock["decision"])]
        np.testing.assert_array_equal(*masks)
        assert (masks[0] != p.argmax(0)).any()
    report = workspace.root / "report_of_heads"
    labels = workspace.data / "labelsTs"
    out = workspace.run(BIN / "segcal", "evaluate", ours, labels, "-o", report)
    summary = json.loads((report / "summary.json").read_text())
    assert summary["cases"]["evaluated"] == 2
    assert "post-processed" not in out


def test_stock_commands_predict_with_the_decision_head(workspace, trained, exported):
    arguments = [*prediction_arguments(workspace), "-npp", 0, "-nps", 0, "--save_probabilities"]
    folders = [workspace.root / name for name in ("stock_of_two", "stock_of_decision")]
    environments = (
        {"nnUNet_extTrainer": str(ext_path())},
        {"nnUNet_results": str(exported["decision"].parent.parent)},
    )
    trainers = (TRAINER, "nnUNetTrainer")
    for folder, trainer, environment in zip(folders, trainers, environments, strict=True):
        workspace.run(
            BIN / "nnUNetv2_predict", "-o", folder, *arguments, "-tr", trainer, **environment
        )
    names = sorted(p.name for p in folders[0].glob("*.npz"))
    assert len(names) == 2
    for name in names:
        np.testing.assert_array_equal(*(probabilities(folder / name) for folder in folders))
    loaded = torch.load(exported["decision"] / "fold_0" / "checkpoint_final.pth", weights_only=True)
    assert loaded["segcal"]["head"] == "decision"


def test_what_goes_along_with_a_head(workspace, trained, exported):
    decision, probability = (exported[head] for head in ("decision", "probability"))
    assert (probability / "fold_0" / "calibrator.json").is_file()
    assert not (decision / "fold_0" / "calibrator.json").exists()
    assert not (decision / "fold_0" / "validation").exists()
    assert not (probability / "fold_0" / "validation").exists()
    shared = workspace.root / "of_none"
    said = workspace.fail(*SEGCAL, "export", trained.parent, shared)
    assert "choose it with --head decision or probability" in said
    one = (workspace.root / "results" / RUN.format("nnUNetTrainerCRaC")).parent
    said = workspace.fail(*SEGCAL, "export", one, shared, "--head", "decision")
    assert "holds no decision head" in said
    assert not shared.exists()


def test_the_calibrator_is_of_the_probability_head(workspace, trained):
    """The validation, which it is fitted to, holds that head's probabilities."""
    validation = trained / "validation"
    assert json.loads((validation / "segcal_predict.json").read_text())["decision"] == (
        "decision head"
    )
    saved = read_calibrator(trained / "calibrator.json")
    assert saved.fitted_on["cases"] == sorted(p.stem for p in validation.glob("*.npz"))
    decided = 0
    for path in validation.glob("*.npz"):
        mask = read_volume(path.with_suffix(".nii.gz")).array
        decided += int((probabilities(path).argmax(0) != mask).sum())
    assert decided > 0
    dice = json.loads((validation / "summary.json").read_text())["foreground_mean"]["Dice"]
    workspace.run(*TRAIN, "-tr", TRAINER, "--val")  # nnU-Net's own, without probabilities
    alone = json.loads((validation / "summary.json").read_text())["foreground_mean"]["Dice"]
    assert alone == pytest.approx(dice, abs=0.01)  # sums of half precision
    calibrated = workspace.root / "calibrated_heads"
    workspace.run(
        *SEGCAL, "predict", "-o", calibrated, *prediction_arguments(workspace), "-tr", TRAINER,
        "--calibrator", "model", "--save-logits",
    )  # fmt: skip
    with np.load(calibrated / "logits" / "phantom_007.npz") as file:
        logits = torch.as_tensor(file["logits"])
    spacing = read_volume(calibrated / "phantom_007.nii.gz").geometry.spacing_mm
    expected = saved.calibrator.apply(logits[None], spacing_mm=spacing)[0]
    found = probabilities(calibrated / "phantom_007.npz")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_both_heads_start_with_the_weights_of_one(workspace):
    source = workspace.root / "results" / RUN.format("nnUNetTrainerCRaC")
    environment = {"nnUNet_results": str(workspace.root / "warm_heads")}
    workspace.run(
        *SEGCAL, "warmstart", source, "-d", 901, "-c", "2d_small", "-f", 0, "-tr", TRAINER,
        "--epochs", 1, **environment,
    )  # fmt: skip
    target = workspace.root / "warm_heads" / RUN.format(TRAINER)
    weights = torch.load(target / "checkpoint_latest.pth", weights_only=False)["network_weights"]
    before = checkpoint(source)["network_weights"]
    for head in ("decision", "probability"):
        found = weights[f"decoder.seg_layers.1.{head}.weight"]
        assert torch.equal(found, before["decoder.seg_layers.1.weight"])
    workspace.run(*TRAIN, "-tr", TRAINER, *BUDGET, "--c", **environment)
    (record,) = workspace.records(TRAINER, "warm_heads")
    assert record["epoch"] == 3


def test_a_schedule_goes_on_where_it_was(workspace):
    trainer = "nnUNetTrainerCRaCRamp"
    command = (*TRAIN, "-tr", trainer, "--seed", 1, *BUDGET)
    workspace.fail(sys.executable, "-c", DIES, *command[1:], code=-signal.SIGKILL)
    workspace.run(*command, "--c")
    records = workspace.records(trainer)
    assert [r["weights"]["crac"] for r in records] == pytest.approx([0, 0.25 / 0.3, 1, 1])
    assert all(r["train"]["crac"] > 0 for r in records)  # terms are told without weights
    folder = workspace.root / "results" / RUN.format(trainer)
    assert "segcal weights by schedule: crac 0.8333" in log_of(folder)
    settings = checkpoint(folder)["init_args"]["segcal"]["settings"]
    assert settings["crac"]["schedule"]["end"] == 0.3
