"""Cells trained, repaired and measured; killed, resumed, refused, failed."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pandas as pd
import pytest

from segcal.adapters.monai.study import MonaiHost
from segcal.evaluation.api import evaluate
from segcal.evaluation.engine import run
from segcal.io.volumes import read_labels, write_nifti
from segcal.metrics.dice import dice
from segcal.posthoc.decision import decide
from segcal.study.measuring import measure
from segcal.study.plan import cells, load_study
from segcal.study.results import read_results
from segcal.study.running import (
    check,
    collect_results,
    epochs_done,
    in_use,
    run_cells,
    statuses,
)
from segcal.training.beginning import OutputInUseError
from segcal.training.time_limit import OutOfTimeError
from tests.alike import TABLES, differences, shares
from tests.conftest import close
from tests.forks import forked, said
from tests.study.small import content_of

pytestmark = pytest.mark.usefixtures("one_thread", "plain_progress")

HOSTS = {"monai": MonaiHost()}
FILES = ("cases.csv", "reliability.json", "logits.csv")
DIES = """
import os, signal, sys, types
sys.modules["segcal.study.report"] = types.SimpleNamespace(  # which takes seconds
    report=lambda *_, **__: [], FILES=(), REPORT="report"
)
from segcal.commands.main import app

place, times = sys.argv[1], int(sys.argv[2])
sys.argv = ["segcal", *sys.argv[3:]]
seen = []
def dies(event, arguments):
    if event == "open" and str(arguments[0]).endswith(place) and arguments[1] != "r":
        seen.append(place)
        if len(seen) == times:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(dies)
app()
"""
"""The command, killed when it opens a file of some name for the n-th time to write it."""


def found_cells(folder, **parts):
    return cells(load_study(content_of(folder, **parts), "study"))


def run_all(found, hosts=HOSTS, **options):
    return {cell.name: why for cell, why in run_cells(found, hosts, **options)}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A study that has been run without a disturbance, its predictions kept."""
    folder = tmp_path_factory.mktemp("done")
    found = found_cells(folder, keep_predictions=True)
    assert set(run_all(found).values()) == {""}
    return found


