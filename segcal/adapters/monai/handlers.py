"""Handlers of MONAI's engines: the update of the multipliers, and metrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ignite.engine import Events
from monai.engines import Evaluator, IterationEvents, Trainer
from monai.handlers import IgniteMetricHandler, from_engine
from torch import nn

from segcal.adapters.monai.losses import SegcalLoss
from segcal.adapters.monai.metrics import CaseMetric, SurfaceMetric
from segcal.term import DualStep, sum_over_ranks

__all__ = ["DualStepHandler", "MetricHandler", "ScheduleHandler"]

PRED_AND_LABEL = ("pred", "label")


class DualStepHandler:
    """Shows a loss every validation batch, and updates its multipliers at the end of the pass.

    Put it first into ``val_handlers``, and put ValidationHandler before CheckpointSaver in
    ``train_handlers``. Handlers run in the order of the lists, and a state that is saved before the
    update lacks the update when training resumes. You are warned when that happens.

    It reads network outputs at FORWARD_COMPLETED, before they are decollated and post-processed.
    Sums over voxels are added up over all ranks, so all ranks get the same multipliers, even if
    they saw different numbers of samples. Samples that a DistributedSampler repeats to even out the
    ranks count twice. Every update is logged, and the means of a penalty's multipliers and penalty
    weights are put into ``engine.state.metrics`` as ``NAME_lambda_mean`` and ``NAME_rho_mean``.

    Args:
        loss: the loss of the trainer; if that is a DeepSupervisionLoss, the loss inside it.
        keys: where ``engine.state.output`` has logits (with deep supervision the first head counts)
            and target.

    Attributes:
        steps: what the last update did, by penalty.

    Raises:
        ValueError: not a SegcalLoss.
    """

    def __init__(self, loss: SegcalLoss, *, keys: Sequence[str] = PRED_AND_LABEL) -> None:
        if not isinstance(loss, SegcalLoss):
            raise ValueError(
                f"loss: expected a SegcalLoss (the loss inside a DeepSupervisionLoss), got "
                f"{type(loss).__name__}"
            )
        self.loss = loss
        self.steps: dict[str, DualStep] = {}
        self._of_output = from_engine(list(keys))
        self._trained = self._saved = self._warned = False
        loss.register_forward_hook(self._on_training)
        loss.register_state_dict_pre_hook(self._on_save)  # type: ignore[no-untyped-call]

    def attach(self, engine: Any) -> None:
        """Attach to the evaluator.

        Args:
            engine: a MONAI evaluator.

        Raises:
            ValueError: another engine, such as the trainer.
        """
        if not isinstance(engine, Evaluator):
            raise ValueError(
                f"engine: expected an evaluator, got {type(engine).__name__}; multipliers are "
                "learned in validation, so this handler belongs in val_handlers"
            )
        engine.add_event_handler(Events.EPOCH_STARTED, self._start)
        engine.add_event_handler(IterationEvents.FORWARD_COMPLETED, self._observe)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._update)

    def _start(self, engine: Any) -> None:
        self.loss.start_pass()

    def _observe(self, engine: Any) -> None:
        logits, target = self._of_output(engine.state.output)
        with torch.no_grad():
            self.loss.observe(logits, target)

    def _update(self, engine: Any) -> None:
        self._warn_of_order()
        self.steps = self.loss.dual_step(sum_over_ranks)
        for name, step in self.steps.items():
            means = {"lambda_mean": _mean(step.lam)}
            if step.rho:
                means["rho_mean"] = _mean(step.rho)
            engine.state.metrics.update({f"{name}_{key}": mean for key, mean in means.items()})
            listed = ", ".join(f"{key} {mean:.6g}" for key, mean in means.items())
            engine.logger.info(f"{name}: update {step.step} of the multipliers: {listed}")
            for note in step.notes:
                engine.logger.warning(f"{name}: {note}")

    def _on_training(self, loss: nn.Module, arguments: Any, value: Any) -> None:
        if torch.is_grad_enabled():
            self._trained, self._saved = True, False

    def _on_save(self, loss: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._saved = True

    def _warn_of_order(self) -> None:
        if self._trained and self._saved and not self._warned:
            warnings.warn(
                "the state of the loss was saved after the epoch's training and before this "
                "update, which a training that resumes from there lacks; put DualStepHandler "
                "first into val_handlers, and in train_handlers ValidationHandler before "
                "CheckpointSaver",
                stacklevel=2,
            )
            self._warned = True
        self._trained = False


class ScheduleHandler:
    """Sets the weights of a loss that have a schedule, before every epoch of training.

    Put it into ``train_handlers``. It counts in epochs of the trainer, so a resumed training goes
    on where it stopped.

    Args:
        loss: the loss of the trainer; if that is a DeepSupervisionLoss, the loss inside it.
        dice: returns the Dice of the last validation, for schedules that wait for a Dice, e.g.
            ``lambda: evaluator.state.metrics["val_mean_dice"]``.
        gap: returns the :func:`segcal.schedule.generalisation_gap` of the last epoch, for schedules
            that follow this gap (recipe ``confidence``); without it their terms have their final
            weight from the start.
    """

    def __init__(
        self,
        loss: SegcalLoss,
        *,
        dice: Callable[[], float] | None = None,
        gap: Callable[[], float] | None = None,
    ) -> None:
        self.loss = loss
        self.dice = dice
        self.gap = gap

    def attach(self, engine: Any) -> None:
        """Attach to the trainer.

        Args:
            engine: a MONAI trainer.

        Raises:
            ValueError: another engine, such as the evaluator.
        """
        if not isinstance(engine, Trainer):
            raise ValueError(
                f"engine: expected a trainer, got {type(engine).__name__}; weights change while it "
                "trains, so this handler belongs in train_handlers"
            )
        engine.add_event_handler(Events.EPOCH_STARTED, self._advance)

    def _advance(self, engine: Any) -> None:
        done = engine.state.epoch - 1
        dice = math.nan if self.dice is None or not done else self.dice()
        if self.gap is not None:
            self.loss.see_gap(self.gap() if done else 0.0)
        weights = self.loss.advance(done / engine.state.max_epochs, dice)
        if weights:
            listed = ", ".join(f"{name} {weight:.4g}" for name, weight in weights.items())
            engine.logger.info(f"weights: {listed}")


class MetricHandler(IgniteMetricHandler):
    """One of :mod:`segcal.adapters.monai.metrics` as ``key_val_metric`` or ``additional_metrics``.

    Distances are in mm: a metric without spacing takes the spacing of the MetaTensors. With
    ``convention="monai"`` it keeps counting voxels, as MONAI's own handlers do.

    Args:
        metric: what is computed.
        keys: where ``engine.state.output`` has prediction and reference.
        save_details: whether to keep the rows of all cases in ``engine.state.metric_details``.
    """

    def __init__(
        self,
        metric: CaseMetric,
        *,
        keys: Sequence[str] = PRED_AND_LABEL,
        save_details: bool = True,
    ) -> None:
        if isinstance(metric, SurfaceMetric) and metric.convention == "segcal":
            metric.spacing = "meta" if metric.spacing is None else metric.spacing
        super().__init__(
            metric_fn=metric, output_transform=from_engine(list(keys)), save_details=save_details
        )


def _mean(rows: Sequence[Sequence[float]]) -> float:
    values = [value for row in rows for value in row]
    return sum(values) / len(values)
