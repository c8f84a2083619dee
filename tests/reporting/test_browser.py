"""The page in a real browser: it sorts, asks no network for anything, and fits a phone.

Needs Chromium (on the path, or named by the variable CHROMIUM) and is skipped without. A second
page, beside the report, opens it in a frame as wide as a phone and writes what it finds into its
own document, which Chromium prints.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import numpy as np
import pytest
from typer.testing import CliRunner

from segcal.commands.main import app
from segcal.io.volumes import write_nifti
from tests.evaluation.test_cohort import geometry, soft

CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(
    not CHROMIUM, reason="no Chromium; install one or set CHROMIUM to its path"
)
WIDTH = 390
PROBE = """<script>
const problems = [];
const say = text => problems.push(String(text));
addEventListener("error", event => say(event.message || event.target.outerHTML), true);
addEventListener("unhandledrejection", event => say(event.reason));
for (const level of ["error", "warn"]) console[level] = (...words) => say(words.join(" "));
addEventListener("load", () => {
  const column = (table, index) =>
    [...table.tBodies[0].rows].map(row => row.cells[index].textContent.trim());
  const found = {problems, sorted: {}};
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, index) => {
      const name = head.textContent.trim().split("\\u00a0")[0];
      const orders = [column(table, index)];
      for (let click = 0; click < 2; click++) {
        head.querySelector("button").click();
        orders.push(column(table, index), head.getAttribute("aria-sort"));
      }
      found.sorted[table.id + "/" + name] = orders;
    });
  }
  found.resources = performance.getEntriesByType("resource").map(entry => entry.name);
  found.pictures = [...document.images].map(image => image.complete && image.naturalWidth);
  found.tables = [...document.querySelectorAll(".scroll > table")].map(
    table => [table.id, table.scrollWidth, table.parentElement.clientWidth]);
  found.width = [document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth];
  parent.postMessage(found, "*");
});
</script>"""
FRAME = """<!doctype html><meta charset="utf-8"><pre id="found"></pre>
<iframe src="{page}" style="width:{width}px;height:800px;border:0"></iframe>
<script>addEventListener("message", event => {{
  document.getElementById("found").textContent = JSON.stringify(event.data);
}});</script>"""


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Report of two methods: cases of which one lacks a label, and names that need an order."""
    root = tmp_path_factory.mktemp("browser")
    y = np.zeros((3, 12, 40), int)
    y[0, 2:6, 2:6], y[1, 6:9, 6:9] = 1, 2
    for method, certainty in (("good", 0.95), ("bad", 0.6)):
        (root / method).mkdir()
        for i, name in enumerate(("case10", "case9", "case100")):
            labels = np.where(y == 2, 0, y) if name == "case9" else y
            write_nifti(root / "gt" / f"{name}.nii.gz", labels, geometry(y.shape))
            p = soft(np.roll(labels, i, axis=2), 3, certainty)
            np.savez(root / method / f"{name}.npz", probabilities=p)
    arguments = [*(str(root / name) for name in ("good", "bad", "gt")), "-o", str(root / "out")]
    done = CliRunner().invoke(app, ["evaluate", *arguments, "--bootstrap", "50"])
    assert done.exit_code == 0, done.output
    return root / "out"


def look(path, width=WIDTH):
    """Open a page with the probe in it, as wide as a phone, say, and return what it found."""
    text = path.read_text(encoding="utf-8")
    assert "<head>" in text
    probed = path.with_name("probed.html")
    probed.write_text(text.replace("<head>", "<head>" + PROBE, 1), encoding="utf-8")
    frame = path.with_name("frame.html")
    frame.write_text(FRAME.format(page=probed.name, width=width), encoding="utf-8")
    done = subprocess.run(
        [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=800,1000",
         f"--user-data-dir={path.parent / 'profile'}", "--virtual-time-budget=20000",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[:2000] + done.stderr[-2000:]
    assert found[1], done.stderr[-2000:]
    return json.loads(html.unescape(found[1]))


@pytest.fixture(scope="module")
def case_page(output):
    return look(output / "good" / "index.html")


@pytest.fixture(scope="module")
def comparison_page(output):
    return look(output / "index.html")


@pytest.mark.parametrize("page", ["case_page", "comparison_page"])
def test_nothing_is_loaded_and_nothing_complains(page, request):
    found = request.getfixturevalue(page)
    assert found["problems"] == []
    assert [name for name in found["resources"] if not name.startswith("data:")] == []
    assert found["pictures"]
    assert all(found["pictures"])


@pytest.mark.parametrize("page", ["case_page", "comparison_page"])
def test_a_phone_has_no_sideways_scrolling(page, request):
    document, body, window = request.getfixturevalue(page)["width"]
    assert window == WIDTH
    assert document <= WIDTH
    assert body <= WIDTH


def test_a_comparison_fits_a_desktop(output):
    tables = {name: size for name, *size in look(output / "index.html", 1200)["tables"]}
    assert set(tables) == {"methods", "differences"}
    for width, room in tables.values():
        assert width <= room


def test_cases_sort_as_people_count(case_page):
    _, up, direction_up, down, direction_down = case_page["sorted"]["cases/case"]
    assert (direction_up, direction_down) == ("ascending", "descending")
    assert up == ["case9", "case10", "case100"]
    assert down == up[::-1]


def test_numbers_sort_and_the_undefined_stay_last(case_page):
    for name, values in {"cases/DSC": 3, "cases/DSC 2": 2, "cases/ECE all": 3}.items():
        _, up, _, down, _ = case_page["sorted"][name]
        numbers = [float(v) for v in up[:values]]
        assert numbers == sorted(numbers)
        assert numbers != sorted(numbers, reverse=True)
        assert [float(v) for v in down[:values]] == numbers[::-1]
        assert up[values:] == down[values:] == ["-"] * (3 - values)


def test_differences_sort(comparison_page):
    _, up, _, _, _ = comparison_page["sorted"]["differences/difference"]
    numbers = [float(v) for v in up if v != "-"]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 3
