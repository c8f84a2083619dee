"""Run one function on many items on a Dask cluster, on this machine or on many."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from segcal.evaluation.engine import AHEAD, Item, Result, in_order
from segcal.io.files import read_json
from segcal.threads import use_threads

CONNECT_S = 10
"""Seconds in which a scheduler must answer."""
RESTART_S = 60
"""Seconds in which a worker on this machine should have restarted (imports, on a busy disk)."""
ALIVE = ("running", "connecting")
"""States in which a client accepts work."""
GONE = "the connection to the Dask scheduler was lost"


def check_cluster(scheduler: str | None) -> None:
    """Check that :func:`run_on_cluster` can start.

    Raises:
        ValueError: Dask is not installed, or no scheduler answers.
    """
    if scheduler is None:
        _distributed()
        return
    with _connected(scheduler):
        pass


def run_on_cluster(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    lost: Callable[[Item, str], Result],
    jobs: int = 1,
    scheduler: str | None = None,
) -> Generator[tuple[int, Result]]:
    """Yield index and result of every item, in order, as :func:`segcal.evaluation.engine.run` does.

    At most ``AHEAD`` items per worker are started and not yet yielded. If a worker dies, its items
    are run again. An item whose workers died repeatedly is tried once more on its own, since Dask
    blames every item that a worker had been given; if its worker dies again, the item is lost. If
    the scheduler goes away, all remaining items are lost.

    Args:
        function: takes an item and handles its errors; it can be pickled.
        items: items, which can be pickled; files that they name have the same path on every worker.
        lost: takes an item and the reason why it has no result; returns a result instead.
        jobs: worker processes to start on this machine; for a running cluster, workers to expect.
        scheduler: address or scheduler file of a running cluster. You must trust it, since it
            sends and receives pickles. None starts a cluster on this machine.

    Raises:
        ValueError: Dask is not installed, or no scheduler answers.
    """
    distributed = _distributed()
    with _started(jobs) if scheduler is None else _connected(scheduler) as client:
        under_way: set[Any] = set()

        def submit(item: Item) -> Any:
            return client.submit(_on_one_thread, function, item, pure=False)

        def alone(item: Item) -> Result:
            for other in under_way:
                with suppress(distributed.CancelledError):
                    other.exception()  # waits
            if client.status not in ALIVE:
                return lost(item, GONE)
            try:
                return submit(item).result()
            except distributed.KilledWorker:
                return lost(item, "every process that worked on it died; out of memory?")
            except distributed.CancelledError:
                return lost(item, GONE)

        def start(item: Item) -> Callable[[], Result]:
            if client.status not in ALIVE:
                return partial(lost, item, GONE)
            future = submit(item)
            under_way.add(future)

            def result() -> Result:
                try:
                    return future.result()
                except (distributed.KilledWorker, distributed.CancelledError):
                    under_way.remove(future)
                    return alone(item)
                finally:
                    under_way.discard(future)

            return result

        yield from in_order(start, items, lambda: AHEAD * max(jobs, _threads(client)))


def _on_one_thread(function: Callable[[Item], Result], item: Item) -> Result:
    """Run in a worker on one thread, even in a worker that somebody else has started."""
    use_threads(1)
    return function(item)


def _threads(client: Any) -> int:
    """How many items the cluster can work on at the moment."""
    if client.status != "running":
        return 0
    try:
        return sum(client.nthreads().values())
    except OSError:
        return 0


def _distributed() -> Any:
    try:
        import distributed
    except ImportError as error:
        raise ValueError(
            f"a Dask cluster needs dask.distributed ({error}); install it with: "
            'pip install "segcal[dask]"'
        ) from error
    return distributed


@contextmanager
def _started(jobs: int) -> Iterator[Any]:
    """A cluster on this machine that leaves no file behind."""
    distributed = _distributed()
    import dask

    with (
        tempfile.TemporaryDirectory(prefix="segcal-", ignore_cleanup_errors=True) as folder,
        dask.config.set(
            {
                "temporary-directory": folder,
                "distributed.deploy.lost-worker-timeout": "1 day",  # a slow start is no loss
            }
        ),
        distributed.LocalCluster(
            n_workers=jobs,
            threads_per_worker=1,
            memory_limit=None,
            silence_logs=logging.CRITICAL,
            scheduler_kwargs={
                "allowed_failures": 1,  # workers that may die of an item before it is blamed
                "dashboard": False,
                "dashboard_address": "127.0.0.1:0",  # the usual port may be taken, which warns
            },
        ) as cluster,
        _kept_at(jobs, cluster),
        distributed.Client(cluster, set_as_default=False) as client,
    ):
        yield client


@contextmanager
def _kept_at(jobs: int, cluster: Any) -> Iterator[None]:
    """Replace workers that do not come back; Dask would wait for them for ever."""
    over = threading.Event()

    def watch() -> None:
        before = 0
        while not over.wait(RESTART_S):
            missing = jobs - len(cluster.scheduler.workers)
            if (gone := min(before, missing)) > 0:
                cluster.scale(len(cluster.worker_spec) + gone)
            before = missing

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def _connected(scheduler: str) -> Iterator[Any]:
    import asyncio  # here, since nothing else needs it and its import takes long

    distributed = _distributed()
    address = _address(scheduler)
    try:
        with ThreadPoolExecutor(1) as thread:  # has no event loop, whoever calls
            kind = thread.submit(asyncio.run, _kind(address)).result()
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        reason = f": {error}" if str(error) else ""
        raise ValueError(
            f"{scheduler}: no Dask scheduler answered within {CONNECT_S} s{reason}; expected the "
            "address of a running scheduler, tcp://HOST:PORT, or its scheduler file"
        ) from error
    if kind != "Scheduler":
        raise ValueError(f"{scheduler}: expected a Dask scheduler, got a {kind}")
    with distributed.Client(address, timeout=CONNECT_S, set_as_default=False) as client:
        yield client


def _address(scheduler: str) -> str:
    """Address of a scheduler, from its scheduler file or as given."""
    if not Path(scheduler).is_file():
        return scheduler
    content = read_json(Path(scheduler))
    if not isinstance(content, dict) or not isinstance(content.get("address"), str):
        raise ValueError(
            f"{scheduler}: expected a scheduler file of Dask, got a file without an 'address'"
        )
    return content["address"]


async def _kind(address: str) -> str:
    """Ask what kind of server listens; a client would wait for ever if it is not a scheduler."""
    import asyncio

    distributed = _distributed()
    security = distributed.Security().get_connection_args("client")
    async with distributed.rpc(address, connection_args=security) as server:
        identity = await asyncio.wait_for(server.identity(), CONNECT_S)
    return str(identity["type"])
