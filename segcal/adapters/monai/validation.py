"""A pass over the validation set, which gives metrics and updates the multipliers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ignite.engine import Events
from monai.engines import Evaluator, IterationEvents
from torch import Tensor

from segcal.binning import BinStatistics
from segcal.metrics.ece import reliability
from segcal.metrics.iou import confusion_matrix, mean_dice, mean_iou
from segcal.objective import Objective
from segcal.term import sum_over_ranks
from segcal.training.results import Validation

ECE_BINS = 15


class ValidationPass:
    """A handler of the evaluator: measures, and updates the multipliers at the end of the pass.

    It does for :class:`SegmentationRun` what
    :class:`segcal.adapters.monai.handlers.DualStepHandler` does for a trainer of your own. It also
    serves recipes that need the image or two views of it, and computes the metrics in the same
    pass.

    Args:
        objective: the loss.
        num_classes: K.
        ignore_index: label to leave out.

    Attributes:
        result: of the last pass.
    """

    result: Validation

    def __init__(self, objective: Objective, num_classes: int, ignore_index: int) -> None:
        self.objective = objective
        self.num_classes = num_classes
        self.ignore_index = ignore_index

    def attach(self, engine: Evaluator) -> None:
        """Attach to the evaluator."""
        engine.add_event_handler(Events.EPOCH_STARTED, self._start)
        engine.add_event_handler(IterationEvents.FORWARD_COMPLETED, self._add)
        engine.add_event_handler(Events.EPOCH_COMPLETED, self._finish)

    def _start(self, engine: Any) -> None:
        self.objective.eval()
        self.objective.start_pass()
        self._samples = 0
        self._terms: dict[str, float] = {}
        self._confusion = np.zeros((self.num_classes, self.num_classes), np.int64)
        empty = np.zeros(ECE_BINS)
        self._bins = BinStatistics(empty.astype(np.int64), empty, empty)

    @torch.no_grad()
    def _add(self, engine: Any) -> None:
        output = engine.state.output
        logits, labels = output["pred"].float(), output["label"][:, 0].long()
        if not torch.isfinite(logits).all():
            raise FloatingPointError(
                "the network's logits are no longer finite; the last checkpoint is from before. A "
                "lower learning rate, fp32, or a network with normalisation may help"
            )
        self.objective.observe(logits, labels)
        _, values = self.objective.loss_and_terms(logits, labels, output["image"])
        n = len(labels)
        self._samples += n
        for name, value in values.items():
            self._terms[name] = self._terms.get(name, 0.0) + n * float(value)
        decision, probability = self.objective.by_head(logits)
        probs = torch.softmax(probability, 1)
        self._bins += reliability(probs, labels, bins=ECE_BINS, ignore_index=self.ignore_index)
        predicted = decision.max(1).indices  # argmax, which takes eight times as long on a CPU
        self._confusion += confusion_matrix(
            predicted, labels, self.num_classes, ignore_index=self.ignore_index
        )

    def _finish(self, engine: Any) -> None:
        parts = [
            np.array([self._samples, *self._terms.values()], np.float64),
            self._confusion.astype(np.float64).ravel(),
            np.stack([self._bins.count, self._bins.confidence_sum, self._bins.hit_sum]).ravel(),
        ]
        total = sum_over_ranks(torch.from_numpy(np.concatenate(parts)).to(engine.state.device))
        sizes = [part.size for part in parts]
        means, confusion, bins = (part.numpy(force=True) for part in torch.split(total, sizes))
        confusion = confusion.reshape(self._confusion.shape).astype(np.int64)
        steps = self.objective.dual_step(sum_over_ranks)
        self.result = Validation(
            terms={n: float(v / means[0]) for n, v in zip(self._terms, means[1:], strict=True)},
            metrics={
                "miou": mean_iou(confusion),
                "dice": mean_dice(confusion),
                "ece": BinStatistics(*bins.reshape(3, ECE_BINS)).expected_error(),
            },
            steps=steps,
            predicted=confusion.sum(0).tolist(),
            labelled=confusion.sum(1).tolist(),
        )
        engine.state.metrics.update(self.result.metrics)


class TermMeans:
    """Means over samples of the unweighted terms of training."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._samples = 0

    def add(self, values: dict[str, Tensor], samples: int) -> None:
        """Take in the terms of a batch."""
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + samples * value.detach().double()
        self._samples += samples

    def take(self, device: torch.device) -> dict[str, float]:
        """Means over all ranks; the sums start again at 0."""
        sums = [torch.as_tensor(s, device=device) for s in (*self._sums.values(), self._samples)]
        *values, samples = sum_over_ranks(torch.stack([s.double() for s in sums])).tolist()
        means = {name: v / max(samples, 1) for name, v in zip(self._sums, values, strict=True)}
        self._start()
        return means
