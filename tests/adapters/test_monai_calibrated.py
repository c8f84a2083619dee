"""``segcal predict --calibrator``: calibrated by what was fitted to this network, or refused."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from segcal.adapters.monai import calibration
from segcal.adapters.monai.experiment import CaseSplit
from segcal.commands.main import app
from segcal.datasets.phantom import PhantomSettings, write_phantom_dataset
from segcal.io.pairing import find_record
from segcal.io.probabilities import read_probabilities
from segcal.io.volumes import read_labels
from segcal.metrics.dice import dice
from segcal.posthoc.links import logits_of
from segcal.posthoc.temperature import Temperature
from segcal.repair.fitting import owners
from segcal.repair.saved import SavedCalibrator, read_calibrator, write_calibrator
from segcal.training.checkpoints import weights_digest
from tests.adapters.monai_experiments import run, write_config
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")


def segcal(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Config of a training, raw predictions of its validation case and of the test cases."""
    folder = tmp_path_factory.mktemp("predict")
    root = folder / "phantom"
    write_phantom_dataset(
        root, train=4, test=2, seed=0, settings=PhantomSettings(shape=(5, 32, 32))
    )
    path = write_config(
        folder, root, recipe="ce", training={"epochs": 2}, output=f"{folder}/runs/{{recipe}}"
    )
    run(path)
    run(path, "recipe=dice_ce", "training.epochs=1")
    segcal("predict", path, "--validation", "-o", folder / "validation")
    segcal("predict", path, "-o", folder / "raw")
    return folder, path


def probabilities(path):
    with np.load(path) as content:
        return torch.from_numpy(content["probabilities"])


@pytest.fixture(scope="module")
def calibrator(trained):
    """What ``segcal calibrate fit`` makes of the validation predictions."""
    folder, _ = trained
    file, labels = folder / "calibrator.json", folder / "phantom" / "labelsTr"
    segcal("calibrate", "fit", folder / "validation", labels, "-o", file, "--method",
           "class_region", "--set", "bands=[2,6]", "--set", "strength=1e-3", "-p", 1)  # fmt: skip
    return file, read_calibrator(file)


def test_what_is_written_is_calibrated(trained, calibrator):
    folder, path = trained
    file, saved = calibrator
    segcal("predict", path, "-o", folder / "npz", "--calibrator", file)
    segcal("predict", path, "-o", folder / "nii", "--calibrator", file, "--format", "nifti")
    names = sorted(p.name for p in (folder / "raw").glob("*.npz"))
    assert len(names) == 2
    for name in names:
        raw, found = (probabilities(folder / kind / name) for kind in ("raw", "npz"))
        volume = read_labels(folder / "raw" / name.replace(".npz", ".nii.gz"))
        spacing_mm = volume.geometry.spacing_mm
        x = logits_of(raw, regions=False)[None]
        expected = saved.calibrator.apply(x, spacing_mm=spacing_mm)[0]
        close(found, expected, atol=1e-5)  # two runs of a network round apart
        assert found.dtype == torch.float32
        assert (found - raw).abs().max() > 0.01
        assert (found - saved.calibrator.apply(x)[0]).abs().max() > 1e-4  # bands are in mm
        mask = read_labels(folder / "npz" / name.replace(".npz", ".nii.gz")).array
        assert np.array_equal(mask, volume.array)  # temperatures change no class
        stacked = folder / "nii" / name.replace(".npz", ".nii.gz")
        volume = read_probabilities(stacked, volume.geometry, num_classes=len(raw))
        close(volume, found, atol=1e-5)
    segcal("calibrate", "apply", folder / "raw", file, "-o", folder / "applied", "-p", 1)
    for name in names:
        found, applied = (probabilities(folder / kind / name) for kind in ("npz", "applied"))
        close(found, applied, atol=1e-5)
    record = find_record(folder / "npz")
    assert record["calibrator"] == json.loads(json.dumps(saved.summary()))
    assert record["calibrator"]["members"] == 1
    without = {k: v for k, v in record.items() if k != "calibrator"}
    assert without == find_record(folder / "raw")


