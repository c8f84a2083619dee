"""Several processes give what one gives, also when one of them dies."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pandas as pd

from segcal.evaluation.cohort import evaluate_cohort, summarise
from segcal.evaluation.engine import default_jobs, run
from segcal.io.cases import pair
from segcal.io.volumes import write_nifti
from tests.evaluation.test_cohort import geometry, soft


def square(x):
    return x * x


def dies_elsewhere(item):
    """Kill the process that runs it, unless that is the one which made the item."""
    pid, value = item
    if os.getpid() != pid and value == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return value


def test_every_item_once():
    assert list(run(square, range(5))) == [(i, i * i) for i in range(5)]
    assert sorted(run(square, range(5), jobs=2)) == [(i, i * i) for i in range(5)]
    assert list(run(square, [], jobs=2)) == []


def test_a_process_that_dies_loses_nothing():
    items = [(os.getpid(), i) for i in range(6)]
    assert sorted(run(dies_elsewhere, items, jobs=2)) == [(i, i) for i in range(6)]


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
    assert sorted(seen) == sorted("abcd" * 2)
    pd.testing.assert_frame_equal(cohorts[0].rows, cohorts[1].rows, check_exact=True)
    assert list(cohorts[0].failed) == list(cohorts[1].failed) == ["c"]
    assert summarise(cohorts[0]) == summarise(cohorts[1])
