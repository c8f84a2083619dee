"""What a user sees of ``segcal evaluate``: tables, odd files, odd names, runs into one folder."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from dataclasses import replace

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
import SimpleITK as sitk  # noqa: N813
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from segcal.commands.console import calibration_table, class_table
from segcal.commands.main import app
from segcal.evaluation import api, cohort
from segcal.evaluation.job import STORE
from segcal.evaluation.reported import readable
from segcal.evaluation.summary import summarise
from segcal.io.volumes import write_nifti
from segcal.reporting import report
from segcal.reproduction.marginloss import evaluate_case_marginloss
from tests.conftest import close
from tests.evaluation.test_cohort import geometry, soft
from tests.io.test_formats import BOXED, box_of_segments, oblique
from tests.io.test_pairing import write_summary


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


@pytest.fixture
def folders(tmp_path):
    """Two good cases of two classes."""
    y = np.zeros((3, 12, 12), int)
    y[0, 2:6, 2:6], y[1, 6:9, 6:9] = 1, 2
    (tmp_path / "p").mkdir()
    for name in "ab":
        write_nifti(tmp_path / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
        np.savez(tmp_path / "p" / f"{name}.npz", probabilities=soft(y, 3))
    return tmp_path, y


@pytest.fixture(autouse=True)
def undrawn(request):
    """Reports without pictures, each of which takes a second, where nobody asks for them."""
    if "pictures" in request.fixturenames:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_diagrams", lambda *arguments: {})
        patch.setattr(report, "_worst", lambda *arguments: ({}, []))
        yield


def evaluate(root, *options, out="out"):
    return run(root / "p", root / "gt", "-o", root / out, *options)


def summary(root, out="out"):
    return json.loads((root / out / "summary.json").read_text())


def test_numbers_are_said_before_figures_are_drawn(folders, monkeypatch):
    def fails(*arguments, **options):
        raise ValueError("the disk is full")

    monkeypatch.setattr(report, "write_report", fails)
    root, _ = folders
    done = evaluate(root)
    assert done.exit_code == 2
    assert re.search(r"HD95.*DSC|DSC.*HD95", done.output)
    assert done.output.index("DSC") < done.output.index("the disk is full")


def test_a_good_run(folders, pictures):
    root, _ = folders
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    assert "Written to" in done.output
    got = summary(root)
    assert got["cases"]["evaluated"] == 2
    header = (root / "out" / "cases.csv").read_text().splitlines()[0]
    for column in ("spacing_z_mm", "dsc/1", "hd95_pooled_mm/2", "ece_fg", "tace_all", "tace_ref"):
        assert column in header.split(",")
    png = (root / "out" / "reliability.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_a_fold_s_own_cases_are_all_that_is_wanted(folders):
    root, y = folders
    fold = root / "model" / "fold_0" / "validation"
    fold.parent.mkdir(parents=True)
    (root / "p").rename(fold)
    write_nifti(root / "gt" / "of_fold_1.nii.gz", y, geometry(y.shape))
    for command in (["check"], ["evaluate", "-o", str(root / "out"), "--bootstrap", "0"]):
        arguments = [*command, str(fold.parent), str(root / "gt")]
        assert CliRunner().invoke(app, arguments).exit_code == 1
        write_summary(fold, "a", "b")
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, done.output
        assert "1 references left out: other folds validate on their cases" in done.output
        (fold / "summary.json").unlink()


def test_several_predictions_are_compared(folders, pictures):
    root, y = folders
    for name in ("soft", "shifted"):
        (root / name).mkdir()
    for case in "ab":
        np.savez(root / "soft" / f"{case}.npz", probabilities=soft(y, 3, 0.6))
        shifted = soft(np.roll(y, 1, axis=2), 3)
        np.savez(root / "shifted" / f"{case}.npz", probabilities=shifted)
    done = run(
        root / "p", root / "soft", root / "shifted", root / "gt", "-o", root / "out",
        "--names", "base,soft,shifted",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "Differences to base" in done.output
    for name in ("base", "soft", "shifted"):
        got = json.loads((root / "out" / name / "summary.json").read_text())
        assert got["cases"]["evaluated"] == 2
        assert got["metrics"]["ece_all"]["ci95"][0] <= got["metrics"]["ece_all"]["mean"]
    comparison = json.loads((root / "out" / "comparison.json").read_text())
    found = {(d["method"], d["metric"]): d for d in comparison["differences"]}
    assert found["soft", "dsc"]["mean"] == 0
    assert found["soft", "ece_all"]["mean"] > 0.2
    assert found["shifted", "dsc"]["mean"] < -0.1
    assert (root / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")
    lines = (root / "out" / "comparison.csv").read_text().splitlines()
    assert lines[0].startswith("case,method,")
    assert len(lines) == 1 + 6


def test_a_dask_cluster_gives_the_same(folders):
    pytest.importorskip("distributed", reason='needs pip install "segcal[dask]"')
    root, y = folders
    for name in "cd":
        write_nifti(root / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
    np.savez(root / "p" / "c.npz", probabilities=soft(np.roll(y, 1, axis=2), 3, 0.7))
    (root / "p" / "d.npz").write_bytes(b"no zip")
    done = [evaluate(root), evaluate(root, "--engine", "dask", "-p", 2, out="dask")]
    assert [d.exit_code for d in done] == [1, 1], done[1].output
    tables = [(root / out / "cases.csv").read_bytes() for out in ("out", "dask")]
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == 1 + 3
    texts = [summary(root, out) for out in ("out", "dask")]
    for key in ("cases", "metrics", "pooled", "classes"):
        assert texts[0][key] == texts[1][key]


def test_an_engine_that_cannot_start_is_said_before_work(folders):
    root, _ = folders
    done = evaluate(root, "--scheduler", "tcp://localhost:1")
    assert done.exit_code == 2
    assert "--scheduler tcp://localhost:1: needs the engine dask" in done.output
    pytest.importorskip("distributed", reason='needs pip install "segcal[dask]"')
    done = evaluate(root, "--engine", "dask", "--scheduler", "nowhere")
    assert done.exit_code == 2
    assert "nowhere: no Dask scheduler answered" in done.output
    assert not (root / "out").exists()


def test_wrong_names_are_said_before_work(folders):
    root, _ = folders
    for names in ("one", "a,a", "a,", "a,../b"):
        done = run(root / "p", root / "p", root / "gt", "-o", root / "out", "--names", names)
        assert done.exit_code == 2
        assert "--names:" in done.output
    done = run(root / "gt", "-o", root / "out")
    assert done.exit_code == 2
    assert "at least one folder of predictions" in done.output
    done = run(root / "p", root / "nowhere", root / "gt", "-o", root / "out")
    assert done.exit_code == 2
    assert "nowhere: no such file or folder" in done.output
    assert not (root / "out").exists()


def test_no_report_goes_into_predictions(folders):
    """With -o beside them, the name of one could be the folder of another."""
    root, _ = folders
    (root / "p").rename(root / "a")
    shutil.copytree(root / "a", root / "b")
    done = run(root / "a", root / "b", root / "gt", "-o", root, "--names", "b,a")
    assert done.exit_code == 2
    assert "holds the files to evaluate" in done.output
    assert sorted(p.name for p in (root / "b").iterdir()) == ["a.npz", "b.npz"]


def test_numbers_are_whole_at_80_columns(folders):
    root, _ = folders
    evaluate(root)
    got = summary(root)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(class_table(got))
    console.print(calibration_table(got, ("fg", "dilated5", "all")))
    text = console.export_text()
    assert "…" not in text
    assert f"{got['metrics']['brier_fg']['mean']:.4f}" in text


def test_names_are_not_markup(folders):
    root, _ = folders
    labels = {"background": 0, "tumour [core]": 1, "[/bold]x": 2}
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))
    done = evaluate(root, out="out[/a]")
    assert done.exit_code == 0, done.output
    assert "[core]" in done.output
    assert "[/bold]x" in done.output


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64, ">i2", np.float32])
def test_reference_of_every_type(folders, dtype):
    root, y = folders
    image = nib.Nifti1Image(y.astype(dtype).transpose(), np.eye(4), dtype=np.dtype(dtype))
    nib.save(image, root / "gt" / "a.nii.gz")
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    assert summary(root)["metrics"]["dsc"]["mean"] == 1


def test_damaged_files_do_not_stop_the_others(folders):
    root, y = folders
    write_nifti(root / "gt" / "c.nii.gz", y, geometry(y.shape))
    write_nifti(root / "gt" / "d.nii.gz", y, geometry(y.shape))
    (root / "p" / "c.npz").write_bytes(b"no zip")
    np.savez(root / "p" / "d.npz", probabilities=soft(y, 3))
    (root / "gt" / "d.nii.gz").write_bytes(b"no gzip")
    done = evaluate(root)
    assert done.exit_code == 1
    assert set(summary(root)["cases"]["failed"]) == {"c", "d"}
    assert "FAILED c:" in done.output
    assert "c.npz: not a complete .npz file" in done.output
    assert summary(root)["cases"]["evaluated"] == 2


def test_label_map_beside_the_probabilities(folders):
    """nnU-Net post-processes label maps only: they decide overlap, the npz calibration."""
    root, y = folders
    kept = np.where(y == 2, 0, y)
    for name in "ab":
        write_nifti(root / "p" / f"{name}.nii.gz", kept, geometry(y.shape))
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    got = summary(root)
    assert got["classes"]["2"]["dsc"]["mean"] == 0
    assert got["classes"]["2"]["hd_mm"]["missed"] == 2
    assert "9 voxels have another label" in got["cases"]["notes"]["a"][0]
    other = np.roll(y, 5, axis=2)  # another frame
    write_nifti(root / "p" / "a.nii.gz", other, geometry(y.shape))
    done = evaluate(root)
    assert done.exit_code == 1
    assert "keep nnU-Net's plans.json" in summary(root)["cases"]["failed"]["a"]


def test_post_processing_may_remove_everything(folders):
    """A false alarm that was removed is no other frame: the case stays in the means."""
    root, y = folders
    write_nifti(root / "gt" / "a.nii.gz", 0 * y, geometry(y.shape))
    write_nifti(root / "p" / "a.nii.gz", 0 * y, geometry(y.shape))
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    got = summary(root)
    assert got["cases"]["evaluated"] == 2
    assert got["classes"]["1"]["hd_mm"]["absent"] == 1


def test_one_file_each_is_the_folder_of_one(folders):
    root, y = folders
    write_nifti(root / "p" / "a.nii.gz", np.where(y == 2, 0, y), geometry(y.shape))
    done = run(root / "p" / "a.npz", root / "gt" / "a.nii.gz", "-o", root / "out")
    assert done.exit_code == 0, done.output
    assert summary(root)["classes"]["2"]["dsc"]["mean"] == 0
    done = run(root / "p" / "a.npz", root / "p" / "b.npz", "-o", root / "out")
    assert done.exit_code == 2
    assert "expected a label map" in done.output


def test_cases_without_probabilities_are_said(folders, pictures):
    root, y = folders
    (root / "p" / "a.npz").unlink()
    write_nifti(root / "p" / "a.nii.gz", y, geometry(y.shape))
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    assert "left out of the calibration errors" in done.output
    assert summary(root)["metrics"]["ece_all"]["n"] == 1
    assert summary(root)["metrics"]["dsc"]["n"] == 2


def test_nothing_but_background(folders, pictures):
    root, y = folders
    for name in "ab":
        (root / "p" / f"{name}.npz").unlink()
        for folder in ("p", "gt"):
            write_nifti(root / folder / f"{name}.nii.gz", 0 * y, geometry(y.shape))
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    assert "Written to" in done.output


def test_options_reach_the_numbers(folders):
    root, _ = folders
    done = evaluate(root, "--bins", 3, "--tace-threshold", 0.06, "--dilation", 2)
    assert done.exit_code == 0, done.output
    got = summary(root)
    assert got["settings"] == {
        "threshold": None, "bins": 3, "tace_threshold": 0.06, "dilation": 2, "tolerance": 0.01,
        "nsd_tolerance_mm": 2.0, "chosen": ["fg", "union", "dilated", "all"], "compat": None,
        "level": 0.95, "interval": "conformal",
    }  # fmt: skip
    assert "ece_dilated2" in got["metrics"]
    evaluate(root, out="other")  # 0.05 is under the threshold, 15 bins
    assert (
        got["metrics"]["tace_all"]["mean"] != summary(root, "other")["metrics"]["tace_all"]["mean"]
    )


def test_nobody_elses_summary_is_overwritten(folders):
    root, _ = folders
    (root / "out").mkdir()
    (root / "out" / "summary.json").write_text('{"foreground_mean": {}}')  # nnU-Net's
    done = evaluate(root)
    assert done.exit_code == 2
    assert "was not written by segcal" in done.output
    assert "foreground_mean" in (root / "out" / "summary.json").read_text()
    assert run(root / "p", root / "gt", "-o", root / "p").exit_code == 2
    assert run(root / "p", root / "gt", "-o", root / "gt").exit_code == 2


def test_interrupted(folders, monkeypatch):
    root, _ = folders
    real = cohort.evaluate_files

    def stop_at_b(case, *arguments, **kwargs):
        if case.name == "b":
            raise KeyboardInterrupt
        return real(case, *arguments, **kwargs)

    monkeypatch.setattr(cohort, "evaluate_files", stop_at_b)
    done = evaluate(root)
    assert done.exit_code == 130
    assert summary(root)["cases"]["evaluated"] == 1
    assert summary(root)["cases"]["interrupted"] is True


def test_an_ignore_label_is_never_counted_as_a_class(folders):
    root, _ = folders
    labels = {"background": 0, "whole": [1, 2], "core": [2], "ignore": 3}
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))
    done = evaluate(root)
    assert done.exit_code == 2
    assert "declares an ignore label" in done.output


def test_predicted_labels_that_are_no_class(folders, pictures):
    root, y = folders
    (root / "p" / "a.npz").unlink()
    write_nifti(root / "p" / "a.nii.gz", 255 * (y > 0), geometry(y.shape))
    (root / "dataset.json").write_text(json.dumps({"labels": {"background": 0, "x": 1, "y": 2}}))
    done = evaluate(root)
    assert done.exit_code == 1
    assert "labels [255] are not among the classes 0, 1, 2" in done.output


def test_a_dataset_json_that_nobody_asked_for_is_not_fatal(folders):
    root, _ = folders
    (root / "dataset.json").write_text(json.dumps({"labels": {"all": [1, 2]}}))
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    assert "Going on without label names" in done.output
    done = evaluate(root, "--dataset-json", root / "dataset.json")
    assert done.exit_code == 2
    assert "regions_class_order" in done.output


def test_runs_into_one_folder_do_not_mix(folders, pictures):
    root, y = folders
    evaluate(root)
    for name in "ab":
        (root / "p" / f"{name}.npz").unlink()
        write_nifti(root / "p" / f"{name}.nii.gz", y, geometry(y.shape))
    assert evaluate(root).exit_code == 0
    assert not (root / "out" / "reliability.png").exists()
    for name in "ab":
        (root / "p" / f"{name}.nii.gz").write_bytes(b"broken")
    assert evaluate(root).exit_code == 1
    assert not (root / "out" / "cases.csv").exists()
    assert set(summary(root)["cases"]["failed"]) == {"a", "b"}


def test_wrong_usage_has_no_traceback(folders):
    root, _ = folders
    (root / "file").write_text("")
    for arguments in (
        (root / "p", root / "gt", "-o", root / "file"),
        (root / "p", root / "gt", "-o", root / "file" / "report"),
        (root / "p", root / "gt", "-o", root / "out", "--dataset-json", root),
        (root / "p", root / "none", "-o", root / "out"),
        (root / "p", root / "gt", "-o", root / "out", "--bins", "0"),
        (root / "p", root / "gt", "-o", root / "out", "--tolerance", "inf"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, (arguments, done.output)
        assert done.exception is None or isinstance(done.exception, SystemExit)


def test_tolerance(folders):
    root, y = folders
    (root / "p" / "a.npz").unlink()
    moved = replace(geometry(y.shape), origin_mm=(0.1, 0.0, 0.0))
    write_nifti(root / "p" / "a.nii.gz", y, moved)
    assert evaluate(root).exit_code == 1
    assert evaluate(root, "--tolerance", 0.2).exit_code == 0


def test_tables_for_a_paper(folders):
    root, _ = folders
    done = evaluate(root, "--format", "markdown,latex", "--format", "latex")
    assert done.exit_code == 0, done.output
    got = summary(root)
    for name in ("tables.md", "tables.tex"):
        text = (root / "out" / name).read_text(encoding="utf-8")
        for metric, digits in (("ece_all", 4), ("brier_fg", 4)):
            assert f"{got['metrics'][metric]['mean']:.{digits}f}" in text
        assert f"{got['classes']['1']['dsc']['mean']:.3f}" in text
        assert f"Written to {root / 'out'}" in done.output
        assert name in done.output
    assert evaluate(root).exit_code == 0
    assert not (root / "out" / "tables.md").exists()  # its numbers would be of another run
    assert not (root / "out" / "tables.tex").exists()
    done = evaluate(root, "--format", "latex,word", out="other")
    assert done.exit_code == 2
    assert "--format: expected markdown or latex, got 'word'" in done.output
    assert not (root / "other").exists()


@pytest.mark.parametrize("name", ["index.html", "cases.csv", "tables.tex", "worst/mine.png"])
def test_what_others_left_in_the_folder_is_not_touched(folders, name):
    root, _ = folders
    (root / "out" / "worst").mkdir(parents=True)
    (root / "out" / name).write_text("mine")
    done = evaluate(root)
    assert done.exit_code == 2
    assert name.split("/")[-1] in done.output
    assert [p for p in (root / "out").rglob("*") if p.is_file()] == [root / "out" / name]
    assert (root / "out" / name).read_text() == "mine"
    done = run(root / "p", root / "gt", root / "gt", "-o", root / "out")
    assert done.exit_code == 2
    assert not (root / "out" / "p").exists()


def test_what_others_put_beside_a_report_stays(folders):
    root, _ = folders
    assert evaluate(root, "--format", "latex").exit_code == 0
    for name in ("worst/mine.png", "notes.txt", ".segcal-results/thesis.txt"):
        (root / "out" / name).parent.mkdir(exist_ok=True)
        (root / "out" / name).write_text("mine")
    assert evaluate(root).exit_code == 2  # mine.png might be overwritten
    (root / "out" / "worst" / "mine.png").rename(root / "out" / "mine.png")
    assert evaluate(root).exit_code == 0
    assert not (root / "out" / "tables.tex").exists()
    for name in ("mine.png", "notes.txt", ".segcal-results/thesis.txt"):
        assert (root / "out" / name).read_text() == "mine"


def test_a_comparison_that_cannot_be_made_leaves_none_behind(folders):
    root, y = folders
    (root / "q").mkdir()
    np.savez(root / "q" / "a.npz", probabilities=soft(y, 3, 0.6))
    both = (root / "p", root / "q", root / "gt", "-o", root / "out")
    assert run(*both).exit_code == 1  # q lacks b
    assert (root / "out" / "comparison.json").exists()
    (root / "q" / "a.npz").write_bytes(b"broken")
    assert run(*both).exit_code == 1
    assert not [*(root / "out").glob("comparison.*"), *(root / "out").glob("*.html")]


def test_no_name_leads_out_of_the_folder(folders, monkeypatch):
    root, _ = folders
    both = (root / "p", root / "gt", root / "gt", "-o", root / "out")
    for names in ("a,..", ".,a"):
        done = run(*both, "--names", names)
        assert done.exit_code == 2
        assert "cannot name a folder" in done.output
    monkeypatch.chdir(root / "p")
    done = run("..", root / "p", root / "gt", "-o", root / "out")
    assert done.exit_code == 2  # .. holds no predictions; it would be called by its name
    assert not (root / "index.html").exists()
    (root / "m1.0").mkdir()
    (root / "m1.1").mkdir()
    done = run(root / "m1.0", root / "m1.1", root / "gt", "-o", root / "out")
    assert "different names" not in done.output


def test_another_number_of_classes_is_a_failed_case(folders):
    root, y = folders
    np.savez(root / "p" / "b.npz", probabilities=soft(y, 4))
    done = evaluate(root)
    assert done.exit_code == 1
    assert "has 4 classes where the cases before have 3" in done.output
    assert summary(root)["cases"]["evaluated"] == 1
    done = CliRunner().invoke(app, ["check", str(root / "p"), str(root / "gt")])
    assert done.exit_code == 1
    assert "channels, where most predictions have" in done.output


def test_results_are_kept_until_the_report_is_there(folders, monkeypatch):
    root, _ = folders

    def fails(*arguments, **options):
        raise ValueError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(report, "write_report", fails)
        assert evaluate(root).exit_code == 2
    assert len([*(root / "out" / ".segcal-results").glob("*.npz")]) == 2
    assert evaluate(root, "--resume").exit_code == 0
    assert not (root / "out" / ".segcal-results").exists()


def test_methods_side_by_side(folders):
    root, y = folders
    (root / "q").mkdir()
    for name in "ab":
        np.savez(root / "q" / f"{name}.npz", probabilities=soft(y, 3, 0.6))
    done = run(
        root / "p", root / "q", root / "gt", "-o", root / "out", "--format", "markdown",
        "--bootstrap", "0",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    lines = (root / "out" / "tables.md").read_text(encoding="utf-8").splitlines()
    lines = lines[: lines.index("## Differences to p")]
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    assert "| 1.000 | 0.00 | **0.1000** |" in rows["p"]  # DSC and HD95 alike, ECE the better
    assert "| 1.000 | 0.00 | 0.4000 |" in rows["q"]
    assert rows["shared cases"].startswith("| shared cases | 2 | 2 |")
    assert {p.name for p in (root / "out" / "p").glob("tables.*")} == {"tables.md"}
    assert 'href="q/index.html"' in (root / "out" / "index.html").read_text(encoding="utf-8")


def test_worst_cases_over_their_images(folders, pictures):
    """a is stored as nnU-Net names it, b lies elsewhere, c is no volume, d is missing."""
    root, y = folders
    (root / "images").mkdir()
    write_nifti(root / "images" / "a_0000.nii.gz", y * 1.5, geometry(y.shape))
    write_nifti(root / "images" / "b.nii.gz", y * 1.5, geometry(y.shape, (1.0, 1.0, 2.0)))
    (root / "images" / "c.nii.gz").write_bytes(b"broken")
    for name in "abcd":
        shutil.copytree(root / "gt", root / name / "gt")
        (root / name / "gt" / "b.nii.gz").unlink()
        (root / name / "gt" / "a.nii.gz").rename(root / name / "gt" / f"{name}.nii.gz")
        (root / name / "p").mkdir()
        shutil.copy(root / "p" / "a.npz", root / name / "p" / f"{name}.npz")
        done = evaluate(root / name, "--images", root / "images", "--bootstrap", "0")
        assert done.exit_code == 0, done.output
        assert ("without its image" in done.output) == (name != "a")
        picture = root / name / "out" / "worst" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
    pages = {n: (root / n / "out" / "index.html").read_text(encoding="utf-8") for n in "abcd"}
    assert "without its image" not in pages["a"]
    assert "b is shown without its image" in pages["b"]
    assert "does not lie on the reference: spacing" in pages["b"]
    assert "cannot be read as a volume" in pages["c"]
    assert "holds no d_0000.nii.gz" in pages["d"]
    done = evaluate(root, "--images", root / "nowhere", out="other")
    assert done.exit_code == 2
    assert "nowhere: no such folder" in done.output


FAST = ("--bootstrap", "0")
ONE = ("--scopes", "all")
REGIONS = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "enhancing": 3}


def region_case(root, name, labels, *, ignored=0):
    """Four voxels worth of nested sigmoids, each a block of 4 x 4, beside their label map."""
    sigmoids = np.array([(0.9, 0.8, 0.2), (0.6, 0.7, 0.9), (0.4, 0.9, 0.1), (0.2, 0.1, 0.05)])
    p = np.kron(sigmoids.T.reshape(3, 1, 2, 2), np.ones((1, 1, 4, 4))).astype(np.float32)
    y = np.kron(np.array([2, 3, 0, 1]).reshape(1, 2, 2), np.ones((1, 4, 4), int))
    if ignored:
        y[0, 4:, :4] = ignored  # where whole says .4 and core .9
    (root / "p").mkdir(exist_ok=True)
    np.savez(root / "p" / f"{name}.npz", probabilities=p)
    made = np.kron(np.array([2, 3, 2, 0]).reshape(1, 2, 2), np.ones((1, 4, 4), int))
    write_nifti(root / "p" / f"{name}.nii.gz", made, geometry(y.shape))
    write_nifti(root / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
    content = {"labels": labels, "regions_class_order": [1, 2, 3]}
    (root / "dataset.json").write_text(json.dumps(content))


def test_regions_through_files(tmp_path, pictures):
    """Nested sigmoids without a background channel; gaps worked out by hand, 10 bins."""
    region_case(tmp_path, "a", REGIONS)
    done = evaluate(tmp_path, *FAST, "--bins", 10, "--scopes", "all,union,fg")
    assert done.exit_code == 0, done.output
    got = summary(tmp_path)
    assert got["cases"]["notes"] == {}  # the label map is what the channels make
    row = pd.read_csv(tmp_path / "out" / "cases.csv").iloc[0]
    for name, error in (("whole", 0.425), ("core", 0.375), ("enhancing", 0.1125)):
        close(row[f"cece_all/{name}"], error, atol=1e-6)
    close(row["cece_all"], (0.425 + 0.375 + 0.1125) / 3, atol=1e-6)
    # predicted whole: blocks 1, 2, 3 of labels 2, 3, 0; core: the same; enhancing: block 2
    for name, dsc in (("whole", 2 * 2 / (3 + 3)), ("core", 2 * 2 / (3 + 2)), ("enhancing", 1)):
        close(row[f"dsc/{name}"], dsc, rtol=1e-7)
    assert row["voxels_all"] == 64
    assert row["voxels_union"] == 64  # block 4 is labelled, block 3 predicted
    assert row["voxels_fg"] == 48
    assert list(got["classes"]) == ["whole", "core", "enhancing"]
    (tmp_path / "dataset.json").unlink()
    done = evaluate(tmp_path, *FAST, out="no regions")
    assert done.exit_code == 1
    assert (
        "overlapping regions from a sigmoid head"
        in summary(tmp_path, "no regions")["cases"]["failed"]["a"]
    )


def test_an_order_that_contradicts_the_regions_is_said(tmp_path):
    region_case(tmp_path, "a", {**REGIONS, "core": [1, 2], "enhancing": 1})
    done = evaluate(tmp_path, *FAST)
    assert done.exit_code == 0, done.output
    assert "'regions_class_order' [1, 2, 3] contradicts the regions" in done.output
    assert "[3, 2, 1] would fit" in done.output
    with pytest.warns(UserWarning, match="contradicts the regions"):
        api.evaluate(tmp_path / "p", tmp_path / "gt", bootstrap=0)


def test_regions_and_an_ignore_label(tmp_path):
    region_case(tmp_path, "a", {**REGIONS, "ignore": 4}, ignored=4)
    done = evaluate(tmp_path, *FAST, "--bins", 10)
    assert done.exit_code == 0, done.output
    assert "4 is left out (ignore)" in done.output
    row = pd.read_csv(tmp_path / "out" / "cases.csv").iloc[0]
    assert row["voxels_all"] == 48
    for name, gaps in (
        ("whole", (0.1, 0.4, 0.8)), ("core", (0.2, 0.3, 0.1)), ("enhancing", (0.2, 0.1, 0.05))
    ):  # fmt: skip
        close(row[f"cece_all/{name}"], sum(gaps) / 3, atol=1e-6)
    close(row["dsc/whole"], 2 * 2 / (2 + 3), rtol=1e-7)
    assert row["dsc/core"] == row["dsc/enhancing"] == 1
    with np.load(tmp_path / "p" / "a.npz") as stored:
        p = stored["probabilities"].copy()
    p[:, 0, 4:, :4] = 0.5  # nobody looks there
    np.savez(tmp_path / "p" / "a.npz", probabilities=p)
    evaluate(tmp_path, *FAST, "--bins", 10, out="again")
    again = pd.read_csv(tmp_path / "again" / "cases.csv").iloc[0]
    for column in ("ece_all", "cece_all", "tace_all", "nll_all", "brier_all"):
        assert again[column] == row[column]


def test_an_ignore_label_has_no_channel(folders):
    """Background, a, b and ignore 3: three channels, and what is 3 is in no number."""
    root, y = folders
    labels = {"background": 0, "a": 1, "b": 2, "ignore": 3}
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))
    masked = y.copy()
    masked[2], masked[0, 2:4, 2:4] = 3, 3
    at, rows = geometry(y.shape), []
    for step in (1, 2):  # what is predicted where it is ignored
        for name in "ab":
            write_nifti(root / "gt" / f"{name}.nii.gz", masked, at)
            p = np.where(masked == 3, soft((y + step) % 3, 3, 0.6), soft(y, 3))
            np.savez(root / "p" / f"{name}.npz", probabilities=p.astype(np.float32))
        done = evaluate(root, *FAST, out=str(step))
        assert done.exit_code == 0, done.output
        rows.append(pd.read_csv(root / str(step) / "cases.csv").set_index("case"))
    row = rows[0].loc["a"]
    close([row["ece_all"], row["ece_fg"]], [0.1, 0.1], atol=1e-6)
    assert row["voxels_all"] == (masked != 3).sum()
    assert row["voxels_fg"] == 16 - 4 + 9
    assert row["dsc/a"] == row["dsc/b"] == 1
    assert row["hd_mm/a"] == 0
    pd.testing.assert_frame_equal(*rows, check_exact=True)
    for name in "ab":  # a fourth channel is one too many
        np.savez(root / "p" / f"{name}.npz", probabilities=soft(y, 4))
    done = evaluate(root, out="four")
    assert done.exit_code == 1
    assert "expected 3 classes (background included), got 4" in done.output


def test_some_cases_have_no_prediction(folders):
    """Five references, four predictions and what lies about: the mean is of four and says so."""
    root, y = folders
    for name in "cde":
        write_nifti(root / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
    for name in ("c", "d", "e_0000", "._x"):
        write_nifti(root / "p" / f"{name}.nii.gz", y, geometry(y.shape))
    (root / "gt" / "._a.nii.gz").write_bytes(b"no volume")
    done = evaluate(root)
    assert done.exit_code == 1
    got = summary(root)
    assert (got["cases"]["evaluated"], got["metrics"]["dsc"]["n"]) == (4, 4)
    assert got["cases"]["without_prediction"] == ["e"]
    assert "1 references without a prediction, not in the means: e" in done.output
    assert "1 predictions without a reference, left out: e_0000" in done.output
    assert "._" not in done.output
    write_nifti(root / "p" / "c.nii", y, geometry(y.shape))
    done = evaluate(root, out="twice")
    assert done.exit_code == 2
    assert "c.nii and c.nii.gz are one case twice" in done.output


def calls(monkeypatch, stop_at=None):
    """Names of the cases that are evaluated from now on; Ctrl-C comes at one of them."""
    real, names = cohort.evaluate_files, []

    def evaluate_files(case, *arguments, **options):
        names.append(case.name)
        if case.name == stop_at:
            raise KeyboardInterrupt
        return real(case, *arguments, **options)

    monkeypatch.setattr(cohort, "evaluate_files", evaluate_files)
    return names


@pytest.fixture
def four(folders):
    """Cases a, b, c, d of different numbers."""
    root, y = folders
    for i, name in enumerate("abcd"):
        write_nifti(root / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
        p = soft(np.roll(y, i, axis=2), 3, 0.9 - 0.1 * i)
        np.savez(root / "p" / f"{name}.npz", probabilities=p)
    return root, y


def write_names(root):
    labels = {"background": 0, "x": 1, "y": 2}
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))


def same_report(root, one, other):
    assert (root / one / "cases.csv").read_bytes() == (root / other / "cases.csv").read_bytes()
    for key in ("cases", "metrics", "pooled", "classes", "surface_over_classes"):
        assert summary(root, one)[key] == summary(root, other)[key]


def test_resume_after_a_failure(four, monkeypatch):
    """The others are kept; the mended case alone is evaluated; the result is that of a new run."""
    root, _ = four
    write_names(root)
    options = (*FAST, "--scopes", "fg,union,crop,all", "--compat", "marginloss")
    whole = (root / "p" / "c.npz").read_bytes()
    (root / "p" / "c.npz").write_bytes(whole[:-100])
    done = evaluate(root, *options)
    assert done.exit_code == 1
    assert list(summary(root)["cases"]["failed"]) == ["c"]
    assert summary(root)["cases"]["evaluated"] == 3
    assert {path.name for path in (root / "out" / STORE).iterdir()} == {"a.npz", "b.npz", "d.npz"}
    (root / "p" / "c.npz").write_bytes(whole)
    names = calls(monkeypatch)
    done = evaluate(root, *options, "--resume")
    assert done.exit_code == 0, done.output
    assert names == ["c"]
    assert not (root / "out" / STORE).exists()
    assert evaluate(root, *options, out="new").exit_code == 0
    assert names == ["c", *"abcd"]
    same_report(root, "out", "new")
    assert evaluate(root, *options, "--resume").exit_code == 0  # nothing is left to go on from
    assert names == ["c", *"abcd", *"abcd"]


def test_resume_after_an_interruption(four, monkeypatch):
    root, _ = four
    names = calls(monkeypatch, stop_at="c")
    done = evaluate(root, *FAST)
    assert done.exit_code == 130
    assert "with --resume goes on from there" in done.output
    assert names == ["a", "b", "c"]
    assert summary(root)["cases"]["evaluated"] == 2
    monkeypatch.undo()
    names = calls(monkeypatch)
    assert evaluate(root, *FAST, "--resume").exit_code == 0
    assert names == ["c", "d"]
    assert not (root / "out" / STORE).exists()
    assert evaluate(root, *FAST, out="new").exit_code == 0
    same_report(root, "out", "new")


def test_resume_goes_on_with_the_method_that_was_interrupted(four, monkeypatch):
    root, _ = four
    (root / "q").mkdir()
    for path in (root / "p").iterdir():
        (root / "q" / path.name).write_bytes(path.read_bytes())
    both = (root / "p", root / "q", root / "gt", "-o", root / "out", *FAST)
    real, names = cohort.evaluate_files, []

    def evaluate_files(case, *arguments, **options):
        names.append(f"{case.prediction.parent.name}/{case.name}")
        if names == [*(f"p/{c}" for c in "abcd"), "q/a", "q/b"]:
            raise KeyboardInterrupt
        return real(case, *arguments, **options)

    monkeypatch.setattr(cohort, "evaluate_files", evaluate_files)
    assert run(*both).exit_code == 130
    names.clear()
    assert run(*both, "--resume").exit_code == 0
    assert names == ["q/b", "q/c", "q/d"]  # nothing of p again
    assert not [*(root / "out").rglob(STORE)]
    assert (root / "out" / "comparison.json").exists()


@pytest.mark.parametrize(
    "change", ["none", "bins", "scopes", "dilation", "nsd", "labels", "prediction", "reference",
               "label map", "foreign", "truncated", "no --resume"],
)  # fmt: skip
def test_what_resume_may_not_keep(four, monkeypatch, change):
    """A changed setting leaves nothing, a changed file or a damaged result all but one case."""
    root, y = four
    reports = []
    write = report.write_report

    def keeps(report, folder, **options):
        reports.append(report.cohort)
        return write(report, folder, **options)

    monkeypatch.setattr(report, "write_report", keeps)
    whole = (root / "p" / "d.npz").read_bytes()
    (root / "p" / "d.npz").write_bytes(b"broken")
    assert evaluate(root, *ONE).exit_code == 1
    (root / "p" / "d.npz").write_bytes(whole)
    options = {
        "bins": ("--bins", 10), "scopes": ("--scopes", "fg"), "dilation": ("--dilation", 2),
        "nsd": ("--nsd-tolerance", 1),
    }.get(change, ())  # fmt: skip
    stored = root / "out" / STORE / "b.npz"
    if change == "labels":
        labels = {"labels": {"background": 0, "x": 1, "y": 2}}
        (root / "dataset.json").write_text(json.dumps(labels))
    elif change == "prediction":
        np.savez(root / "p" / "b.npz", probabilities=soft(y, 3, 0.55))
    elif change == "reference":
        write_nifti(root / "gt" / "b.nii.gz", y * (y == 1), geometry(y.shape))
    elif change == "label map":
        write_nifti(root / "p" / "b.nii.gz", y * (y == 1), geometry(y.shape))
    elif change == "foreign":
        np.savez(stored, probabilities=np.zeros(3))
    elif change == "truncated":
        stored.write_bytes(stored.read_bytes()[:-30])
    names = calls(monkeypatch)
    resume = () if change == "no --resume" else ("--resume",)
    assert evaluate(root, *ONE, *options, *resume).exit_code == 0
    if change == "none":
        assert names == ["d"]
    elif options or change in ("labels", "no --resume"):
        assert names == list("abcd")
    else:
        assert names == ["b", "d"]
    assert evaluate(root, *ONE, *options, out="new").exit_code == 0
    _, resumed, new = reports
    pd.testing.assert_frame_equal(resumed.rows, new.rows, check_exact=True)
    assert summarise(resumed) == summarise(new)


def test_columns_of_the_published_evaluation(four):
    root, y = four
    done = evaluate(root, *FAST, "--compat", "marginloss")
    assert done.exit_code == 2
    assert "dataset.json is needed" in done.output  # an absent label has DSC 1 there
    write_names(root)
    done = evaluate(root, *FAST, "--compat", "marginloss")
    assert done.exit_code == 0, done.output
    rows = pd.read_csv(root / "out" / "cases.csv").set_index("case")
    for name, row in rows.iterrows():
        with np.load(root / "p" / f"{name}.npz") as stored:
            p = stored["probabilities"]
        expected = evaluate_case_marginloss(
            p.argmax(0), y, labels={1: "x", 2: "y"}, probabilities=p
        )
        found = {c.removeprefix("marginloss_"): row[c] for c in rows if c.startswith("margin")}
        assert found.keys() == expected.keys()
        close([*found.values()], [*expected.values()], rtol=1e-7)
    got = summary(root)
    assert got["metrics"]["marginloss_hd95_pooled_voxels"]["n"] == 4
    assert "marginloss tace_ref" in got["conventions"]
    assert evaluate(root, *FAST, out="without").exit_code == 0
    plain = pd.read_csv(root / "without" / "cases.csv").set_index("case")
    assert not [c for c in plain if c.startswith("marginloss")]
    pd.testing.assert_frame_equal(rows[plain.columns], plain, check_exact=True)


@pytest.mark.parametrize(
    "labels", [{"background": 0, "x": 1, "y": 2, "ignore": 3}, {"background": 0, "all": [1, 2]}]
)
def test_the_published_evaluation_knows_no_regions(folders, labels):
    root, _ = folders
    content = {"labels": labels, "regions_class_order": [1]}
    (root / "dataset.json").write_text(json.dumps(content))
    done = evaluate(root, "--compat", "marginloss")
    assert done.exit_code == 2
    assert "supports neither regions nor an ignore label" in " ".join(done.output.split())
    assert not (root / "out" / "summary.json").exists()


def test_one_scope_alone(folders, pictures):
    root, _ = folders
    done = evaluate(root, *FAST, "--scopes", "fg", "--format", "markdown,latex")
    assert done.exit_code == 0, done.output
    header = (root / "out" / "cases.csv").read_text().splitlines()[0].split(",")
    assert "ece_fg" in header
    assert "tace_ref" in header
    assert not [c for c in header if c.endswith(("_all", "_union", "_dilated5"))]
    assert summary(root)["pooled"].keys() == {c for c in summary(root)["pooled"] if "_fg" in c}
    done = run(
        root / "p", root / "p", root / "gt", "-o", root / "two", *FAST, "--scopes", "all",
        "--names", "one,two",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "ece_all" in (root / "two" / "comparison.csv").read_text()
    assert "ece_fg" not in (root / "two" / "comparison.csv").read_text()


def test_a_region_of_interest(folders):
    """Half the image: of its 3 x 12 x 6 voxels, those in the right half of the first slice."""
    root, y = folders
    roi = np.zeros(y.shape, int)
    roi[0, :, 6:] = 7  # whatever is not 0
    p = soft(y, 3)
    p[:, 0, :, 6:] = np.array([0.7, 0.2, 0.1])[:, None, None]
    for name in "ab":
        np.savez(root / "p" / f"{name}.npz", probabilities=p)
        write_nifti(root / "masks" / f"{name}.nii.gz", roi, geometry(y.shape))
    for options in (("--scopes", "roi"), ("--scopes", "all")):  # --roi adds its scope
        done = evaluate(root, *FAST, *options, "--roi", root / "masks")
        assert done.exit_code == 0, done.output
        row = pd.read_csv(root / "out" / "cases.csv").iloc[0]
        assert row["voxels_roi"] == 72
        close(row["ece_roi"], 0.3, atol=1e-6)
        close(summary(root)["pooled"]["ece_roi"], 0.3, atol=1e-6)
        assert ("ece_all" in row) == ("all" in options)
    write_nifti(root / "masks" / "b.nii.gz", roi[:, :, 1:], geometry((3, 12, 11)))
    done = evaluate(root, *FAST, "--roi", root / "masks", out="small")
    assert done.exit_code == 1
    assert "masks/b.nii.gz: does not lie on the reference: size" in done.output
    (root / "masks" / "b.nii.gz").unlink()
    for options, message in (
        (("--roi", root / "masks"), "masks: holds no mask for 1 cases, e.g. b"),
        (("--roi", root / "nowhere"), "nowhere: no such folder"),
        (("--scopes", "roi"), "--roi: expected the folder of the masks for the scope roi"),
        (("--scopes", "fg,air"), "--scopes: expected one of"),
        (("--scopes", ""), "--scopes: expected one of"),
        (("--scopes", "fg,fg"), "--scopes: expected different scopes, got fg, fg"),
    ):
        done = evaluate(root, *options, out="wrong")
        assert done.exit_code == 2
        assert message in " ".join(done.output.split())
        assert not (root / "wrong").exists()


def test_a_folder_is_called_what_it_is_called(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["evaluate", "predictions", "labels", "-o", "out"])
    assert done.exit_code == 2
    assert "Error: predictions: no such file or folder" in done.output.replace("\n", " ")


ODD = ("=1+1", "+a", "-b", "@c", "[bold]", ":smile:", "n" * 248)


def test_odd_names_of_cases(folders, pictures):
    """Formulas, markup, emoji, the longest name: each is in the report, and as it is on screen."""
    root, y = folders
    for name in ODD:
        write_nifti(root / "gt" / f"{name}.nii", y, geometry(y.shape))
        np.savez(root / "p" / f"{name}.npz", probabilities=soft(y, 3))
    for name in ("[bold]", ":smile:"):
        np.savez(root / "p" / f"{name}.npz", probabilities=soft(y, 3)[:, :2])
    done = evaluate(root, "--processes", 2)
    assert done.exit_code == 1, done.output
    assert "FAILED [bold]: " in done.output
    assert "FAILED :smile:: " in done.output
    names = [line.split(",")[0] for line in (root / "out" / "cases.csv").read_text().splitlines()]
    assert sorted(names) == sorted(["case", "a", "b", "n" * 248, "'=1+1", "'+a", "'-b", "'@c"])
    assert summary(root)["cases"]["evaluated"] == 7
    assert not list(root.rglob(".segcal-????????-*"))


def test_names_of_methods_are_no_markup(folders):
    root, _ = folders
    done = run(root / "p", root / "p", root / "gt", "-o", root / "out", "--names", "[bold],[red]x")
    assert done.exit_code == 0, done.output
    assert "Differences to [bold]" in done.output
    assert "[red]x " in done.output


def test_a_folder_that_cannot_be_written_is_said_before_work(folders):
    root, _ = folders
    done = run(root / "p", root / "gt", "-o", "/proc")
    assert done.exit_code == 2
    assert "/proc: nothing can be written into /proc (" in done.output
    assert "name another folder" in done.output
    done = run(root / "p", root / "gt", "-o", "/proc/new")
    assert done.exit_code == 2
    assert "/proc/new: nothing can be written into /proc (" in done.output


def test_a_folder_whose_name_is_no_utf8(folders):
    root, _ = folders
    odd = root / os.fsdecode(b"p\xff")
    (root / "p").rename(odd)
    done = run(odd, root / "gt", "-o", root / "out")
    assert done.exit_code == 0, done.output
    assert summary(root)["cases"]["evaluated"] == 2
    (odd / os.fsdecode(b"x\xff.npz")).write_bytes(b"")
    done = run(odd, root / "gt", "-o", root / "out")
    assert done.exit_code == 2
    assert r"x\udcff.npz: its name is not valid UTF-8" in done.output


def test_patterns_and_labels_without_a_file(folders):
    root, y = folders
    for name in "ab":
        (root / "gt" / f"{name}.nii.gz").rename(root / "gt" / f"of_{name}.nii.gz")
    np.savez(root / "p" / "b.npz", probabilities=soft(y, 3)[:2])
    options = "--labels", "liver=1,spleen=2", "--reference-pattern", "of_{case}.nii.gz"
    done = evaluate(root, *options)
    assert done.exit_code == 1, done.output
    assert list(summary(root)["classes"]) == ["liver", "spleen"]
    assert "(background included), got 2 (labels: --labels liver=1,spleen=2)" in done.output
    checked = CliRunner().invoke(app, ["check", str(root / "p"), str(root / "gt"), *options])
    assert checked.exit_code == 1
    assert "1 of 2 cases can be evaluated" in checked.output
    assert "got 2 (labels: --labels liver=1,spleen=2)" in checked.output
    done = evaluate(root, *options, "--dataset-json", root / "none.json")
    assert done.exit_code == 2
    assert "--labels: liver=1,spleen=2: is given beside --dataset-json" in done.output
    done = evaluate(root, "--prediction-pattern", "a.npz")
    assert "--prediction-pattern: expected a path in the folder with {case}" in done.output


def test_metrics_of_the_tables_are_chosen(folders):
    root, _ = folders
    options = "--format", "markdown,latex", "--metrics", "dsc,HD95,ece"
    done = run(root / "p", root / "p", root / "gt", "-o", root / "out", "--names", "a,b", *options)
    assert done.exit_code == 0, done.output
    for text in (
        done.output,
        (root / "out" / "a" / "tables.md").read_text(),
        (root / "out" / "a" / "tables.tex").read_text(),
    ):
        for shown in ("DSC", "HD95", "ECE"):
            assert shown in text
        for other in ("ASSD", "TACE ", "Brier"):
            assert other not in text
    for remark in ("HD95: pooled", "pooled: ECE of all voxels together"):
        assert remark in " ".join(done.output.split())
    for remark in ("CECE", "pen.: "):  # of what is not there
        assert remark not in done.output
    methods = (root / "out" / "tables.md").read_text()
    assert "| HD95 penalised (mm)" in methods
    assert "ECE dilated5" in methods
    assert "TACE" not in methods
    done = evaluate(root, "--metrics", "dsc,hd96")
    assert done.exit_code == 2
    assert "--metrics: expected some of DSC, IoU, HD, HD95, " in done.output
    assert "got 'hd96'" in done.output


def test_names_in_tables_are_for_people(folders):
    """No key of a column is in a table, and CRaC's TACE only where it is asked for."""
    root, _ = folders
    done = run(
        root / "p", root / "p", root / "gt", "-o", root / "out", "--names", "a,b",
        "--format", "markdown,latex",
    )  # fmt: skip
    texts = [done.output]
    for folder in (root / "out", root / "out" / "a"):
        texts += [(folder / name).read_text() for name in ("tables.md", "tables.tex")]
        texts += re.findall("<table.*?</table>", (folder / "index.html").read_text(), re.DOTALL)
    for text in texts:
        shown = re.sub('(title|data-value)="[^"]*"', "", text)
        body = "\n".join(line for line in shown.splitlines() if ": " not in line)
        assert not re.search(r"hd95_|assd_|ece_|tace_|dsc/|tace\\_", body)
    assert "TACE ref" not in done.output
    page = root / "out" / "index.html"
    assert "TACE ref" not in page.read_text()
    methods = root / "p", root / "p", root / "gt", "-o", root / "out", "--names", "a,b"
    assert run(*methods, "--metrics", "tace_ref").exit_code == 0
    assert "TACE ref" in page.read_text()
    alone = evaluate(root, "--metrics", "tace_ref,volume_difference", out="b").output
    assert "TACE ref" in alone
    assert re.search(r"\nml *\n", alone)
    assert readable("hd95_penalised_mm") == "HD95 penalised (mm)"
    assert readable("dsc/liver") == "DSC liver"
    assert readable("cece_fg/core") == "CECE fg core"
    assert readable("tace_ref") == "TACE ref"


