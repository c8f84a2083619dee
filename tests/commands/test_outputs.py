"""Commands that work for long say at once where nothing can be written."""

from __future__ import annotations

from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset
from tests.adapters.monai_experiments import run as train
from tests.adapters.monai_experiments import write_config
from tests.datasets.test_msd import write_task
from tests.study.small import write_study

NOWHERE = "/proc/new"  # where not even root can write
TOLD = "nothing can be written into /proc"


def refused(*arguments):
    done = CliRunner().invoke(app, [str(a) for a in arguments])
    assert done.exit_code == 2, done.output
    assert TOLD in " ".join(done.output.split())


def test_training_and_prediction(tmp_path):
    data = tmp_path / "phantom"
    write_phantom_dataset(data, train=3, test=1, settings=PhantomSettings(shape=(3, 32, 32)))
    config = write_config(tmp_path, data, training={"epochs": 1})
    train(config)
    refused("predict", config, "-o", NOWHERE)
    for more in ([], ["--set", "data.root=/nowhere"]):  # before what is trained on is looked at
        refused("train", config, "--set", f"output={NOWHERE}", *more)
    refused("classify", "train", "digits", "--set", f"output={NOWHERE}")


def test_studies(tmp_path):
    refused("study", "digits", "--set", f"output={NOWHERE}")
    refused("study", "digits", "--set", f"output={NOWHERE}", "-o", tmp_path / "report")
    study = write_study(tmp_path)
    refused("study", study, "--set", f"output={NOWHERE}", "-o", tmp_path / "report")


def test_data_sets(tmp_path):
    task = write_task(tmp_path / "Task05_Prostate")
    refused("convert", "msd", task, "/proc")


def test_nnunet(tmp_path, monkeypatch):
    for name in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        monkeypatch.setenv(name, str(tmp_path))
    refused("nnunet", "predict", "-i", tmp_path, "-o", NOWHERE, "-d", "1", "-c", "2d")
    refused("nnunet", "predict-from-modelfolder", "-i", tmp_path, "-o", NOWHERE, "-m", tmp_path)
    refused("nnunet", "export", tmp_path, NOWHERE)
    monkeypatch.setenv("nnUNet_results", NOWHERE)
    refused("nnunet", "train", "1", "2d", "0")
