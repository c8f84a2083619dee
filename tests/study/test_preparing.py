"""Data sets of a seed: who trains, who validates, who tests."""

from __future__ import annotations

import json

import numpy as np
import pytest

from segcal.io.pairing import pair
from segcal.io.volumes import Geometry, read_volume
from segcal.study.plan import StudySet, cells, load_study
from segcal.study.preparing import middle_box, owner_of, part, prepare, split_of
from tests.study.small import content_of, write_raw

NAMES = [f"case_{i:03d}" for i in range(1, 11)]


def source(**parts) -> StudySet:
    given = {"raw": "a", "patients": {"train": 2, "validation": 1}, "epochs": 1, **parts}
    return StudySet.model_validate(given)


def cell_of(folder, **parts):
    squares = {"epochs": 1, "data": {"size": [12, 12]}, **parts}
    return cells(load_study(content_of(folder, sets={"squares": squares}), "s"))[0]


def sides(split):
    return split.train, split.val, split.test


def test_patients_are_parted_and_seeds_draw_others():
    splits = [part(source(cases_per_patient=2), NAMES, seed) for seed in range(4)]
    for split in splits:
        assert [len(side) for side in sides(split)] == [4, 2, 4]
        assert sorted(sum(sides(split), ())) == NAMES
        persons = [{(int(c[-3:]) + 1) // 2 for c in side} for side in sides(split)]
        assert sum(map(len, persons)) == 5  # nobody on two sides
    assert len({split.test for split in splits}) > 1
    assert part(source(cases_per_patient=2), reversed(NAMES), 0) == splits[0]


def test_those_that_are_left_train_or_test():
    rest = {"train": [7, 2, 1], "test": [3, 2, 5]}
    wanted = {"train": {"validation": 2, "test": 1}, "test": {"train": 3, "validation": 2}}
    for what, counts in rest.items():
        split = part(source(patients=wanted[what]), NAMES, 0)
        assert [len(side) for side in sides(split)] == counts


def test_folds_test_every_patient_once():
    chosen = source(folds=3, patients={"validation": 2})
    splits = [part(chosen, NAMES, seed) for seed in range(6)]
    for turn in (splits[:3], splits[3:]):
        assert sorted(c for split in turn for c in split.test) == NAMES
    assert splits[0].test != splits[3].test  # another order in the next round
    for split in splits:
        assert len(split.val) == 2
        assert sorted(sum(sides(split), ())) == NAMES


def test_a_data_set_is_links_and_lies_as_evaluations_read_it(tmp_path):
    raw = write_raw(tmp_path / "raw", NAMES[:7], NAMES[7:])
    cell = cell_of(tmp_path, raw=str(raw), patients={"train": 5, "validation": 2})
    prepare(cell)
    split = split_of(cell.data)
    assert [len(side) for side in sides(split)] == [5, 2, 3]
    images = sorted((cell.data / "imagesTr").iterdir())
    assert [p.name[:8] for p in images] == sorted((*split.train, *split.val))
    assert images[0].resolve().parent.parent == raw
    for name, cases in (("fit", split.val), ("test", split.test)):
        found = pair(cell.labels(name), cell.labels(name))
        assert [c.name for c in found.cases] == sorted(cases)
    assert json.loads((cell.data / "dataset.json").read_text())["numTraining"] == 7
    before = (cell.data / "splits_final.json").stat().st_mtime_ns
    prepare(cell)
    assert (cell.data / "splits_final.json").stat().st_mtime_ns == before
    other = cell_of(tmp_path, raw=str(raw), patients={"train": 4, "validation": 2})
    with pytest.raises(ValueError, match="was prepared with other settings"):
        prepare(other)


def test_half_a_data_set_is_made_anew(tmp_path, monkeypatch):
    raw = write_raw(tmp_path / "raw", NAMES)
    cell = cell_of(tmp_path, raw=str(raw), patients={"train": 5, "validation": 2})

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr("segcal.study.preparing._lay_out", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare(cell)
    assert not cell.data.exists()
    prepare(cell)
    assert len(split_of(cell.data).test) == 3


def test_phantoms_have_their_posterior_beside_and_are_others_for_every_seed(tmp_path):
    content = content_of(tmp_path, seeds=[0, 1])
    found = {cell.seed: cell for cell in cells(load_study(content, "s"))}
    for cell in found.values():
        prepare(cell)
        split = split_of(cell.data)
        assert [len(side) for side in sides(split)] == [2, 2, 2]
        for name, cases in (("fit", split.val), ("test", split.test)):
            paired = pair(cell.posterior(name), cell.labels(name))
            assert [c.name for c in paired.cases] == sorted(cases)
        case = split.test[0]
        assert owner_of(cell, [case]) == {case: f"s{cell.seed} {case}"}
    images = [
        read_volume(next((cell.data / "imagesTs").iterdir())).array for cell in found.values()
    ]
    assert not np.array_equal(*images)


def test_a_prepared_data_set_may_be_moved(tmp_path):
    (cell, *_) = cells(load_study(content_of(tmp_path), "s"))
    prepare(cell)
    (tmp_path / "study").rename(tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / cell.data.relative_to(tmp_path / "study")
    assert len(pair(moved / "posterior/test", moved / "labels/test").cases) == 2


def test_the_middle_is_cut_where_it_lies(tmp_path):
    raw = write_raw(tmp_path / "raw", NAMES)
    cell = cell_of(
        tmp_path, raw=str(raw), patients={"train": 5, "validation": 2}, middle_mm=8.0,
        data={"size": [4, 8]},
    )  # fmt: skip
    prepare(cell)
    case = split_of(cell.data).test[0]
    image = read_volume(cell.data / "imagesTs" / f"{case}_0000.nii.gz")
    assert image.array.shape == (2, 4, 8)
    assert image.array[0, 0].tolist() == list(range(1, 9))
    assert image.geometry.origin_mm == pytest.approx((1.0, 8.0, 0.0))
    label = read_volume(cell.data / "labels/test" / f"{case}.nii.gz")
    assert label.array.sum() == 2 * 4 * 4
    assert not image.geometry.differences(label.geometry)


def test_the_box_of_a_turned_volume():
    geometry = Geometry((3, 11, 6), (10.0, 2.0, 1.0), (5.0, 6.0, 7.0), np.diag([-1.0, -1.0, 1.0]))
    box, cut = middle_box(geometry, 8.0)
    assert box == (slice(None), slice(3, 7), slice(0, 6))
    assert cut.shape == (3, 4, 6)
    np.testing.assert_allclose(cut.affine @ [0, 0, 0, 1], geometry.affine @ [0, 3, 0, 1])
