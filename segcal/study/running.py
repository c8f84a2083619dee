"""The cells of a study, run one after the other, in several processes, or on a Dask cluster.

A cell is one training with its predictions and results. It is done when its ``result.json`` exists,
which is written last, and names every repair of the study: where a repair was added later, the cell
is predicted and measured again, with all repairs old and new, but not trained. A study can be
killed at any time: trainings continue from their last checkpoint, predictions and results are
computed again. Only one study at a time runs into a folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import pandas as pd

from segcal.evaluation.api import Runner
from segcal.evaluation.engine import run
from segcal.evaluation.job import LIBRARIES
from segcal.io.files import read_json, remove_leftovers, whole_file, write_json, write_text
from segcal.recipes import load_objective, names, resolve_terms
from segcal.study.measuring import measure, tables_of
from segcal.study.plan import RESULTS, Host, Part, StudyCell, TrainedCell
from segcal.study.preparing import check_source, classes_of, prepare
from segcal.training.beginning import OutputInUseError, versions_of
from segcal.training.epoch_log import EpochLog
from segcal.training.time_limit import NEVER, OutOfTimeError, is_past

__all__ = [
    "TO_MEASURE", "Status", "check", "collect_results", "epochs_done", "in_use", "result_of",
    "run_cell", "run_cells", "statuses",
]  # fmt: skip

RESULT_NAME = "result.json"
FAILURE_NAME = "failed.txt"
LOG_NAME = "log.jsonl"
LOCK_NAME = ".segcal-study.lock"
PARTS: tuple[Part, ...] = ("fit", "test")
TO_MEASURE = "to measure"
"""State of a cell that was trained and measured, but without some repair that is now asked for."""
ELSEWHERE = {
    "summary": None,
    "output": None,
    "data": ("root", "images", "labels", "cache", "on_device"),
    "training": ("device", "workers", "val_batch_size"),
}
"""Settings that may differ from those of a finished cell, since they do not change its result."""


@dataclass(frozen=True)
class Status:
    """State of a cell.

    Attributes:
        state: ``done``, ``failed``, ``to do``, or ``to measure`` (trained, but measured without
            some repair of the study).
        result: content of its ``result.json``; None before it was first measured.
        why: reason of a failure.
    """

    state: str
    result: dict[str, Any] | None = None
    why: str = ""


def check(cells: Sequence[StudyCell], hosts: Mapping[str, Host]) -> None:
    """Check everything that can be checked before work starts.

    Raises:
        ValueError: settings do not fit, or cells were finished with other settings; the message
            names set, network and recipe.
    """
    classes: dict[str, int] = {}
    for cell in cells:
        try:
            if cell.set not in classes:
                check_source(cell.source, [c.seed for c in cells if c.set == cell.set])
                classes[cell.set] = classes_of(cell.source)
        except ValueError as error:
            raise ValueError(f"sets.{cell.set}: {error}") from None
        try:
            resolved = hosts[cell.host].resolve(cell, classes[cell.set]).model_dump(mode="json")
        except ValueError as error:
            raise ValueError(f"{cell.name}: {error}") from None
        result = result_of(cell)
        if result is None:
            continue
        now = {"loss": loss_of(cell), **resolved}
        if other := _differences({"loss": result["loss"], **result["experiment"]}, now):
            raise ValueError(
                f"{cell.folder / RESULT_NAME}: was made with other settings ({', '.join(other)}); "
                "choose another output, or remove that folder to train again"
            )


def loss_of(cell: StudyCell) -> dict[str, Any]:
    """Terms of the loss of a cell with all arguments, so that changes of a recipe are noticed."""
    recipe = load_objective(cell.variant.recipe)
    terms = resolve_terms(recipe, overrides=cell.variant.terms)
    found = {
        "weights": recipe.weights,
        "terms": {n: {"target": one.target, "args": one.args} for n, one in terms.items()},
        "schedule": {n: vars(one.ramp) for n, one in recipe.schedule.items()},
    }
    return dict(plain(found))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names of settings that differ."""
    found = []
    for key in dict.fromkeys((*before, *now)):
        ignored = ELSEWHERE.get(key, ())
        a, b = before.get(key), now.get(key)
        if ignored is None:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            inner = dict.fromkeys((*a, *b))
            found += [f"{key}.{k}" for k in inner if k not in ignored and a.get(k) != b.get(k)]
        elif a != b:
            found.append(key)
    return found


