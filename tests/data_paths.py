"""Where real volumes lie, for the tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(
    os.environ.get("SEGCAL_TEST_DATA", Path(__file__).parent.parent.parent / "shared" / "data")
)


def real_data(name: str) -> Path:
    """Folder of a real data set; without it the test is skipped, or fails when CI is set."""
    folder = ROOT / name
    if not folder.is_dir():
        message = f"{folder} is missing; set SEGCAL_TEST_DATA to the folder that holds {name}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder
