"""A Dask cluster gives what one process gives, whoever dies on the way."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

import pytest

from segcal.evaluation import cluster
from segcal.evaluation.cluster import check_cluster, run_on_cluster
from segcal.evaluation.engine import AHEAD, run
from tests.evaluation.items import deadly, first_ends_last, numbers, square, wait_for, waits
from tests.evaluation.test_engine import Counted, gone
from tests.forks import forks

dask = pytest.importorskip("dask", reason='needs pip install "segcal[dask]"')
distributed = pytest.importorskip("distributed", reason='needs pip install "segcal[dask]"')
METHOD = "distributed.worker.multiprocessing-method"


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Workers that are forks, as Dask can have them, and need not import torch first."""
    with dask.config.set({METHOD: forks().get_start_method()}):
        yield


def lost(item, why):
    return "lost", item, why


def started_here(**options):
    return distributed.LocalCluster(
        n_workers=2,
        threads_per_worker=1,
        memory_limit=None,
        silence_logs=logging.CRITICAL,
        scheduler_kwargs={"dashboard_address": "127.0.0.1:0", "dashboard": False, **options},
    )


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """Address of a cluster that blames an item for the first worker that dies of it."""
    folder = tmp_path_factory.mktemp("dask")
    with started_here(allowed_failures=0) as local:
        (folder / "scheduler.json").write_text(f'{{"address": "{local.scheduler_address}"}}')
        yield local.scheduler_address, str(folder / "scheduler.json")


def test_the_same_as_in_this_process(running, one_thread):
    for scheduler in running:
        got = list(run_on_cluster(numbers, range(12), lost=lost, scheduler=scheduler))
        assert got == list(run(numbers, range(12), lost=lost))
    assert list(run_on_cluster(numbers, [], lost=lost, scheduler=running[0])) == []


def test_a_slow_first_item_still_comes_first(running, tmp_path):
    items = [(tmp_path, i, 5) for i in range(8)]
    got = list(run_on_cluster(first_ends_last, items, lost=lost, scheduler=running[0]))
    assert got == [(i, i) for i in range(8)]


def test_few_items_are_under_way_at_once(running):
    """Four for each of its two workers, or for those that are expected."""
    for jobs, ahead in ((1, 2 * AHEAD), (3, 3 * AHEAD)):
        items = Counted(40)
        for index, _ in run_on_cluster(square, items, lost=lost, jobs=jobs, scheduler=running[0]):
            assert items.given == min(40, index + ahead)


def test_a_worker_that_is_killed_loses_nothing(running, tmp_path):
    items = [(tmp_path, i) for i in range(10)]
    results = run_on_cluster(waits, items, lost=lost, scheduler=running[0])
    got = [next(results)]
    wait_for(tmp_path / "1", tmp_path / "2")
    victim = (tmp_path / "1").read_text().split()[0]
    os.kill(int(victim), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert [*got, *results] == [(i, i) for i in range(10)]
    again = (tmp_path / "1").read_text().split()
    assert len(again) == 2
    assert again[1] != victim


def test_an_item_that_kills_its_workers_is_lost_and_no_other(tmp_path, monkeypatch, capfd):
    """In a cluster of its own, that is gone afterwards, without a trace."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cwd"))
    items = [(tmp_path, i) for i in range(9)]
    with dask.config.set({METHOD: "spawn"}):  # what forks say could not be seen here
        got = dict(run_on_cluster(deadly, items, lost=lost, jobs=2))
    what, item, why = got.pop(3)
    assert (what, item) == ("lost", items[3])
    assert "every process that worked on it died" in why
    assert got == {i: i for i in range(9) if i != 3}
    assert list(got) == sorted(got)
    victims = (tmp_path / "3").read_text().split()
    assert len(victims) == len(set(victims)) > 2
    assert list((tmp_path / "cwd").iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert all(gone(int(pid)) for i in range(9) for pid in (tmp_path / str(i)).read_text().split())


def test_workers_that_do_not_come_back_are_replaced(tmp_path, monkeypatch):
    start = distributed.Nanny.instantiate

    async def only_once(nanny):
        if nanny.process is not None:
            raise OSError("cannot fork")
        return await start(nanny)

    monkeypatch.setattr(distributed.Nanny, "instantiate", only_once)
    monkeypatch.setattr(cluster, "RESTART_S", 2)
    items = [(tmp_path, i) for i in range(6)]
    results = run_on_cluster(waits, items, lost=lost, jobs=2)
    got = [next(results)]
    wait_for(tmp_path / "1", tmp_path / "2")
    for i in "12":
        os.kill(int((tmp_path / i).read_text().split()[0]), signal.SIGKILL)
    (tmp_path / "go").touch()
    assert [*got, *results] == [(i, i) for i in range(6)]


def test_what_is_left_when_the_scheduler_goes_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    items = [(tmp_path, i) for i in range(20)]
    with started_here() as local:
        address = local.scheduler_address
        results = run_on_cluster(waits, items, lost=lost, scheduler=address)
        assert next(results) == (0, 0)
    rest = list(results)
    assert [index for index, _ in rest] == list(range(1, 20))
    assert {result[0] for _, result in rest} == {"lost"}
    assert "the connection to the Dask scheduler was lost" in rest[-1][1][2]


def test_nobody_answers(running, tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts and never says a word
        silent = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{silent}: no Dask scheduler answered within 1 s"):
            check_cluster(silent)
    with pytest.raises(ValueError, match=f"{silent}: no Dask scheduler answered within 1 s"):
        next(run_on_cluster(square, [1], lost=lost, scheduler=silent))
    with pytest.raises(ValueError, match=r"^somewhere: no Dask scheduler .*missing port number"):
        check_cluster("somewhere")
    (tmp_path / "s.json").write_text("[]")
    with pytest.raises(ValueError, match=r"s\.json: expected a scheduler file"):
        check_cluster(str(tmp_path / "s.json"))
    with distributed.Client(running[0], set_as_default=False) as client:
        worker = next(iter(client.nthreads()))
    with pytest.raises(ValueError, match=f"{worker}: expected a Dask scheduler, got a Worker"):
        check_cluster(worker)
    check_cluster(running[0])
    check_cluster(None)


def test_without_dask(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ValueError, match=r'pip install "segcal\[dask\]"'):
        check_cluster(None)
    with pytest.raises(ValueError, match=r'pip install "segcal\[dask\]"'):
        next(run_on_cluster(square, [1], lost=lost))
