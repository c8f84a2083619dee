"""What is counted while a file is read equals what is counted afterwards, or is thrown away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import numpy as np
import pytest

from segcal.evaluation.cohort import evaluate_files
from segcal.evaluation.early import EarlyCounts
from segcal.evaluation.settings import EvaluationSettings
from segcal.io.label_sets import LabelSet
from segcal.io.pairing import Case
from segcal.io.volumes import Geometry, write_nifti
from segcal.tally import Voxels

SHAPE = (6, 20, 24)
AT = Geometry(SHAPE, (3.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
IGNORED = LabelSet({0: "background", 1: "a", 2: "b"}, 9, "here")


@pytest.fixture
def case(tmp_path):
    rng = np.random.default_rng(0)
    y = np.zeros(SHAPE, np.uint8)
    y[2:4, 5:12, 4:20] = 1
    y[1:5, 12:17, 6:14] = 2
    logits = 3 * np.eye(3, dtype=np.float32)[y].transpose(3, 0, 1, 2)
    logits = np.exp(logits + rng.standard_normal(logits.shape).astype(np.float32))
    y[:, :2] = 9
    np.savez_compressed(tmp_path / "c.npz", probabilities=logits / logits.sum(0))
    write_nifti(tmp_path / "c.nii.gz", y, AT)
    return Case("c", tmp_path / "c.npz", tmp_path / "c.nii.gz")


class AtOnce(ThreadPoolExecutor):
    """Does what it is given at once, so that nothing is left out because it came too late."""

    def submit(self, *work):
        future = super().submit(*work)
        wait([future])
        return future


@pytest.fixture
def early(monkeypatch):
    """Classes that were counted early, where one class arrives after the other."""
    monkeypatch.setattr("segcal.evaluation.early.ThreadPoolExecutor", AtOnce)
    counted, count = [], Voxels.count_class
    monkeypatch.setattr("segcal.io.files.BULK", 1000)
    monkeypatch.setattr("segcal.evaluation.early.threads_for", lambda items: items)
    monkeypatch.setattr(Voxels, "count_class", lambda v, k: (count(v, k), counted.append(k)))
    return counted


def both(case, monkeypatch, **options):
    """Results with and without counting early."""
    with_it = evaluate_files(case, IGNORED, **options)
    monkeypatch.setattr(EarlyCounts, "possible", False)
    return with_it, evaluate_files(case, IGNORED, **options)


def assert_same(one, other):
    assert one.row.keys() == other.row.keys()
    np.testing.assert_array_equal(list(one.row.values()), list(other.row.values()))
    for scope, tally in one.calibration.items():
        assert (tally.cells == other.calibration[scope].cells).all()


@pytest.mark.parametrize("chosen", [("fg", "union", "dilated", "all"), ("union",), ("dilated",)])
def test_early_counts_change_no_number(case, early, monkeypatch, chosen):
    one, other = both(case, monkeypatch, settings=EvaluationSettings(chosen=chosen))
    assert early == [0, 1, 2]
    assert_same(one, other)


def test_what_comes_too_late_is_counted_later(case, monkeypatch):
    """In threads of its own, any number of classes may be counted when all is read."""
    monkeypatch.setattr("segcal.evaluation.early.threads_for", lambda items: items)
    one, other = both(case, monkeypatch, settings=EvaluationSettings())
    assert_same(one, other)


def test_masks_that_come_later_are_counted_later(case, early, monkeypatch):
    one, other = both(case, monkeypatch, settings=EvaluationSettings(chosen=("crop", "all")))
    assert not early
    assert_same(one, other)


def test_counts_of_other_probabilities_are_thrown_away(early):
    """A channel of background put in front of the others, say, is not what was counted."""
    p = np.random.default_rng(0).dirichlet(np.ones(3), SHAPE).transpose(3, 0, 1, 2).copy()
    y = np.zeros(SHAPE, int)
    for given, kept in ((p, True), (p.copy(), False), (p[:2], False), (None, False)):
        with EarlyCounts(EvaluationSettings()) as counts:
            counts.arrived(y, None, p, 3)
            assert (counts.voxels(given) is not None) == kept
    with EarlyCounts(EvaluationSettings()) as counts:
        assert counts.voxels(p) is None


def test_a_thread_that_has_not_begun_leaves_all_to_others():
    """On a busy machine, a small file is read before the thread gets its turn."""
    p, y, turn = np.full((3, *SHAPE), 1 / 3), np.zeros(SHAPE, int), Event()
    with EarlyCounts(EvaluationSettings()) as counts:
        counts._pool.submit(turn.wait)
        counts.arrived(y, None, p, 3)
        counts._pool.shutdown(wait=False, cancel_futures=True)
        turn.set()
        assert counts.voxels(p) is None


@pytest.mark.parametrize("wrong", [np.nan, 1.7])
def test_the_file_is_refused_as_ever(case, early, wrong):
    with np.load(case.prediction) as archive:
        p = archive["probabilities"]
    p[0, 0, 0, 0] = wrong
    np.savez_compressed(case.prediction, probabilities=p)
    with pytest.raises(ValueError, match=r"c\.npz: class 0"):
        evaluate_files(case, IGNORED, settings=EvaluationSettings())
    with EarlyCounts(EvaluationSettings()) as counts:
        counts.arrived(np.zeros(SHAPE, int), None, p, 3)
        assert counts.voxels(p) is None


def test_a_damaged_file_ends_the_counting(case, early):
    content = case.prediction.read_bytes()
    case.prediction.write_bytes(content[: len(content) // 2] + bytes(len(content) // 2))
    with pytest.raises(ValueError, match=r"c\.npz"):
        evaluate_files(case, IGNORED, settings=EvaluationSettings())