@pytest.fixture
def binary(tmp_path):
    """A case of one structure, and the probability of its foreground."""
    y = np.zeros((3, 12, 12), int)
    y[1, 3:9, 3:9] = 1
    p = np.where(y == 1, 0.62, 0.07).astype(np.float32)
    p[1, 3:9, 3:5] = 0.4
    p[1, 3:9, 9] = 0.55
    write_nifti(tmp_path / "gt" / "a.nii.gz", y, geometry(y.shape))
    (tmp_path / "p").mkdir()
    np.savez(tmp_path / "p" / "a.npz", probabilities=np.stack([1 - p, p]))
    return tmp_path, y, p


def numbers(root, out="out"):
    got = summary(root, out)
    return [got["metrics"][key]["mean"] for key in ("dsc", "ece_all", "ece_fg", "brier_all")]


def test_one_map_of_foreground(binary):
    """In a volume, .npy and .npz of three axes: the numbers of both classes."""
    root, y, p = binary
    assert evaluate(root).exit_code == 0
    expected = numbers(root)
    (root / "p" / "a.npz").unlink()
    write_nifti(root / "p" / "a.nii.gz", p, geometry(y.shape))
    done = evaluate(root, out="volume")
    assert done.exit_code == 0, done.output
    assert "a.nii.gz: read as the probability of foreground" in done.output
    close(numbers(root, "volume"), expected, rtol=1e-6)
    (root / "p" / "a.nii.gz").unlink()
    np.save(root / "p" / "a.npy", p)
    assert evaluate(root, out="npy").exit_code == 0
    close(numbers(root, "npy"), expected, rtol=1e-6)
    (root / "p" / "a.npy").unlink()
    np.savez(root / "p" / "a.npz", softmax=np.stack([1 - p, p]))
    assert evaluate(root, out="softmax").exit_code == 0
    assert numbers(root, "softmax") == expected
    done = evaluate(root, "--labels", "a=1,b=2", out="more")
    assert "expected 3 classes (background included), got 2" in done.output


