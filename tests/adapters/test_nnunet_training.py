"""Real nnU-Net, through its own commands: train, kill, resume, predict, evaluate."""

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
from tests.alike import TABLES, differences

pytestmark = pytest.mark.slow

TRAINER = """
import sys
from segcal.adapters.nnunet.registration import register
register()
from nnunetv2.run.run_training import get_trainer_from_args
import torch
cpu = torch.device("cpu")
trainer = get_trainer_from_args("901", "2d_small", 0, "nnUNetTrainerCRaC", device=cpu)
trainer.initialize()
"""
DIES = """
import os, signal, sys
from segcal.commands.main import app

epochs = []
def dies(event, arguments):
    if event == "open" and arguments[1] == "a" and str(arguments[0]).endswith("segcal_log.jsonl"):
        if len(epochs) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        epochs.append(arguments[0])

sys.addaudithook(dies)
app()
"""
"""The command, killed when it is about to log its third epoch."""


def test_training_learns_multipliers(workspace):
    records = workspace.records("nnUNetTrainerCRaC")
    assert [r["epoch"] for r in records] == [0, 1, 2, 3]
    lam = np.array([r["crac"]["lam"] for r in records])
    assert lam.shape == (4, 2, 4)
    assert (np.diff(lam, axis=0) > 0).all()  # z >= 0: they can only grow
    assert (lam[0] > 1e-6).all()
    assert all(min(r["crac"]["count"]) > 0 for r in records)
    assert set(records[0]["train"]) == {"base", "crac"}
    assert all(0 < r["ece"] < 1 for r in records)
    checkpoint = torch.load(
        workspace.root / "results" / RUN.format("nnUNetTrainerCRaC") / "checkpoint_final.pth",
        weights_only=False,
    )
    state = checkpoint["init_args"]["segcal"]["state"]
    assert state["terms.crac.lam"].tolist() == records[-1]["crac"]["lam"]
    assert state["terms.crac.rho"].tolist() == records[-1]["crac"]["rho"]


def test_killed_and_resumed_equals_uninterrupted(workspace):
    trainer = "nnUNetTrainerCRaC"
    results = workspace.root / "resumed"
    environment = {"nnUNet_results": str(results)}
    command = (*TRAIN, "-tr", trainer, "--seed", 1, *BUDGET)
    killed = (sys.executable, "-c", DIES, *command[1:])
    workspace.fail(*killed, code=-signal.SIGKILL, **environment)
    assert len(workspace.records(trainer, "resumed")) == 2
    assert not (results / RUN.format(trainer) / "checkpoint_final.pth").exists()
    workspace.run(*command, "--c", **environment)
    records = [workspace.records(trainer, root) for root in ("resumed", "results")]
    assert not differences(*records, **TABLES)
    weights = [
        torch.load(root / RUN.format(trainer) / "checkpoint_final.pth", weights_only=False)
        for root in (workspace.root / "results", results)
    ]
    assert not differences(*(saved["network_weights"] for saved in weights))


def test_other_settings_are_refused_on_resume(workspace):
    """A checkpoint of other penalties is not silently continued."""
    script = (
        TRAINER
        + """
path = sys.argv[1]
trainer.load_checkpoint(path)
lam = trainer.loss.penalties.terms["crac"].lam.clone()
assert (lam > 1e-6).all()
trainer.penalty_settings["crac"]["margin_inner"] = 3.0
trainer.load_checkpoint(path)  # as --val does
try:
    trainer.run_training()
except ValueError as error:
    assert "crac: margin_inner = 5.0, not 3.0. Continue with" in str(error), error
else:
    raise SystemExit("other margins were accepted")
checkpoint = torch.load(path, weights_only=False)
del checkpoint["init_args"]["segcal"]
torch.save(checkpoint, sys.argv[2])
trainer.load_checkpoint(sys.argv[2])  # a stock checkpoint: said, not refused
trainer.print_to_log_file("done")
"""
    )
    fold = workspace.root / "results" / RUN.format("nnUNetTrainerCRaC")
    other = workspace.root / "stock.pth"
    out = workspace.run(sys.executable, "-c", script, fold / "checkpoint_final.pth", other)
    assert "holds no segcal state" in out


