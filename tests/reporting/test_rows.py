"""A row of the table of metrics is all that a number needs to be in every report."""

from __future__ import annotations

import json
import re

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.evaluation.reported import calibration_metrics, compared_columns, metric_of
from segcal.evaluation.settings import EvaluationSettings
from segcal.io.volumes import write_nifti
from segcal.metrics import table
from segcal.metrics.table import CalibrationMetric, StructureMetric
from tests.conftest import close
from tests.evaluation.test_cohort import geometry, soft
from tests.reporting.test_page import Tables

TOY = CalibrationMetric(
    key="toy_error",
    heading="Toy",
    brief="Toy",
    meaning="half of the largest gap of {bins} bins",
    function=lambda tally, groups: tally.top.maximum_error() / 2,
    show_pooled=True,
    compared=True,
    in_cases=True,
)
SIZE = StructureMetric(
    key="size",
    heading="Size",
    brief="Size",
    meaning="share of the box that is predicted",
    function=lambda pair: float(pair.prediction.mean()),
    better="higher",
    digits=3,
    mean_of_labels=True,
    compared=True,
    in_cases=True,
)
EVERYWHERE = [("CALIBRATION", TOY), ("STRUCTURE", SIZE)]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Two methods, evaluated with a row more in each part of the table; output and folder."""
    root = tmp_path_factory.mktemp("reports")
    y = np.zeros((3, 12, 12), int)
    y[0, 2:6, 2:6], y[1, 6:9, 6:9] = 1, 2
    for i, name in enumerate("ab"):
        write_nifti(root / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
        for method, certainty in (("p", 0.9), ("q", 0.6)):
            (root / method).mkdir(exist_ok=True)
            p = soft(np.roll(y, i, axis=2), 3, certainty)
            np.savez(root / method / f"{name}.npz", probabilities=p)
    with pytest.MonkeyPatch.context() as patch:
        for part, row in EVERYWHERE:
            patch.setattr(table, part, (*getattr(table, part), row))
        done = CliRunner().invoke(
            app,
            ["evaluate", *(str(root / name) for name in ("p", "q", "gt")), "-o", str(root / "out"),
             "--scopes", "fg,all", "--bootstrap", "20", "--format", "markdown,latex"],
        )  # fmt: skip
    assert done.exit_code == 0, done.output
    return done.output, root / "out"


def column(row):
    return row.column("all") if isinstance(row, CalibrationMetric) else row.key


@pytest.mark.parametrize(("part", "row"), EVERYWHERE, ids=["calibration", "structure"])
def test_files_of_numbers(reports, part, row):
    _, out = reports
    summary = json.loads((out / "p" / "summary.json").read_text())
    rows = pd.read_csv(out / "p" / "cases.csv").set_index("case")
    assert summary["conventions"][row.key] == row.meaning.format(bins=15)
    close(summary["metrics"][column(row)]["mean"], rows[column(row)].mean())
    if row is TOY:
        close(rows["toy_error_fg"].tolist(), (rows["mce_fg"] / 2).tolist())
        close(summary["pooled"]["toy_error_all"], summary["pooled"]["mce_all"] / 2)
    else:
        close(summary["classes"]["2"]["size"]["mean"], rows["size/2"].mean())
    comparison = json.loads((out / "comparison.json").read_text())
    assert column(row) in {one["metric"] for one in comparison["differences"]}
    assert row.key in comparison["conventions"]


@pytest.mark.parametrize(("part", "row"), EVERYWHERE, ids=["calibration", "structure"])
def test_printed_tables(reports, part, row):
    output, out = reports
    headings = [line.split() for line in output.splitlines() if "n" in line.split()[:2]]
    assert any(row.brief in words for words in headings)
    if row is TOY:
        words = [word for line in headings if line[:2] == ["scope", "n"] for word in line[2:]]
        assert words[words.index("Toy") + 1] == "pooled"  # in whichever table there was room
    name = f"{row.heading} all" if row is TOY else row.heading
    shown = [line for line in output.splitlines() if line.startswith(f" q        {name} ")]
    assert len(shown) == 1  # among the differences
    arrow = {"lower": "↓", "higher": "↑"}[row.better]
    page = (out / "p" / "index.html").read_text()
    cells = {cell.strip() for lines in Tables(page).tables for line in lines for cell in line}
    assert {f"{row.heading} {arrow}", f"{row.heading}\N{NO-BREAK SPACE}{arrow}"} & cells
    assert f"{name}\N{NO-BREAK SPACE}{arrow}" in cells  # of the table of cases
    meaning = row.meaning.format(bins=15)
    assert f"<dt>{row.key}</dt><dd>{meaning}</dd>" in page
    markdown = (out / "p" / "tables.md").read_text()
    latex = (out / "p" / "tables.tex").read_text()
    assert re.search(rf"\| {row.heading}.{arrow} \|", markdown)
    assert re.search(rf"{row.heading}\s\$\\(up|down)arrow\$ (&|\\\\)", latex)
    assert f": {meaning}" in markdown
    assert f": {meaning}" in latex
    for name, escaped in (("tables.md", arrow), ("tables.tex", r"\$\\(up|down)arrow\$")):
        text = (out / name).read_text()
        assert re.search(rf"{row.heading}( all)?\s{escaped}", text)


def test_columns_find_their_rows():
    keys = [row.key for row in calibration_metrics()]
    assert len(set(keys)) == len(keys)
    assert keys.index("tace_ref") == keys.index("tace") + 1
    for name, key in {
        "dsc": "dsc", "dsc/left": "dsc", "hd95_penalised_mm": "hd95_penalised_mm",
        "brier_fg": "brier", "brier_reliability_dilated5": "brier_reliability",
        "tace_ref": "tace_ref", "tace_roi": "tace", "cece_all/tumour": "cece", "ace_fg": "ace",
    }.items():  # fmt: skip
        assert metric_of(name).key == key
    for name in ("diagonal_mm", "spacing_z_mm", "voxels_fg", "marginloss_ece_fg", "ece"):
        assert metric_of(name) is None
    assert compared_columns(("fg", "all")) == [
        "dsc", "hd95_penalised_mm", "ece_fg", "ece_all", "tace_fg", "tace_all",
    ]  # fmt: skip


def test_every_row_says_what_it_means():
    conventions = EvaluationSettings(bins=7, nsd_tolerance_mm=1.5).conventions()
    defined = {key for keys in conventions for key in keys.split(", ")}
    rows = [*table.STRUCTURE, *table.PENALISED, *calibration_metrics()]
    assert {row.key for row in rows} <= defined
    assert not [text for text in conventions.values() if "{" in text]
    assert "7 groups" in conventions["aece"]
    assert "1.5 mm" in conventions["nsd"]
