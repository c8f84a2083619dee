"""Runs the parts of the check, each in a process of its own, within a time budget."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from segcal import __version__
from segcal.io.files import write_json

STARTS = 10.0
"""Seconds that a process takes to start; a part needs at least this much time."""


@dataclass(frozen=True)
class GpuPart:
    """One part of the check.

    Attributes:
        name: its module in :mod:`segcal.gpu`.
        what: what it checks.
        seconds: its largest share of a budget of 480 seconds.
    """

    name: str
    what: str
    seconds: float


PARTS = (
    GpuPart("equality", "the fast path equals the readable version, in every precision", 90),
    GpuPart("kernel_tests", "the project's own tests of the kernels", 120),
    GpuPart("compiles", "how often kernels are compiled over volumes of ten shapes", 40),
    GpuPart("timing", "time, launches and memory beside cross-entropy and MONAI", 120),
    GpuPart("processes", "multipliers learned on two processes equal those of one", 45),
    GpuPart("training", "a short training gives the same results as on the CPU", 75),
    GpuPart("epochs", "an epoch of the published U-Net, slices on the GPU and off it", 60),
    GpuPart("nnunet", "steps of nnU-Net's default network, with AMP and torch.compile", 120),
    GpuPart("sanitizer", "NVIDIA's compute-sanitizer finds nothing", 90),
)
WHOLE = 480.0


def check(
    device: str,
    *,
    report: Path | None = None,
    only: Sequence[str] = (),
    seconds: float = WHOLE,
    tiny: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run all parts and return what they found, ready for JSON.

    Args:
        device: ``cuda``, or ``cpu`` for a rehearsal.
        report: file for the results, rewritten after every part.
        only: names of parts; empty runs all parts.
        seconds: time budget; parts for which no time is left are skipped.
        tiny: whether to use few and small shapes.
        say: called with messages on the progress.

    Raises:
        ValueError: a name of a part is unknown.
    """
    known = [part.name for part in PARTS]
    if unknown := [name for name in only if name not in known]:
        raise ValueError(f"part: expected some of {', '.join(known)}, got {', '.join(unknown)}")
    chosen = [part for part in PARTS if not only or part.name in only]
    begun = time.monotonic()
    found: dict[str, Any] = {**_where(device), "parts": {}}
    for number, part in enumerate(chosen, 1):
        left = seconds - (time.monotonic() - begun)
        limit = min(part.seconds * max(1.0, seconds / WHOLE), left)
        head = f"{number} of {len(chosen)}, {part.name}: "
        if limit < STARTS:
            found["parts"][part.name] = {"status": "out of time", "seconds": 0.0}
            say(f"{head}left out, since no time is left")
            continue
        say(f"{head}{part.what} (at most {limit:.0f} s)")
        result = run_part(part.name, device, limit, tiny=tiny)
        found["parts"][part.name] = result
        say(f"    {result['status']} after {result['seconds']:.0f} s{_reasons(result)}")
        found["seconds"] = round(time.monotonic() - begun, 1)
        if report is not None:
            write_json(report, found)
    if report is not None:
        write_json(report, found)
    return found


def run_part(name: str, device: str, seconds: float, *, tiny: bool) -> dict[str, Any]:
    """Run one part; ``status`` is passed, failed, skipped or out of time."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder) / "found.json", Path(folder) / "log.txt"
        command = [sys.executable, "-m", "segcal.gpu.part", name, "--out", str(path)]
        command += ["--device", device, "--seconds", str(seconds - STARTS / 2)]
        command += ["--tiny"] if tiny else []
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: S603 - a module of ours
                command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
        said = log.read_text("utf-8", errors="replace")[-2000:]
    result = {"status": "passed", "seconds": round(time.monotonic() - begun, 1), **kept}
    if code is None:
        result["status"] = "out of time"
    elif code != 0:
        result |= {"status": "failed", "said": said}
    elif kept.get("wrong"):
        result["status"] = "failed"
    elif kept.get("skipped"):
        result["status"] = "skipped"
    return result


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part and the processes it has started, if they still run."""
    if process.poll() is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # of the session that it leads
        else:
            process.kill()
    process.wait()


def _where(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "segcal": __version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "device": platform.processor() or platform.machine(),
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name(0)
        found["gpus"] = torch.cuda.device_count()
        found["capability"] = list(torch.cuda.get_device_capability(0))
    return found


def _reasons(result: dict[str, Any]) -> str:
    if result["status"] == "skipped":
        return f": {result['skipped']}"
    wrong = list(result.get("wrong", []))
    if "said" in result:
        wrong.append((result["said"].strip().splitlines() or ["it printed nothing"])[-1])
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return f": {'; '.join(wrong[:3])}{more}" if wrong else ""