def test_a_saturated_map_is_no_label_map(binary):
    root, y, _ = binary
    near = np.random.default_rng(0).uniform(0, 1e-3, y.shape)
    (root / "p" / "a.npz").unlink()
    write_nifti(root / "p" / "a.nii.gz", np.abs(y - near).astype(np.float32), geometry(y.shape))
    done = evaluate(root)
    assert done.exit_code == 0, done.output
    assert "read as the probability of foreground" in done.output
    assert summary(root)["metrics"]["dsc"]["mean"] == 1
    three = evaluate(root, "--labels", "a=1,b=2")
    assert three.exit_code == 1
    assert "holds one map of probabilities, where 3 classes are expected" in three.output


def test_bytes_are_refused_with_the_remedy(binary):
    root, y, p = binary
    (root / "p" / "a.npz").unlink()
    both = np.stack([1 - p, p])
    write_nifti(root / "p" / "a.nii.gz", np.rint(255 * both).astype(np.uint8), geometry(y.shape))
    for command in ("evaluate", "check"):
        given = [command, str(root / "p"), str(root / "gt")]
        done = CliRunner().invoke(app, given + ["-o", str(root / "out")] * (command == "evaluate"))
        assert done.exit_code == 1, done.output
        assert "got uint8; store value / 255 as float32" in done.output


