"""Real nnU-Net, through its own commands: train, kill, resume, predict, evaluate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from segcal.adapters.nnunet.discovery import ext_path

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
RUN = "Dataset901_Phantom/{}__nnUNetPlans__2d_small/fold_0"
BUDGET = ["--epochs", "4", "--iterations", "4", "--val-iterations", "3", "--save-every", "1"]
TRAIN = [BIN / "segcal", "nnunet", "train", "901", "2d_small", "0", "-device", "cpu"]


TRAINER = """
import sys
from segcal.adapters.nnunet.discovery import register
register()
from nnunetv2.run.run_training import get_trainer_from_args
import torch
cpu = torch.device("cpu")
trainer = get_trainer_from_args("901", "2d_small", 0, "nnUNetTrainerCRaC", device=cpu)
trainer.initialize()
"""


class Workspace:
    """nnU-Net's folders, and its commands run in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "raw" / "Dataset901_Phantom"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("nnUNet_")}
        self.environment = {
            **inherited,
            "nnUNet_raw": str(root / "raw"),
            "nnUNet_preprocessed": str(root / "preprocessed"),
            "nnUNet_results": str(root / "results"),
            "nnUNet_def_n_proc": "1",
            "nnUNet_n_proc_DA": "1",
        }

    def run(self, *command, **environment):
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True,
            env={**self.environment, **environment},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def run_until(self, reached, *command, **environment):
        """Start a command in a process group of its own and SIGKILL it when `reached()`."""
        log = self.root / "killed.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=out, start_new_session=True,
                env={**self.environment, **environment},
            )  # fmt: skip
        deadline = time.monotonic() + 300
        try:
            while not reached():
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.02)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def records(self, trainer, results="results"):
        path = self.root / results / RUN.format(trainer) / "segcal_log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    w = Workspace(tmp_path_factory.mktemp("nnunet"))
    (w.root / "preprocessed").mkdir()
    w.run(BIN / "segcal", "phantom", w.data, "--train", 6, "--test", 2, "--size", 40, "--slices", 4)
    w.run(
        BIN / "nnUNetv2_plan_and_preprocess", "-d", 901, "-c", "2d", "-np", 1, "-npfp", 1,
        "--verify_dataset_integrity",
    )  # fmt: skip
    w.run(
        sys.executable, SCRIPTS / "small_plans.py", 901, "2d", "--patch", "32,32", "--batch", 4,
        "--features", "4,8,16",
    )  # fmt: skip
    w.run(*TRAIN, "-tr", "nnUNetTrainerCRaC", "--seed", 1, *BUDGET)
    return w


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
    workspace.run_until(
        lambda: len(workspace.records(trainer, "resumed")) >= 2, *command, **environment
    )
    assert not (results / RUN.format(trainer) / "checkpoint_final.pth").exists()
    workspace.run(*command, "--c", **environment)
    assert workspace.records(trainer, "resumed") == workspace.records(trainer)
    weights = [
        torch.load(root / RUN.format(trainer) / "checkpoint_final.pth", weights_only=False)
        for root in (workspace.root / "results", results)
    ]
    for name, value in weights[0]["network_weights"].items():
        assert torch.equal(value, weights[1]["network_weights"][name]), name


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
try:
    trainer.load_checkpoint(path)
except ValueError as error:
    assert "crac: margin_inner = 5.0, not 3.0" in str(error), error
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


def test_validation_again_and_warm_start(workspace):
    """--val --npz of a finished training; another trainer starts from its weights."""
    folder = workspace.root / "results" / RUN.format("nnUNetTrainerCRaC")
    workspace.run(*TRAIN, "-tr", "nnUNetTrainerCRaC", "--val", "--npz")
    for name in sorted(p.stem for p in (folder / "validation").glob("*.npz")):
        with np.load(folder / "validation" / f"{name}.npz") as file:
            probabilities = file["probabilities"]
        np.testing.assert_allclose(probabilities.sum(0), 1, atol=1e-5)
    assert name  # there was one
    few = ["--epochs", "1", "--iterations", "2", "--val-iterations", "2"]
    weights = folder / "checkpoint_final.pth"
    out = workspace.run(*TRAIN, "-tr", "nnUNetTrainerSVLS", "-pretrained_weights", weights, *few)
    assert "Loading pretrained weights" in out
    (record,) = workspace.records("nnUNetTrainerSVLS")
    assert set(record["train"]) == {"base"}


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
from segcal.adapters.nnunet.discovery import register
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


def test_predictions_are_nnunets_and_can_be_evaluated(workspace):
    arguments = ["-i", workspace.data / "imagesTs", "-d", 901, "-c", "2d_small", "-f", 0,
                 "-tr", "nnUNetTrainerCRaC", "-device", "cpu", "-npp", 1, "-nps", 1]  # fmt: skip
    ours, stock = workspace.root / "ours", workspace.root / "stock"
    workspace.run(BIN / "segcal", "nnunet", "predict", "-o", ours, *arguments)
    workspace.run(
        BIN / "nnUNetv2_predict", "-o", stock, *arguments, "--save_probabilities",
        nnUNet_extTrainer=str(ext_path()),
    )  # fmt: skip
    names = sorted(p.name for p in ours.glob("*.npz"))
    assert names == ["phantom_007.npz", "phantom_008.npz"]
    for name in names:
        with np.load(ours / name) as a, np.load(stock / name) as b:
            np.testing.assert_array_equal(a["probabilities"], b["probabilities"])
    report = workspace.root / "report"
    workspace.run(BIN / "segcal", "evaluate", ours, workspace.data / "labelsTs", "-o", report)
    summary = json.loads((report / "summary.json").read_text())
    assert summary["cases"]["evaluated"] == 2
    assert list(summary["classes"]) == ["right ventricle", "myocardium", "left ventricle"]
    assert 0 < summary["metrics"]["ece_all"]["mean"] < 1
    assert summary["labels"].endswith("dataset.json")


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
