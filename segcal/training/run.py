"""The skeleton of a training run: what all trainers have in common.

A trainer is a subclass of :class:`TrainingRun` that defines what is trained and what an epoch is.
The skeleton does the rest: it begins or resumes, seeds every epoch, steps the schedule, keeps the
best and the last state, writes log, figure and ``run.json``, watches for collapse, and stops early
if no epoch has been better for a while. Multipliers are the learned weights of penalties.
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from segcal.io.files import check_writable
from segcal.objective import Objective
from segcal.posthoc.folding import fitted_temperature, fold_temperature
from segcal.recipes import Recipe
from segcal.reporting.picture import draw
from segcal.reporting.progress import FIGURE_NAME, plot_progress
from segcal.schedule import generalisation_gap
from segcal.term import sum_over_ranks
from segcal.training.beginning import begin, check_unused, last_checkpoint
from segcal.training.building import build_optimizer
from segcal.training.checkpoints import BEST_NAME, LAST_NAME, read_checkpoint, write_checkpoint
from segcal.training.collapse import CollapseWatch
from segcal.training.devices import Ranks, choose_device
from segcal.training.epoch_log import EpochLog
from segcal.training.experiments import Experiment
from segcal.training.results import Criterion, HeldOutPass, Trained, Validation
from segcal.training.time_limit import NEVER, OutOfTimeError, is_past

__all__ = ["TrainingRun"]

FIGURE_SECONDS = 20.0
"""Least time in seconds between two drawings of the figure, which is also drawn at the end."""
Kind = TypeVar("Kind", bound=Experiment)
Say = Callable[[str], None]


class TrainingRun(ABC, Generic[Kind]):
    """A training that has been checked and is ready to run.

    A trainer implements :meth:`prepare`, :meth:`build_network`, :meth:`train_epoch` and
    :meth:`validate_epoch`, which the skeleton calls in this order; the other hooks may stay as
    they are. Everything that a trainer needs to continue as if it had not been stopped is in
    :meth:`own_state`, or drawn from the seed of the epoch.

    Args:
        experiment: experiment to train.
        ranks: this process among the processes that train together; None means one process.
        resume: whether to continue from the last checkpoint, or from the beginning if there is
            none yet.
        say: called in the first process with messages for the user.

    Raises:
        OutputInUseError: the output holds a training that is not to be resumed.
        ValueError: something does not fit.

    Attributes:
        classes: names of the classes, labels or regions; set by :meth:`prepare`.
        criterion: metric that chooses the best epoch; set by :meth:`prepare`.
        recipe: terms of the loss; set by :meth:`prepare`.
        objective: the loss; set by :meth:`prepare`.
        collapse: watches for classes that are no longer predicted; set by :meth:`prepare`, or
            None.
        network, optimizer, scheduler: built after :meth:`prepare`.
        epoch: number of epochs that are done.
        best_epoch: number of the best epoch, from 0; -1 before the first.
    """

    libraries: ClassVar[Sequence[str]] = ("segcal", "torch", "numpy", "scipy")
    """Distributions whose versions ``run.json`` states."""
    keys: ClassVar[Sequence[str]] = ("experiment", "recipe", "epoch", "network", "objective")
    """Keys that every checkpoint has."""

    classes: tuple[str, ...]
    criterion: Criterion
    recipe: Recipe
    objective: Objective
    collapse: CollapseWatch | None = None

    def __init__(
        self,
        experiment: Kind,
        ranks: Ranks | None = None,
        *,
        resume: bool = False,
        say: Say = lambda text: None,
    ) -> None:
        settings = experiment.training
        self.experiment, self.folder = experiment, experiment.folder
        self.ranks = ranks or Ranks(0, 1, choose_device(settings.device))
        self.device = self.ranks.device
        self.say = say if self.ranks.first else lambda text: None
        if self.ranks.first:
            check_writable(self.folder)
        if not resume:
            check_unused(experiment)
        checkpoint = last_checkpoint(experiment, self.keys) if resume else None
        self.prepare(checkpoint)
        if checkpoint is not None and checkpoint["recipe"] != self.recipe.model_dump():
            raise ValueError(
                f"{self.folder / LAST_NAME}: was trained with another content of "
                f"{experiment.recipe}; restore that content, or choose another output"
            )
        self.objective.to(self.device)
        torch.manual_seed(settings.seed)
        self.network = self.build_network(fresh=checkpoint is None).to(self.device)
        self.check_network()
        self.optimizer, self.scheduler = build_optimizer(
            experiment.optimizer,
            experiment.scheduler,
            self.network,
            epochs=settings.epochs,
            metric=self.criterion.name,
            higher=self.criterion.higher,
            groups=self.parameter_groups(),
        )
        self.epoch, self.best_epoch, self._best_score = 0, -1, -math.inf
        self._improved = -1  # the first of the epochs that are as good as the best
        self.load()
        if checkpoint is not None:
            self._restore(checkpoint)
        if not self.epoch:
            self.objective.see_gap(0.0)
        self._scheduled = self.objective.advance(self._progress)
        self._check_ranks()
        if self.ranks.first:
            begin(
                experiment,
                self.ranks,
                epoch=self.epoch,
                libraries=self.libraries,
                facts={
                    "metric": self.criterion.name,
                    "classes": list(self.classes),
                    "recipe": self.recipe.model_dump(),
                    **self.facts(),
                },
            )
        self.advance: Callable[[str], None] = lambda state: None

    # What a trainer defines.

    @abstractmethod
    def prepare(self, checkpoint: dict[str, Any] | None) -> None:
        """Set classes, criterion, recipe and objective; slow work belongs in :meth:`load`.

        Args:
            checkpoint: checkpoint that the training continues from, or None.

        Raises:
            ValueError: something does not fit, or is not what the checkpoint was trained on.
        """

    @abstractmethod
    def build_network(self, *, fresh: bool) -> nn.Module:
        """Build the network; the seed of the training has just been set.

        Args:
            fresh: False if a checkpoint will fill it, so that initial weights need not be read.

        Raises:
            ValueError: it is not a network, or its arguments do not fit.
        """

    @abstractmethod
    def train_epoch(self, seed: int) -> dict[str, float]:
        """Train an epoch; return the mean of every unweighted term over its samples.

        Args:
            seed: seed of the epoch and this process, which torch's generator has just got.

        Raises:
            FloatingPointError: the loss is no longer finite.
        """

    @abstractmethod
    def validate_epoch(self) -> Validation:
        """Validate and update the multipliers: ``start_pass``, ``observe``, ``dual_step``.

        Raises:
            FloatingPointError: logits are no longer finite.
        """

    @abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Further content of checkpoints: the data trained on, and the trainer's own state."""

    def restore_own(self, checkpoint: dict[str, Any]) -> None:
        """Restore the trainer's own state from a checkpoint."""

    def check_network(self) -> None:
        """Raise ValueError unless the network and the loss fit the data."""

    def parameter_groups(self) -> list[dict[str, Any]] | None:
        """Groups of parameters with learning rates of their own; None treats all alike."""
        return None

    def load(self) -> None:
        """Read the data, after everything that is quick has been checked.

        Raises:
            ValueError: something does not fit.
        """

    def facts(self) -> dict[str, Any]:
        """Further content of ``run.json``."""
        return {}

    def after_epoch(self, record: dict[str, Any], validation: Validation) -> None:
        """Do further work after an epoch that has been logged and kept.

        Args:
            record: its line of the log.
            validation: its result.
        """

    @abstractmethod
    def held_out(self, network: nn.Module) -> HeldOutPass:
        """Predictions of a network on the validation set, in the same order each time.

        Args:
            network: network to use in place of the one that is trained.
        """

    def finish(self) -> None:
        """Close open resources after the last epoch."""

    # What all trainers do.

    @property
    def epochs_left(self) -> int:
        """Number of epochs that are still to be trained, unless the training ends early."""
        return max(0, self.experiment.training.epochs - self.epoch)

    @property
    def out_of_patience(self) -> bool:
        """Whether no epoch has been better for as many epochs as the settings allow."""
        patience = self.experiment.training.early_stop
        return patience is not None and self.epoch - 1 - self._improved >= patience

    def run(
        self, advance: Callable[[str], None] = lambda state: None, *, until: float = NEVER
    ) -> Trained:
        """Train to the end.

        Args:
            advance: called after every step with a text on the state of the training.
            until: time, as of ``time.time``, after which no epoch but the first begins.

        Raises:
            FloatingPointError: loss or logits are no longer finite.
            OutOfTimeError: that time has come; a run with ``resume`` goes on.
        """
        self.advance = advance
        self._drawn = time.monotonic()
        try:
            while self.epochs_left and not self.out_of_patience:
                self._run_epoch()
                if self.epochs_left and not self.out_of_patience and self._all_past(until):
                    raise OutOfTimeError(f"{self.folder}: {self.epochs_left} epochs are left")
        finally:  # also of a training that was interrupted or diverged
            if self.ranks.first:
                self._draw()
        if self.recipe.temperature and self.ranks.first and self.best_epoch >= 0:
            self._fold_temperature()
        self.finish()
        best = self._best_score if self.criterion.higher else -self._best_score
        return Trained(
            folder=self.folder,
            epochs=self.epoch,
            best_epoch=self.best_epoch,
            metric=self.criterion.name,
            best=best if math.isfinite(best) else math.nan,
            early=self.out_of_patience,
        )

    def _fold_temperature(self) -> None:
        """Divide the last layer of the best network by its temperature, in its checkpoint.

        If that cannot be done, the user is told; the training counts as successful all the same.
        """
        path = self.folder / BEST_NAME
        content = read_checkpoint(path, self.keys)
        if "temperature" in content:  # of a training that had ended before
            return
        network = copy.deepcopy(self.network)
        network.load_state_dict(content["network"])
        network.eval()
        batches, number, ignore_index = self.held_out(network)
        try:
            temperature = fitted_temperature(batches, number, ignore_index=ignore_index)
            values = fold_temperature(
                network,
                temperature,
                lambda: next(self.held_out(network).batches)[0],
                num_heads=self.objective.num_heads,
            )
        except ValueError as error:
            self.say(
                f"WARNING: {BEST_NAME} was left without a temperature: {error}. Calibrate its "
                "probabilities with segcal calibrate"
            )
            return
        write_checkpoint(path, {**content, "network": network.state_dict(), "temperature": values})
        facts = temperature.facts
        self.say(
            f"Temperature {values[0]:.4g}, by which the last layer in {BEST_NAME} is divided: NLL "
            f"of validation {facts['nll_before']:.4f} -> {facts['nll_after']:.4f}, same masks"
        )

    def _check_ranks(self) -> None:
        """Wait for all processes; raise ValueError unless all are at the same epoch."""
        mine = torch.tensor([self.epoch, self.epoch**2], dtype=torch.float64)
        total, squares = sum_over_ranks(mine).tolist()
        if total**2 != self.ranks.size * squares:  # equal if and only if all epochs are
            raise ValueError(
                f"{self.folder / LAST_NAME}: the processes find different checkpoints; the output "
                "must lie on a file system that all machines share"
            )

    def _all_past(self, until: float) -> bool:
        """Whether time is up for one of the processes and so for all."""
        if until == NEVER:
            return False
        return bool(sum_over_ranks(torch.tensor([is_past(until)], dtype=torch.float64)) > 0)

    @property
    def _progress(self) -> float:
        """Share of the epochs that are done, which schedules depend on."""
        return self.epoch / self.experiment.training.epochs

    def _run_epoch(self) -> None:
        """Train and validate one epoch, log it, and keep the best and the last state."""
        started = time.monotonic()
        # of its own for each epoch and process, so that nothing depends on what came before
        seed = self.experiment.training.seed + 1000003 * (self.epoch + 1) + 7919 * self.ranks.rank
        torch.manual_seed(seed)
        train = self.train_epoch(seed)
        validation = self.validate_epoch()
        rate = self.optimizer.param_groups[0]["lr"]
        value = validation.metrics[self.criterion.key]
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(value)
        elif self.scheduler is not None:
            self.scheduler.step()
        record: dict[str, Any] = {
            "epoch": self.epoch,
            "train": train,
            "val": validation.terms,
            **validation.metrics,
            "lr": rate,
        }
        if self.collapse is not None:
            record["collapsed"] = self.collapse.update(validation.predicted, validation.labelled)
        record["seconds"] = round(time.monotonic() - started, 3)
        if self._scheduled:
            record["weights"] = self._scheduled
        record |= {name: vars(step) for name, step in validation.steps.items()}
        best = self._is_best(value)
        self.epoch += 1
        dice = validation.metrics.get("dice", math.nan)
        first = next(iter(validation.terms), "")  # of a recipe, the likelihood
        losses = (of.get(first, math.nan) for of in (train, validation.terms))
        self.objective.see_gap(generalisation_gap(*losses))
        self._scheduled = self.objective.advance(self._progress, dice)
        if self.ranks.first:
            self._keep(record, best=best)
            self.after_epoch(record, validation)
        self._warn(record, validation)

    def _is_best(self, value: float) -> bool:
        """Whether no earlier epoch is better; the epoch is then remembered as the best.

        Among equal epochs the last is chosen: if a coarse metric ties many epochs, the network of
        the first would hardly be trained.
        """
        score = value if self.criterion.higher else -value
        score = -math.inf if math.isnan(score) else score  # e.g. no foreground at all
        better = self.best_epoch < 0 or score > self._best_score
        if better:
            self._improved = self.epoch
        best = better or score == self._best_score > -math.inf
        if best:
            self._best_score, self.best_epoch = score, self.epoch
        return best

    def _keep(self, record: dict[str, Any], *, best: bool) -> None:
        EpochLog(self.folder).append(record)
        content = self._state()
        if best:
            write_checkpoint(self.folder / BEST_NAME, content)
        write_checkpoint(self.folder / LAST_NAME, content)
        if time.monotonic() - self._drawn > FIGURE_SECONDS:
            self._draw()

    def _draw(self) -> None:
        records = EpochLog(self.folder).records()
        if records:
            draw(plot_progress(records, self.classes), "").save(self.folder / FIGURE_NAME)
        self._drawn = time.monotonic()

    def _warn(self, record: dict[str, Any], validation: Validation) -> None:
        epoch = f"epoch {record['epoch']}"
        for name, step in validation.steps.items():
            for note in step.notes:
                self.say(f"{epoch}: {name}: {note}")
        watch = self.collapse
        if watch is not None and (news := watch.news(record["collapsed"], self.classes)):
            self.say(f"{epoch}: {news}")

    def _state(self) -> dict[str, Any]:
        """Content of a checkpoint."""
        content = {
            "experiment": self.experiment.model_dump(mode="json"),
            "recipe": self.recipe.model_dump(),
            "epoch": self.epoch,
            "best": self._best_score,
            "best_epoch": self.best_epoch,
            "improved": self._improved,
            "network": self.network.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            **self.own_state(),
        }
        if self.collapse is not None:
            content["missing"] = list(self.collapse.missing)
        return content

    def _restore(self, checkpoint: dict[str, Any]) -> None:
        self.epoch, self._best_score = checkpoint["epoch"], checkpoint["best"]
        self.best_epoch, self._improved = checkpoint["best_epoch"], checkpoint["improved"]
        self.network.load_state_dict(checkpoint["network"])
        self.objective.load_state_dict(checkpoint["objective"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(checkpoint["scheduler"])
        if self.collapse is not None:
            self.collapse.missing = list(checkpoint["missing"])
        self.restore_own(checkpoint)
