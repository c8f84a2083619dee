"""Pairing of files and dataset.json."""

from __future__ import annotations

import json

import pytest

from segcal.io.cases import find_dataset_json, find_reader, pair, read_label_set


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_pairs_by_name_and_names_what_is_left(tmp_path):
    references = touch(tmp_path / "gt", "a.nii.gz", "b.nii.gz", "c.nii.gz", "d.nii.gz", "e.nii.gz",
                       "._a.nii.gz", "notes.txt")  # fmt: skip
    predictions = touch(tmp_path / "p", "a.npz", "a.nii.gz", "a.pkl", "b.nii.gz", "c.nii.gz",
                        "._x.nii.gz", "e_0000.nii.gz", "plans.json")  # fmt: skip
    pairing = pair(predictions, references)
    assert [c.name for c in pairing.cases] == ["a", "b", "c"]
    assert pairing.cases[0].prediction.name == "a.npz"
    assert pairing.cases[0].label_map == predictions / "a.nii.gz"
    assert pairing.cases[1].label_map is None
    assert pairing.without_prediction == ["d", "e"]
    assert pairing.without_reference == ["e_0000"]
    single = pair(predictions / "a.npz", references / "b.nii.gz")
    assert [c.name for c in single.cases] == ["b"]


def test_refuses(tmp_path):
    references = touch(tmp_path / "gt", "a.nii.gz")
    with pytest.raises(ValueError, match="no such file or folder"):
        pair(tmp_path / "none", references)
    with pytest.raises(ValueError, match="expected two folders, or two files"):
        pair(references / "a.nii.gz", references)
    with pytest.raises(ValueError, match=r"no file name is common to .* \(1 cases: b\)"):
        pair(touch(tmp_path / "p", "b.npz"), references)
    with pytest.raises(ValueError, match="holds no volumes"):
        pair(references, touch(tmp_path / "empty"))
    twice = touch(tmp_path / "twice", "a.nii.gz", "a.nii")
    for folders in ((references, twice), (twice, references)):
        with pytest.raises(ValueError, match="are one case twice"):
            pair(*folders)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def test_label_set(tmp_path):
    decathlon = write(tmp_path / "msd" / "dataset.json", {"labels": {"0": "background", "1": "a"}})
    assert read_label_set(decathlon).names == {0: "background", 1: "a"}
    path = write(
        tmp_path / "dataset.json",
        {"labels": {"background": 0, "tumour": 2, "liver": 1, "ignore": 3}},
    )
    labels = read_label_set(path)
    assert labels.names == {0: "background", 1: "liver", 2: "tumour"}
    assert labels.ignore_index == 3
    predictions, references = touch(tmp_path / "fold_0" / "validation"), touch(tmp_path / "gt")
    assert find_dataset_json(predictions, references) == path
    assert find_dataset_json(references, references) == path
    write(tmp_path / "plans.json", {"image_reader_writer": "NibabelIOWithReorient"})
    assert find_reader(predictions) == "NibabelIOWithReorient"
    write(tmp_path / "plans.json", {"image_reader_writer": "SimpleITKIO"})
    assert find_reader(predictions) == "SimpleITKIO"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({"background": 0, "whole": [1, 2]}, "'regions_class_order' must name"),
        ({"background": 0, "whole": []}, "expected an integer, or a list"),
        ({"background": 0, "a": 1, "b": 1}, "share value 1"),
        ({"background": 0, "a": "2"}, "expected an integer"),
        ({"0": "background", "1": "tumour", "2": "tumour"}, "a name stands for two label values"),
        ({}, "expected 'labels'"),
    ],
)
def test_refuses_labels(tmp_path, labels, message):
    path = write(tmp_path / "dataset.json", {"labels": labels})
    with pytest.raises(ValueError, match=message) as error:
        read_label_set(path)
    assert str(path) in str(error.value)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match="not a JSON file"):
        read_label_set(path)