def test_references_in_folders_of_masks(folders):
    """Overlaps go to the larger label, and an organ without a file has no numbers."""
    root, y = folders
    shutil.rmtree(root / "gt")
    liver, core = y > 0, y == 2
    for case in "ab":
        write_nifti(root / "gt" / case / "liver.nii.gz", liver.astype(np.uint8), geometry(y.shape))
        write_nifti(root / "gt" / case / "core.nii.gz", core.astype(np.uint8), geometry(y.shape))
    (root / "gt" / "b" / "liver.nii.gz").unlink()
    done = evaluate(root, "--labels", "liver=1,core=2")
    assert done.exit_code == 0, done.output
    assert "which get the largest of their labels: liver < core" in " ".join(done.output.split())
    assert "label liver has no file, so it has no results in this case" in done.output
    rows = pd.read_csv(root / "out" / "cases.csv", index_col="case")
    assert rows["dsc/liver"].tolist()[0] == 1
    assert np.isnan(rows["dsc/liver"].tolist()[1])
    assert rows["dsc/core"].tolist() == [1, 1]
    checked = ["check", str(root / "p"), str(root / "gt"), "--labels", "liver=1,core=2"]
    done = CliRunner().invoke(app, checked)
    assert done.exit_code == 0
    assert "Note on b: " in done.output
    assert "label liver has no file" in done.output


