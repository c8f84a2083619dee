"""nnU-Net in a study: planned once, trained, killed, gone on with."""

from __future__ import annotations

import json
import time

import pandas as pd
import pytest

from segcal.adapters.nnunet.apart import run_apart
from segcal.adapters.nnunet.plans import small_configuration
from segcal.adapters.nnunet.study import NnunetHost
from segcal.study.plan import cells, load_study
from segcal.study.running import check, run_cells, statuses
from tests.adapters.nnunet_commands import Workspace
from tests.adapters.nnunet_data import architecture
from tests.alike import TABLES, differences, shares
from tests.study.small import content_of

HOSTS = {"nnunet": NnunetHost()}
NETWORK = {
    "host": "nnunet", "configuration": "2d", "patch": [32, 32], "batch": 4, "features": [4, 8, 8],
    "iterations": 3, "val_iterations": 2, "mirroring": False, "epochs": 6,
}  # fmt: skip
HEARTS = {
    "phantom": {"shape": [3, 40, 40]}, "epochs": 2,
    "patients": {"train": 3, "validation": 2, "test": 2},
}  # fmt: skip


def found_cells(folder, network=NETWORK, **parts):
    given = {
        "sets": {"hearts": HEARTS}, "networks": {"small": network}, "scheduler": None,
        "training": {"device": "cpu"}, **parts,
    }  # fmt: skip
    return cells(load_study(content_of(folder, **given), "study"))


@pytest.mark.parametrize(
    ("network", "parts", "message"),
    [
        ({"patches": [3]}, {}, "patches: unknown; there are configuration, patch"),
        ({"epochs": 0}, {}, "epochs: .*greater than or equal to 1"),
        ({}, {"recipes": ["ce"]}, "recipe ce: has no nnU-Net trainer"),
        ({}, {"recipes": {"a": {"recipe": "crac", "terms": {"crac": {"margin": 3}}}}},
         "takes no margin"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path, network, parts, message):
    with pytest.raises(ValueError, match=message):
        check(found_cells(tmp_path, {**NETWORK, **network}, **parts), HOSTS)


def test_an_experiment_names_its_trainer(tmp_path):
    recipes = {
        "dice_ce": None,
        "own": {
            "recipe": "crac",
            "terms": {"crac": {"margin_inner": 3}},
            "changes": {"dice": False},
        },
    }
    found = [HOSTS["nnunet"].resolve(c, 4) for c in found_cells(tmp_path, recipes=recipes)]
    assert [e.trainer for e in found] == ["nnUNetTrainerBaseline", "nnUNetTrainerCRaC_CE"]
    assert found[1].terms == {"crac": {"margin_inner": 3}}
    assert found[0].epochs == 6


def test_a_small_configuration_inherits():
    kwargs = architecture(2)
    plans = {"configurations": {"2d": {"architecture": kwargs}}}
    found = small_configuration(plans, "2d", patch=[8, 8], batch=2, features=[4, 6])
    assert found["inherits_from"] == "2d"
    assert (found["patch_size"], found["batch_size"]) == ([8, 8], 2)
    assert found["architecture"]["arch_kwargs"]["strides"] == [[1, 1], [2, 2]]
    assert found["architecture"]["arch_kwargs"]["n_stages"] == 2
    assert kwargs["arch_kwargs"]["n_stages"] == 3
    with pytest.raises(ValueError, match="expected one of 2d, got '3d'"):
        small_configuration(plans, "3d")


@pytest.mark.slow
def test_a_step_that_fails_says_so(tmp_path):
    folders = {name: tmp_path / name for name in ("raw", "preprocessed", "results")}
    log = tmp_path / "log"
    with pytest.raises(RuntimeError, match=r"nnU-Net's train ended with 1, see .*no such folder"):
        run_apart("train", ["1", "2d", "0"], folders=folders, log=log)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_killed_and_gone_on_with_equals_undisturbed(tmp_path):
    """A study that trains with nnU-Net; the process that was killed leaves none behind."""
    (undisturbed,) = found_cells(tmp_path / "one", recipes=["crac"])
    check([undisturbed], HOSTS)
    assert [why for _, why in run_cells([undisturbed], HOSTS)] == [""]
    table = pd.read_csv(undisturbed.folder / "cases.csv")
    assert set(table["case"]) == {"phantom_006", "phantom_007"}
    assert table["kl_all"].notna().all()
    result = statuses([undisturbed])[undisturbed].result
    assert (result["epochs"], result["host"]) == (6, "nnunet")
    (tmp_path / "two").mkdir()
    config = tmp_path / "two" / "study.json"
    (cell,) = found_cells(tmp_path / "two", recipes=["crac"])
    content = content_of(
        tmp_path / "two", sets={"hearts": HEARTS}, networks={"small": NETWORK}, recipes=["crac"],
        scheduler=None, training={"device": "cpu"}, baseline="crac",
    )  # fmt: skip
    config = config.with_suffix(".yaml")
    config.write_text(json.dumps(content))
    latest = HOSTS["nnunet"].log(cell) / "checkpoint_latest.pth"
    workspace = Workspace(tmp_path / "two")
    started = workspace.start("segcal", "study", config)
    started.wait_for(latest.exists)
    assert not started.kill()
    deadline = time.monotonic() + 60
    while _runs(cell) and time.monotonic() < deadline:  # nnU-Net's process has its own group
        time.sleep(0.1)
    assert not _runs(cell)
    assert statuses([cell])[cell].state == "to do"
    assert [why for _, why in run_cells([cell], HOSTS)] == [""]
    assert not differences(*map(read, (cell, undisturbed)), **TABLES)


def read(cell):
    """What the files of a cell hold."""
    log = (cell.folder / "log.jsonl").read_text().splitlines()
    return {
        **{name: pd.read_csv(cell.folder / name) for name in ("cases.csv", "logits.csv")},
        "reliability": shares(json.loads((cell.folder / "reliability.json").read_text())),
        "log": [json.loads(line) for line in log],
    }


def _runs(cell) -> list[int]:
    """Processes of nnU-Net that write into the folder of a cell."""
    import psutil

    place = str(cell.folder.resolve())
    found = []
    for process in psutil.process_iter():
        try:
            if place in process.environ().get("nnUNet_results", ""):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
