"""What a notebook gets is what the command writes."""

from __future__ import annotations

import doctest
import inspect
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import segcal
import segcal.evaluation
from segcal.commands.main import app
from segcal.evaluation import cohort
from segcal.evaluation.api import compare_methods, evaluate
from segcal.evaluation.job import STORE
from segcal.evaluation.settings import EvaluationSettings
from segcal.io.volumes import write_nifti
from segcal.reporting.report import write_comparison, write_report
from tests.conftest import close
from tests.evaluation.test_cohort import geometry, soft

DATED = re.compile(rb"\d{4}-\d\d-\d\dT[0-9:+]+")
QUICK = {"settings": EvaluationSettings(chosen=("fg",)), "bootstrap": 0}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Predictions of two methods for two cases, their references, and what the labels mean."""
    root = tmp_path_factory.mktemp("cohort")
    y = np.zeros((3, 12, 12), int)
    y[0, 2:6, 2:6], y[1, 6:9, 6:9] = 1, 2
    for i, name in enumerate("ab"):
        write_nifti(root / "labelsTs" / f"{name}.nii.gz", y, geometry(y.shape))
        for method, certainty in (("predictions", 0.9), ("softer", 0.6)):
            (root / method).mkdir(exist_ok=True)
            p = soft(np.roll(y, i, axis=2), 3, certainty)
            np.savez(root / method / f"{name}.npz", probabilities=p)
    labels = {"background": 0, "organ": 1, "tumour": 2}
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))
    return root


def by_command(root, *arguments):
    done = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    assert done.exit_code == 0, done.output


def files(folder):
    """Contents without dates, by name."""
    found = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): DATED.sub(b"", path.read_bytes()) for path in found
    }


def test_the_example_writes_what_the_command_writes(folders, monkeypatch):
    monkeypatch.chdir(folders)
    found: dict[str, object] = {}
    (example,) = doctest.DocTestFinder(recurse=False).find(evaluate, "evaluate", globs={})
    assert len(example.examples) == 7
    for line in example.examples:
        exec(line.source, found)
    by_command(folders, "predictions", "labelsTs", "-o", "by_command", "--format", "markdown")
    assert files("report") == files("by_command")
    rows = pd.read_csv("by_command/cases.csv").set_index("case")
    close(found["dsc"].tolist(), rows["dsc"].tolist())
    summary = json.loads(Path("by_command/summary.json").read_text())
    assert found["ece"] == summary["metrics"]["ece_fg"]["mean"]
    close(found["diagram"].expected_error(), summary["pooled"]["ece_fg"])
    assert set(found["written"].files) == {*files("report")} - {".segcal-report.json"}


def test_several_methods(folders, monkeypatch):
    monkeypatch.chdir(folders)
    settings = EvaluationSettings(chosen=("fg", "all"), bins=10)
    comparison = compare_methods(
        {"one": "predictions", "two": "softer"}, "labelsTs", settings=settings, bootstrap=50
    )
    write_comparison(comparison, "comparison", formats=["latex"])
    for name, report in comparison.reports.items():
        write_report(report, f"comparison/{name}", formats=["latex"])
    by_command(
        folders, "predictions", "softer", "labelsTs", "-o", "compared", "--names", "one,two",
        "--scopes", "fg,all", "--bins", 10, "--bootstrap", 50, "--format", "latex",
    )  # fmt: skip
    assert files("comparison") == files("compared")
    assert comparison.shown[0].metric == "dsc"
    by_folder = compare_methods(["predictions", "softer"], "labelsTs", **QUICK)
    assert list(by_folder.reports) == ["predictions", "softer"]


def test_defaults_are_those_of_the_command(folders):
    command = inspect.signature(evaluate).parameters
    from segcal.commands.evaluate import DEFAULT_SCOPES
    from segcal.commands.evaluate import evaluate as of_command

    options = inspect.signature(of_command).parameters
    settings = EvaluationSettings()
    assert settings.chosen == DEFAULT_SCOPES
    for name in ("bins", "tace_threshold", "dilation", "tolerance", "compat"):
        assert getattr(settings, name) == options[name].default
    assert settings.nsd_tolerance_mm == options["nsd_tolerance"].default
    for name in ("bootstrap", "engine", "scheduler", "dataset_json", "roi"):
        assert command[name].default == options[name].default
    assert command["processes"].default == 1  # of several, a script needs a guard


def test_one_file_each_regions_of_interest_and_names(folders):
    report = evaluate(
        folders / "predictions" / "a.npz", folders / "labelsTs" / "a.nii.gz", name="mine", **QUICK
    )
    assert report.job.name == "mine"
    assert list(report.cases.index) == ["a"]
    assert list(report.summary["classes"]) == ["organ", "tumour"]
    within = evaluate(
        folders / "predictions", folders / "labelsTs", roi=folders / "labelsTs", **QUICK
    )
    close(within.cases["ece_roi"].tolist(), within.cases["ece_fg"].tolist())


def test_what_is_stored_is_not_evaluated_again(folders, tmp_path, monkeypatch):
    given = (folders / "predictions", folders / "labelsTs")
    real, names = cohort.evaluate_files, []

    def stops_at_b(case, *arguments, **options):
        names.append(case.name)
        if names == ["a", "b"]:
            raise KeyboardInterrupt
        return real(case, *arguments, **options)

    monkeypatch.setattr(cohort, "evaluate_files", stops_at_b)
    store = tmp_path / "store"
    report = evaluate(*given, store=store, **QUICK)
    assert report.cohort.interrupted
    assert len(report.cases) == 1
    done = []
    report = evaluate(*given, store=store, progress=done.append, **QUICK)
    assert names == ["a", "b", "b"]
    assert done == ["a", "b"]
    assert len(report.cases) == 2
    assert not [*store.iterdir()]
    names.clear()
    with pytest.raises(KeyboardInterrupt):
        compare_methods([folders / "predictions", folders / "softer"], given[1], **QUICK)


def test_a_store_that_holds_files_of_the_users_leaves_them(folders, tmp_path):
    shutil.copytree(folders / "predictions", tmp_path / "p")
    before = sorted(path.name for path in (tmp_path / "p").iterdir())
    evaluate(tmp_path / "p", folders / "labelsTs", store=tmp_path / "p", **QUICK)
    assert sorted(path.name for path in (tmp_path / "p").iterdir()) == before


@pytest.mark.parametrize("wrong", [{"bootstrap": -1}, {"processes": 0}, {"processes": -2}])
def test_numbers_out_of_range(folders, wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected"):
        evaluate(folders / "predictions", folders / "labelsTs", **{**QUICK, **wrong})


def test_a_failed_case_is_in_the_report(folders, tmp_path):
    (tmp_path / "p").mkdir()
    for name in "ab":
        content = (folders / "predictions" / f"{name}.npz").read_bytes()
        (tmp_path / "p" / f"{name}.npz").write_bytes(content[: -100 if name == "b" else None])
    report = evaluate(tmp_path / "p", folders / "labelsTs", store=tmp_path / "store", **QUICK)
    assert list(report.failed) == ["b"]
    assert report.notes == {}
    assert [path.name for path in (tmp_path / "store" / STORE).iterdir()] == ["a.npz"]
    (tmp_path / "p" / "a.npz").write_bytes(b"")
    with pytest.raises(ValueError, match="reports: no case of p could be evaluated"):
        compare_methods([tmp_path / "p", folders / "predictions"], folders / "labelsTs", **QUICK)


def test_labels_that_cannot_be_read_are_not_missed(folders, tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.npz").write_bytes((folders / "predictions" / "a.npz").read_bytes())
    (tmp_path / "dataset.json").write_text("{}")
    with pytest.warns(UserWarning, match="going on without label names: .*dataset.json") as said:
        report = evaluate(tmp_path / "p", folders / "labelsTs", **QUICK)
    assert [warning.filename for warning in said] == [__file__]
    assert list(report.summary["classes"]) == ["1", "2"]
    assert report.job.labels.problem


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "threads"}, "engine: expected one of"),
        ({"scheduler": "here"}, "scheduler here: needs the engine dask"),
        ({"roi": "nowhere"}, "nowhere: no such folder"),
        ({"settings": EvaluationSettings(chosen=("roi",))}, "roi: expected the folder of the mask"),
        ({"dataset_json": "nowhere.json"}, "nowhere.json"),
    ],
)
def test_errors_name_arguments(folders, options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(folders / "predictions", folders / "labelsTs", **options)


def test_refused_reports(folders, tmp_path):
    report = evaluate(folders / "predictions", folders / "labelsTs", **QUICK)
    with pytest.raises(ValueError, match="formats: expected one of"):
        write_report(report, tmp_path, formats=["word"])
    with pytest.raises(ValueError, match="images: nowhere: no such folder"):
        write_report(report, tmp_path, images="nowhere")
    with pytest.raises(ValueError, match="holds the files to evaluate"):
        write_report(report, folders / "labelsTs")
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ValueError, match="predictions: expected at least two methods"):
        compare_methods([folders / "predictions"], folders / "labelsTs")
    with pytest.raises(ValueError, match="names: expected 2 different names"):
        compare_methods([folders / "predictions"] * 2, folders / "labelsTs")


def test_the_library_does_not_speak_of_options():
    root = Path(segcal.__file__).parent
    rooms = ("evaluation", "reporting", "metrics", "reproduction")
    for path in (path for room in rooms for path in (root / room).rglob("*.py")):
        assert not re.search(r"[\"' (]--[a-z]", path.read_text()), path


def test_the_package_offers_what_its_users_need():
    assert segcal.evaluation.evaluate is evaluate
    assert segcal.evaluation.compare_methods is compare_methods
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        segcal.evaluation.nothing  # noqa: B018
