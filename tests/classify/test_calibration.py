"""Post-hoc calibration of classifiers: fitted to validation samples, shown beside the raw."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from segcal.classify.calibration import fit_classifier, to_calibrate
from segcal.classify.evaluation import evaluate_classifier
from segcal.classify.experiment import load_experiment
from segcal.classify.readers.archives import write_npz
from segcal.classify.readers.samples import Samples
from segcal.classify.training import ClassificationRun
from segcal.commands.main import app
from segcal.losses.multilabel.spa import SPA
from segcal.posthoc.class_region import ClassRegionTemperature
from segcal.posthoc.temperature import Temperature
from segcal.repair.saved import read_calibrator
from tests.classify.classifiers import write_config, write_labels
from tests.conftest import close

pytestmark = pytest.mark.usefixtures("one_thread")


def segcal(*arguments, code=0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


def train(config, *settings):
    return ClassificationRun(load_experiment(config, settings)).run().folder


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A classifier of digits that is eight times as sure as it was trained to be."""
    folder = tmp_path_factory.mktemp("digits") / "run"
    train("digits", "recipe=ce", "training.epochs=2", "training.device=cpu", f"output={folder}")
    for path in folder.glob("checkpoint_*.pt"):
        content = torch.load(path, weights_only=True)
        *_, weight, bias = [k for k in content["network"] if k.endswith(("weight", "bias"))]
        for name in (weight, bias):
            content["network"][name] *= 8
        torch.save(content, path)
    return folder


def predictions(folder):
    with np.load(folder / "predictions.npz") as kept:
        return {key: torch.from_numpy(kept[key]) for key in kept.files if key != "names"}


def test_classes_before_and_after(digits, tmp_path):
    said = segcal("classify", "evaluate", digits, "-o", tmp_path / "r", "--calibrate")
    assert "calibrated (temperature)" in said
    assert "validation samples, which also chose the epoch; NLL there" in said
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    raw, after = (summary["outcomes"][kind]["metrics"] for kind in (
        "softmax", "calibrated (temperature)"))  # fmt: skip
    assert after["accuracy"] == raw["accuracy"]
    assert after["nll"] < raw["nll"]
    assert after["ece"] < raw["ece"]
    saved = read_calibrator(tmp_path / "r" / "calibrator.json")
    held_out = evaluate_classifier(digits, part="validation", device="cpu")
    fitted = Temperature().fit(held_out.logits.double(), held_out.part.targets)
    assert saved.calibrator.value == fitted.value > 1.5
    kept = predictions(tmp_path / "r")
    close(kept["probabilities_calibrated"], fitted.apply(kept["logits"].double()), atol=1e-7)
    assert saved.channels == held_out.data.names
    assert (saved.members, saved.model["trainer"]) == (1, "ce")
    assert summary["calibrator"]["predictions"] == "validation samples of digits"
    assert summary["calibrator"]["nll_after"] == fitted.facts["nll_after"]
    table = pd.read_csv(tmp_path / "r" / "classes.csv")
    assert table["probabilities"].unique().tolist() == ["softmax", "calibrated (temperature)"]
    assert "calibrated (temperature)" in (tmp_path / "r" / "index.html").read_text()
    segcal("classify", "evaluate", digits, "-o", tmp_path / "r")
    assert not (tmp_path / "r" / "calibrator.json").exists()  # of the report before


def test_a_temperature_for_each_predicted_class(digits):
    found = evaluate_classifier(digits, device="cpu", calibrate="class_region")
    calibrator = found.calibrator.calibrator
    assert isinstance(calibrator, ClassRegionTemperature)
    assert calibrator.temperatures.shape == (10, 2)
    raw, after = (found.outcomes[k].metrics for k in ("softmax", "calibrated (class_region)"))
    assert after["accuracy"] == raw["accuracy"]
    assert after["nll"] < raw["nll"]