def test_checkpoint_is_whole_or_the_one_before(workspace):
    """A training may die at any byte of a checkpoint."""
    script = (
        TRAINER
        + """
from pathlib import Path
path = Path(sys.argv[1]) / "checkpoint_latest.pth"
trainer.save_checkpoint(str(path))
before = path.read_bytes()
save = torch.save
def dies(checkpoint, name):
    save(checkpoint, name)
    Path(name).write_bytes(Path(name).read_bytes()[:1000])
    raise KeyboardInterrupt
torch.save = dies
try:
    trainer.save_checkpoint(str(path))
except KeyboardInterrupt:
    pass
assert path.read_bytes() == before
assert [p.name for p in path.parent.iterdir()] == [path.name]
trainer.load_checkpoint(str(path))
for size in (0, 1000, len(before) // 2):
    path.write_bytes(before[:size])
    try:
        trainer.load_checkpoint(str(path))
    except ValueError as error:
        assert str(path) in str(error) and "not a whole checkpoint" in str(error), error
    else:
        raise SystemExit(f"{size} bytes were accepted")
"""
    )
    folder = workspace.root / "checkpoints"
    folder.mkdir()
    workspace.run(sys.executable, "-c", script, folder)


@pytest.fixture(scope="module")
def calibrated(workspace):
    """The training validated again, as users do, and calibrated by its validation."""
    workspace.run_as_users_do(*TRAIN, "-tr", "nnUNetTrainerCRaC", "--val", "--calibrate")
    folder = workspace.root / "results" / RUN.format("nnUNetTrainerCRaC")
    return folder, read_calibrator(folder / "calibrator.json")


def test_validation_again_and_warm_start(workspace, calibrated):
    """--val of a finished training keeps probabilities; another starts from its weights."""
    folder, saved = calibrated
    names = sorted(p.stem for p in (folder / "validation").glob("*.npz"))
    for name in names:
        with np.load(folder / "validation" / f"{name}.npz") as file:
            probabilities = file["probabilities"]
        np.testing.assert_allclose(probabilities.sum(0), 1, atol=1e-5)
    assert saved.fitted_on["cases"] == names != []
    few = ["--epochs", "1", "--iterations", "2", "--val-iterations", "2"]
    weights = folder / "checkpoint_final.pth"
    out = workspace.run(*TRAIN, "-tr", "nnUNetTrainerSVLS", "-pretrained_weights", weights, *few)
    assert "Loading pretrained weights" in out
    (record,) = workspace.records("nnUNetTrainerSVLS")
    assert set(record["train"]) == {"base"}


