"""Pairing of files and dataset.json."""

from __future__ import annotations

import json

import pytest

from segcal.io.label_sets import read_label_set
from segcal.io.pairing import find_dataset_json, find_reader, pair


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def write_summary(folder, *cases):
    """What nnU-Net measures of its validation."""
    measured = [{"prediction_file": str(folder / f"{case}.nii.gz")} for case in cases]
    (folder / "summary.json").write_text(json.dumps({"metric_per_case": measured}))


def test_cases_of_other_folds_are_not_missed(tmp_path):
    model, references = tmp_path / "trainer__plans__2d", tmp_path / "labelsTr"
    touch(references, *(f"{case}.nii.gz" for case in "abcde"))
    for fold, cases in (("fold_0", "ab"), ("fold_1", "cd")):
        touch(model / fold / "validation", *(f"{case}.nii.gz" for case in cases))
        write_summary(model / fold / "validation", *cases)
    for given, others in (
        (model / "fold_0", ["c", "d", "e"]), (model / "fold_0" / "validation", ["c", "d", "e"]),
        (model, ["e"]),
    ):  # fmt: skip
        found = pair(given, references)
        assert (found.without_prediction, found.of_other_folds) == ([], others)
    (model / "fold_0" / "validation" / "b.nii.gz").unlink()  # one of its own is missed
    found = pair(model / "fold_0", references)
    assert (found.without_prediction, found.of_other_folds) == (["b"], ["c", "d", "e"])
    for text in ("{}", "[]", "{", None):  # nothing tells which are its own: all are
        path = model / "fold_0" / "validation" / "summary.json"
        path.write_text(text) if text else path.unlink()
        found = pair(model / "fold_0", references)
        assert (found.without_prediction, found.of_other_folds) == (["b", "c", "d", "e"], [])


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
    (hinted,) = pairing.without_reference
    assert hinted.startswith("e_0000 (named like a channel of an image; rename it to e ")
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
    with pytest.raises(ValueError, match=r"1 cases: a_0000 \(named like a channel"):
        pair(touch(tmp_path / "channels", "a_0000.nii.gz"), references)
    twice = touch(tmp_path / "twice", "a.nii.gz", "a.nii")
    for folders in ((references, twice), (twice, references)):
        with pytest.raises(ValueError, match="are one case twice"):
            pair(*folders)


def test_either_of_two_endings_is_named(tmp_path):
    twice = touch(tmp_path / "twice", "a.nii.gz", "a.nii")
    with pytest.raises(ValueError, match=r"twice: a\.nii and a\.nii\.gz are one case twice"):
        pair(twice, touch(tmp_path / "gt", "a.nii.gz"))


def test_results_folder_of_nnunet(tmp_path):
    """The model's folder stands for all folds, a fold's for its validation."""
    references = touch(tmp_path / "gt", "a.nii.gz", "b.nii.gz", "c.nii.gz")
    model = touch(tmp_path / "Dataset001_X" / "T__P__2d", "dataset.json", "plans.json")
    (model / "plans.json").write_text('{"image_reader_writer": "NibabelIO"}')
    for fold, case in (("fold_0", "a"), ("fold_1", "b")):
        touch(model / fold, "checkpoint_final.pth", "progress.png")
        touch(model / fold / "validation", f"{case}.npz", f"{case}.pkl", f"{case}.nii.gz",
              "summary.json")  # fmt: skip
    touch(model / "fold_2", "checkpoint_best.pth")  # still in training
    touch(model / "crossval_results_folds_0_1", "a.nii.gz", "b.nii.gz")
    pairing = pair(model, references)
    assert [(c.name, c.prediction.parent.parent.name) for c in pairing.cases] == [
        ("a", "fold_0"), ("b", "fold_1"),
    ]  # fmt: skip
    assert [c.label_map.name for c in pairing.cases] == ["a.nii.gz", "b.nii.gz"]
    record = model / "fold_1" / "validation" / "segcal_predict.json"
    record.write_text('{"decision": "decision head"}')  # what each fold's validation says is its
    decisions = [c.decision for c in pair(model, references).cases]
    assert decisions == ["argmax", "decision head"]
    record.unlink()
    assert pairing.without_prediction == ["c"]
    one = pair(model / "fold_1", references)
    assert [c.prediction for c in one.cases] == [model / "fold_1" / "validation" / "b.npz"]
    assert pair(model / "fold_1" / "validation", references) == one
    for given in (model, model / "fold_0", model / "fold_0" / "validation"):
        assert find_dataset_json(given, references) == model / "dataset.json"
        assert find_reader(given) == "NibabelIO"
    touch(model / "fold_all" / "validation", "a.nii.gz")
    with pytest.raises(ValueError, match=r"fold_0/validation/a\.npz and .*fold_all/validation/a\."):
        pair(model, references)
    for given in (model / "fold_2", touch(tmp_path / "new" / "fold_0").parent):
        with pytest.raises(ValueError, match="no fold holds a folder 'validation'"):
            pair(given, references)


def test_folders_of_volumes_are_cases(tmp_path):
    references = touch(tmp_path / "gt", "a.nii.gz", "b.nii.gz", "c.nii.gz")
    p = tmp_path / "p"
    touch(p / "a", "liver.nii.gz", "spleen.nii.gz", "._liver.nii.gz")
    touch(p / "z", "liver.nii.gz")
    touch(p / "b", "report.txt")
    pairing = pair(p, references)
    assert [(c.prediction, c.label_map) for c in pairing.cases] == [(p / "a", None)]
    assert (pairing.without_prediction, pairing.without_reference) == (["b", "c"], ["z"])
    touch(p, "c.nii.gz")  # beside files, other folders are something else
    pairing = pair(p, references)
    assert [c.name for c in pairing.cases] == ["a", "c"]
    assert pairing.without_reference == []
    touch(p, "a.npz")
    with pytest.raises(ValueError, match=r"folder a and a\.npz are one case twice"):
        pair(p, references)


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
