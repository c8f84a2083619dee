"""A step of nnU-Net in a process of its own, because environment variables name its folders.

The process ends together with its parent, even if the parent is killed: it reads its job from a
pipe and exits when the other end is closed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from segcal.adapters.nnunet.patching import Aggregation, replaced
from segcal.adapters.nnunet.running import Budget, predict, train
from segcal.repair.saved import NO_CALIBRATOR
from segcal.training.time_limit import NEVER, OutOfTimeError

Step = Literal["plan", "train", "predict"]
SHOWN = 3
"""Number of lines of the log that an error shows."""


def run_apart(
    step: Step,
    arguments: Sequence[str],
    *,
    folders: Mapping[str, Path],
    log: Path,
    threads: int = 1,
    budget: Mapping[str, Any] | None = None,
    until: float = NEVER,
) -> None:
    """Run a step and wait for it.

    Args:
        step: ``plan`` is nnUNetv2_plan_and_preprocess; ``train`` and ``predict`` are functions of
            :mod:`segcal.adapters.nnunet.running`.
        arguments: of nnU-Net's command.
        folders: ``raw``, ``preprocessed`` and ``results``.
        log: file for the output of the step.
        threads: of torch.
        budget: of a training, see :class:`segcal.adapters.nnunet.running.Budget`.
        until: time, as of ``time.time``, at which the step is ended if it still runs.

    Raises:
        RuntimeError: the step failed; the message shows the end of its log.
        OutOfTimeError: it was ended by `until`.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("nnUNet_")}
    environment |= {f"nnUNet_{name}": str(path.resolve()) for name, path in folders.items()}
    environment |= {"nnUNet_def_n_proc": "1", "nnUNet_n_proc_DA": "1", "PYTHONUNBUFFERED": "1"}
    job = {
        "step": step, "arguments": list(arguments), "threads": threads, "budget": dict(budget or {})
    }  # fmt: skip
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "segcal.adapters.nnunet.apart"],
            stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            if process.stdin is not None:
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
            code = process.wait(None if until == NEVER else max(0.0, until - time.time()))
        except BaseException as error:  # Ctrl-C, say
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                raise OutOfTimeError(f"nnU-Net's {step} was ended, see {log}") from None
            raise
        finally:
            if process.stdin is not None:
                process.stdin.close()
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = " / ".join(line.strip() for line in lines[-SHOWN:])
        raise RuntimeError(f"nnU-Net's {step} ended with {code}, see {log}: {last}")


def main() -> None:
    """Run the job that is read from standard input."""
    # not the standard input, which forks close: they would wait for a thread that reads it
    pipe = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    text = b""
    while not text.endswith(b"\n"):
        text += os.read(pipe, 1 << 16)
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()
    job = json.loads(text)
    if job["step"] == "plan":
        from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import (
            plan_and_preprocess_entry,
        )

        sys.argv = ["nnUNetv2_plan_and_preprocess", *job["arguments"]]
        plan_and_preprocess_entry()
    elif job["step"] == "train":
        import multiprocessing

        # nnU-Net takes every core of a CPU, of which other cells have theirs
        with replaced(multiprocessing, "cpu_count", lambda: job["threads"]):
            train(job["arguments"], Budget(**job["budget"]))
    else:
        import torch

        torch.set_num_threads(job["threads"])
        predict(job["arguments"], Aggregation(calibrator=NO_CALIBRATOR))


def _end_with(pipe: int) -> None:
    """End this process and all that it has started, when the other end of the pipe is closed."""
    os.read(pipe, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
