"""The training of an experiment of classification, in one process.

An epoch consists of the training batches and a pass over the validation set, at the end of which
the multipliers (learned penalty weights) are updated. Then the log is written, and the checkpoint
with all that a resumed training needs to go on as if it had not been stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from segcal.classify.augmenting import Augment
from segcal.classify.building import (
    build_network,
    build_objective,
    check_network,
    check_objective,
    check_rebuilt,
    parameter_groups,
    recipe_of,
)
from segcal.classify.data import check_data, load
from segcal.classify.experiment import ClassificationExperiment
from segcal.classify.measures import HIGHER_IS_BETTER, TEST, measure
from segcal.classify.networks import Standardised
from segcal.classify.prediction import label_loss, predict
from segcal.classify.streaming import decoders
from segcal.training.checkpoints import LAST_NAME
from segcal.training.results import Criterion, HeldOutPass, Validation
from segcal.training.run import TrainingRun

__all__ = ["ClassificationRun"]


class ClassificationRun(TrainingRun[ClassificationExperiment]):
    """A training of a classifier that has been checked and is ready to run.

    Example::

        trained = ClassificationRun(load_experiment("digits")).run()

    See :class:`segcal.training.run.TrainingRun`. The argument ``advance`` of :meth:`run` is called
    after every epoch with a sentence on its results.
    """

    keys = (*TrainingRun.keys, "data")
    network: Standardised

    def prepare(self, checkpoint: dict[str, Any] | None) -> None:
        """Read the samples, and build the loss."""
        experiment = self.experiment
        self.data = load(experiment.data)
        if checkpoint is not None:
            check_data(checkpoint, self.data, self.folder / LAST_NAME)
        self.classes = self.data.names
        workers = decoders(experiment.training.workers)
        self.parts = {n: part.to(self.device, workers) for n, part in self.data.parts.items()}
        self.objective = build_objective(experiment, self.data)
        self.recipe = recipe_of(experiment, self.data)
        self.criterion = self._choose_criterion()
        # what is streamed comes transformed
        self.augment = Augment(() if experiment.data.streams else experiment.data.augment)

    def _choose_criterion(self) -> Criterion:
        """The metric that chooses the best epoch; ValueError if the data do not allow it."""
        multilabel = self.data.multilabel
        metric = self.experiment.training.metric or self._default_metric()
        higher = metric in HIGHER_IS_BETTER
        if higher and (metric == "accuracy") == multilabel:
            raise ValueError(f"training.metric: {metric} does not fit this data set; try nll")
        if multilabel and not (self.data.parts["validation"].targets == 1).any():
            raise ValueError(
                "data.split: no validation sample has a label, so no epoch is better than another; "
                "give another seed or a larger share"
            )
        return Criterion(metric, metric, higher)

    def _default_metric(self) -> str:
        """NLL; for a loss whose scores are no probabilities, a metric of their ranking."""
        if self.recipe.multilabel and not self.data.multilabel:
            return "accuracy"
        loss = label_loss(self.objective)
        return "map_class" if loss is not None and loss.no_posterior else "nll"

    def build_network(self, *, fresh: bool) -> Standardised:
        """Build what the experiment names."""
        return build_network(self.experiment, self.data, pretrained=fresh)

    def check_network(self) -> None:
        """Raise ValueError unless the network gives logits that the loss accepts."""
        train = self.parts["train"]
        logits = check_network(self.network, train, self.augment, len(self.classes))
        check_objective(self.experiment.recipe, self.objective, logits, train.targets[:2])
        check_rebuilt(self.experiment, self.data, self.network)

    def parameter_groups(self) -> list[dict[str, Any]] | None:
        """Parameter groups, with the last layer separate if it has its own learning rate."""
        rate = self.experiment.training.head_lr
        if rate is None:
            return None
        return parameter_groups(self.network, rate, len(self.classes))

    def train_epoch(self, seed: int) -> dict[str, float]:
        """A step for every batch of the training samples."""
        settings = self.experiment.training
        self.network.train()
        self.objective.train()
        sums: dict[str, float] = {}
        count = 0
        for inputs, targets in self.parts["train"].shuffled(settings.batch_size, seed):
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast(
                self.device.type, torch.bfloat16, enabled=settings.precision == "bf16"
            ):
                logits = self.network(self.augment(inputs))
            total, values = self.objective.loss_and_terms(logits.float(), targets)
            if not torch.isfinite(total):
                raise FloatingPointError(
                    f"the loss is {total.item()} in epoch {self.epoch}; lower the learning rate or "
                    "the weight of the penalty"
                )
            total.backward()  # type: ignore[no-untyped-call]
            if settings.clip_grad is not None:
                nn.utils.clip_grad_norm_(self.network.parameters(), settings.clip_grad)
            self.optimizer.step()
            _add(sums, values, len(targets))
            count += len(targets)
        return {name: value / count for name, value in sums.items()}

    @torch.no_grad()
    def validate_epoch(self) -> Validation:
        """Measure all validation samples at once."""
        part = self.parts["validation"]
        logits = predict(self.network, part)
        if not torch.isfinite(logits).all():
            raise FloatingPointError(
                f"the logits of validation samples are not finite in epoch {self.epoch}; lower the "
                "learning rate"
            )
        self.objective.eval()
        self.objective.start_pass()
        terms: dict[str, float] = {}
        size = self.experiment.training.batch_size  # pairs of samples count: batches as in training
        for x, y in zip(torch.split(logits, size), torch.split(part.targets, size), strict=True):
            _add(terms, self.objective.loss_and_terms(x, y)[1], len(y) / len(part))
        self.objective.observe(logits, part.targets)
        steps = self.objective.dual_step()
        metrics = self._metrics(logits, part.targets)
        if self.experiment.training.test_curves:
            test = self.parts["test"]
            found = self._metrics(predict(self.network, test), test.targets)
            metrics |= {f"{TEST}{name}": value for name, value in found.items()}
        return Validation(terms, metrics, steps)

    def held_out(self, network: nn.Module) -> HeldOutPass:
        """All validation samples at once."""
        part = self.parts["validation"]

        def batches() -> Iterator[tuple[Tensor, Tensor]]:
            yield predict(network, part), part.targets

        return HeldOutPass(batches(), 1, None)

    def _metrics(self, logits: Tensor, targets: Tensor) -> dict[str, float]:
        loss = label_loss(self.objective)
        bins = self.experiment.bins
        outcomes = measure(logits.cpu(), targets.cpu(), self.classes, loss, bins=bins)
        found = [outcome.metrics for outcome in outcomes.values()]
        metrics = dict(found[-1])  # of the posterior, where the loss has one
        if loss is not None and not loss.bijective:  # phi may make ties
            metrics |= {k: v for k, v in found[0].items() if k in HIGHER_IS_BETTER}
        return metrics

    def after_epoch(self, record: dict[str, Any], validation: Validation) -> None:
        """Advance by an epoch."""
        key = self.criterion.key
        self.advance(f"{key} {record[key]:.4f}, ECE {record['ece']:.4f}")

    def facts(self) -> dict[str, Any]:
        """Numbers of samples, and of training samples of every class or label."""
        return {
            "samples": {name: len(part) for name, part in self.parts.items()},
            "train": self.data.frequencies(),
        }

    def own_state(self) -> dict[str, Any]:
        """Checksum of the samples, kept in the checkpoint."""
        return {"data": self.data.checksum}


def _add(sums: dict[str, float], values: Mapping[str, Tensor], weight: float) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + float(value) * weight
