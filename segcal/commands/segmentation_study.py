"""What ``segcal study`` does with a study of segmentation: check, run with a live table, report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from segcal.commands.console import open_console, say
from segcal.commands.errors import user_errors
from segcal.commands.experiment import OPTIONS
from segcal.training.time_limit import OutOfTimeError

if TYPE_CHECKING:  # torch is imported when there is work to do
    from segcal.evaluation.api import Runner
    from segcal.study.plan import Host, SegmentationStudy, StudyCell
    from segcal.study.running import Status

SHOWN = 12
"""Running cells that the live table names."""
MEASURING = ("predict", "evaluate")
"""What is done again in a cell that was trained before."""
FRESH_S = 120.0
"""Seconds; a cell whose log was written within them is running."""


@dataclass(frozen=True)
class Options:
    """What the command line asks for.

    Attributes:
        config: name of the study, or its file.
        processes: number of cells (trainings of one network) at the same time.
        engine: what runs the cells.
        scheduler: address of a Dask cluster.
        forms: formats of the report's tables.
        report: folder of the report; None takes ``report`` in the study's folder.
        dry_run: only check and list.
        report_only: train nothing.
        until: time, as of ``time.time``, at which trainings stop.
    """

    config: str
    processes: int
    engine: str
    scheduler: str | None
    forms: Sequence[str]
    report: Path | None
    dry_run: bool
    report_only: bool
    until: float


def run_study(content: Mapping[str, Any], options: Options) -> None:
    """Run or report a study of segmentation.

    Args:
        content: what its YAML file says, with the settings of the command line.
        options: the other options of the command line.
    """
    console = open_console()
    with user_errors({**OPTIONS, "engine": "--engine", "scheduler": "--scheduler"}):
        from segcal.evaluation.api import runner_of
        from segcal.io.files import check_writable
        from segcal.reporting.folder import ReportFolder
        from segcal.study.plan import cells, load_study
        from segcal.study.report import FILES, REPORT
        from segcal.study.running import check, in_use, statuses

        study = load_study(content, options.config)
        ReportFolder(options.report or study.folder / REPORT).check(FILES)
        found = cells(study)
        hosts = _hosts({cell.host for cell in found})
        if not options.report_only:
            check_writable(study.folder)
            check(found, hosts)
        before = statuses(found)
        if options.dry_run:
            _say_plan(console, study, before)
            return
        todo = [c for c, s in before.items() if s.state != "done" and not options.report_only]
        runner = runner_of(options.engine, options.scheduler)  # type: ignore[arg-type]
    say(console, f"{len(found)} cells, {len(todo)} of them to do")
    if again := sum(before[cell].result is not None for cell in todo):
        say(console, f"{again} of these are trained; they are measured again, with new repairs")
    stopped = ""
    if todo:
        with user_errors(OPTIONS), in_use(study.folder):
            stopped = _run(console, todo, before, hosts, options, runner)
    after = statuses(found)
    _report(console, study, options, after)
    _end(console, after, stopped)


def _hosts(names: set[str]) -> dict[str, Host]:
    """Hosts by name, which train the networks; nnU-Net is imported only if a study uses it."""
    found: dict[str, Host] = {}
    if "monai" in names:
        from segcal.adapters.monai.study import MonaiHost

        found["monai"] = MonaiHost()
    if "nnunet" in names:
        from segcal.adapters.nnunet.study import NnunetHost

        found["nnunet"] = NnunetHost()
    return found


def _run(
    console: Console,
    todo: Sequence[StudyCell],
    before: Mapping[StudyCell, Status],
    hosts: Mapping[str, Host],
    options: Options,
    runner: Runner,
) -> str:
    """Run what is to be done; return what stopped it, or nothing."""
    from segcal.study.running import run_cells

    progress = _Progress(todo, before, hosts, options.processes)
    try:
        with progress.shown():
            for cell, why in run_cells(
                todo, hosts, processes=options.processes, runner=runner, until=options.until
            ):
                if why:
                    say(console, f"FAILED {cell.name}: {why}", "red")
                elif not console.is_terminal:
                    say(console, progress.line(cell))
    except KeyboardInterrupt:
        return "Interrupted"
    except OutOfTimeError:
        return "Time is up"
    return ""


class _Progress:
    """Progress of running cells, read from their files, wherever they are run.

    Args:
        todo: cells that will be run.
        before: how far all cells were before.
        hosts: what trains their networks.
        processes: number of cells at the same time.
    """

    def __init__(
        self,
        todo: Sequence[StudyCell],
        before: Mapping[StudyCell, Status],
        hosts: Mapping[str, Host],
        processes: int,
    ) -> None:
        self.todo, self.hosts, self.processes = todo, hosts, processes
        self.begun = time.time()
        self._known = [(c, _seconds(s.result)) for c, s in before.items() if s.result]
        self._epochs_before = sum(self._epochs(cell) for cell in todo)
        self._looked, self._shown = 0.0, Group()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it on a terminal."""
        console = open_console(stderr=True)
        if not console.is_terminal:
            yield
            return
        with Live(get_renderable=self._table, console=console, refresh_per_second=1):
            yield

    def line(self, cell: StudyCell) -> str:
        """Return a line on a cell that has ended."""
        from segcal.study.running import result_of

        result = result_of(cell) or {}
        scores = ", ".join(
            f"{k} {v:.4f}" for k, v in result.get("val", {}).items() if v is not None
        )
        _, left = self._look()
        clock = time.strftime("%H:%M:%S")
        return f"{clock} {cell.name}: val {scores}; {_seconds(result):.0f} s; {left}"

    def _table(self) -> Group:
        if time.monotonic() - self._looked > 2:
            rows, left = self._look()
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for name in ("running", "epoch"):
                table.add_column(name, justify="left", no_wrap=True)
            for cell, epoch in rows[:SHOWN]:
                last = cell.settings["epochs"]
                table.add_row(cell.name, f"{epoch} of {last}" if epoch < last else "measured")
            self._shown = Group(Text(left), table)
            self._looked = time.monotonic()
        return self._shown

    def _look(self) -> tuple[list[tuple[StudyCell, int]], str]:
        """Return the running cells with their epochs, and a sentence on all cells."""
        from segcal.study.running import TO_MEASURE, statuses

        running, remaining, states = [], 0.0, Counter[str]()
        epochs, epochs_left = 0, 0
        found = statuses(self.todo)
        new = [(c, _seconds(s.result)) for c, s in found.items() if s.result]
        for cell, status in found.items():
            states[status.state] += 1
            epoch = self._epochs(cell)
            epochs += epoch
            if status.state == TO_MEASURE:
                remaining += _expected(cell, status, ())
                if self._is_predicted(cell):
                    running.append((cell, epoch))
            if status.state != "to do":
                continue
            epochs_left += max(cell.settings["epochs"] - epoch, 0)
            share = 1 - min(epoch / cell.settings["epochs"], 1)
            remaining += share * _expected(cell, status, [*self._known, *new])
            if epoch and self._is_fresh(cell):
                running.append((cell, epoch))
        done = f"{states['done']} of {len(self.todo)} cells done"
        failed = f", {states['failed']} failed" if states["failed"] else ""
        elapsed = time.time() - self.begun
        since = timedelta(seconds=round(elapsed))
        new_epochs = epochs - self._epochs_before
        if not (self._known or new) and new_epochs > 0:  # no cell to go by yet, but some epochs
            remaining = self.processes * elapsed * epochs_left / new_epochs
        text = f"{done}{failed}, {since} since the beginning"
        if remaining:
            left = timedelta(seconds=round(remaining / self.processes))
            text += f", about {left} left"
        return running, text

    def _epochs(self, cell: StudyCell) -> int:
        from segcal.study.running import epochs_done

        return epochs_done(cell, self.hosts[cell.host])

    def _is_predicted(self, cell: StudyCell) -> bool:
        """Whether it has been predicted since the beginning."""
        from segcal.study.running import PARTS

        folders = [cell.predictions(part) for part in PARTS]
        return any(f.is_dir() and f.stat().st_mtime > self.begun for f in folders)

    def _is_fresh(self, cell: StudyCell) -> bool:
        from segcal.training.epoch_log import EpochLog

        try:
            written = EpochLog(self.hosts[cell.host].log(cell)).path.stat().st_mtime
        except OSError:
            return False
        return written > max(self.begun, time.time() - FRESH_S)


