"""Every script starts and says what it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.forks import said

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [p for p in sorted(SCRIPTS.rglob("*.py")) if p.stem != "check_wheel"],  # which has no options
    ids=lambda path: path.stem,
)
def test_script_explains_itself(path, tmp_path):
    command = [sys.executable, str(path), "--help"]
    code, (out, err) = said(command, [tmp_path / "out.txt", tmp_path / "err.txt"])
    assert code == 0, err
    assert "usage:" in out.lower()
