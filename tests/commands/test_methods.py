"""``segcal methods`` knows every config and explains each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.recipes import load_component, names


def run(*arguments):
    return CliRunner().invoke(app, ["methods", *arguments])


def test_lists_all():
    out = run().output
    for kind in ("losses", "penalties", "multilabel", "posthoc", "recipes"):
        for name in names(kind):
            assert f"\n {name} " in out, name


def test_names_for_other_programs():
    done = subprocess.run(
        [sys.executable, "-m", "segcal", "methods", "--json"], capture_output=True, text=True
    )
    assert json.loads(done.stdout) == {
        kind: names(kind) for kind in ("losses", "penalties", "multilabel", "posthoc", "recipes")
    }


@pytest.mark.parametrize("kind", ["losses", "penalties", "multilabel"])
def test_explains_every_method(kind):
    for name in names(kind):
        done = run(name)
        assert done.exit_code == 0
        component = load_component(kind, name)
        assert component.target in done.output
        assert "options:" in done.output
        assert "``" in done.output  # a formula
        assert component.summary


def test_says_where_paper_and_code_differ():
    out = run("crac").output
    assert "Where poster" in out
    assert "recipe crac" in out
    assert "margin_inner=5.0" in out
    done = run("crak")
    assert done.exit_code == 2
    assert "no method named 'crak' (did you mean crac" in done.output
    assert "did you mean dice_ce, dice_ce_surgery" in run("dice").output.replace("\n", " ")
    for option in ("gamma:", "lambda_bounds:", "start_epoch:", "gaussian_full"):
        assert option in out  # of its base class, and of what its docstring refers to
    assert "padding=background" in run("crac_published").output


def test_data_of_one_method():
    data = json.loads(run("crac", "--json").output)
    assert set(data) == {"penalties", "recipes"}
    assert data["penalties"]["options"]["rho_max"] == 10
    assert data["penalties"]["options"]["rho0"] == 0.1
    assert data["recipes"]["penalties"] == {"crac": 1.0}


def test_draws_the_functions_of_a_penalty(tmp_path):
    path = tmp_path / "functions.png"
    assert run("cals", "--figure", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    for name, figure, said in (
        ("nacl", path, "--figure: expected a penalty with learned multipliers (cals, crac,"),
        ("cals", tmp_path / "functions.pdf", "expected the name of a .png"),
    ):
        done = run(name, "--figure", str(figure))
        assert done.exit_code == 2
        assert said in done.output.replace("\n", " ")
    assert [one.name for one in tmp_path.iterdir()] == ["functions.png"]


def test_draws_a_loss_of_labels_and_its_link(tmp_path):
    path = tmp_path / "spa.png"
    assert run("spa", "--figure", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    done = run("two_way", "--figure", str(tmp_path / "two_way.png"))
    assert done.exit_code == 2
    assert "no posterior goes with this loss" in done.output.replace("\n", " ")
    assert [one.name for one in tmp_path.iterdir()] == ["spa.png"]