def test_several_thresholds_are_compared(binary):
    """DSC by hand: 36 voxels; above 0.5 the 24 of 0.62 and 6 false ones, above 0.3 all and 6."""
    root, y, _ = binary
    write_nifti(root / "p" / "a.nii.gz", y, geometry(y.shape))  # a label map beside, not used
    done = evaluate(root, "--threshold", "0.3,0.5,0.6", "--bootstrap", 0)
    assert done.exit_code == 0, done.output
    for t, dsc in (("0.3", 2 * 36 / (42 + 36)), ("0.5", 2 * 24 / (30 + 36)), ("0.6", 48 / 60)):
        got = json.loads((root / "out" / f"p@{t}" / "summary.json").read_text())
        close(got["metrics"]["dsc"]["mean"], dsc)
        assert got["conventions"]["masks"] == f"where the probability is above {t}"
    assert "Differences to p@0.3" in done.output
    assert evaluate(root, "--threshold", 0.6, out="one").exit_code == 0
    close(summary(root, "one")["metrics"]["dsc"]["mean"], 48 / 60)
    for given in ("x", "1", "0.5,0.5"):
        done = evaluate(root, "--threshold", given, out="none")
        assert done.exit_code == 2
        assert "--threshold: expected" in done.output
    np.savez(root / "p" / "a.npz", probabilities=soft(y, 3))
    done = evaluate(root, "--threshold", 0.5, out="three")
    assert "has 3 classes; a threshold is for foreground against background" in done.output