def log_of(cell):
    lines = (cell.folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def result_of(cell):
    result = json.loads((cell.folder / "result.json").read_text())
    drop = ("seconds", "experiment")
    return {k: v for k, v in result.items() if k not in drop}


def test_a_cell_has_its_rows(done):
    cell = done[1]
    table = pd.read_csv(cell.folder / "cases.csv")
    assert len(table) == 2 * 5 * 2
    assert set(table["repair"]) == {
        "raw", "temperature", "class_region", "class_region_case", "true_posterior"
    }  # fmt: skip
    assert set(table["decision"]) == {"mask", "dice"}
    assert table["patient"].str.startswith("s0 phantom_").all()
    assert {
        "dsc", "hd95_penalised_mm", "ece_fg", "ece_union", "ece_dilated5", "ece_all", "nll_all",
        "nll_dilated5", "tace_all", "cece_all", "brier_all", "kl_all", "kl_dilated5",
        "tace_ref", "dsc/right ventricle", "dsc/myocardium", "dsc/left ventricle",
    } == set(table.columns[4:])  # fmt: skip
    assert result_of(cell)["parameters"] > 0
    assert result_of(cell)["epochs"] == 2
    assert set(result_of(cell)["val"]) == {"dsc", "ece_dilated5", "nll_all"}
    assert [record["epoch"] for record in log_of(cell)] == [0, 1]
    assert "crac" in log_of(cell)[0]
    assert epochs_done(cell, HOSTS["monai"]) == 2


def test_numbers_are_those_of_the_evaluation(done):
    cell = done[0]
    report = evaluate(cell.predictions("test"), cell.labels("test"), bootstrap=0)
    table = pd.read_csv(cell.folder / "cases.csv").set_index(["repair", "decision", "case"])
    table = table.sort_index()
    raw = table.loc[("raw", "mask")]
    for column in ("dsc", "hd95_penalised_mm", "ece_fg", "nll_dilated5", "tace_all", "cece_all"):
        close(list(raw[column]), list(report.cases[column]), rtol=1e-8)
    kept = json.loads((cell.folder / "reliability.json").read_text())["raw"]
    for scope, name in (("near", "dilated5"), ("all", "all")):
        bins = report.calibration[name].top
        assert kept[scope]["count"] == bins.count.tolist()
        close(kept[scope]["confidence_sum"], bins.confidence_sum)
        close(kept[scope]["hit_sum"], bins.hit_sum)
    case = raw.index[0]
    with np.load(cell.predictions("test") / f"{case}.npz") as file:
        probs = file["probabilities"].astype(np.float64)
    with np.load(cell.posterior("test") / f"{case}.npz") as file:
        known = file["probabilities"].astype(np.float64)
    close(raw.loc[case, "kl_all"], (known * np.log(np.maximum(known, 1e-12) / probs)).sum(0).mean(),
          rtol=1e-5)  # fmt: skip
    reference = read_labels(cell.labels("test") / f"{case}.nii.gz").array
    mask = decide(probs, "dice")
    overlap = (
        2 * ((mask == 3) & (reference == 3)).sum() / ((mask == 3).sum() + (reference == 3).sum())
    )
    close(table.loc[("raw", "dice", case), "dsc/left ventricle"], overlap, rtol=1e-8)
    floor = table.loc[("true_posterior", "mask", case)]
    assert abs(floor["kl_all"]) < 1e-9
    overlap = np.array([dice(decide(known, "argmax"), reference, label) for label in (1, 2, 3)])
    close(floor["dsc"], overlap.mean(), rtol=1e-8)
    logits = pd.read_csv(cell.folder / "logits.csv")
    assert logits.groupby(["region", "label"])["mean_logit"].sum().abs().max() < 1e-4
    one = logits[logits["channel"] == 0]
    assert one["voxels"].sum() == 2 * reference.size


def test_the_mask_is_what_was_written(done):
    """Of a network with two heads, it is not the argmax of the probabilities."""
    cell = done[0]
    case = next(cell.labels("test").glob("*.nii.gz")).name
    reference = read_labels(cell.labels("test") / case)
    path = cell.predictions("test") / case
    before = read_labels(path)
    write_nifti(path, reference.array, reference.geometry)
    try:
        rows = pd.DataFrame(measure(cell).rows)
    finally:
        write_nifti(path, before.array, before.geometry)
    of_case = rows[(rows["case"] == case[:-7]) & (rows["repair"] != "true_posterior")]
    assert (of_case.loc[of_case["decision"] == "mask", "dsc"] == 1).all()
    assert (of_case.loc[of_case["decision"] == "dice", "dsc"] < 1).all()


def test_results_are_collected(done, tmp_path):
    found = statuses(done)
    folder = collect_results(tmp_path, found)
    table = pd.read_csv(folder / "cells.csv")
    assert table["status"].tolist() == ["done", "done"]
    assert table["recipe"].tolist() == ["dice_ce", "crac"]
    assert (table["seconds"] > 0).all()
    assert {"val_dsc", "val_ece_dilated5", "val_nll_all", "epochs"} <= set(table)
    cases = pd.read_csv(folder / "cases.csv")
    assert len(cases) == 40
    assert cases.columns[:5].tolist() == ["set", "network", "recipe", "seed", "case"]


def numbers_of(cell):
    """What the files of a cell hold."""
    tables = {n: pd.read_csv(cell.folder / n) for n in FILES if n.endswith(".csv")}
    reliability = json.loads((cell.folder / "reliability.json").read_text())
    return {**tables, "reliability": shares(reliability)}


def test_predictions_go_unless_they_are_kept(done, tmp_path):
    cell = replace(done[0], output=tmp_path, keep_predictions=False)
    assert run_all([cell]) == {cell.name: ""}
    assert not cell.predictions("test").exists()
    # nothing depends on where
    assert not differences(numbers_of(cell), numbers_of(done[0]), **TABLES)


class TrainsNoMore(MonaiHost):
    """A host that refuses to train."""

    def train(self, cell, until):
        raise AssertionError("trained again")


def test_a_new_repair_is_measured_without_training(done, tmp_path):
    """By a study that kept no predictions; a first attempt fails, and loses nothing."""
    before = [replace(c, output=tmp_path, repairs=("temperature",)) for c in done[:1]]
    before = [replace(c, keep_predictions=False) for c in before]
    run_all(before)
    assert [s.state for s in statuses(before).values()] == ["done"]
    (cell,) = again = [replace(c, repairs=done[0].repairs) for c in before]
    assert [s.state for s in statuses(again).values()] == ["to measure"]
    check(again, HOSTS)
    checkpoint = cell.folder / "training" / "checkpoint_last.pt"
    hidden = checkpoint.rename(tmp_path / "hidden")
    host = {"monai": TrainsNoMore()}
    assert str(checkpoint) in run_all(again, host)[cell.name]
    (failed,) = statuses(again).values()
    assert failed.state == "failed"
    assert set(failed.result["fits"]) == {"temperature"}
    cases = pd.read_csv(collect_results(tmp_path, statuses(again)) / "cases.csv")
    assert set(cases["repair"]) == {"raw", "temperature", "true_posterior"}
    results = read_results(tmp_path)
    assert (results.outdated(), results.missing()) == (["hearts/unet/dice_ce/seed_0"], [])
    hidden.rename(checkpoint)
    assert run_all(again, host) == {cell.name: ""}
    assert [s.state for s in statuses(again).values()] == ["done"]
    assert [s.state for s in statuses(before).values()] == ["done"]  # it has what they ask for
    assert not differences(numbers_of(cell), numbers_of(done[0]), **TABLES)
    assert not differences(result_of(cell), result_of(done[0]), **TABLES)
    content = json.loads((cell.folder / "result.json").read_text())
    content["measured_with"] = content["versions"] = {"segcal": "older"}
    (cell.folder / "result.json").write_text(json.dumps(content))
    other = replace(cell, repairs=("class_region_bias",))
    assert run_all([other], host) == {cell.name: ""}
    content = json.loads((cell.folder / "result.json").read_text())
    assert content["versions"] == {"segcal": "older"}  # that trained
    assert content["measured_with"]["segcal"] == version("segcal")
    repairs = set(pd.read_csv(cell.folder / "cases.csv")["repair"])
    assert repairs == {"raw", *cell.repairs, "class_region_bias", "true_posterior"}
    assert [s.state for s in statuses(again).values()] == ["done"]


@pytest.mark.parametrize(
    ("place", "times"),
    [
        ("segcal_log.jsonl", 2),  # in the second epoch
        ("phantom_006.nii.gz", 3),  # in the predictions
        ("-result.json", 1),  # when only the result is missing
    ],
)
def test_killed_and_run_again_equals_undisturbed(done, tmp_path, place, times):
    """SIGKILL anywhere, then the same command."""
    config = tmp_path / "study.yaml"
    config.write_text(json.dumps(content_of(tmp_path, recipes=["crac"])))
    logs = [tmp_path / "out.log", tmp_path / "err.log"]
    command = ["study", str(config)]
    code, texts = said([sys.executable, "-c", DIES, place, str(times), *command], logs)
    assert code == -signal.SIGKILL, texts
    (cell,) = found = found_cells(tmp_path, recipes=["crac"])
    assert statuses(found)[cell].state == "to do"
    code, texts = said([sys.executable, "-c", DIES, "never", "1", *command], logs)
    assert code == 0, texts
    assert not differences(numbers_of(cell), numbers_of(done[1]), **TABLES)
    assert not differences(log_of(cell), log_of(done[1]), **TABLES)
    assert not differences(result_of(cell), result_of(done[1]), **TABLES)
    left = [p for p in (tmp_path / "study").rglob("*") if p.name.startswith(".segcal-")]
    assert [p.name for p in left] == [".segcal-study.lock"]


@pytest.mark.parametrize("processes", [1, 2])
def test_out_of_time_and_run_again_equals_undisturbed(done, tmp_path, processes):
    """Each slice brings as many trainings one epoch further as run at the same time."""

    def in_order(function, items, *, lost, jobs):  # the engine's processes take seconds
        yield from enumerate(map(function, items))

    found = [replace(cell, output=tmp_path) for cell in done]
    epochs = []
    for _ in range(10):
        try:
            assert set(run_all(found, processes=processes, runner=in_order, until=0.0)) <= {
                cell.name for cell in found
            }
        except OutOfTimeError:
            epochs.append([epochs_done(cell, HOSTS["monai"]) for cell in found])
            found = [c for c, s in statuses(found).items() if s.state == "to do"]
        else:
            break
    assert epochs == ([[1, 0], [2, 0], [1]] if processes == 1 else [[1, 1]])
    for cell, other in ((replace(c, output=tmp_path), c) for c in done):
        assert not differences(numbers_of(cell), numbers_of(other), **TABLES)
        assert not differences(log_of(cell), log_of(other), **TABLES)
        assert not differences(result_of(cell), result_of(other), **TABLES)


def test_a_second_run_into_the_folder_is_refused(tmp_path):
    refused = pytest.raises(OutputInUseError, match=r"uses it \(process \d+ on")
    with in_use(tmp_path), refused, in_use(tmp_path):
        pass
    with in_use(tmp_path):  # the first has ended
        pass


class Breaks(MonaiHost):
    """A host whose first network runs out of memory."""

    def train(self, cell, until):
        if cell.recipe == "dice_ce":
            raise MemoryError("2 GiB more")
        return super().train(cell, until)


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path):
    found = found_cells(tmp_path)
    whys = run_all(found, {"monai": Breaks()})
    assert whys == {found[0].name: "MemoryError: 2 GiB more", found[1].name: ""}
    states = statuses(found)
    assert [s.state for s in states.values()] == ["failed", "done"]
    assert states[found[0]].why == "MemoryError: 2 GiB more"
    assert "in train" in (found[0].folder / "failed.txt").read_text()
    table = pd.read_csv(collect_results(tmp_path, states) / "cells.csv")
    assert table["status"].tolist() == ["failed", "done"]
    assert table["why"][0] == "MemoryError: 2 GiB more"
    assert run_all(found[:1]) == {found[0].name: ""}  # the next time it is tried again
    assert statuses(found)[found[0]].state == "done"


