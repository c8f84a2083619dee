"""The fuzz of the readers finds nothing in them, and does find what it looks for."""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import SimpleITK as sitk  # noqa: N813

from tests.forks import said

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz_readers.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fuzz_readers", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_nothing_is_found(tmp_path):
    """A small run; 2,000 inputs take some 15 seconds."""
    command = [sys.executable, str(SCRIPT), "--inputs", "350", "--keep", str(tmp_path / "kept")]
    code, (out, err) = said(command, [tmp_path / "out.txt", tmp_path / "err.txt"])
    assert code == 0, out + err
    assert not (tmp_path / "kept").exists()
    assert "code run" in out


def damaged(script, monkeypatch, name, read, count=40, patience=20.0, **changes):
    """What is found where a format is read in another way."""
    kind = replace(script.FORMATS[name], read=read, **changes)
    monkeypatch.setitem(script.FORMATS, name, kind)
    return script.fuzz(name, count, 0, patience, None)[0]


def naive(path):
    try:
        return sitk.GetArrayFromImage(sitk.ReadImage(str(path)))
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from None


def sleepy(path):
    try:
        json.loads(path.read_bytes())
    except ValueError:
        time.sleep(60)


def hungry(path):
    try:
        json.loads(path.read_bytes())
    except ValueError:
        bytearray(5 << 28)


@pytest.mark.parametrize(
    ("name", "read", "found"),
    [
        ("a.mha", naive, "silent"),
        ("a.mhd of a.zraw", naive, "silent"),
        ("b.pkl", lambda path: pickle.loads(path.read_bytes()), "code run"),
        ("a.json", lambda path: path.read_text().index('"labels"'), "traceback"),
        ("a.json", lambda path: int("x"), "traceback"),  # names no file
        ("a.nrrd", lambda path: sys.exit(3), "traceback"),
        ("dataset.json", hungry, "memory"),
    ],
)
def test_what_is_looked_for_is_found(script, monkeypatch, name, read, found):
    assert damaged(script, monkeypatch, name, read, count=8 if read is hungry else 40)[found]


def test_a_hang_is_found(script, monkeypatch):
    count = damaged(script, monkeypatch, "a.json", sleepy, count=12, patience=0.3)
    assert count["hang"] >= 1
    assert count["hang"] + count["read"] + count["changed"] == 12


def test_the_same_seed_gives_the_same_inputs(script):
    runs = [script.fuzz("a.nii.gz", 30, seed, 20.0, None)[0] for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert sum(runs[0][k] for k in ("read", "refused", "changed")) == 30
