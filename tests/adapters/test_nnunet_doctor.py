"""What the doctor makes of an installation, and of environments that are wrong in known ways."""

from __future__ import annotations

import json
import os

import pytest

from segcal.adapters.nnunet.discovery import ext_path
from segcal.adapters.nnunet.doctor import (
    GIB,
    disks,
    free_space,
    installation,
    path_variables,
    processes,
    run_probe,
    settings,
    trainers,
)
from segcal.adapters.nnunet.probe import blocks

WORKS = {"imports": {"torch": None}, "cuda": "a GPU"}


def verdicts(findings):
    return {f.what: f.verdict for f in findings}


@pytest.fixture
def folders(tmp_path):
    names = ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results")
    for name in names:
        (tmp_path / name).mkdir()
    return {name: str(tmp_path / name) for name in names}


def test_folders_that_are_there(folders):
    assert set(verdicts(path_variables(folders)).values()) == {"ok"}


def test_folders_that_are_not_set():
    found = path_variables({})
    assert verdicts(found) == {
        "nnUNet_raw": "note", "nnUNet_preprocessed": "stop", "nnUNet_results": "stop",
    }  # fmt: skip
    assert 'export nnUNet_results="$HOME/nnunet/results"' in found[2].advice


def test_folders_that_are_not_there(folders, tmp_path):
    gone = {name: f"{value}/gone" for name, value in folders.items()}
    assert verdicts(path_variables(gone)) == {
        "nnUNet_raw": "note", "nnUNet_preprocessed": "stop", "nnUNet_results": "ok",
    }  # fmt: skip
    (tmp_path / "file").write_text("")
    assert path_variables({**folders, "nnUNet_results": str(tmp_path / "file" / "x")})[
        2
    ].verdict == ("stop")


def test_folder_that_is_read_only(folders, monkeypatch):
    """The system is asked, whatever it says: root would be allowed to write everywhere."""
    asked = []
    monkeypatch.setattr("os.access", lambda path, mode: bool(asked.append((str(path), mode))))
    assert path_variables(folders)[2].verdict == "stop"
    assert (folders["nnUNet_results"], os.W_OK) in asked


@pytest.mark.parametrize(
    ("free", "results", "preprocessed"),
    [(GIB // 2, "stop", "note"), (5 * GIB, "note", "note"), (50 * GIB, "ok", "ok")],
)
def test_free_space(free, results, preprocessed):
    assert free_space("nnUNet_results", free).verdict == results
    assert free_space("nnUNet_preprocessed", free).verdict == preprocessed


def test_disks_of_folders_to_come(folders):
    found = disks({"nnUNet_results": folders["nnUNet_results"] + "/a/b"})
    assert [f.what for f in found] == ["disk of nnUNet_results"]


def test_worker_processes():
    assert processes({}, 64) == []
    assert verdicts(processes({}, 2)) == {"nnUNet_def_n_proc": "note"}
    assert processes({"nnUNet_def_n_proc": "1"}, 2) == []
    assert verdicts(processes({"nnUNet_n_proc_DA": "0"}, 64)) == {"nnUNet_n_proc_DA": "note"}


def test_broken_imports():
    probed = {"imports": {"torch": None, "timm": "RuntimeError: operator torchvision::nms"}}
    found = verdicts(installation({**probed, "cuda": None}))
    assert found["import timm"] == "note"
    assert found["GPU"] == "note"
    probed["imports"]["torch"] = "ImportError: libcudart"
    assert verdicts(installation({**probed, "cuda": None}))["import torch"] == "stop"
    assert verdicts(installation({"failed": "exit code -11"}))["import of nnU-Net"] == "stop"
    assert verdicts(installation(WORKS))["nnunetv2"] == "ok"


def test_trainers_that_one_way_does_not_find(tmp_path):
    both = {"by_registration": {"A": None}, "by_variable": {"A": "ImportError: timm"}}
    assert [f.verdict for f in trainers(both, None)] == ["ok", "note"]
    entries = os.pathsep.join([str(ext_path()), str(tmp_path / "gone")])
    found = trainers(both, entries)
    assert [f.verdict for f in found] == ["ok", "note", "ok", "note"]
    assert found[1].found == f"{tmp_path / 'gone'}, no such folder"
    assert "1 of 1 not found: A: ImportError: timm" in found[-1].found
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    assert "holds packages" in trainers(both, str(tmp_path))[1].found
    neither = {"by_registration": {"A": "RuntimeError: no"}, "by_variable": {}}
    assert trainers(neither, None)[0].verdict == "stop"


def test_probe_of_this_installation():
    """Both ways find every trainer, or the variable's way says that an import stopped it."""
    probed = run_probe({**os.environ, "nnUNet_extTrainer": str(ext_path())})
    assert {"nnUNetTrainerCRaC", "nnUNetTrainerNACL"} <= probed["by_registration"].keys()
    assert set(probed["by_registration"].values()) == {None}
    broken = probed["imports"]["timm"] or probed["imports"]["torchvision"]
    assert set(probed["by_variable"].values()) == {None} or broken


def test_probe_that_breaks(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit(3)")  # found before Python's own
    assert "exit code 3" in run_probe({**os.environ, "PYTHONPATH": str(tmp_path)})["failed"]


def test_blocks_of_the_plans_are_looked_at(tmp_path, monkeypatch):
    folder = tmp_path / "Dataset001_A"
    folder.mkdir()
    plans = {
        "configurations": {
            "2d": {"patch_size": [8, 8]},
            "good": {"inherits_from": "2d", "segcal": {"crac": {"margin_inner": 3.0}}},
            "misspelt": {"inherits_from": "2d", "segcal": {"crac": {"margin_iner": 3.0}}},
        }
    }
    (folder / "nnUNetPlans.json").write_text(json.dumps(plans))
    (folder / "splits_final.json").write_text("[]")
    (folder / "broken.json").write_text("{")
    monkeypatch.setenv("nnUNet_preprocessed", str(tmp_path))
    found = settings({"blocks": blocks()})
    path = folder / "nnUNetPlans.json"
    assert [f.verdict for f in found] == ["ok", "stop"]
    assert found[0].found == f"{path}, good: fits"
    assert found[1].found.startswith(f"{path}, misspelt: segcal.penalties.crac.CRaC: takes no")
    assert "takes no margin_iner; it takes num_classes, margin_inner" in found[1].found
    monkeypatch.delenv("nnUNet_preprocessed")
    assert blocks() == {}
