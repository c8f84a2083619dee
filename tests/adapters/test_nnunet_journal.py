"""What an epoch leaves in nnU-Net's log and series."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from segcal.adapters.nnunet.journal import Journal
from segcal.penalties.confidence import Confidence


class Logger:
    """Stands for nnU-Net's: series by name, one value an epoch."""

    def __init__(self):
        self.series = {}
        self.local_logger = SimpleNamespace(my_fantastic_logging=self.series)

    def log(self, key, value, epoch):
        assert len(self.series[key]) == epoch
        self.series[key].append(value)


def test_gaps_are_called_so_and_what_a_penalty_lacks_is_left_out(tmp_path):
    lines = []
    trainer = SimpleNamespace(
        output_folder=tmp_path,
        current_epoch=0,
        local_rank=0,
        logger=Logger(),
        print_to_log_file=lines.append,
    )
    penalty = Confidence(2, per_channel=True, cap=1e-6)
    penalty.observe(torch.full((1, 2, 4, 5), 3.0), torch.zeros(1, 2, 4, 5, dtype=torch.long))
    journal = Journal(trainer, ["a", "b"])
    journal.write(
        train={},
        val={},
        ece=0.1,
        steps={"confidence": penalty.dual_step()},
        collapsed=[],
        weights={"soft_dice": 0.25},
    )
    assert "segcal weights by schedule: soft_dice 0.25" in lines
    assert trainer.logger.series["segcal_weight_soft_dice"] == [0.25]
    assert "segcal confidence in-inner: lam [1e-06, 1e-06], confidence less accuracy [0.953," in (
        "\n".join(lines)
    )
    assert lines[-1].startswith("WARNING: segcal confidence: a multiplier has reached its bound")
    assert "segcal_confidence_constraint_out-outer/b" in trainer.logger.series
    assert not any("rho" in key for key in trainer.logger.series)
    (record,) = journal.epoch_log.records()
    assert record["confidence"]["rho"] == []
    assert record["weights"] == {"soft_dice": 0.25}
