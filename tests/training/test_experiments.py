"""Settings in place of those of a file, parts by name, differences."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from segcal.components import Component
from segcal.io.yaml import Strict, merged
from segcal.training.building import build_part
from segcal.training.experiments import differences, read_content, shipped


def test_settings_are_put_in(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\nb: {c: 2, d: [1, 2]}\n")
    content = read_content(path, Whole, "classify", ["b.c=0.5", "b.e.f=[x, y]", "g=null"])
    assert content == {"a": 1, "b": {"c": 0.5, "d": [1, 2], "e": {"f": ["x", "y"]}}, "g": None}


@pytest.mark.parametrize("setting", ["epochs", "=3", "a..b=1"])
def test_settings_that_are_none(tmp_path, setting):
    path = tmp_path / "a.yaml"
    path.write_text("a: 1\n")
    with pytest.raises(ValueError, match="expected key=value"):
        read_content(path, Whole, "classify", [setting])
    with pytest.raises(ValueError, match="its value is no YAML"):
        read_content(path, Whole, "classify", ["a=[1"])


def test_unknown_names_and_files(tmp_path):
    assert "digits" in shipped("classify")
    with pytest.raises(ValueError, match=r"there are .*digits"):
        read_content("digit", Whole, "classify")
    with pytest.raises(ValueError, match="no such file"):
        read_content(tmp_path / "a.yaml", Whole, "classify")
    (tmp_path / "a.yaml").write_text("- 1\n")
    with pytest.raises(ValueError, match="expected keys training, recipe"):
        read_content(tmp_path / "a.yaml", Whole, "classify")


def test_merging_goes_mapping_by_mapping_but_never_mixes_targets():
    content = {"a": {"target": "x", "args": {"p": 1}}, "b": {"c": 1, "d": 2}, "e": 1}
    assert merged(content, {"b": {"c": 3}, "f": 4}) == {**content, "b": {"c": 3, "d": 2}, "f": 4}
    assert merged(content, {"a": {"args": {"q": 2}}})["a"]["args"] == {"p": 1, "q": 2}
    other = {"target": "y", "args": {"q": 2}}
    assert merged(content, {"a": other})["a"] == other
    assert content["b"] == {"c": 1, "d": 2}


def test_parts_are_what_they_should_be():
    layer = Component(target="torch.nn.Linear", args={"in_features": 2})
    built = build_part(layer, nn.Module, "network", out_features=3, spatial_dims=2)
    assert built.weight.shape == (3, 2)
    with pytest.raises(ValueError, match=r"optimizer: torch\.nn\.Linear is not a torch\.optim"):
        build_part(layer, torch.optim.Optimizer, "optimizer")
    made = build_part(Component(target="torchvision.models.squeezenet1_1"), nn.Module, "network")
    assert made.num_classes == 1000
    for function in ("torch.load", "torch.hub.load", "segcal.training.experiments.shipped"):
        with pytest.raises(ValueError, match=rf"network: {function} is not a torch\.nn"):
            build_part(Component(target=function, args={"f": "a"}), nn.Module, "network")


def test_arguments_that_are_targets_are_classes_of_segcal():
    for target in ("torch.load", "torch.nn.Linear", "segcal.io.files.write_text"):
        inner = {"target": target, "args": {"path": "a", "text": "b"}}
        layer = Component(target="torch.nn.Linear", args={"in_features": inner, "out_features": 1})
        with pytest.raises(ValueError, match="as an argument, only classes of segcal are built"):
            build_part(layer, nn.Module, "network")


class Part(Strict):
    """A part of an experiment."""

    epochs: int = 1
    device: str = "cpu"


class Whole(Strict):
    """An experiment."""

    training: Part = Part()
    recipe: str = "ce"


def test_differences():
    before = Whole()
    now = Whole(training=Part(epochs=2, device="cuda"), recipe="fl")
    parts = {"training": ("device",), "recipe": ()}
    assert differences(before, before, parts) == []
    assert differences(before, now, parts) == [
        "training.epochs = 1, not 2",
        "recipe = 'ce', not 'fl'",
    ]