def test_predictions_are_calibrated_by_workers(workspace, calibrated):
    _, saved = calibrated
    output = workspace.root / "calibrated"
    workspace.run_as_users_do(
        BIN / "segcal", "nnunet", "predict", "-o", output, *prediction_arguments(workspace),
        "-tr", "nnUNetTrainerCRaC", "--calibrator", "model", "--save-logits",
    )  # fmt: skip
    with np.load(output / "logits" / "phantom_007.npz") as file:
        logits = torch.as_tensor(file["logits"])
    spacing = read_volume(output / "phantom_007.nii.gz").geometry.spacing_mm
    expected = saved.calibrator.apply(logits[None], spacing_mm=spacing)[0]
    with np.load(output / "phantom_007.npz") as file:
        found = file["probabilities"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert np.abs(found - torch.softmax(logits, 0).numpy()).max() > 0.01


def test_cascade(workspace):
    """Both stages, the second from what the first has predicted."""
    path = workspace.root / "preprocessed" / "Dataset901_Phantom" / "nnUNetPlans.json"
    plans = json.loads(path.read_text())
    stages = {"low": {"next_stage": "high"}, "high": {"previous_stage": "low"}}
    for name, link in stages.items():
        plans["configurations"][name] = {"inherits_from": "2d_small", **link}
    path.write_text(json.dumps(plans))
    splits = path.with_name("splits_final.json")
    before = splits.read_text()
    cases = [p.stem for p in path.parent.glob("nnUNetPlans_2d/*.pkl")]
    splits.write_text(json.dumps([{"train": cases, "val": cases}]))  # every case has a prediction
    few = ["--epochs", "1", "--iterations", "2", "--val-iterations", "2"]
    try:
        for name in stages:
            workspace.run(
                BIN / "segcal", "nnunet", "train", 901, name, 0, "-device", "cpu",
                "-tr", "nnUNetTrainerNACL", *few,
            )  # fmt: skip
    finally:
        splits.write_text(before)
    results = (
        workspace.root / "results" / RUN.format("nnUNetTrainerNACL").replace("2d_small", "high")
    )
    assert (results / "segcal_log.jsonl").exists()
    assert len(list((results / "validation").glob("*.nii.gz"))) == len(cases)


def test_settings_from_the_plans(workspace):
    path = workspace.root / "preprocessed" / "Dataset901_Phantom" / "nnUNetPlans.json"
    plans = json.loads(path.read_text())
    for name, settings in (
        ("margin3", {"crac": {"margin_inner": 3.0}}),
        ("wrong", {"crac": {"margin": 3.0}}),
    ):
        plans["configurations"][name] = {"inherits_from": "2d_small", "segcal": settings}
    path.write_text(json.dumps(plans))
    script = """
import torch
from segcal.adapters.nnunet.registration import register
register()
from nnunetv2.run.run_training import get_trainer_from_args
def initialised(name):
    cpu = torch.device("cpu")
    trainer = get_trainer_from_args("901", name, 0, "nnUNetTrainerCRaC", device=cpu)
    trainer.initialize()
    return trainer
print(initialised("margin3").loss.penalties.terms["crac"].margins)
try:
    initialised("wrong")
except ValueError as error:
    print(error)
"""
    out = workspace.run(sys.executable, "-c", script)
    assert "(3.0, 1.0)" in out
    assert "segcal.penalties.crac.CRaC: takes no margin; it takes num_classes, margin_inner" in out


def test_confidence_is_calibrated_by_default(workspace):
    """The calibrator that the recipe names is fitted by train, and applied by predict."""
    command = ["-tr", "nnUNetTrainerConfidence"]
    workspace.run(*TRAIN, *command, "--seed", 1, *BUDGET)
    fold = workspace.root / "results" / RUN.format("nnUNetTrainerConfidence")
    saved = read_calibrator(fold / "calibrator.json")
    assert saved.method == "class_region_case"
    assert saved.fitted_on["cases"] == sorted(p.stem for p in fold.glob("validation/*.npz")) != []
    records, masks = [], []
    for name, extra in (("by_default", []), ("without", ["--calibrator", "none"])):
        output = workspace.root / name
        workspace.run(
            BIN / "segcal", "nnunet", "predict", "-o", output,
            *prediction_arguments(workspace), *command, *extra,
        )  # fmt: skip
        records.append(json.loads((output / "segcal_predict.json").read_text()))
        masks.append(read_volume(output / "phantom_007.nii.gz").array)
    assert records[0]["calibrator"]["method"] == "class_region_case"
    assert "calibrator" not in records[1]
    np.testing.assert_array_equal(*masks)


def prediction_arguments(workspace):
    return ["-i", workspace.data / "imagesTs", "-d", 901, "-c", "2d_small", "-f", 0,
            "-device", "cpu", "-npp", 1, "-nps", 1]  # fmt: skip


@pytest.fixture(scope="module")
def stock(workspace):
    """What nnUNetv2_predict makes of the training."""
    folder = workspace.root / "stock"
    workspace.run(
        BIN / "nnUNetv2_predict", "-o", folder, *prediction_arguments(workspace), "-npp", 0,
        "-nps", 0, "-tr", "nnUNetTrainerCRaC", "--save_probabilities",
        nnUNet_extTrainer=str(ext_path()),
    )  # fmt: skip
    return folder


def test_predictions_are_nnunets_and_can_be_evaluated(workspace, stock):
    uncalibrated = ["-tr", "nnUNetTrainerCRaC", "--calibrator", "none"]
    arguments = [*prediction_arguments(workspace), *uncalibrated]
    ours, extras = workspace.root / "ours", ["--save-logits", "--per-fold"]
    workspace.run_as_users_do(BIN / "segcal", "nnunet", "predict", "-o", ours, *extras, *arguments)
    assert "calibrator" not in json.loads((ours / "segcal_predict.json").read_text())
    names = sorted(p.name for p in ours.glob("*.npz"))
    assert names == ["phantom_007.npz", "phantom_008.npz"]
    for name in names:
        with np.load(ours / name) as a, np.load(stock / name) as b:
            p, q = a["probabilities"], b["probabilities"]
        assert 0 < np.abs(p - q).max() < 0.02  # sums of single, and of half precision
        assert np.abs(p - q).mean() < 1e-3
        with np.load(ours / "fold_0" / name) as a, np.load(ours / "logits" / name) as b:
            np.testing.assert_array_equal(p, a["probabilities"])  # the only fold
            softmax = torch.softmax(torch.as_tensor(b["logits"]), 0).numpy()
        np.testing.assert_allclose(softmax, p, rtol=1e-5, atol=1e-7)
    report = workspace.root / "report"
    workspace.run(BIN / "segcal", "evaluate", ours, workspace.data / "labelsTs", "-o", report)
    summary = json.loads((report / "summary.json").read_text())
    assert summary["cases"]["evaluated"] == 2
    assert list(summary["classes"]) == ["right ventricle", "myocardium", "left ventricle"]
    assert 0 < summary["metrics"]["ece_all"]["mean"] < 1
    assert summary["labels"].endswith("dataset.json")
    went_on = [*arguments, "--continue_prediction"]
    gone = ours / "logits" / names[0]
    gone.unlink()
    (ours / names[1]).write_bytes(b"as it was")
    workspace.run(BIN / "segcal", "nnunet", "predict", "-o", ours, *extras, *went_on)
    assert gone.is_file()  # what lacks a file is predicted anew, the rest is left
    assert (ours / names[1]).read_bytes() == b"as it was"
    mixed = workspace.fail(
        BIN / "segcal", "nnunet", "predict", "-o", ours, "--average", "prob", *went_on
    )
    assert "was predicted with --average logit, not prob" in mixed


def test_exported_model_predicts_without_segcal(workspace, stock):
    model = (workspace.root / "results" / RUN.format("nnUNetTrainerCRaC")).parent
    shared, predicted = workspace.root / "shared", workspace.root / "from_shared"
    out = workspace.run(BIN / "segcal", "nnunet", "export", model, shared)
    copy = (shared / RUN.format("nnUNetTrainer")).parent
    assert str(copy) in out
    script = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "segcal":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Blocked())
