"""nnU-Net's folders and its own commands, run in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

BIN = Path(sys.executable).parent
SCRIPTS = Path(__file__).parent.parent.parent / "scripts"
RUN = "Dataset901_Phantom/{}__nnUNetPlans__2d_small/fold_0"
BUDGET = ["--epochs", "4", "--iterations", "4", "--val-iterations", "3", "--save-every", "1"]
TRAIN = [BIN / "segcal", "nnunet", "train", "901", "2d_small", "0", "-device", "cpu"]


class Workspace:
    """nnU-Net's folders, and its commands run in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "raw" / "Dataset901_Phantom"
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("nnUNet_")}
        self.environment = {
            **inherited,
            "nnUNet_raw": str(root / "raw"),
            "nnUNet_preprocessed": str(root / "preprocessed"),
            "nnUNet_results": str(root / "results"),
            "nnUNet_def_n_proc": "1",
            "nnUNet_n_proc_DA": "1",
        }

    def run(self, *command, **environment):
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True,
            env={**self.environment, **environment},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def fail(self, *command, code=2, **environment):
        """Run a command that must end with `code`; return what it says."""
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True,
            env={**self.environment, **environment},
        )  # fmt: skip
        assert done.returncode == code, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    def start(self, *command, **environment):
        """Start a command in a process group of its own."""
        return Started(
            list(map(str, command)), self.root / "started.log", {**self.environment, **environment}
        )

    def run_until(self, reached, *command, **environment):
        """Start a command and SIGKILL it, with all it has started, when `reached()`."""
        started = self.start(*command, **environment)
        try:
            started.wait_for(reached)
        finally:
            os.killpg(started.process.pid, signal.SIGKILL)
            started.process.wait()

    def records(self, trainer, results="results"):
        path = self.root / results / RUN.format(trainer) / "segcal_log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Started:
    """A process that may be killed, and those that it has started."""

    def __init__(self, command, log, environment):
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, start_new_session=True,
                env={**environment, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self.begun = time.monotonic()

    @property
    def seconds(self):
        return time.monotonic() - self.begun

    def said(self, text):
        return text in self.log.read_text(errors="replace")

    def wait_for(self, reached, *, every=0.02):
        """Wait until `reached()`; an error if the command ends, or takes minutes."""
        while not reached():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert self.seconds < 300, self.log.read_text()[-3000:]
            time.sleep(every)

    def group(self):
        """Processes of its group that run."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getpgid(process.pid) == self.process.pid:
                    found.append(process)
            except ProcessLookupError:
                continue
        return [p for p in found if p.info["status"] != psutil.STATUS_ZOMBIE]

    def kill(self):
        """SIGKILL the process alone; return what of its group runs a while later."""
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 60
        while (left := self.group()) and time.monotonic() < deadline:
            time.sleep(0.1)
        return left