@pytest.mark.filterwarnings("ignore:Temperature")  # of a label, which no scale repairs
@pytest.mark.parametrize(
    ("recipe", "of"),
    [
        ("bce", "logits"), ("spa", "log-odds by link"), ("two_way", "logits"),
        ("asymmetric", "logits"), ("spa_lpr", "log-odds by link"),
    ],
)  # fmt: skip
def test_labels_of_every_kind_of_loss(tmp_path, recipe, of):
    """Each label is a sigmoid; of its posterior's log-odds if it has one that is told apart."""
    data = write_labels(tmp_path / "a.npz", n=400)
    folder = train(write_config(tmp_path, data), f"recipe={recipe}", "training.epochs=2")
    found = evaluate_classifier(folder, device="cpu", calibrate="temperature")
    *_, before, after = found.outcomes
    assert after == "calibrated (temperature)"
    assert found.calibrator.fitted_on["of"] == of
    held_out = evaluate_classifier(folder, device="cpu", part="validation")
    x = held_out.logits.double()
    if of != "logits":
        x = held_out.loss.log_odds(x)
    fitted = Temperature(per_channel=True).fit(x, held_out.part.targets, ignore_index=-1)
    assert found.calibrator.calibrator.state()["learned"] == fitted.state()["learned"]
    metrics = found.outcomes[after].metrics
    assert np.isfinite(list(metrics.values())).all()
    close(metrics["map_class"], found.outcomes[before if before != "phi" else "sigmoid"]
          .metrics["map_class"], rtol=1e-9)  # fmt: skip
    assert set(found.outcomes[after].retrieval) == {1, 2, 3}
    assert found.notes()[0].startswith("calibrated (temperature): fitted to the")


def test_unknown_labels_are_left_out(tmp_path):
    with np.load(write_labels(tmp_path / "a.npz", n=300)) as content:
        inputs, targets = content["inputs"], content["targets"].astype(np.int8)
    generator = np.random.default_rng(1)
    targets[generator.random(targets.shape) < 0.3] = -1
    write_npz(tmp_path / "b.npz", Samples(inputs, targets, ("a", "b", "c")))
    folder = train(write_config(tmp_path, tmp_path / "b.npz", recipe="bce"), "training.epochs=1")
    found = evaluate_classifier(folder, device="cpu", calibrate="temperature")
    held_out = evaluate_classifier(folder, device="cpu", part="validation")
    known = held_out.part.targets[:, 0] >= 0
    first = found.calibrator.calibrator.channels[0].value
    x = torch.stack([torch.zeros(int(known.sum())), held_out.logits[known, 0]], 1).double()
    assert first == Temperature().fit(x, held_out.part.targets[known, 0]).value


def test_a_label_that_is_unknown_everywhere_is_named(tmp_path):
    with np.load(write_labels(tmp_path / "a.npz")) as content:
        inputs, targets = content["inputs"], content["targets"].astype(np.int8)
    write_npz(tmp_path / "b.npz", Samples(inputs, targets, ("a", "b", "c")))
    folder = train(write_config(tmp_path, tmp_path / "b.npz", recipe="bce"), "training.epochs=1")
    held_out = evaluate_classifier(folder, device="cpu", part="validation")
    gone = held_out.part.targets.clone()
    gone[:, 1] = -1
    with pytest.raises(ValueError, match=r"^b: unknown in every validation sample"):
        fit_classifier("temperature", held_out.logits, gone, held_out.data.names, held_out.loss)


def test_what_a_fit_is_odd_about_is_said_and_does_not_warn(tmp_path):
    """Perfect validation samples do not identify a temperature."""
    data = write_labels(tmp_path / "a.npz")
    with np.load(data) as content:
        inputs = content["inputs"]
    classes = np.arange(len(inputs)) % 2
    inputs[:, 0] = 40.0 * classes
    write_npz(tmp_path / "b.npz", Samples(inputs, classes, ("no", "yes")))
    config = write_config(tmp_path, tmp_path / "b.npz", recipe="ce")
    folder = train(config, "training.epochs=8")
    said = segcal("classify", "evaluate", folder, "-o", tmp_path / "r", "--calibrate")
    assert "temperature 0.05 is at the bound of the search" in said


def test_what_does_not_fit_is_refused(digits, tmp_path):
    command = ["classify", "evaluate", digits, "-o", tmp_path / "r"]
    said = segcal(*command, "--method", "temperature", code=2)
    assert "--method: chooses what --calibrate fits" in said
    said = segcal(*command, "--calibrate", "--method", "prayer", code=2)
    assert "--method: expected one of beta, class_region" in said
    said = segcal(*command, "--calibrate", "--part", "validation", code=2)
    assert "--calibrate: is fitted to the validation samples" in said


def test_the_log_odds_of_spa_are_calibrated_and_not_its_scores():
    logits = torch.randn(5, 2)
    kind, x = to_calibrate(logits, SPA())
    assert kind == "log-odds by link"
    close(x, SPA().log_odds(logits.double()))
