"""Records of an epoch: lines in nnU-Net's log, series of its logger, segcal_log.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

from segcal.reporting.progress import PANELS, region_names
from segcal.term import DualStep
from segcal.training.epoch_log import EpochLog


class Journal:
    """Writes down the epochs of a training.

    Args:
        trainer: whose epochs are written down; its output folder exists once the training starts.
        channel_names: names of the classes, or regions.
    """

    def __init__(self, trainer: nnUNetTrainer, channel_names: Sequence[str]) -> None:
        self.trainer = trainer
        self.channel_names = channel_names

    @property
    def epoch_log(self) -> EpochLog:
        """The log file in the training's folder."""
        return EpochLog(Path(self.trainer.output_folder))

    def write(
        self,
        *,
        train: Mapping[str, float],
        val: Mapping[str, float],
        ece: float,
        steps: Mapping[str, DualStep],
        collapsed: Sequence[int],
        weights: Mapping[str, float],
    ) -> None:
        """Write down the current epoch.

        Args:
            train: unweighted terms of the loss in training, by name.
            val: the same in validation.
            ece: calibration error of the validation patches.
            steps: updates of multipliers by term.
            collapsed: classes that are not predicted any more.
            weights: of terms with a schedule.
        """
        self._terms("train", train)
        self._terms("val", val)
        self._say(f"segcal ECE of validation patches: {ece:.4f}")
        self._series("segcal_val_ece", ece)
        if weights:
            shown = ", ".join(f"{name} {weight:.4g}" for name, weight in weights.items())
            self._say(f"segcal weights by schedule: {shown}")
        for name, weight in weights.items():
            self._series(f"segcal_weight_{name}", weight)
        for name, step in steps.items():
            self._step(name, step)
        self._fill_series()
        if self.trainer.local_rank == 0:
            record: dict[str, object] = {
                "epoch": self.trainer.current_epoch,
                "train": train,
                "val": val,
                "ece": ece,
                "collapsed": collapsed,
            }
            if weights:
                record["weights"] = weights
            updates = {name: vars(step) for name, step in steps.items()}
            self.epoch_log.append({**record, **updates})

    def _say(self, line: str) -> None:
        self.trainer.print_to_log_file(line)

    def _terms(self, phase: str, terms: Mapping[str, float]) -> None:
        shown = ", ".join(f"{k} {v:.4f}" for k, v in terms.items())
        self._say(f"segcal {phase} terms (unweighted): {shown}")
        for name, value in terms.items():
            self._series(f"segcal_{phase}_{name}", value)

    def _step(self, name: str, step: DualStep) -> None:
        for row, region in enumerate(region_names(len(step.lam))):
            values = {key: v[row] for key in PANELS if (v := vars(step)[key])}
            names = {"constraint": step.quantity}
            shown = ", ".join(f"{names.get(key, key)} {_short(v)}" for key, v in values.items())
            self._say(f"segcal {name} {region}: {shown}")
            for key, of_channels in values.items():
                for channel, value in zip(self.channel_names, of_channels, strict=True):
                    self._series(f"segcal_{name}_{key}_{region}/{channel}", value)
        for note in step.notes:
            self._say(f"WARNING: segcal {name}: {note}")

    def _series(self, key: str, value: float) -> None:
        """Put a value into nnU-Net's log and W&B.

        nnU-Net needs a value for every epoch, so epochs before the first value get that value.
        """
        logger, epoch = self.trainer.logger, self.trainer.current_epoch
        series = logger.local_logger.my_fantastic_logging.setdefault(key, [])
        series.extend([value] * (epoch - len(series)))
        logger.log(key, value, epoch)

    def _fill_series(self) -> None:
        """Repeat the last value of series without one for this epoch, for nnU-Net's figure."""
        for key, series in self.trainer.logger.local_logger.my_fantastic_logging.items():
            if key.startswith("segcal_") and len(series) == self.trainer.current_epoch:
                self._series(key, series[-1])


def _short(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{v:.3g}" for v in values) + "]"