def _seconds(result: Mapping[str, Any] | None, parts: Sequence[str] = ()) -> float:
    """Seconds that a cell took, or some parts of its work."""
    seconds = (result or {}).get("seconds", {})
    return float(sum(seconds[part] for part in parts or seconds))


def _expected(cell: StudyCell, status: Status, known: Sequence[tuple[StudyCell, float]]) -> float:
    """Seconds that a cell will take, as the most similar finished cells did; 0 without any."""
    if status.result:
        return _seconds(status.result, MEASURING)
    for keys in (("set", "network", "recipe"), ("set", "network"), ()):
        alike = [s for c, s in known if all(getattr(c, k) == getattr(cell, k) for k in keys)]
        if alike:
            return sum(alike) / len(alike)
    return 0.0


def _say_plan(
    console: Console, study: SegmentationStudy, found: Mapping[StudyCell, Status]
) -> None:
    """List the cells, and what they cost."""
    say(console, study.summary, "bold")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("set", "network", "recipe", "seeds", "epochs", "state"):
        table.add_column(name)
    rows: dict[tuple[str, str, str], list[tuple[StudyCell, Status]]] = {}
    for cell, status in found.items():
        rows.setdefault((cell.set, cell.network, cell.recipe), []).append((cell, status))
    for key, members in rows.items():
        states = Counter(status.state for _, status in members)
        seeds = " ".join(str(cell.seed) for cell, _ in members)
        said = ", ".join(f"{n} {state}" for state, n in states.items())
        table.add_row(*key, seeds, str(members[0][0].settings["epochs"]), said)
    console.print(table)
    states = Counter(status.state for status in found.values())
    say(console, f"{len(found)} cells: " + ", ".join(f"{n} {s}" for s, n in states.items()))
    if study.cost is not None:
        say(console, study.cost.sentence)
    known = [(c, _seconds(s.result)) for c, s in found.items() if s.result]
    left = sum(_expected(c, s, known) for c, s in found.items() if s.state != "done")
    if known and left:
        say(console, f"Going by the cells that are done, {left / 3600:.1f} h are left.")
    say(console, f"Output: {study.folder}")


