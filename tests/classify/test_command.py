"""``segcal classify`` and ``segcal study``."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.io.volumes import Geometry, write_nifti
from tests.classify.classifiers import write_classes, write_config, write_labels

pytestmark = pytest.mark.usefixtures("one_thread")


def segcal(*arguments, code=0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_train_and_evaluate_classes(tmp_path):
    config = write_config(tmp_path, write_classes(tmp_path / "a.npz"))
    said = segcal("classify", "train", config, "--set", "training.epochs=2")
    assert "2 epochs, done. Best: epoch" in said
    assert "segcal classify evaluate" in said
    said = segcal(
        "classify", "evaluate", tmp_path / "run", "-o", tmp_path / "r", "--format", "latex"
    )
    assert "24 test samples" in said
    files = {p.name for p in (tmp_path / "r").iterdir() if not p.name.startswith(".")}
    assert files == {
        "index.html", "summary.json", "classes.csv", "reliability.png", "reliability_classes.png",
        "tables.tex", "predictions.npz"}  # fmt: skip
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    with np.load(tmp_path / "r" / "predictions.npz") as kept:
        hits = kept["logits"].argmax(1) == kept["targets"]
    assert summary["outcomes"]["softmax"]["metrics"]["accuracy"] == pytest.approx(hits.mean())
    assert sum(summary["outcomes"]["softmax"]["reliability"]["hit_sum"]) == hits.sum()
    table = pd.read_csv(tmp_path / "r" / "classes.csv")
    assert table["class"].tolist() == ["class 0", "class 1", "class 2"]
    assert "24 samples evaluated" in (tmp_path / "r" / "index.html").read_text()
    said = segcal("classify", "train", config, code=2)
    assert "choose another output (--resume, or --set output=FOLDER)" in said
    segcal("classify", "train", config, "--resume", "--set", "training.epochs=3")
    said = segcal("classify", "evaluate", tmp_path / "run", "-o", tmp_path / "r", "--last",
                  "--part", "train")  # fmt: skip
    assert "72 train samples" in said
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["predictions"].endswith("epoch 2")
    assert not (tmp_path / "r" / "tables.tex").exists()  # of the report before
    assert summary["conventions"]["bins"].startswith("15 of")
    segcal("classify", "evaluate", tmp_path / "run", "-o", tmp_path / "r", "--bins", "25",
           "--calibrate")  # fmt: skip
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert summary["conventions"]["bins"].startswith("25 of")
    outcomes = summary["outcomes"].values()
    assert [len(outcome["reliability"]["count"]) for outcome in outcomes] == [25, 25]
    moved = (tmp_path / "a.npz").rename(tmp_path / "b.npz")
    evaluate = ["classify", "evaluate", tmp_path / "run", "-o", tmp_path / "r"]
    assert "a.npz: no such file" in segcal(*evaluate, code=2)
    assert "24 test samples" in segcal(*evaluate, "--set", f"data.args.path={moved}")
    assert "device: expected auto" in segcal(*evaluate, "--device", "gpu", code=2)


def test_labels_get_a_column_for_their_link(tmp_path):
    config = write_config(tmp_path, write_labels(tmp_path / "a.npz"))
    segcal("classify", "train", config, "--set", "recipe=asymmetric", "--set", "training.epochs=1")
    said = segcal("classify", "evaluate", tmp_path / "run", "-o", tmp_path / "r")
    assert "sigmoid" in said
    assert "phi" in said
    table = pd.read_csv(tmp_path / "r" / "classes.csv")
    assert table.groupby("probabilities", sort=False)["label"].agg(list).to_dict() == {
        "sigmoid": ["a", "b", "c"], "phi": ["a", "b", "c"]}  # fmt: skip
    assert (tmp_path / "r" / "retrieval.png").stat().st_size > 10_000
    assert (tmp_path / "r" / "loss.png").stat().st_size > 10_000
    assert not (tmp_path / "r" / "retrieval_images.png").exists()  # of features
    page = (tmp_path / "r" / "index.html").read_text()
    assert "3 conditions" in page


def test_a_lost_loss_ends_with_a_sentence(tmp_path):
    config = write_config(tmp_path, write_classes(tmp_path / "a.npz"), recipe="ce", optimizer={
        "target": "torch.optim.SGD", "args": {"lr": 1e30}})  # fmt: skip
    assert "Stopped: the loss is nan" in segcal("classify", "train", config, code=1)


def test_a_report_does_not_overwrite_what_is_not_its_own(tmp_path):
    config = write_config(tmp_path, write_classes(tmp_path / "a.npz"))
    segcal("classify", "train", config, "--set", "training.epochs=1")
    assert "name another folder" in segcal(
        "classify", "evaluate", tmp_path / "run", "-o", tmp_path / "run", code=2
    )
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "classes.csv").write_text("mine")
    assert "was not written by segcal" in segcal(
        "classify", "evaluate", tmp_path / "run", "-o", tmp_path / "r", code=2
    )
    assert "no such file" in segcal("classify", "evaluate", tmp_path, "-o", tmp_path / "x", code=2)


def test_from_segmentation(tmp_path):
    geometry = Geometry((3, 16, 16), (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), np.eye(3))
    labels = np.zeros((3, 16, 16), np.uint8)
    labels[1:, 4:8, 4:8] = 1
    for i in range(4):
        write_nifti(tmp_path / "d" / "labelsTr" / f"c{i}.nii.gz", labels, geometry)
        image = (100 * labels + np.arange(16)).astype(np.float32)
        write_nifti(tmp_path / "d" / "imagesTr" / f"c{i}_0000.nii.gz", image, geometry)
    content = {"labels": {"background": 0, "liver": 1}}
    (tmp_path / "d" / "dataset.json").write_text(json.dumps(content))
    path = tmp_path / "slices.npz"
    said = segcal("classify", "from-segmentation", tmp_path / "d", "-o", path, "--size", "16")
    assert "12 slices of 4 cases: liver 8; none 4" in said
    segcal("classify", "train", "slices", "--set", f"data.args.path={path}", "--set",
           "training.epochs=1", "--set", f"output={tmp_path / 'run'}")  # fmt: skip
    assert "ends in .npz" in segcal(
        "classify", "from-segmentation", tmp_path / "d", "-o", tmp_path / "a.zip", code=2
    )
    command = ("classify", "from-segmentation", tmp_path / "d", "--size", "16", "-o")
    path.write_text("mine")
    assert "exists already; remove it" in segcal(*command, path, code=2)
    assert path.read_text() == "mine"
    (tmp_path / "folder.npz").mkdir()
    assert "is a folder" in segcal(*command, tmp_path / "folder.npz", "--overwrite", code=2)
    segcal(*command, path, "--overwrite")
    deep = tmp_path / "new" / "folder" / "slices.npz"
    segcal(*command, deep)
    assert deep.read_bytes() == path.read_bytes()
    (tmp_path / "d" / "labelsTr" / "c0.nii.gz").write_bytes(b"not read before this is said:")
    assert "cannot write to" in segcal(*command, path / "slices.npz", code=2)


def test_study(tmp_path):
    config = write_config(tmp_path, write_classes(tmp_path / "a.npz"))
    content = {
        "summary": "clouds",
        "sets": {"clouds": {"config": str(config), "changes": {"training": {"epochs": 1}}}},
        "recipes": ["ce", "ls"],
        "seeds": [1],
        "output": str(tmp_path / "study"),
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    said = segcal("study", path, "--report-only", code=1)
    assert "Nothing has been trained" in said
    said = segcal("study", path, "--set", "recipes=[ce]")
    assert "1 trainings, 1 of them to do" in said
    said = segcal("study", path, "--format", "markdown")
    assert "2 trainings, 1 of them to do" in said
    folder = tmp_path / "study" / "report"
    assert "| ls |" in (folder / "tables.md").read_text()
    assert not (folder / "tables.tex").exists()
    assert "no YAML file" in segcal("study", "nothing", code=2)


def test_what_is_wrong_is_said(tmp_path):
    gone = write_config(tmp_path, tmp_path / "none.npz")
    shown = segcal("classify", "train", gone, code=2)
    assert f"data.args.path: {tmp_path / 'none.npz'}: no such file or folder" in shown
    labels = write_config(tmp_path, write_classes(tmp_path / "a.npz"), recipe="spa")
    shown = segcal("classify", "train", labels, code=2)
    assert "spa is a multi-label loss, but classes exclude each other here" in shown
    assert not (tmp_path / "run").exists()


def test_a_study_says_what_it_takes_before_it_begins(tmp_path):
    """What is there is listed, what is missing is named for every set, and nothing is written."""
    config = write_config(tmp_path, write_classes(tmp_path / "a.npz"))
    moved = {"data": {"args": {"path": str(tmp_path / "moved.npz")}}}
    lists = {"data": {"source": "image_list", "args": {
        "path": str(tmp_path), "train": str(tmp_path / "LT_train.txt")}}}  # fmt: skip
    content = {
        "summary": "clouds",
        "cost": {"gpu_minutes": 90, "disk_gb": 2.5},
        "sets": {
            "clouds": {"config": str(config)},
            "moved": {"config": str(config), "changes": moved},
            "lists": {"config": str(config), "changes": lists},
        },
        "recipes": ["ce", "ls"],
        "seeds": [1, 2],
        "output": str(tmp_path / "study"),
    }
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    said = " ".join(segcal("study", path, "--dry-run", code=2).split())
    assert "clouds ls 1 2 4 2 to do" in said
    assert "12 trainings, 12 of them to do" in said
    assert "about 90 min of a GPU (estimated, never run on one), and 2.5 GB of a disk" in said
    assert "GB are free" in said
    assert "Missing for moved: sets.moved, ce: data.args.path: " in said
    assert "moved.npz: no such file or folder" in said
    assert "LT_train.txt: cannot be read" in said
    assert "Missing for clouds" not in said
    assert not (tmp_path / "study").exists()
    content["sets"] = {"clouds": content["sets"]["clouds"]}
    path.write_text(yaml.safe_dump(content))
    segcal("study", path, "--set", "recipes=[ce]", "--set", "sets.clouds.changes.training.epochs=1")
    settings = ["--set", "sets.clouds.changes.training.epochs=1"]
    said = " ".join(segcal("study", path, "--dry-run", *settings).split())
    assert "clouds ce 1 2 1 2 done" in said
    assert "4 trainings, 2 of them to do" in said