def test_a_moved_training_is_the_same_and_a_calibrator_in_it_is_applied(
    trained, calibrator, tmp_path
):
    folder, path = trained
    file, saved = calibrator
    moved_to = shutil.copytree(folder / "runs" / "ce", tmp_path / "ce")
    beside = moved_to / "calibrator.json"
    moved = ["predict", path, "--set", f"output={moved_to}"]
    assert "alibrat" not in segcal(*moved)
    shutil.copy(file, beside)
    assert f"Calibrated by {beside} (class_region)" in segcal(*moved)
    assert find_record(moved_to / "predictions")["calibrator"]["cases"] == 1
    assert "alibrated by" not in segcal(*moved, "--calibrator", "none")
    assert "alibrated by" not in segcal(*moved, "--validation")  # which calibrators are fitted to
    for name in ("predictions_uncalibrated", "predictions_validation"):
        assert "calibrator" not in find_record(moved_to / name)
    segcal(*moved, "--calibrator", beside)
    assert "calibrator" in find_record(moved_to / "predictions_calibrated")
    raw, found = (
        probabilities(next((moved_to / name).glob("*.npz")))
        for name in ("predictions_uncalibrated", "predictions")
    )
    volume = read_labels(next((moved_to / "predictions").glob("*.nii.gz")))
    close(found, saved.calibrator.apply(
        logits_of(raw, regions=False)[None], spacing_mm=volume.geometry.spacing_mm
    )[0], atol=1e-5)  # fmt: skip
    said = segcal(*moved, "--checkpoint", "last")  # nobody asked for the one that does not fit
    assert f"WARNING: {beside} is not applied: " in said
    assert "checkpoint checkpoint_last.pt, but the calibrator was fitted to checkpoint" in said
    beside.write_text("{}")
    assert "not a calibrator" in segcal(*moved, code=2)
    segcal(*moved, "--calibrator", "none")
    said = segcal(*moved, "--calibrator", file, "--set", "inference.overlap=0.25")
    assert "among those that the calibrator was fitted to" not in said
    assert "overlap 0.25, but the calibrator was fitted with overlap 0.5" in said


def test_cases_of_the_fit_are_told(trained, calibrator, tmp_path):
    _, path = trained
    said = segcal(
        "predict", path, "--validation", "--calibrator", calibrator[0], "-o", tmp_path / "out"
    )
    assert "1 of 1 cases are among those that the calibrator was fitted to" in said


def test_a_calibrator_of_another_network_is_refused(trained, calibrator, tmp_path):
    folder, path = trained
    file, _ = calibrator
    command = ["predict", path, "--calibrator", file, "-o", tmp_path / "out"]
    said = segcal(*command, "--set", "recipe=dice_ce", code=2)
    assert "trainer dice_ce, but the calibrator was fitted to trainer ce" in said
    said = segcal(*command, "--checkpoint", "last", code=2)
    assert "checkpoint checkpoint_last.pt, but the calibrator was fitted to checkpoint" in said
    again = shutil.copytree(folder / "runs" / "ce", tmp_path / "ce")
    shutil.copy(again / "checkpoint_last.pt", again / "checkpoint_best.pt")
    content = torch.load(again / "checkpoint_best.pt", weights_only=True)
    next(iter(content["network"].values())).mul_(2)  # as after another training to this folder
    torch.save(content, again / "checkpoint_best.pt")
    said = segcal(*command, "--set", f"output={again}", code=2)
    assert "but the calibrator was fitted to weights" in said
    assert not (tmp_path / "out").exists()
    segcal(*command, "--set", "recipe=dice_ce", "--any-model")
    assert find_record(tmp_path / "out")["trainer"] == "dice_ce"


