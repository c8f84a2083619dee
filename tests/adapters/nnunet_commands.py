"""nnU-Net's folders and the commands around it, each run in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.forks import PATIENCE, Command, said

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

    def run_as_users_do(self, *command, **environment):
        """Run a command in an interpreter of its own, whose imports take seconds."""
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, timeout=PATIENCE,
            env={**self.environment, **environment},
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    def run(self, *command, **environment):
        """Run a command in a fork; return what it writes to its standard output."""
        return self._ended(command, environment, 0)[0]

    def fail(self, *command, code=2, **environment):
        """Run a command that must end with `code`; return what it says."""
        return "".join(self._ended(command, environment, code))

    def _ended(self, command, environment, code):
        files = [self.root / name for name in ("out.log", "err.log")]
        ended, texts = said(list(map(str, command)), files, {**self.environment, **environment})
        assert ended == code, f"{command}\n{texts[0][-3000:]}\n{texts[1][-3000:]}"
        return texts

    def start(self, *command, **environment):
        """Start a command in a process group of its own."""
        log = self.root / "started.log"
        return Started(list(map(str, command)), log, {**self.environment, **environment})

    def run_until(self, reached, *command, **environment):
        """Run a command as users do; SIGKILL it, with all it has started, when `reached()`."""
        log = self.root / "started.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                list(map(str, command)), stdout=out, stderr=out, start_new_session=True,
                env={**self.environment, **environment, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        try:
            assert wait_until(reached, process), log.read_text()[-3000:]
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def records(self, trainer, results="results"):
        path = self.root / results / RUN.format(trainer) / "segcal_log.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_until(reached, process, *, every=0.02):
    """Whether `reached()` while a process runs or when it has ended, `PATIENCE` granted."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        if reached():
            return True
        if ended:
            return False
        time.sleep(every)
    return False


class Started:
    """A process that may be killed, and those that it has started."""

    def __init__(self, command, log, environment):
        self.log = log
        log.write_text("")
        self.process = Command(command, environment, log, log, pools=True)
        self.begun = time.monotonic()

    @property
    def seconds(self):
        return time.monotonic() - self.begun

    def said(self, text):
        return text in self.log.read_text(errors="replace")

    def runs(self):
        return self.process.poll() is None

    def wait_for(self, reached):
        """Wait until `reached()`; an error if it ends before that, or takes minutes."""
        if not wait_until(reached, self.process):
            self.process.kill_group()
            raise AssertionError(self.log.read_text()[-3000:])

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
