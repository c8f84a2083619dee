"""Results of cases on disk: exact, of these files and settings alone, and never unpickled."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest

from segcal.evaluation import cohort
from segcal.evaluation.settings import EvaluationSettings
from segcal.evaluation.store import CaseOutcome, Store
from segcal.io.pairing import Case, pair, with_rois
from segcal.io.volumes import write_nifti
from tests.evaluation.test_cohort import geometry, soft

EVERYTHING = EvaluationSettings(
    bins=7, chosen=("fg", "union", "dilated", "crop", "roi", "all"), compat="marginloss"
)


@pytest.fixture
def files(tmp_path):
    """A case with everything that belongs to one; one of its labels is missed."""
    y = np.zeros((3, 10, 10), int)
    y[0, 2:6, 2:6], y[1, 6:9, 6:9] = 1, 2
    (tmp_path / "p").mkdir()
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, geometry(y.shape))
    write_nifti(tmp_path / "roi" / "a.nii.gz", y > 0, geometry(y.shape))
    write_nifti(tmp_path / "p" / "a.nii.gz", np.where(y == 2, 0, y), geometry(y.shape))
    np.savez(tmp_path / "p" / "a.npz", probabilities=soft(y, 3))
    (case,) = with_rois(pair(tmp_path / "p", tmp_path / "gt"), tmp_path / "roi").cases
    return tmp_path, case


def evaluated(case):
    notes = []
    result = cohort.evaluate_files(case, None, settings=EVERYTHING, note=notes.append)
    return CaseOutcome(result.row, notes, {k: t.to_arrays() for k, t in result.calibration.items()})


def same(a, b):
    np.testing.assert_array_equal([*a.result.values()], [*b.result.values()], strict=True)
    assert [*a.result] == [*b.result]
    assert [*a.calibration] == [*b.calibration]
    for scope, one in a.calibration.items():
        assert one.keys() == b.calibration[scope].keys()
        for name, array in one.items():
            np.testing.assert_array_equal(array, b.calibration[scope][name], strict=True)
    assert a.notes == b.notes


def test_what_comes_back_is_what_was_kept(files):
    root, case = files
    outcome, store = evaluated(case), Store(root / "store", "these settings")
    assert not store.holds(case)
    store.save(case, outcome)
    assert store.holds(case)
    assert outcome.notes
    assert outcome.result["hd_mm/2"] == np.inf
    same(store.load(case), outcome)
    store.remove()
    assert not (root / "store").exists()


def test_a_failure_is_not_kept(files):
    root, case = files
    store = Store(root / "store", "")
    store.save(case, CaseOutcome("a.npz: damaged", []))
    assert not store.holds(case)


@pytest.mark.parametrize("part", ["prediction", "label_map", "reference", "roi"])
def test_a_touched_file_is_another(files, part):
    root, case = files
    store = Store(root / "store", "")
    store.save(case, evaluated(case))
    path = getattr(case, part)
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
    assert not store.holds(case)


def test_other_settings_are_other_numbers(files):
    root, case = files
    Store(root / "store", "a").save(case, evaluated(case))
    assert Store(root / "store", "a").holds(case)
    assert not Store(root / "store", "b").holds(case)


def test_files_that_are_read_along_belong_to_the_case(files):
    """The crop of nnU-Net v1, the voxels of a MetaImage header, the files of a folder."""
    root, case = files
    outcome = evaluated(case)
    (root / "classes").mkdir()
    for name in ("p/a.pkl", "gt/b.mhd", "gt/b.zraw", "classes/liver.nii.gz"):
        (root / name).write_bytes(b"1")
    store = Store(root / "store", "")
    for changed, one in (
        ("p/a.pkl", case),
        ("gt/b.zraw", Case("a", case.prediction, root / "gt" / "b.mhd")),
        ("classes/liver.nii.gz", Case("a", root / "classes", case.reference)),
    ):
        store.save(one, outcome)
        assert store.holds(one)
        (root / changed).write_bytes(b"other")
        assert not store.holds(one)


class Runs:
    """An object whose pickle makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_damaged_and_foreign_files_are_ignored(files):
    root, case = files
    store = Store(root / "store", "")
    outcome = evaluated(case)
    store.save(case, outcome)
    path = root / "store" / "a.npz"
    whole = path.read_bytes()
    for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert not store.holds(case)
        assert store.load(case) is None
    mark = root / "ran"
    evil = np.array([Runs(mark)], dtype=object)
    np.savez(path, key=evil, known=evil)
    assert not store.holds(case)
    path.write_bytes(pickle.dumps(Runs(mark)))
    assert not store.holds(case)
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    assert not store.holds(case)
    np.savez(path, probabilities=np.zeros(3))
    assert not store.holds(case)
    np.savez(path, key=store._key(case), known=evil)  # only the key is right
    assert store.holds(case)
    assert store.load(case) is None
    assert not mark.exists()
    pickle.loads(pickle.dumps(Runs(mark)))  # what trusts does run it
    assert mark.exists()
    path.unlink()
    path.mkdir()
    assert not store.holds(case)


def test_no_flipped_byte_changes_a_number(files):
    root, case = files
    store = Store(root / "store", "")
    outcome = evaluated(case)
    store.save(case, outcome)
    path = root / "store" / "a.npz"
    whole = path.read_bytes()
    lost = 0
    for position in range(0, len(whole), len(whole) // 400):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x5A]) + whole[position + 1 :])
        found = store.load(case)
        lost += found is None
        if found is not None:
            same(found, outcome)
    assert lost > 300


def test_a_damaged_result_is_evaluated_again(files):
    root, case = files
    pairing = with_rois(pair(root / "p", root / "gt"), root / "roi")
    store = Store(root / "store", "")
    first = cohort.evaluate_cohort(pairing, settings=EVERYTHING, store=store)
    path = root / "store" / "a.npz"
    content = bytearray(path.read_bytes())
    position = content.index("hd95_pooled_mm".encode("utf-32-le"))  # behind the key
    content[position] ^= 0xFF
    path.write_bytes(bytes(content))
    assert store.holds(case)
    again = cohort.evaluate_cohort(pairing, settings=EVERYTHING, store=store)
    assert again.rows.equals(first.rows)
    assert again.failed == {}
    same(store.load(case), evaluated(case))  # and kept
