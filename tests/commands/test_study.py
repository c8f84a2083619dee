"""``segcal study`` of segmentation, as it is called."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.study.running import in_use
from tests.study.small import write_study

pytestmark = pytest.mark.usefixtures("one_thread", "plain_progress")


def segcal(*arguments, code=0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return " ".join(result.output.split())


def test_dry_run_lists_cells_and_cost_and_writes_nothing(tmp_path):
    config = write_study(tmp_path)
    said = segcal("study", config, "--dry-run", "--set", "seeds=[0, 1, 2]")
    assert "hearts unet crac 0 1 2 2 3 to do" in said
    assert "6 cells: 6 to do" in said
    assert "about 0.01 h of a CPU core, or 1 min of a GPU (estimated, never run on one)" in said
    assert not (tmp_path / "study").exists()
    said = segcal("study", config, "--dry-run", "--set", "recipes=[magic]", code=2)
    assert "no recipe, penalty or loss is called 'magic'" in said


def test_a_study_is_run_reported_and_gone_on_with(tmp_path):
    config = write_study(tmp_path)
    said = segcal("study", config)
    assert "2 cells, 2 of them to do" in said
    assert re.search(r"hearts, unet, crac, seed 0: val dsc 0\.\d{4}", said)
    results = tmp_path / "study" / "results"
    assert pd.read_csv(results / "cells.csv")["status"].tolist() == ["done", "done"]
    report = tmp_path / "study" / "report"
    assert (report / "index.html").is_file()
    assert (report / "tables.md").is_file()
    summary = json.loads((report / "summary.json").read_text())
    assert "two recipes on phantoms" in json.dumps(summary)
    assert "2 cells: 2 done" in segcal("study", config, "--dry-run")
    said = segcal("study", config, "--set", "recipes=[dice_ce, crac, ce]", "--report-only", "-o",
                  tmp_path / "other", "--format", "latex")  # fmt: skip
    assert "3 cells, 0 of them to do" in said
    assert (tmp_path / "other" / "tables.tex").is_file()
    assert pd.read_csv(results / "cells.csv")["status"].tolist() == ["done", "done", "to do"]
    more = ["--set", "repairs=[temperature, class_region_bias]"]
    assert "2 cells: 2 to measure" in segcal("study", config, "--dry-run", *more)
    said = segcal("study", config, *more)
    assert "2 of these are trained; they are measured again, with new repairs" in said
    assert "class_region_bias" in set(pd.read_csv(results / "cases.csv")["repair"])
    other = segcal("study", config, "--set", "sets.hearts.epochs=3", code=2)
    assert "was made with other settings" in other
    said = segcal("study", config, "--set", "recipes=[ce]", "--report-only", "--set",
                  f"output={tmp_path / 'nowhere'}", code=1)  # fmt: skip
    assert "No report yet: nothing has been trained" in said
    assert not (tmp_path / "nowhere").exists()


def test_a_study_in_slices_of_time(tmp_path):
    """Which leave nothing that a study in one go has not, either."""
    config = write_study(tmp_path, recipes=["dice_ce"])
    said = segcal("study", config, "--minutes", 0, code=130)
    assert "Time is up: the same command goes on from there" in said
    assert "No report yet: nothing has been trained" in said
    said = segcal("study", config, "--minutes", 0)
    assert "dice_ce, seed 0: val dsc" in said


def test_a_failing_cell_is_told_and_ends_with_1(tmp_path):
    sgd = {"target": "torch.optim.SGD", "args": {"lr": 1e30}}
    recipes = {"far": {"recipe": "ce", "changes": {"optimizer": sgd}}, "dice_ce": None}
    said = segcal("study", write_study(tmp_path, recipes=recipes, scheduler=None), code=1)
    assert "FAILED hearts, unet, far, seed 0: " in said
    assert (tmp_path / "study" / "report" / "index.html").is_file()


def test_a_folder_in_use_is_refused(tmp_path):
    config = write_study(tmp_path)
    with in_use(tmp_path / "study"):
        said = segcal("study", config, code=2)
    assert "another study uses it" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "kind=detection"], "kind: expected classification or segmentation, got"),
        (["--scheduler", "tcp://127.0.0.1:1"], "--scheduler tcp://127.0.0.1:1: needs the engine"),
        (["--format", "word"], "--format: expected"),
    ],
)
def test_wrong_usage(tmp_path, arguments, message):
    assert message in segcal("study", write_study(tmp_path), *arguments, code=2)


def test_options_of_segmentation_are_refused_elsewhere():
    assert "only studies of segmentation" in segcal("study", "digits", "--engine", "dask", code=2)


@pytest.mark.slow
def test_a_dask_cluster_finds_the_same(tmp_path):
    pytest.importorskip("distributed")
    tables = []
    for name, options in (("one", []), ("dask", ["--engine", "dask", "-p", "2"])):
        config = write_study(tmp_path, output=str(tmp_path / name))
        segcal("study", config, *options)
        tables.append((tmp_path / name / "results" / "cases.csv").read_bytes())
    assert tables[0] == tables[1]
