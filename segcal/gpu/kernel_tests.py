"""Runs the tests of the kernels that need a GPU, from a checkout of the project."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torch

import segcal
from segcal.gpu.findings import Findings

PLACE = Path("tests") / "sweep" / "test_cuda.py"


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Run pytest on these tests; on a CPU they are only collected."""
    root = Path(segcal.__file__).parents[1]
    if not (root / PLACE).is_file():
        findings.skip("an installed package has no tests; run it from a checkout")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLACE)]
    command += ["-m", "not slow"] if device.type == "cuda" else ["--collect-only"]
    done = subprocess.run(  # noqa: S603 - tests of ours
        command, cwd=root, capture_output=True, text=True, check=False
    )
    findings.note("counts", {what: int(n) for n, what in _counts(done.stdout)})
    findings.note("end", done.stdout[-2000:])
    findings.expect(done.returncode == 0, f"pytest ended with {done.returncode}")


def _counts(text: str) -> list[tuple[str, str]]:
    last = text.strip().splitlines()[-1:]
    return re.findall(r"(\d+) (passed|failed|skipped|errors?|tests collected)", "".join(last))
