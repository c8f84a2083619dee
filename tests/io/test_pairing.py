"""Pairing of files and dataset.json."""

from __future__ import annotations

import json
import os

import pytest

from segcal.evaluation.labels import find_labels
from segcal.io.case_patterns import Patterns
from segcal.io.label_sets import parse_labels, read_label_set
from segcal.io.pairing import find_dataset_json, find_reader, pair, with_cases


def touch(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def write_summary(folder, *cases):
    """What nnU-Net measures of its validation."""
    measured = [{"prediction_file": str(folder / f"{case}.nii.gz")} for case in cases]
    (folder / "summary.json").write_text(json.dumps({"metric_per_case": measured}))


def test_some_cases_alone(tmp_path):
    """What a list does not name is missed in neither folder."""
    predictions = touch(tmp_path / "p", *(f"{case}.nii.gz" for case in "abx"))
    references = touch(tmp_path / "r", *(f"{case}.nii.gz" for case in "abcd"))
    found = with_cases(pair(predictions, references), ["a", "c"])
    assert [case.name for case in found.cases] == ["a"]
    assert (found.without_prediction, found.without_reference) == (["c"], [])
    with pytest.raises(ValueError, match="neither a prediction nor a reference of e, f"):
        with_cases(found, ["a", "f", "e"])


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


BOTH_SIDES = [
    # predictions, references, names of the cases, what is said
    (["img0035.nii.gz", "img0036.nii.gz"], ["label0035.nii.gz", "label0036.nii.gz"],
     ["0035", "0036"], "Paired as img{case} and label{case}"),
    (["a.seg.nrrd", "b.seg.nrrd"], ["a.nrrd", "b.nrrd"], ["a", "b"], None),
    (["a/a_trans.nii.gz", "b/b_trans.nii.gz"], ["a.nii.gz", "b.nii.gz"], ["a", "b"], ""),
    (["a_seg.nii.gz"], ["a.nii.gz"], ["a"], "Paired as {case}_seg and {case}"),
    (["img1/img1_trans.nii.gz", "img2/img2_trans.nii.gz"], ["label1.nii", "label2.nii"],
     ["1", "2"], "Paired as img{case} and label{case}"),
    (["volume-0.nii", "volume-1.nii"], ["segmentation-0.nii", "segmentation-1.nii"], ["0", "1"],
     "Paired as volume-{case} and segmentation-{case}"),
    (["a_pred.npz", "a_pred.nii.gz"], ["a_gt.nii.gz", "b_gt.nii.gz"], ["a"],
     "Paired as {case}_pred and {case}_gt"),
]  # fmt: skip


def touch_all(folder, names):
    for name in names:
        touch((folder / name).parent, (folder / name).name)
    return folder


@pytest.mark.parametrize(("given", "wanted", "names", "note"), BOTH_SIDES)
def test_usual_names_are_paired_without_being_told(tmp_path, given, wanted, names, note):
    pairing = pair(touch_all(tmp_path / "p", given), touch_all(tmp_path / "gt", wanted))
    assert [case.name for case in pairing.cases] == names
    if note is not None:  # a reader of .seg.nrrd knows the ending
        assert pairing.note == note
    assert all(case.prediction.is_file() for case in pairing.cases)
    if "a_pred.npz" in given:
        assert pairing.cases[0].label_map == tmp_path / "p" / "a_pred.nii.gz"
        assert pairing.without_prediction == ["b"]


@pytest.mark.parametrize(
    ("given", "wanted", "patterns", "names"),
    [
        (["a/a_seg.nii.gz", "a/a_t1.nii.gz", "b/b_seg.nii.gz"], ["labela.nii.gz", "labelb.nii.gz"],
         ("{case}/{case}_seg.nii.gz", "label{case}.nii.gz"), ["a", "b"]),
        (["a/a_seg.nii.gz", "a/a_t1.nii.gz", "a/b_seg.nii.gz"], ["a.nii.gz", "b.nii.gz"],
         ("{case}/{case}_seg", None), ["a"]),
        (["x_a_1.npz", "x_b_2.npz", "x_a_1.nii.gz"], ["deep/a/gt/liver.nii.gz"],
         ("x_{case}_*", "*/{case}/gt"), ["a"]),
        (["[a].nii.gz"], ["[b].nii.gz"], ("[{case}]", "[b].nii.gz".replace("b", "{case}")), []),
    ],
)  # fmt: skip
def test_patterns(tmp_path, given, wanted, patterns, names):
    folders = touch_all(tmp_path / "p", given), touch_all(tmp_path / "gt", wanted)
    if not names:
        with pytest.raises(ValueError, match="no file name is common"):
            pair(*folders, Patterns(*patterns))
        return
    cases = pair(*folders, Patterns(*patterns)).cases
    assert [case.name for case in cases] == names
    if "x_a_1.npz" in given:
        assert cases[0].label_map == tmp_path / "p" / "x_a_1.nii.gz"
        assert cases[0].reference.is_dir()


@pytest.mark.parametrize(
    "pattern", ["a.nii.gz", "/{case}", "../{case}", "{case}/{name}", "}{case}"]
)
def test_patterns_that_are_none(pattern):
    with pytest.raises(ValueError, match=r"prediction_pattern: expected a path in the folder with"):
        Patterns(pattern)
    with pytest.raises(ValueError, match="reference_pattern: "):
        Patterns(None, pattern)


def test_a_pattern_is_suggested_where_no_name_is_common(tmp_path):
    """Three names of each side, and the pattern that pairs the most."""
    p = touch_all(
        tmp_path / "p", [f"run7/{c}/ours_{c}_T.nii.gz" for c in ("p01", "p02", "p03", "p4")]
    )
    gt = touch_all(tmp_path / "gt", [f"done-{c}-x.nii.gz" for c in ("p01", "p02", "p03", "p4")])
    with pytest.raises(ValueError, match="no file name is common") as error:
        pair(p, gt)
    text = str(error.value)
    assert (
        "run7/p01/ours_p01_T, run7/p02/ours_p02_T, run7/p03/ours_p03_T, ...; and done-p01-x, "
        in text
    )
    options = "--prediction-pattern 'run7/{case}/ours_{case}_T' --reference-pattern 'done-{case}-x'"
    assert f"{options} would pair them" in text
    suggested = Patterns("run7/{case}/ours_{case}_T", "done-{case}-x")
    assert [c.name for c in pair(p, gt, suggested).cases] == ["p01", "p02", "p03", "p4"]


def test_two_files_of_one_pattern_are_refused(tmp_path):
    p = touch_all(tmp_path / "p", ["a_1.nii.gz", "a_2.nii.gz"])
    with pytest.raises(ValueError, match=r"a_1\.nii\.gz and a_2\.nii\.gz are one case twice: a"):
        pair(p, touch(tmp_path / "gt", "a.nii.gz"), Patterns("{case}_*"))


def test_a_name_that_no_report_can_write_is_said_at_once(tmp_path):
    p = touch(tmp_path / "p")
    (p / os.fsdecode(b"b\xff.nii.gz")).write_bytes(b"")
    touch(tmp_path / "gt", "a.nii.gz")
    for folders in ((p, tmp_path / "gt"), (tmp_path / "gt", p)):
        with pytest.raises(ValueError, match=r"b\\udcff\.nii\.gz: its name is not valid UTF-8"):
            pair(*folders)


def test_a_dataset_json_two_folders_above_is_not_taken_silently(tmp_path):
    write(tmp_path / "dataset.json", {"labels": {"background": 0, "a": 1}})
    p = touch(tmp_path / "x" / "y", "a.nii.gz")
    assert find_dataset_json(p, p) is None
    found = find_labels(None, p, p)
    assert found.label_set is None
    assert "dataset.json lies two folders above" in found.problem
    assert find_labels(tmp_path / "dataset.json", p, p).label_set.names == {0: "background", 1: "a"}


def test_labels_in_words():
    labels = parse_labels("liver=1, left kidney=2,ignore=255")
    assert labels.names == {0: "background", 1: "liver", 2: "left kidney"}
    assert labels.ignore_index == 255
    assert labels.source == "--labels liver=1, left kidney=2,ignore=255"
    for text in ("", "liver", "liver=x", "liver=1,liver=2", "=1", "liver=-1"):
        with pytest.raises(ValueError, match=r"labels: expected NAME=VALUE"):
            parse_labels(text)
    with pytest.raises(ValueError, match="share value 1"):
        parse_labels("liver=1,spleen=1")