def result_of(cell: StudyCell) -> dict[str, Any] | None:
    """Result of a cell; None if it is not done.

    Raises:
        ValueError: a file that cannot be read.
    """
    path = cell.folder / RESULT_NAME
    return read_json(path) if path.is_file() else None


def statuses(cells: Sequence[StudyCell]) -> dict[StudyCell, Status]:
    """State of every cell."""
    found = {}
    for cell in cells:
        result = result_of(cell)
        told = cell.folder / FAILURE_NAME
        if result is not None and set(cell.repairs) <= set(result["fits"]):
            found[cell] = Status("done", result)
        elif told.is_file():
            found[cell] = Status("failed", result, told.read_text(encoding="utf-8").split("\n")[0])
        else:
            found[cell] = Status("to do" if result is None else TO_MEASURE, result)
    return found


def epochs_done(cell: StudyCell, host: Host) -> int:
    """Number of epochs in the log of a training."""
    path = EpochLog(host.log(cell)).path
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Lock the folder of a study against other runs; the lock ends even if the process is killed.

    Raises:
        OutputInUseError: another run uses the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise OutputInUseError(
                f"{folder}: another study uses it ({who}); wait for it, or choose another output"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def run_cells(
    todo: Sequence[StudyCell],
    hosts: Mapping[str, Host],
    *,
    processes: int = 1,
    runner: Runner = run,
    until: float = NEVER,
) -> Iterator[tuple[StudyCell, str]]:
    """Run cells; yield each cell in order, when it has ended, with the reason if it failed.

    Trainings that run when time is up stop after their epoch, and the others do not begin. As many
    as run at the same time are always begun, so that each call brings a study further.

    Args:
        todo: cells to run.
        hosts: by name.
        processes: number of cells at the same time, with one thread each if there are several.
        runner: see :func:`segcal.evaluation.api.runner_of`.
        until: time, as of ``time.time``, at which trainings stop.

    Raises:
        ValueError: data that cannot be prepared.
        OutOfTimeError: after all that have ended: time was up before the end of some.
    """
    for cell in todo:  # here, so that no two processes write the same
        prepare(cell)
    one = partial(_run_safely, hosts=dict(hosts), first=processes, until=until)
    left = 0
    for index, why in runner(one, list(enumerate(todo)), lost=_lost, jobs=processes):
        if why is None:
            left += 1
        else:
            yield todo[index], why
    if left:
        raise OutOfTimeError(f"{left} cells are not done")


def _lost(numbered: tuple[int, StudyCell], why: str) -> str:
    with suppress(OSError):
        _fail(numbered[1], why)
    return why


def _fail(cell: StudyCell, why: str, more: str = "") -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    write_text(cell.folder / FAILURE_NAME, f"{why}\n\n{more}")


def _run_safely(
    numbered: tuple[int, StudyCell], hosts: Mapping[str, Host], first: int, until: float
) -> str | None:
    """Run a cell; return why it failed, or "", or None if there was no time for all of it."""
    number, cell = numbered
    if number >= first and is_past(until):
        return None
    try:
        (cell.folder / FAILURE_NAME).unlink(missing_ok=True)
        run_cell(cell, hosts[cell.host], until)
    except OutOfTimeError:
        return None
    except Exception as error:  # noqa: BLE001 - a network's own, out of memory, a full disk
        why = str(error)
        if not isinstance(error, ValueError | FloatingPointError):
            why = f"{type(error).__name__}: {error}"
        why = why.replace("\n", " ")
        with suppress(OSError):
            _fail(cell, why, traceback.format_exc())
        return why
    return ""


def run_cell(cell: StudyCell, host: Host, until: float = NEVER) -> None:
    """Train, predict and measure, continuing from where it stopped; write ``result.json``.

    A cell that has a result is not trained again, and keeps the repairs that it was measured with.

    Args:
        cell: whose data set has been prepared.
        host: of its network.
        until: time, as of ``time.time``, at which its training stops.

    Raises:
        ValueError: something does not fit.
        FloatingPointError: the loss is no longer finite.
        OutOfTimeError: the training was stopped.
    """
    cell.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(cell.folder)
    experiment = host.resolve(cell, classes_of(cell.source)).model_dump(mode="json")
    before = result_of(cell)
    trained = host.train(cell, until) if before is None else _trained(before)
    started = perf_counter()
    for part in PARTS:
        host.predict(cell, part)
    predicted = perf_counter()
    kept = [] if before is None else [name for name in before["fits"] if name in names("posthoc")]
    measured = measure(replace(cell, repairs=tuple(dict.fromkeys([*kept, *cell.repairs]))))
    for name, table in tables_of(measured).items():
        write_table(cell.folder / name, table)
    write_json(cell.folder / "reliability.json", measured.reliability)
    log = EpochLog(host.log(cell)).path
    if log.is_file():
        write_text(cell.folder / LOG_NAME, log.read_text(encoding="utf-8"))
    seconds = {
        "train": round(trained.seconds, 1),
        "predict": round(predicted - started, 1),
        "evaluate": round(perf_counter() - predicted, 1),
    }
    content = {
        "status": "done",
        "set": cell.set,
        "network": cell.network,
        "recipe": cell.recipe,
        "seed": cell.seed,
        "host": cell.host,
        "experiment": experiment,
        "loss": loss_of(cell),
        "seconds": seconds,
        "epochs": trained.epochs,
        "best_epoch": trained.best_epoch,
        "parameters": trained.parameters,
        "val": measured.val,
        "fits": measured.fits,
        "test_cases": len({row["case"] for row in measured.rows}),
        "test_patients": len({row["patient"] for row in measured.rows}),
        "versions": trained.versions,
        "measured_with": versions_of(LIBRARIES),
    }
    write_json(cell.folder / RESULT_NAME, plain(content))
    if not cell.keep_predictions:
        for part in PARTS:
            shutil.rmtree(cell.predictions(part), ignore_errors=True)


def _trained(result: Mapping[str, Any]) -> TrainedCell:
    """What the result of a cell says about its training."""
    facts = {f.name: result[f.name] for f in fields(TrainedCell) if f.name != "seconds"}
    return TrainedCell(seconds=result["seconds"]["train"], **facts)


def plain(content: Any) -> Any:
    """The value as JSON can hold it: NaN and infinity become None, unknown types text."""
    text = json.dumps(content, default=str)
    return json.loads(text, parse_constant=lambda name: None)


def write_table(path: Path, table: pd.DataFrame) -> None:
    """Write a table without its index, completely or not at all."""
    with whole_file(path) as temporary:
        table.to_csv(temporary, index=False, float_format="%.9g")


def collect_results(output: Path, found: Mapping[StudyCell, Status]) -> Path:
    """Write ``results/cells.csv`` and ``results/cases.csv``; return their folder.

    Args:
        output: folder of the study.
        found: its cells, in the order of the tables.

    Raises:
        ValueError: a file of a cell that cannot be read.
    """
    folder = output / RESULTS
    rows, tables = [], []
    for cell, status in found.items():
        keys: dict[str, Any] = {
            "set": cell.set,
            "network": cell.network,
            "recipe": cell.recipe,
            "seed": cell.seed,
        }
        result = status.result or {}
        seconds = result.get("seconds", {})
        rows.append({
            **keys,
            "status": status.state,
            "why": status.why or None,
            "seconds": round(sum(seconds.values()), 1) if seconds else None,
            **{f"{key}_s": seconds.get(key) for key in ("train", "predict", "evaluate")},
            **{key: result.get(key) for key in (
                "epochs", "best_epoch", "parameters", "test_cases", "test_patients")},
            **{f"val_{key}": value for key, value in result.get("val", {}).items()},
        })  # fmt: skip
        if status.result is not None:
            table = _read_table(cell.folder / "cases.csv")
            for place, (key, value) in enumerate(keys.items()):
                table.insert(place, key, value)
            tables.append(table)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / "cells.csv", pd.DataFrame(rows))
    if tables:
        write_table(folder / "cases.csv", pd.concat(tables, ignore_index=True))
    return folder


def _read_table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_csv(path, dtype={"case": str, "patient": str})
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
