"""The log of a training."""

from __future__ import annotations

import pytest

from segcal.training.epoch_log import EpochLog


def test_epochs_that_run_again_and_half_a_line_are_forgotten(tmp_path):
    log = EpochLog(tmp_path)
    log.forget_from(0)  # nothing there yet
    assert log.records() == []
    for epoch in range(3):
        log.append({"epoch": epoch, "train": {"cross_entropy": 0.5}})
    with log.path.open("a") as file:
        file.write('{"epoch": 3, "trai')
    log.forget_from(2)
    assert log.records() == [{"epoch": e, "train": {"cross_entropy": 0.5}} for e in (0, 1)]


def test_what_json_does_not_have_becomes_null(tmp_path):
    log, nan = EpochLog(tmp_path), float("nan")
    log.append({"epoch": 0, "val": {"a": nan, "b": 1.5}, "lam": [[nan, 2.0], (float("inf"),)]})
    assert log.records() == [
        {"epoch": 0, "val": {"a": None, "b": 1.5}, "lam": [[None, 2.0], [None]]}
    ]


def test_a_damaged_line_is_named(tmp_path):
    log = EpochLog(tmp_path)
    log.append({"epoch": 0})
    with log.path.open("a") as file:
        file.write('{"epoch": 1, "trai')
    with pytest.raises(ValueError, match=r"segcal_log\.jsonl: line 2 is damaged.*; remove it"):
        log.records()
