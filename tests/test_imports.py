"""The maths needs torch, NumPy and SciPy alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, pkgutil, sys

BLOCKED = "nnunetv2 monai nibabel SimpleITK yaml pydantic pandas".split()

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import segcal
names = "arrays tensors compiling term neighbourhood binning surface ranking objective".split()
for package in ("alm", "losses", "losses.multilabel", "penalties", "metrics", "sweep"):
    module = importlib.import_module(f"segcal.{package}")
    names += [f"{package}.{m.name}" for m in pkgutil.iter_modules(module.__path__)]
for name in names:
    importlib.import_module(f"segcal.{name}")
print(len(names))
"""


def test_the_maths_imports_without_hosts():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 18


def test_the_command_line_starts_without_torch():
    script = (
        "import sys; from segcal.commands.main import app; assert 'torch' not in sys.modules;"
        "assert 'nnunetv2' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SMALL_RUNS = """
import sys
from segcal.commands.main import app

for words in (
    "phantom data --train 1 --test 2",
    "check data/posteriorTs data/labelsTs",
    "evaluate data/posteriorTs data/labelsTs -o report",
    "trust data/posteriorTs -o triage",
):
    try:
        app(words.split(), standalone_mode=False)
    except SystemExit as ended:
        assert not ended.code, words
    for slow in ("torch", "scipy.stats", "scipy.optimize", "SimpleITK", "matplotlib.pyplot"):
        assert slow not in sys.modules, (words, slow)
"""


def test_a_small_evaluation_imports_no_large_library_that_it_does_not_need(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SMALL_RUNS], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report/index.html").is_file()


THREADS = """
import sys
from segcal.threads import threads_for, use_threads

assert [threads_for(n) for n in (0, 2, 9)] == [1, 2, 3]
use_threads(2)
assert threads_for(9) == 2
import torch

assert torch.get_num_threads() == threads_for(9) == 2
use_threads(1)
assert torch.get_num_threads() == threads_for(9) == 1
torch.set_num_threads(2)
assert threads_for(9) == 2
"""


@pytest.mark.parametrize("of_mkl", [{}, {"MKL_NUM_THREADS": "1"}])
def test_threads_are_those_of_torch_before_and_after_it_is_imported(of_mkl):
    told = {**os.environ, "OMP_NUM_THREADS": "3", **of_mkl}
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=told)
    assert done.returncode == 0, done.stderr
