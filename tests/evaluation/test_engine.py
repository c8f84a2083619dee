"""Several processes give what one gives, also when one of them dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from segcal.evaluation.cohort import evaluate_cohort
from segcal.evaluation.engine import AHEAD, default_jobs, run
from segcal.evaluation.summary import summarise
from segcal.io.pairing import pair
from segcal.io.volumes import write_nifti
from tests.evaluation.items import LONG, dies, first_ends_last, square, stops_everything
from tests.evaluation.test_cohort import geometry, soft
from tests.forks import forked


@pytest.fixture
def quick(monkeypatch):
    """Processes that need not import torch first."""
    monkeypatch.setattr("multiprocessing.get_context", forked(multiprocessing.get_context))


class Counted(Sequence):
    """Integers that count how many have been handed out."""

    def __init__(self, n):
        self.n, self.given = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError(i)
        self.given = max(self.given, i + 1)
        return i


def lost(item, why):
    return item, why


def gone(pid):
    """Whether a process has ended, a minute to do so granted."""
    for _ in range(600):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_item_once_and_in_order(jobs, quick):
    assert list(run(square, range(20), lost=lost, jobs=jobs)) == [(i, i * i) for i in range(20)]
    assert list(run(square, [], lost=lost, jobs=jobs)) == []


def test_a_slow_first_item_still_comes_first(tmp_path, quick):
    items = [(tmp_path, i, 5) for i in range(8)]
    assert list(run(first_ends_last, items, lost=lost, jobs=2)) == [(i, i) for i in range(8)]


@pytest.mark.parametrize(("jobs", "ahead"), [(1, 1), (2, 2 * AHEAD)])
def test_few_items_are_under_way_at_once(jobs, ahead, quick):
    items = Counted(40)
    for index, _ in run(square, items, lost=lost, jobs=jobs):
        assert items.given == min(40, index + ahead)


def test_a_process_that_dies_loses_nothing(tmp_path, quick):
    """What was done before is not done again: items 1 and 2 came back before 3 was begun."""
    items = [(tmp_path, i, 1) for i in range(12)]
    assert list(run(dies, items, lost=lost, jobs=2)) == [(i, i) for i in range(12)]
    assert [(tmp_path / str(i)).read_text() for i in (0, 1, 2, 11)] == ["once "] * 4


def test_an_item_that_kills_every_process_is_lost_alone(tmp_path, quick):
    items = [(tmp_path, i, 99) for i in range(12)]
    (_, (who, why)), *others = run(dies, items, lost=lost, jobs=2)
    assert who == items[0]
    assert "died" in why
    assert others == [(i, i) for i in range(1, 12)]
    assert (tmp_path / "deaths").read_text() == "xx"  # with others, and alone


def test_ctrl_c_ends_the_processes(tmp_path, interruptible):
    items = [(os.getpid(), signal.SIGINT, tmp_path, i) for i in range(4)]
    with pytest.raises(KeyboardInterrupt):
        list(run(stops_everything, items, lost=lost, jobs=2))
    assert all(gone(int((tmp_path / i).read_text())) for i in "01")


def test_a_kill_leaves_no_orphans(tmp_path):
    """Standard output is at its end when the last process that has it is gone."""
    program = f"""
import os, pathlib
from segcal.evaluation.engine import run
from tests.evaluation.items import stops_everything
if __name__ == "__main__":
    folder = pathlib.Path({str(tmp_path)!r})
    list(run(stops_everything, [(os.getpid(), 9, folder, i) for i in range(4)], lost=print, jobs=2))
"""
    script = tmp_path / "script.py"
    script.write_text(program)
    path = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, **path},
        capture_output=True,
        timeout=LONG / 3,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert (tmp_path / "0").exists()


def test_few_cases_are_not_worth_a_process():
    assert default_jobs(0) == default_jobs(3) == 1
    assert 1 <= default_jobs(10**6) <= os.cpu_count()


def test_a_cohort_is_the_same_in_two_processes(tmp_path: Path):
    rng = np.random.default_rng(0)
    (tmp_path / "p").mkdir()
    for name in "abcd":
        y = (rng.random((3, 12, 12)) < 0.3).astype(int)
        write_nifti(tmp_path / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
        np.savez(tmp_path / "p" / f"{name}.npz", probabilities=soft(y, 2, rng.uniform(0.6, 0.9)))
    (tmp_path / "p" / "c.npz").write_bytes(b"no zip")
    seen = []
    cohorts = [
        evaluate_cohort(
            pair(tmp_path / "p", tmp_path / "gt"), jobs=jobs, progress=lambda c: seen.append(c.name)
        )
        for jobs in (1, 2)
    ]
    assert "".join(seen) == "abcd" * 2
    pd.testing.assert_frame_equal(cohorts[0].rows, cohorts[1].rows, check_exact=True)
    assert list(cohorts[0].failed) == list(cohorts[1].failed) == ["c"]
    assert summarise(cohorts[0]) == summarise(cohorts[1])
