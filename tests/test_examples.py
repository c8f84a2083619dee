"""The examples run, learn, and go on from where they stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
pytestmark = pytest.mark.slow


def run(name, *options):
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *map(str, options)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_example(name):
    last = run(name, "--epochs", 3).splitlines()[-1]
    if name == "plain_pytorch":
        assert re.match(r"epoch 2: loss \d.\d+, validation ECE 0.\d+, {'crac'", last)
    else:
        values = {k: float(v) for k, v in re.findall(r"'(\w+)': ([\d.]+)", last)}
        assert 0 < values["ece"] < 0.6
        assert values["crac_lambda_mean"] > 0.01


def test_plain_pytorch_goes_on(tmp_path):
    whole = run("plain_pytorch", "--epochs", 2, "--checkpoint", tmp_path / "a.pt").splitlines()
    run("plain_pytorch", "--epochs", 1, "--checkpoint", tmp_path / "b.pt")
    resumed = run("plain_pytorch", "--epochs", 2, "--checkpoint", tmp_path / "b.pt").splitlines()
    assert len(whole) == 2
    assert len(resumed) == 1  # the second epoch alone
    assert resumed[0].startswith("epoch 1:")