def test_a_calibrator_of_other_classes_is_refused(trained, tmp_path):
    _, path = trained
    fitted = Temperature().fit(torch.zeros(1, 2, 4), torch.zeros(1, 4, dtype=torch.long))
    write_calibrator(tmp_path / "c.json", SavedCalibrator("temperature", fitted, ("a", "b")))
    said = segcal("predict", path, "--calibrator", tmp_path / "c.json", "--any-model", code=2)
    assert "has 4 channels, but the calibrator was fitted to 2: a, b" in said
    assert "not a JSON file" in segcal("predict", path, "--calibrator", path, code=2)
    said = segcal("predict", path, "--calibrator", tmp_path / "none.json", code=2)
    assert "none.json" in said


def test_weights_have_a_digest_of_their_own():
    state = {"a": torch.zeros(2, 3), "n": torch.tensor(3), "h": torch.ones(2, dtype=torch.bfloat16)}
    found = weights_digest(state)
    assert len(found) == 16
    assert weights_digest(dict(reversed(state.items()))) == found
    for other in (
        {**state, "a": torch.zeros(3, 2)},
        {**state, "n": torch.tensor(4)},
        {**state, "b": torch.zeros(0)},
    ):
        assert weights_digest(other) != found


def test_the_mask_of_a_decision_head_stays(trained, tmp_path):
    folder, _ = trained
    recipe = tmp_path / "two.yaml"
    recipe.write_text(
        "base: {cross_entropy: 1.0, soft_dice: 1.0}\nprobability: {base: {svls: 1.0}}\n"
    )
    path = write_config(tmp_path, folder / "phantom", recipe=str(recipe), training={"epochs": 1})
    run(path)
    made, labels, file = (tmp_path / n for n in ("validation", "labels", "calibrator.json"))
    segcal("predict", path, "--validation", "-o", made)
    segcal("calibrate", "fit", made, folder / "phantom" / "labelsTr", "-o", file,
           "--method", "temperature", "-p", 1)  # fmt: skip
    done = tmp_path / "done"
    segcal("calibrate", "apply", made, file, "-o", done)
    (mask,) = made.glob("*.nii.gz")
    before, after = (read_labels(where / mask.name).array for where in (made, done))
    p = probabilities(done / mask.name.replace(".nii.gz", ".npz")).numpy()
    assert (before != p.argmax(0)).any()
    np.testing.assert_array_equal(after, before)  # one temperature changes no argmax
    assert find_record(done)["decision"] == "decision head"
    labels.mkdir()
    shutil.copy(folder / "phantom" / "labelsTr" / mask.name, labels)
    shutil.copy(folder / "phantom" / "dataset.json", labels)
    said = segcal("evaluate", done, labels, "-o", tmp_path / "report", "-p", 1)
    assert "decided by decision head" in " ".join(said.split())
    (row,) = pd.read_csv(tmp_path / "report" / "cases.csv").to_dict("records")
    reference = read_labels(labels / mask.name).array
    expected = np.nanmean([dice(after, reference, k) for k in (1, 2, 3)])
    assert row["dsc"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [(None, ["p1_a", "p1_b", "q12"]), ("(p|q)[0-9]", ["p1", "p1", "q1"])],
)
def test_cases_of_a_patient_stay_together_as_in_the_split(tmp_path, monkeypatch, pattern, expected):
    given = []
    for name in ("check_output", "predict_cases", "write_calibrator"):
        monkeypatch.setattr(calibration, name, lambda *_, **__: None)
    monkeypatch.setattr(calibration, "fit_calibrator", lambda *_, **options: given.append(options))
    data = SimpleNamespace(split=CaseSplit(patient=pattern))
    experiment = SimpleNamespace(folder=tmp_path, data=data)
    case = SimpleNamespace(label=tmp_path / "p1_a.nii.gz")
    calibration.calibrate_training(SimpleNamespace(experiment=experiment), [case], "temperature")
    assert owners(["p1_a", "p1_b", "q12"], given[0]["patients"]) == expected
