"""What a user sees of ``segcal calibrate``."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from segcal.commands.calibrate import _of_doubt
from segcal.commands.main import app
from segcal.io.volumes import write_nifti
from tests.repair.conftest import SHAPE, cohort, geometry, record


def run(*arguments):
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


@pytest.fixture
def folders(tmp_path):
    return cohort(tmp_path)


def test_fit_apply_and_evaluate(folders, tmp_path):
    path, out = tmp_path / "calibrator.json", tmp_path / "out"
    done = run("fit", folders.predictions, folders.labels, "-o", path, "-p", 1)
    assert done.exit_code == 0, done.output
    for text in ("class_region_case: fitted to 6", "nats): ", "boundary", "tumour", "Written:"):
        assert text in done.output
    done = run("apply", folders.predictions, path, "-o", out, "-p", 1, "--decide", "dice")
    assert done.exit_code == 0, done.output
    assert "the calibrator was fitted on these predictions" in done.output
    assert "6 cases calibrated; label maps changed in" in done.output
    done = CliRunner().invoke(
        app, ["evaluate", str(out), str(folders.labels), "-o", str(tmp_path / "report"), "-p", "1"]
    )
    assert done.exit_code == 0, done.output
    assert "decided by dice" in done.output


def test_fit_takes_methods_arguments_and_offsets(folders, tmp_path):
    path = tmp_path / "c.json"
    given = ("-o", path, "-p", 1, "--set", "bands=[1.5, 3]", "--offsets")
    done = run("fit", folders.predictions, folders.labels, *given)
    assert done.exit_code == 0, done.output
    assert "to 1.5 mm" in done.output
    content = json.loads(path.read_text())
    assert content["state"]["arguments"]["bands"] == [1.5, 3.0]
    assert content["offsets"] is not None
    done = run(
        "apply", folders.predictions, path, "-o", tmp_path / "o", "--decide", "offsets", "-p", 1
    )
    assert done.exit_code == 0, done.output
    done = run("fit", folders.predictions, folders.labels, "--method", "temperature", "-o", path)
    assert "Temperature: " in done.output


def test_a_fit_says_how_temperatures_follow_the_doubt_of_a_case(folders, tmp_path):
    path = tmp_path / "c.json"
    given = ("fit", folders.predictions, folders.labels, "-o", path, "-p", 1)
    few = run(*given, "--patients", "case")  # all of one patient
    assert few.exit_code == 0, few.output
    assert "The same temperatures for all cases" in few.output
    assert "doubt" not in run(*given, "--method", "class_region").output
    assert _of_doubt(1.0, " of liver") == (
        "Temperatures of liver follow the doubt of a case: if the network expects twice the errors "
        "of another case, they are 2.00 times as high"
    )


def test_regions_have_temperatures_each(tmp_path):
    rng = np.random.default_rng(0)
    predictions = tmp_path / "p"
    predictions.mkdir()
    labels = {"background": 0, "whole": [1, 2], "core": [2]}
    content = {"labels": labels, "regions_class_order": [1, 2]}
    (predictions / "dataset.json").write_text(json.dumps(content))
    for name in "ab":
        p = rng.uniform(0.01, 0.99, size=(2, *SHAPE)).astype(np.float32)
        np.savez(predictions / f"{name}.npz", probabilities=p)
        write_nifti(tmp_path / "gt" / f"{name}.nii.gz", (p > 0.5).sum(0), geometry())
    done = run("fit", predictions, tmp_path / "gt", "-o", tmp_path / "c.json", "-p", 1)
    assert done.exit_code == 0, done.output
    for text in ("of whole; above 1", "of core; above 1", "not in it"):
        assert text in done.output


def test_a_separable_fit_is_pointed_out(tmp_path):
    perfect = cohort(tmp_path, sharpened=1.0, cases=2)
    for name in perfect.reference:
        write_nifti(perfect.labels / f"{name}.nii.gz", perfect.stored(name).argmax(0), geometry())
    path = tmp_path / "c.json"
    done = run("fit", perfect.predictions, perfect.labels, "--method", "temperature", "-o", path)
    assert done.exit_code == 0, done.output
    assert "Note: Temperature: temperature 0.05 is at the bound" in done.output
    assert json.loads(path.read_text())["state"]["facts"]["notes"]


def test_compare_writes_a_report(folders, tmp_path):
    out = tmp_path / "out"
    other = cohort(tmp_path / "other", cases=2, seed=7)
    given = ("--methods", "temperature,class_region", "-p", 1, "--bootstrap", 100, "-o", out)
    done = run(
        "compare", folders.predictions, folders.labels, *given,
        "--test", other.predictions, "--test-labels", other.labels,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "2 cases of --test have names of cases" in done.output
    assert "Recommended: " in done.output
    for name in ("index.html", "comparison.json", "comparison_cases.csv", "reliability_before.png",
                 "reliability_after.png", "comparison.png", "comparison_test.png"):  # fmt: skip
        assert (out / name).is_file()
    page = (out / "index.html").read_text()
    assert "Recommended" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    content = json.loads((out / "comparison.json").read_text())
    assert content["patients"] == 6
    assert set(content["fits"]) == {"temperature", "class_region"}


def test_what_is_wrong_is_said_at_once(folders, tmp_path):
    path = tmp_path / "c.json"
    for arguments, message in (
        (("fit", folders.predictions, folders.labels, "-o", tmp_path / "c.txt"), "ends in .json"),
        (("fit", folders.predictions, folders.labels, "--method", "platt"), "no config named"),
        (("fit", folders.predictions, tmp_path / "none"), "no such file or folder"),
        (("apply", folders.predictions, path, "-o", tmp_path / "o"), "no such file"),
        (("compare", folders.predictions, folders.labels, "--methods", "a", "-o", tmp_path / "o"),
         "--methods: no post-hoc method a"),
    ):  # fmt: skip
        done = run(*arguments)
        assert done.exit_code == 2, done.output
        assert message in done.stderr
        assert "Traceback" not in done.output
    assert not path.exists()
    assert run("fit", folders.predictions, folders.labels, "-o", path, "-p", 1).exit_code == 0
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model": {"trainer": "A"}}))
    record(folders.predictions, trainer="B")
    done = run("apply", folders.predictions, path, "-o", tmp_path / "o")
    assert done.exit_code == 2
    assert "--any-model" in done.stderr
    given = ("apply", folders.predictions, path, "-o", tmp_path / "o", "--any-model", "-p", 1)
    assert run(*given).exit_code == 0


def test_what_cannot_be_written_or_read_is_said(folders, tmp_path):
    path = tmp_path / "calibrator.json"
    run("fit", folders.predictions, folders.labels, "-o", path, "-p", 1)
    done = run("apply", path, folders.predictions, "-o", tmp_path / "out")
    assert done.exit_code == 2
    assert "a folder, expected a JSON file" in done.output
    done = run("apply", folders.predictions, path, "-o", path / "out")
    assert done.exit_code == 2
    assert "Not a directory" in done.output


def test_a_case_that_fails_names_the_labels_in_use(folders, tmp_path):
    path = tmp_path / "calibrator.json"
    run("fit", folders.predictions, folders.labels, "-o", path, "-p", 1)
    bad = folders.stored("case_00")
    bad[0, 0, 0, 0] = np.nan
    np.savez(folders.predictions / "case_00.npz", probabilities=bad)
    done = run("apply", folders.predictions, path, "-o", tmp_path / "out", "-p", 1)
    assert done.exit_code == 1
    said = "".join(done.output.split())
    assert f"areNaNorinfinite(labels:{folders.predictions}/dataset.json)" in said


def test_two_patients_get_no_marks(tmp_path):
    two = cohort(tmp_path, cases=2)
    done = run(
        "compare", two.predictions, two.labels, "-o", tmp_path / "r", "--methods", "temperature"
    )
    assert done.exit_code == 0, done.output
    row = next(line for line in done.output.splitlines() if line.strip().startswith("temperature"))
    assert "*" not in row
    assert "!" not in row


def test_patterns_pair_for_fit_and_apply(tmp_path):
    """A calibrator of paired cases is written under the names of the cases."""
    rng = np.random.default_rng(0)
    for name in "ab":
        p = rng.dirichlet(np.ones(2), SHAPE).transpose(3, 0, 1, 2).astype(np.float32)
        (tmp_path / "p" / name).mkdir(parents=True)
        np.savez(tmp_path / "p" / name / "soft.npz", probabilities=p)
        write_nifti(tmp_path / "gt" / f"of_{name}.nii.gz", p.argmax(0), geometry())
    calibrator, given = tmp_path / "c.json", ("--prediction-pattern", "{case}/soft.npz")
    done = run(
        "fit", tmp_path / "p", tmp_path / "gt", *given, "--reference-pattern", "of_{case}",
        "--labels", "liver=1", "--method", "temperature", "-o", calibrator, "-p", 1,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "fitted to 2 cases" in done.output
    out = tmp_path / "out"
    done = run(
        "apply", tmp_path / "p", calibrator, *given, "--labels", "liver=1", "-o", out, "-p", 1
    )
    assert done.exit_code == 0, done.output
    assert {path.name for path in out.glob("*.npz")} == {"a.npz", "b.npz"}
    done = run("apply", tmp_path / "p", calibrator, *given, "-o", "/proc/out")
    assert done.exit_code == 2
    assert "/proc/out: nothing can be written into /proc" in done.output
