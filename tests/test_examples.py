"""The examples run, learn, and go on from where they stopped."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.forks import said

EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
pytestmark = pytest.mark.slow


SMALLER = """
import functools, runpy, sys
from segcal.datasets import phantom

small = phantom.PhantomSettings(shape=(6, 48, 48))
phantom.make_phantom = functools.partial(phantom.make_phantom, settings=small)
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv.pop(0))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""An example on smaller hearts than its own, which it would train on for half a minute."""


@pytest.fixture
def run(tmp_path):
    def run(name, *options):
        script = ["-c", SMALLER, str(EXAMPLES), str(EXAMPLES / f"{name}.py"), *map(str, options)]
        files = [tmp_path / f"{stream}.txt" for stream in ("out", "err")]
        code, (out, err) = said([sys.executable, *script], files)
        assert code == 0, out + err
        return out

    return run


@pytest.mark.parametrize("name", sorted(p.stem for p in EXAMPLES.glob("*.py")))
def test_example(name, run):
    last = run(name, "--epochs", 3).splitlines()[-1]
    if name == "plain_pytorch":
        assert re.match(r"epoch 2: loss \d.\d+, validation ECE 0.\d+, {'crac'", last)
    else:
        values = {k: float(v) for k, v in re.findall(r"'(\w+)': ([\d.]+)", last)}
        assert 0 < values["ece"] < 0.6
        assert values["crac_lambda_mean"] > 0.01


def test_plain_pytorch_goes_on(tmp_path, run):
    whole = run("plain_pytorch", "--epochs", 2, "--checkpoint", tmp_path / "a.pt").splitlines()
    run("plain_pytorch", "--epochs", 1, "--checkpoint", tmp_path / "b.pt")
    resumed = run("plain_pytorch", "--epochs", 2, "--checkpoint", tmp_path / "b.pt").splitlines()
    assert len(whole) == 2
    assert len(resumed) == 1  # the second epoch alone
    assert resumed[0].startswith("epoch 1:")
