"""Commands around nnU-Net that need no training."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from segcal.adapters.nnunet import doctor, sharing
from segcal.adapters.nnunet.running import check_predict
from segcal.commands.main import app

RUNNER = CliRunner()
PROBED = {
    "imports": {"torch": None, "timm": None, "torchvision": None},
    "cuda": "a GPU",
    "by_registration": {"nnUNetTrainerCRaC": None},
    "by_variable": {"nnUNetTrainerCRaC": None},
}


@pytest.fixture
def environment(tmp_path, monkeypatch):
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("COLUMNS", "200")


def test_doctor_tells_what_stops_a_training(environment, monkeypatch):
    monkeypatch.setattr(doctor, "run_probe", lambda environment: PROBED)
    done = RUNNER.invoke(app, ["nnunet", "doctor"])
    assert done.exit_code == 0, done.output
    assert "Nothing would stop a training" in done.output
    monkeypatch.delenv("nnUNet_results")
    done = RUNNER.invoke(app, ["nnunet", "doctor"])
    assert done.exit_code == 1
    assert 'nnUNet_results: export nnUNet_results="$HOME/nnunet/results"' in done.output
    assert "A training would not work: nnUNet_results." in done.output
    wrong = {"a.json, 2d": "unknown crc", "b.json, 2d": "unknown crc"}
    monkeypatch.setattr(doctor, "run_probe", lambda environment: {**PROBED, "blocks": wrong})
    done = RUNNER.invoke(app, ["nnunet", "doctor"])
    assert "b.json, 2d: unknown crc" in done.output
    assert done.output.count("correct the entry, or remove it") == 1  # advice is said once
    assert "A training would not work: nnUNet_results, entry segcal of plans." in done.output


def test_recipes_lists_every_trainer(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    done = RUNNER.invoke(app, ["nnunet", "recipes"])
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line for line in done.output.splitlines() if "nnUNetTrainer" in line}
    assert {"nnUNetTrainer", "nnUNetTrainerCRaC", "nnUNetTrainerNACL"} <= rows.keys()
    for name, loss in (
        ("CRaC", "Dice + cross-entropy + crac"),
        ("CALS", "Dice + cross-entropy + cals"),
        ("FL", "Dice + focal "),
        ("MMCE", "Dice + cross-entropy + 0.1 mmce"),
    ):
        assert loss in rows[f"nnUNetTrainer{name}"]
    assert "nnUNetTrainerCRaC_CE is cross-entropy + crac." in " ".join(done.output.split())


@pytest.mark.parametrize("option", ["--continue_prediction", "--c", "--continue"])
def test_other_predictions_are_not_mixed_in(environment, tmp_path, option):
    """Before nnU-Net starts; however nnU-Net's parser lets its option be written."""
    before = {"average": "logit", "checkpoint": "checkpoint_final.pth"}
    (tmp_path / "segcal_predict.json").write_text(json.dumps(before))
    for command in ("predict", "predict-from-modelfolder"):
        arguments = ["nnunet", command, "-o", str(tmp_path), "-f", "0", "1", option]
        done = RUNNER.invoke(app, [*arguments, "--average", "prob"])
        assert done.exit_code == 2, done.output
        assert "was predicted with --average logit, not prob" in done.output
        chosen = [*arguments, *(["-c", "2d"] if command == "predict" else [])]
        done = RUNNER.invoke(app, [*chosen, "-chk", "checkpoint_best.pth"])
        assert done.exit_code == 2, done.output
        assert "with -chk checkpoint_final.pth, not checkpoint_best.pth" in done.output
        check_predict(chosen[2:], from_modelfolder=command != "predict")  # as before


def test_warm_start_of_nothing(environment, tmp_path):
    options = ["-d", "901", "-c", "2d", "-f", "0", "-tr", "nnUNetTrainerCRaC"]
    done = RUNNER.invoke(app, ["nnunet", "warmstart", str(tmp_path), *options])
    assert done.exit_code == 2, done.output
    assert "holds no checkpoint_final.pth; is its training finished?" in done.output


@pytest.mark.parametrize(
    ("option", "ending"),
    [([], "-f 0 all"), (["-chk", "checkpoint_best.pth"], "-f 0 all -chk checkpoint_best.pth")],
)
def test_export_names_the_command_that_finds_the_checkpoint(tmp_path, monkeypatch, option, ending):
    """nnU-Net looks for checkpoint_final.pth by itself."""
    for fold in ("fold_0", "fold_all"):
        (tmp_path / fold).mkdir()
    heads = []
    monkeypatch.setattr(
        sharing,
        "export_model",
        lambda model, results, checkpoint, *, head: heads.append(head) or tmp_path,
    )
    done = RUNNER.invoke(app, ["nnunet", "export", "model", "shared", *option])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1].endswith(f"-m {tmp_path} {ending}")
    RUNNER.invoke(app, ["nnunet", "export", "model", "shared", "--head", "probability"])
    assert heads == [None, "probability"]
