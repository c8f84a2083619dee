"""The check of a GPU: that all of it runs, on a CPU, and that it notices what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from segcal.commands import doctor
from segcal.commands.main import app
from segcal.gpu import checking, compiles, equality, kernel_tests, sanitizer, timing
from segcal.gpu.checking import PARTS, GpuPart, check
from segcal.gpu.findings import Findings
from segcal.sweep import cpu

RUNNER = CliRunner()
CPU = torch.device("cpu")


@pytest.fixture
def findings(tmp_path):
    return Findings(tmp_path / "found.json", 600.0)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_it_says_so(no_gpu, tmp_path):
    done = RUNNER.invoke(app, ["doctor", "--gpu", "-o", str(tmp_path / "gpu.json")])
    assert done.exit_code == doctor.NO_GPU == 3
    text = " ".join(done.stdout.split())
    assert "No CUDA device: torch" in text
    assert "segcal doctor --gpu --device cpu" in text


def test_without_an_option_it_names_the_fast_paths(no_gpu):
    done = RUNNER.invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "cpu: fast path works" in done.stdout
    assert "GPU: none that torch can use" in done.stdout


def test_an_unknown_part_is_refused(no_gpu):
    done = RUNNER.invoke(app, ["doctor", "--gpu", "--device", "cpu", "--part", "speed"])
    assert done.exit_code == 2
    assert "--part: expected some of equality, kernel_tests" in " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.timeout(900)  # nine processes that import torch, two of them MONAI and nnU-Net
def test_the_rehearsal_runs_every_part(tmp_path):
    said = []
    found = check("cpu", report=tmp_path / "gpu.json", seconds=900, tiny=True, say=said.append)
    statuses = {name: part["status"] for name, part in found["parts"].items()}
    assert list(statuses) == [part.name for part in PARTS]
    assert set(statuses.values()) <= {"passed", "skipped"}, found
    assert statuses["equality"] == statuses["timing"] == statuses["processes"] == "passed"
    assert json.loads((tmp_path / "gpu.json").read_text()) == json.loads(json.dumps(found))
    assert said[0].startswith("1 of 9, equality: ")
    assert len(said) == 2 * len(PARTS)


def test_a_part_that_fails_does_not_end_the_others(monkeypatch, tmp_path):
    parts = (GpuPart("no_such_part", "breaks", 60), GpuPart("sanitizer", "cannot be run here", 60))
    monkeypatch.setattr(checking, "PARTS", parts)
    said = []
    found = check("cpu", report=tmp_path / "gpu.json", tiny=True, say=said.append)["parts"]
    assert found["no_such_part"]["status"] == "failed"
    assert "No module named 'segcal.gpu.no_such_part'" in found["no_such_part"]["said"]
    assert "No module named" in said[1]
    assert found["sanitizer"]["status"] == "skipped"
    assert json.loads((tmp_path / "gpu.json").read_text())["parts"] == found


def test_the_budget_is_kept(monkeypatch, no_gpu):
    """What has begun is ended, what has not is left out, and both are said."""
    monkeypatch.setattr(checking, "STARTS", 0.5)
    said = []
    found = check("cpu", seconds=0.9, tiny=True, say=said.append)
    assert {part["status"] for part in found["parts"].values()} == {"out of time"}
    assert found["seconds"] < 30
    assert "left out, since no time is left" in said[-1]


def test_equality_finds_a_kernel_that_is_wrong(findings, monkeypatch):
    equality.run(findings, CPU, tiny=True)
    assert not findings.wrong
    assert findings.found["compared"] == 30
    run = cpu.run

    def wrong(*arguments):
        values, found, gradient = run(*arguments)
        return values, found, None if gradient is None else gradient * 1.001

    monkeypatch.setattr(cpu, "run", wrong)
    equality.run(findings, CPU, tiny=True)
    assert any("NACL, 2 classes, (33, 40), float32" in text for text in findings.wrong)


def test_timing_has_a_row_for_everything(findings):
    timing.run(findings, CPU, tiny=True)
    assert not findings.wrong
    rows = findings.found["(1, 4, 16, 16), ignore False"]
    assert {"torch CE", "CE + NACL", "CE + confidence", "observe CRaC"} <= set(rows)
    assert rows["torch CE"]["ratio_to_ce"] == 1
    assert all(row["ratio_to_bandwidth_limit"] > 0 for row in rows.values())
    assert "(1, 4, 8, 8, 8), ignore True" in findings.found


def test_timing_ends_in_time(tmp_path):
    findings = Findings(tmp_path / "found.json", 1.0)
    timing.run(findings, CPU, tiny=True)
    assert findings.found["stopped_before"] == "(1, 4, 16, 16), ignore False"


def test_too_many_compilations_are_found(findings, monkeypatch):
    counts = iter(range(100))
    monkeypatch.setattr(compiles, "_compiled", lambda _: {"_sweep": 2 * next(counts)})
    compiles.run(findings, CPU, tiny=True)
    assert not findings.wrong
    monkeypatch.setattr(compiles, "_compiled", lambda _: {"_sweep": 3 * next(counts)})
    compiles.run(findings, CPU, tiny=True)
    assert findings.wrong[0] == "NACL: _sweep is compiled 3 times"


def test_the_sanitizer_is_judged_by_its_exit_code(findings, monkeypatch):
    codes = iter([0, 86])

    def run(command, **_):
        findings.note(" ".join(command[1:3]), command[5:])
        path = command[command.index("--out") + 1]
        Path(path).touch()
        return SimpleNamespace(returncode=next(codes), stdout="", stderr="")

    monkeypatch.setattr(sanitizer.shutil, "which", lambda _: "compute-sanitizer")
    monkeypatch.setattr(sanitizer.subprocess, "run", run)
    sanitizer.run(findings, torch.device("cuda"), tiny=False)
    assert findings.wrong == ["racecheck ended with 86"]


def test_an_installed_package_has_no_tests(findings, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_tests.segcal, "__file__", str(tmp_path / "segcal" / "__init__.py"))
    kernel_tests.run(findings, CPU, tiny=True)
    assert "run it from a checkout" in findings.skipped