from nnunetv2.inference.predict_from_raw_data import predict_entry_point
predict_entry_point()
assert not any(name.partition(".")[0] == "segcal" for name in sys.modules)
"""
    workspace.run_as_users_do(
        sys.executable, "-c", script, "-o", predicted, *prediction_arguments(workspace)[:-4],
        "-npp", 0, "-nps", 0, "--save_probabilities", nnUNet_results=str(shared),
    )  # fmt: skip
    names = sorted(p.name for p in stock.glob("*.npz"))
    assert len(names) == 2
    for name in names:
        with np.load(stock / name) as a, np.load(predicted / name) as b:
            np.testing.assert_array_equal(a["probabilities"], b["probabilities"])
    checkpoint = torch.load(copy / "fold_0" / "checkpoint_final.pth", weights_only=True)
    assert checkpoint["trainer_name"] == "nnUNetTrainer"
    provenance = checkpoint["segcal"]
    assert provenance["trainer_name"] == "nnUNetTrainerCRaC"
    lam = workspace.records("nnUNetTrainerCRaC")[-1]["crac"]["lam"]
    assert provenance["training"]["state"]["terms.crac.lam"].tolist() == lam
    assert "exists already" in workspace.fail(BIN / "segcal", "nnunet", "export", model, shared)
    assert [p.name for p in copy.parent.iterdir()] == [copy.name]


def test_warm_start_goes_on_from_the_end(workspace):
    source = workspace.root / "results" / RUN.format("nnUNetTrainerCRaC")
    environment = {"nnUNet_results": str(workspace.root / "warm")}
    fold = workspace.root / "warm" / RUN.format("nnUNetTrainerNACL")
    start = [BIN / "segcal", "nnunet", "warmstart", source, "-d", 901, "-c", "2d_small"]
    nacl = ["-tr", "nnUNetTrainerNACL"]
    other = workspace.fail(*start, "-f", 1, *nacl, **environment)
    assert "it was trained on fold 0, whose training cases fold 1 validates on" in other
    assert not (workspace.root / "warm").exists()
    out = workspace.run(*start, "-f", 0, *nacl, "--epochs", 2, **environment)
    assert "segcal nnunet train 901 2d_small 0 -tr nnUNetTrainerNACL --c --epochs 4" in out
    assert "full learning rate" not in out
    script = """
import sys
from segcal.adapters.nnunet.registration import register
register()
from nnunetv2.run.run_training import get_trainer_from_args, maybe_load_checkpoint
import torch
cpu = torch.device("cpu")
trainer = get_trainer_from_args("901", "2d_small", 0, "nnUNetTrainerNACL", device=cpu)
maybe_load_checkpoint(trainer, True, False)
assert trainer.current_epoch == 2
trainer.perform_actual_validation()
"""
    workspace.run(sys.executable, "-c", script, **environment)
    dice = [
        json.loads((f / "validation" / "summary.json").read_text())["foreground_mean"]["Dice"]
        for f in (source, fold)
    ]
    assert dice[0] == dice[1] > 0
    workspace.run(*TRAIN, *nacl, *BUDGET, "--c", **environment)
    assert [r["epoch"] for r in workspace.records("nnUNetTrainerNACL", "warm")] == [2, 3]
    logged = torch.load(fold / "checkpoint_final.pth", weights_only=False)["logging"]
    assert {key: len(values) for key, values in logged.items()} == dict.fromkeys(logged, 4)
    again = workspace.fail(*start, "-f", 0, *nacl, **environment)
    assert "does not overwrite a training" in again


def test_stock_command_trains_with_the_environment_variable(workspace):
    """nnUNetv2_train itself, an epoch of its 250 iterations, with nothing but the variable set."""
    workspace.run_until(
        lambda: len(workspace.records("nnUNetTrainerNACL")) >= 1,
        BIN / "nnUNetv2_train", 901, "2d_small", 0, "-tr", "nnUNetTrainerNACL", "-device", "cpu",
        nnUNet_extTrainer=str(ext_path()),
    )  # fmt: skip
    (record, *_) = workspace.records("nnUNetTrainerNACL")
    assert record["train"]["nacl"] > 0
    assert "crac" not in record