def test_a_loss_that_diverges_is_a_failure_of_its_cell(tmp_path):
    sgd = {"target": "torch.optim.SGD", "args": {"lr": 1e30}}
    recipes = {"dice_ce": None, "far": {"recipe": "ce", "changes": {"optimizer": sgd}}}
    found = found_cells(tmp_path, recipes=recipes, scheduler=None)
    whys = run_all(found)
    assert whys[found[0].name] == ""
    assert "no longer finite" in whys[found[1].name] or "nan" in whys[found[1].name]


def test_finished_cells_of_other_settings_are_refused(done):
    check(done, HOSTS)
    longer = [replace(c, settings={**c.settings, "epochs": 3}) for c in done]
    with pytest.raises(
        ValueError, match=r"was made with other settings \(scheduler.args, training.epochs"
    ):
        check(longer, HOSTS)
    elsewhere = {**done[0].settings, "training": {"batch_size": 2, "device": "auto"}}
    check([replace(done[0], settings=elsewhere)], HOSTS)


@pytest.mark.slow
def test_several_processes_find_the_same(done, tmp_path, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", forked(multiprocessing.get_context))
    found = [replace(c, output=tmp_path) for c in done]
    assert set(run_all(found, processes=2, runner=run).values()) == {""}
    for cell, other in zip(found, done, strict=True):
        assert not differences(numbers_of(cell), numbers_of(other), **TABLES)


def test_a_process_that_dies_is_a_failure_of_its_cell(tmp_path):
    def dead(function, items, *, lost, jobs):
        yield from enumerate(lost(item, "its process died") for item in items)

    found = found_cells(tmp_path)
    assert set(run_all(found, runner=dead).values()) == {"its process died"}
    assert [s.state for s in statuses(found).values()] == ["failed", "failed"]