@pytest.mark.parametrize("boxed", ["reference", "prediction", "both"])
@pytest.mark.parametrize("stated", [True, False])
def test_segments_of_slicer_are_compared_in_the_whole_image(tmp_path, boxed, stated):
    """Segments are stored as the box that they fill: the numbers are those of the label maps."""
    for folder in ("p", "gt", "boxed_p", "boxed_gt"):
        (tmp_path / folder).mkdir()
    rolled = np.roll(BOXED, 1, 2)
    for folder, array in (("p", rolled), ("gt", BOXED)):
        sitk.WriteImage(oblique(array), str(tmp_path / folder / "a.nii.gz"))
        box_of_segments(tmp_path / f"boxed_{folder}/a.seg.nrrd", oblique(array), stated)
    gt = "gt" if boxed == "prediction" else "boxed_gt"
    p = "p" if boxed == "reference" else "boxed_p"
    if boxed == "both" and not stated:
        done = run(tmp_path / p, tmp_path / gt, "-o", tmp_path / "out")
        assert done.exit_code == 1
        assert "lie outside of the image that they are compared on" in " ".join(done.output.split())
        return
    rows = []
    for number, (predictions, references) in enumerate((("p", "gt"), (p, gt))):
        output = tmp_path / f"out{number}"
        assert run(tmp_path / predictions, tmp_path / references, "-o", output).exit_code == 0
        rows.append(pd.read_csv(output / "cases.csv"))
    pd.testing.assert_frame_equal(*rows)
    checked = CliRunner().invoke(app, ["check", str(tmp_path / p), str(tmp_path / gt)])
    assert checked.exit_code == 0, checked.output


