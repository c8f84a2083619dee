"""Processes that begin with everything imported: forks of one that has done nothing else.

An interpreter of its own spends seconds on importing torch and nnU-Net before it does anything;
a fork takes milliseconds. The process that is forked has no threads, unlike the one of the tests.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import entry_points
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

PRELOADED = [  # those that are installed
    "distributed",
    "ignite.distributed",
    "nnunetv2.experiment_planning.plan_and_preprocess_entrypoints",
    "nnunetv2.run.run_training",
    "segcal.adapters.monai.training",
    "segcal.adapters.nnunet.prediction",
    "segcal.adapters.nnunet.sharing",
    "segcal.adapters.nnunet.trainers",
    "segcal.adapters.nnunet.warmstart",
    "segcal.commands.main",
    "segcal.evaluation.cohort",
]
PATIENCE = 150
"""Seconds after which a command has failed, on a busy machine too; they take a few."""
PROCESSES = "nnUNet_def_n_proc"
"""A variable that nnU-Net reads when it is imported."""


def forks() -> ForkServerContext:
    """What :mod:`multiprocessing` needs to start processes here; nnU-Net starts one at a time."""
    before = os.environ.get(PROCESSES)
    os.environ[PROCESSES] = "1"
    try:
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    finally:
        del os.environ[PROCESSES]
        if before is not None:
            os.environ[PROCESSES] = before
    return multiprocessing.get_context("forkserver")


def forked(spawned: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``multiprocessing.get_context`` with forks in the place of spawned interpreters."""
    context = forks()
    return lambda method=None: context if method == "spawn" else spawned(method)


class Command:
    """A command line that runs in a fork, in a process group of its own.

    Args:
        command: a program of this environment, or this Python with a file or ``-c`` and a text.
        environment: all its variables.
        out: gets its standard output.
        err: gets its standard error.
        pools: whether pools of spawned processes are such, or done at once by the process itself.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], out: Path, err: Path, *, pools: bool
    ) -> None:
        method = multiprocessing.get_start_method()
        self._process = forks().Process(
            target=_run, args=(command, environment, out, err, pools, Path.cwd(), method)
        )
        self._process.start()
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        """Return its exit code when it has ended, None if it has not in so many seconds."""
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        """SIGKILL it alone."""
        self._process.kill()

    def kill_group(self) -> None:
        """SIGKILL it, if it still runs, and all that it has started."""
        self._process.kill()  # which may have no group yet
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def said(
    command: list[str], files: list[Path], environment: dict[str, str] | None = None
) -> tuple[int | None, list[str]]:
    """Run a command; return its exit code, None if it takes minutes, and what it wrote.

    Args:
        command: as of :class:`Command`.
        files: for its standard output and its standard error.
        environment: all its variables; those of this process if None.
    """
    for file in files:
        file.unlink(missing_ok=True)
    process = Command(
        command, dict(os.environ) if environment is None else environment, *files, pools=False
    )
    code = process.wait(PATIENCE)
    process.kill_group()
    return code, [file.read_text(errors="replace") for file in files]


def _run(
    command: list[str],
    environment: dict[str, str],
    out: Path,
    err: Path,
    pools: bool,
    folder: Path,
    method: str,
) -> None:
    os.setsid()
    multiprocessing.set_start_method(method, force=True)  # and not that which started us
    os.chdir(folder)
    for path, descriptor in ((out, 1), (err, 2)):
        with path.open("ab") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout, sys.stderr = (  # the system's, for good
        open(i, "w", buffering=1, closefd=False)  # noqa: SIM115
        for i in (1, 2)
    )
    os.environ.clear()
    os.environ.update(environment)
    if not pools:
        multiprocessing.get_context = WithoutSpawn()
    program, *arguments = command
    if program != sys.executable:
        sys.argv = command
        (entry,) = entry_points(group="console_scripts", name=Path(program).name)
        sys.exit(entry.load()())
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(arguments[1], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


class _AtOnce(ThreadPool):
    """Does what it is given before it says that it has been given it."""

    def starmap_async(self, *arguments: Any, **options: Any) -> Any:
        result = super().starmap_async(*arguments, **options)
        result.wait()
        return result


class WithoutSpawn:
    """``multiprocessing.get_context``, whose spawned pools are no processes."""

    def __init__(self) -> None:
        self._get_context = multiprocessing.get_context

    def __call__(self, method: str | None = None) -> Any:
        found = self._get_context(method)
        if method == "spawn":
            found = type("Spawned", (type(found),), {"Pool": lambda self, n=1: _AtOnce(n)})()
        return found