def _report(
    console: Console, study: SegmentationStudy, options: Options, found: Mapping[StudyCell, Status]
) -> None:
    from segcal.study.report import REPORT, report
    from segcal.study.running import collect_results

    baseline = study.compared_with
    with user_errors():
        if study.folder.is_dir():
            collect_results(study.folder, found)
        done = {cell.recipe for cell, status in found.items() if status.result}
        if baseline not in done:
            why = f"the baseline {baseline} has not been trained" if done else ""
            say(console, f"No report yet: {why or 'nothing has been trained'}.", "red")
            return
        folder = options.report or study.folder / REPORT
        files = report(
            study.folder,
            baseline=baseline,
            header={
                "name": study.summary or options.config,
                "study": study.model_dump(mode="json"),
            },
            forms=options.forms,
            folder=folder,
        )
    say(console, f"Written to {folder}: {', '.join(files)}")


def _end(console: Console, found: Mapping[StudyCell, Status], stopped: str) -> None:
    """Say how it ended, by the exit code, too."""
    if stopped:
        say(console, f"{stopped}: the same command goes on from there.", "red")
        raise typer.Exit(130)
    failed = {cell.name: s.why for cell, s in found.items() if s.state == "failed"}
    for name, why in failed.items():
        say(console, f"failed: {name}: {why}", "red")
    if failed or not any(s.result for s in found.values()):
        raise typer.Exit(1)
