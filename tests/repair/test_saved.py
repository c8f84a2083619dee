"""A calibrator's file: what comes back, what is refused, and which model it is for."""

from __future__ import annotations

import json

import pytest
import torch

from segcal.io.label_sets import LabelSet
from segcal.posthoc.temperature import Temperature
from segcal.repair.saved import SavedCalibrator, model_of, read_calibrator, write_calibrator
from tests.repair.conftest import record


def saved(**others):
    x = torch.tensor([[2.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    fitted = Temperature().fit(x, torch.tensor([0, 0, 1]))
    content = {"channels": ("background", "organ"), **others}
    return SavedCalibrator("temperature", fitted, **content)


def test_round_trip(tmp_path):
    before = saved(model={"trainer": "nnUNetTrainer"}, fitted_on={"cases": ["a"]}, offsets={"a": 1})
    write_calibrator(tmp_path / "c.json", before)
    after = read_calibrator(tmp_path / "c.json")
    assert after.calibrator.value == before.calibrator.value
    for name in ("method", "channels", "regions", "class_order", "model", "fitted_on", "offsets"):
        assert getattr(after, name) == getattr(before, name)


def test_files_that_are_none_are_refused(tmp_path):
    path = tmp_path / "c.json"
    write_calibrator(path, saved())
    good = json.loads(path.read_text())
    for content, message in (
        ([], "not a calibrator"),
        ({}, "not a calibrator"),
        ({**good, "format": 99}, "got 99.*fit it again"),
        ({**good, "method": "platt"}, "its method 'platt' is unknown"),
        ({**good, "state": {}}, "damaged"),
        ({**good, "channels": None}, "damaged"),
        ({k: v for k, v in good.items() if k != "model"}, "damaged"),
        ({**good, "channels": ["background"]}, "damaged.*has 2 channels, but names 1"),
        ({**good, "state": {**good["state"], "facts": {}}}, "damaged.*cases"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"c\.json: .*{message}"):
            read_calibrator(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        read_calibrator(path)
    with pytest.raises(ValueError, match="a folder, expected a JSON file"):
        read_calibrator(tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        read_calibrator(tmp_path / "other.json")


def test_channels_mean_what_they_meant():
    one = saved()
    one.check_labels(None, 2, "p")
    one.check_labels(LabelSet({0: "background", 1: "organ"}, None, "d"), 2, "p")
    for labels, channels, message in (
        (None, 3, "has 3 channels, but the calibrator was fitted to 2"),
        (LabelSet({0: "background", 1: "tumour"}, None, "d"), 2, "background, tumour of d"),
        (LabelSet({}, None, "d", {"a": (1,), "b": (1, 2)}, (1, 2)), 2, "the other kind"),
    ):
        with pytest.raises(ValueError, match=f"p: .*{message}"):
            one.check_labels(labels, channels, "p")


def test_another_model_is_refused():
    model = {"trainer": "A", "plans": "P", "folds": ["fold_0"], "average": "logit"}
    one = saved(model=model)
    assert one.check_model(model, "p") == []
    assert one.check_model({}, "p") == []
    assert saved().check_model(model, "p") == []
    (note,) = one.check_model({**model, "average": "prob"}, "p")
    assert "average prob, but the calibrator was fitted with average logit" in note
    with pytest.raises(
        ValueError, match="p: trainer B, but the calibrator was fitted to trainer A"
    ):
        one.check_model({**model, "trainer": "B"}, "p")
    five = {**model, "folds": [f"fold_{i}" for i in range(5)]}
    with pytest.raises(ValueError, match=r"mean of 5 networks.*single networks.*--calibrator"):
        one.check_model(five, "p")
    with pytest.raises(ValueError, match="mean of single networks"):
        saved(model=five).check_model(model, "p")


def test_model_of_a_record_or_of_nnunets_folders(tmp_path):
    assert model_of(tmp_path) == {}
    record(tmp_path, trainer="T", folds=["fold_0"])
    assert model_of(tmp_path) == {"trainer": "T", "folds": ["fold_0"]}
    model = tmp_path / "Dataset027_ACDC" / "nnUNetTrainerCRaC__nnUNetPlans__2d"
    for fold in (0, 1):
        (model / f"fold_{fold}" / "validation").mkdir(parents=True)
    whole = model_of(model)
    assert whole["dataset"] == "Dataset027_ACDC"
    assert (whole["trainer"], whole["plans"], whole["configuration"]) == (
        "nnUNetTrainerCRaC", "nnUNetPlans", "2d",
    )  # fmt: skip
    assert whole["folds"] == ["fold_0", "fold_1"]
    assert saved(model=whole).members == 1
    assert model_of(model / "fold_1" / "validation")["folds"] == ["fold_1"]
    said = {"heads": 2, "decision": "decision head", "folds": ["fold_0"]}
    record(model / "fold_0" / "validation", **said)  # as trainers of two heads validate
    heads = model_of(model)
    assert (heads["decision"], heads["folds"]) == ("decision head", ["fold_0", "fold_1"])
    (tmp_path / "segcal_predict.json").write_text("[]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        model_of(tmp_path)