def test_labels_saved_as_colours(tmp_path):
    y = np.zeros((12, 12), np.uint8)
    y[2:6, 2:6], y[6:9, 6:9] = 1, 2
    for folder, mode in (("p", "RGB"), ("gt", "RGBA"), ("bad", "RGB")):
        (tmp_path / folder).mkdir()
        grey = y if folder != "bad" else y * np.uint8(100)
        Image.fromarray(grey).convert(mode).save(tmp_path / folder / "a.png")
    done = run(tmp_path / "p", tmp_path / "gt", "-o", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert set(pd.read_csv(tmp_path / "out" / "cases.csv")["dsc"]) == {1.0}
    checked = CliRunner().invoke(app, ["check", str(tmp_path / "p"), str(tmp_path / "gt")])
    assert checked.exit_code == 0, checked.output
    colours = np.stack([y * 100, y * 0, y * 0], -1).astype(np.uint8)
    Image.fromarray(colours).save(tmp_path / "bad" / "a.png")
    done = run(tmp_path / "bad", tmp_path / "gt", "-o", tmp_path / "out2")
    assert done.exit_code == 1
    said = " ".join(done.output.split())
    assert "3 colours (red, green, blue); save a label number in place of each" in said
    assert "1 for (100, 0, 0), 2 for (200, 0, 0)" in said
