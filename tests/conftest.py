"""Fixtures shared by all tests."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"
MANY = 100
"""Tests from which on it pays to compile before the first of them."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile the loops that most tests need, or the first to need them would wait for minutes."""
    if len(session.items) >= MANY and not session.config.option.collectonly:
        from segcal.penalties.nacl import NACL

        for dtype in (torch.float32, torch.float64):
            NACL(2)(torch.zeros(1, 2, 2, 2, dtype=dtype), torch.zeros(1, 2, 2, dtype=torch.int64))


class Golden(dict[str, Any]):
    """The arrays of one golden file as tensors."""

    def __init__(self, name: str) -> None:
        with np.load(GOLDEN / f"{name}.npz") as data:
            super().__init__(
                {k: torch.as_tensor(data[k]) for k in data.files if data[k].dtype.kind in "fiub"}
            )


@pytest.fixture
def golden():
    """Return a loader of golden files by name."""
    return Golden


@pytest.fixture
def one_thread():
    """Keep torch to one thread: tiny networks are slower on many, and far slower on busy ones."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def pictures():
    """For a test that needs the pictures which its neighbours do without."""


@pytest.fixture
def plain_progress(request, monkeypatch):
    """Save the figure of a training empty: to draw it takes longer than a small training does."""
    if "pictures" in request.fixturenames:
        return
    from matplotlib.figure import Figure

    from segcal.reporting.progress import plot_progress

    for name, module in list(sys.modules.items()):
        if name.startswith("segcal.") and vars(module).get("plot_progress") is plot_progress:
            monkeypatch.setattr(module, "plot_progress", lambda *_: Figure(figsize=(1, 1)))


@pytest.fixture
def interruptible():
    """Let SIGINT raise KeyboardInterrupt: a shell starts its background jobs with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def close(actual: Any, expected: Any, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Assert closeness with the golden tolerances."""
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=rtol,
        atol=atol,
    )
