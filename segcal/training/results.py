"""Results of the passes of a training, and of the training as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from segcal.term import DualStep

__all__ = ["Criterion", "HeldOutPass", "Trained", "Validation"]


@dataclass(frozen=True)
class Criterion:
    """Metric that makes one epoch better than another.

    Attributes:
        key: key of the metric in :class:`Validation`.
        name: readable name.
        higher: whether a higher value is better.
    """

    key: str
    name: str
    higher: bool = True


@dataclass(frozen=True)
class Validation:
    """Result of a pass over the validation set.

    Attributes:
        terms: mean of every unweighted term of the loss over samples.
        metrics: numbers by name: the criterion's, ``ece``, which the figure shows, and if there is
            one, ``dice``, which schedules may wait for.
        steps: updates of the multipliers (learned weights of penalties), by penalty.
        predicted: voxels per class in the prediction, if collapse is watched.
        labelled: voxels per class in the labels, if collapse is watched.
    """

    terms: dict[str, float]
    metrics: dict[str, float]
    steps: dict[str, DualStep]
    predicted: Sequence[float] = ()
    labelled: Sequence[float] = ()


class HeldOutPass(NamedTuple):
    """Predictions of a network on the validation set.

    Attributes:
        batches: logits ``(N, K, *S)`` and labels ``(N, *S)``.
        number: number of batches.
        ignore_index: label to leave out.
    """

    batches: Iterator[tuple[Tensor, Tensor]]
    number: int
    ignore_index: int | None


@dataclass(frozen=True)
class Trained:
    """Result of a training.

    Attributes:
        folder: folder of the results.
        epochs: number of trained epochs, including epochs before the training was resumed.
        best_epoch: number of the best epoch, from 0.
        metric: metric that chose the best epoch.
        best: value of this metric in validation.
        early: whether the training ended early, since no epoch was better for a while.
    """

    folder: Path
    epochs: int
    best_epoch: int
    metric: str
    best: float
    early: bool
