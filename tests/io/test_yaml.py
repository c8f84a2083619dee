"""YAML of strangers: small files that would become large, deep or endless."""

from __future__ import annotations

import time

import pytest

from segcal.io.yaml import DEPTH, LARGEST, read_yaml
from segcal.training.experiments import put

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BOMB, f"its aliases stand for more than {LARGEST} values"),
        ("a: &a [1, *a]", "an alias refers to a part that contains it"),
        ("a: &a {b: *a}", "an alias refers to a part that contains it"),
        ("[" * 5000 + "]" * 5000, f"nested more than {DEPTH} levels deep"),
        ("\n".join(" " * i + "a:" for i in range(2000)), f"nested more than {DEPTH} levels deep"),
    ],
    ids=["bomb", "list in itself", "mapping in itself", "brackets", "indented"],
)
def test_yaml_that_grows_is_refused_at_once(tmp_path, text, message):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    begun = time.monotonic()
    with pytest.raises(ValueError, match=rf"recipe\.yaml: not a YAML file \({message}"):
        read_yaml(path)
    with pytest.raises(ValueError, match=message):
        put({}, f"a={text}")
    assert time.monotonic() - begun < 5


def test_aliases_of_a_config_are_followed(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("a: &a {x: [1, 1e-3]}\nb: *a\nc: {<<: *a, y: 2}\nd: [*a, *a]\n")
    a = {"x": [1, 1e-3]}
    assert read_yaml(path) == {"a": a, "b": a, "c": {**a, "y": 2}, "d": [a, a]}
