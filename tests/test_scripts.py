"""Every script starts and says what it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [p for p in sorted(SCRIPTS.rglob("*.py")) if p.stem != "check_wheel"],  # which has no options
    ids=lambda path: path.stem,
)
def test_script_explains_itself(path):
    done = subprocess.run(
        [sys.executable, path, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout.lower()
