"""The maths needs torch, NumPy and SciPy alone."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import importlib, pkgutil, sys

BLOCKED = "nnunetv2 monai nibabel SimpleITK yaml pydantic pandas".split()

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocked())
import segcal
names = "tensors compiling term neighbourhood binning surface ranking objective".split()
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
