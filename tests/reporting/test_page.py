"""The page holds everything itself, says what is undefined, and lets no name be markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.io.files import write_json
from segcal.io.volumes import write_nifti
from tests.evaluation.test_cohort import geometry, soft


class Tables(HTMLParser):
    """Cells of every table, texts of headings, and what the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self._cell = self._heading = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        self._cell = self._cell or tag in ("td", "th")
        self._heading = tag in ("h1", "h2")
        if self._heading:
            self.headings.append("")
        self.loads += [attributes[k] for k in ("src", "href") if k in attributes]

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._cell = False
        if tag in ("h1", "h2"):
            self._heading = False

    def handle_data(self, data):
        if self._cell:
            self.tables[-1][-1][-1] += data
        if self._heading:
            self.headings[-1] += data


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("report")
    y = np.zeros((3, 12, 12), int)
    y[0, 2:6, 2:6], y[1, 6:9, 6:9] = 1, 2
    (tmp_path / "p").mkdir()
    for i, name in enumerate("ab"):
        write_nifti(tmp_path / "gt" / f"{name}.nii.gz", y, geometry(y.shape))
        shifted = np.roll(y, i, axis=2)
        np.savez(tmp_path / "p" / f"{name}.npz", probabilities=soft(shifted, 3))
    (tmp_path / "p" / "bad.npz").write_bytes(b"")
    write_nifti(tmp_path / "gt" / "bad.nii.gz", y, geometry(y.shape))
    labels = {"background": 0, "<b onload=x>1": 1, "two & more": 2}
    write_json(tmp_path / "dataset.json", {"labels": labels, "file_ending": ".nii.gz"})
    done = CliRunner().invoke(
        app,
        ["evaluate", str(tmp_path / "p"), str(tmp_path / "gt"), "-o", str(tmp_path / "out"),
         "--dataset-json", str(tmp_path / "dataset.json")],
    )  # fmt: skip
    assert done.exit_code == 1, done.output  # bad.npz
    return (tmp_path / "out" / "index.html").read_text()


def test_everything_is_inside(report):
    page = Tables(report)
    assert page.headings == [
        "Evaluation: p", "Overlap and surfaces", "Calibration", "Does the confidence hold?",
        "Volumes", "Cases with the lowest DSC", "Cases", "How these numbers are defined",
    ]  # fmt: skip
    pictures = [load for load in page.loads if load.startswith("data:image/png;base64,")]
    assert len(pictures) == 9  # four diagrams, three of confidence and volumes, and two cases
    others = [load for load in page.loads if load not in pictures]
    assert others == ["data:,", *(f"#s{i}" for i in range(1, 7)), "#definitions"]
    assert set(others[1:]) == {f"#{name}" for name in re.findall(r'<h2 id="([^"]+)"', report)}
    assert not re.search(r"https?:|//cdn|@import|url\(", report)


def test_numbers_and_failures_are_there(report):
    overlap, calibration, confidence, volumes, cases = Tables(report).tables
    for table in (confidence, volumes):
        assert [row[0].strip() for row in table[1:3]] == ["<b onload=x>1", "two & more"]
    assert overlap[0][:3] == ["label", "n", "DSC\N{NO-BREAK SPACE}↑"]
    assert [row[0].strip() for row in overlap[1:]] == ["<b onload=x>1", "two & more"]
    assert calibration[0] == ["metric", "fg", "union", "dilated5", "all"]
    assert [row[0].strip() for row in calibration[1:4]] == ["n", "ECE ↓", "ECE, pooled ↓"]
    assert [cell.strip() for cell in calibration[1][1:]] == ["2"] * 4
    assert [row[0].strip() for row in cases[1:]] == ["a", "b"]
    assert "1 failed" in report
    assert "<b>bad</b> failed:" in report
    assert "<b onload" not in report  # a label's name is text
    assert "2|P&amp;G|/(|P|+|G|)" in report


def test_a_report_without_a_good_case(tmp_path):
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "a.npz").write_bytes(b"")
    write_nifti(tmp_path / "gt" / "a.nii.gz", np.ones((2, 4, 4), int), geometry((2, 4, 4)))
    done = CliRunner().invoke(
        app, ["evaluate", str(tmp_path / "p"), str(tmp_path / "gt"), "-o", str(tmp_path / "o")]
    )
    assert done.exit_code == 1
    page = (tmp_path / "o" / "index.html").read_text()
    assert "0 cases evaluated" in page
    assert Tables(page).tables == []
