"""Checks kernels for wrong memory accesses and races with NVIDIA's compute-sanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from segcal.gpu.findings import Findings

ERROR_CODE = 86


def run(findings: Findings, device: torch.device, *, tiny: bool) -> None:
    """Run the comparison of small shapes under memcheck and racecheck, if they are installed."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        findings.skip("compute-sanitizer is not on PATH (it comes with NVIDIA's CUDA toolkit)")
        return
    if device.type != "cuda":
        findings.skip("needs a GPU")
        return
    with tempfile.TemporaryDirectory() as folder:
        for tool in ("memcheck", "racecheck"):
            part = ["-m", "segcal.gpu.part", "equality", "--tiny", "--out", f"{folder}/{tool}.json"]
            command = [program, "--tool", tool, "--error-exitcode", str(ERROR_CODE)]
            command += [sys.executable, *part]
            try:
                done = subprocess.run(  # noqa: S603 - a module of ours
                    command, capture_output=True, text=True, check=False,
                    timeout=max(1.0, findings.left - 2),
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                findings.note(tool, "out of time")
                continue
            findings.note(tool, (done.stdout + done.stderr)[-1000:])
            ended = f"{tool} ended with {done.returncode}"
            findings.expect(done.returncode == 0 and Path(f"{folder}/{tool}.json").exists(), ended)
