"""The log of a training."""

from __future__ import annotations

from segcal.io.epoch_log import EpochLog


def test_epochs_that_run_again_and_half_a_line_are_forgotten(tmp_path):
    log = EpochLog(tmp_path)
    log.forget_from(0)  # nothing there yet
    for epoch in range(3):
        log.append({"epoch": epoch, "train": {"cross_entropy": 0.5}})
    with log.path.open("a") as file:
        file.write('{"epoch": 3, "trai')
    log.forget_from(2)
    assert log.records() == [{"epoch": e, "train": {"cross_entropy": 0.5}} for e in (0, 1)]
