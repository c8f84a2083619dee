"""What the passes of a training come to, and the training as a whole."""

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
    """What makes one epoch better than another.

    Attributes:
        key: of the metric among those of :class:`Validation`.
        name: for people.
        higher: whether more of it is better.
    """

    key: str
    name: str
    higher: bool = True


@dataclass(frozen=True)
class Validation:
    """Result of a pass over the validation set.

    Attributes:
        terms: mean of every unweighted term of the loss over samples.
        metrics: numbers by name: that of the criterion, and ``ece``, which the figure shows;
            ``dice``, which schedules may wait for, where there is one.
        steps: what the update of the multipliers did, by penalty.
        predicted: voxels per class in the prediction, where collapse is watched.
        labelled: voxels per class in the labels, where collapse is watched.
    """

    terms: dict[str, float]
    metrics: dict[str, float]
    steps: dict[str, DualStep]
    predicted: Sequence[float] = ()
    labelled: Sequence[float] = ()


class HeldOutPass(NamedTuple):
    """What a network says of the validation set.

    Attributes:
        batches: logits that give probabilities, ``(N, K, *S)``, and labels ``(N, *S)``.
        number: how many batches there are.
        ignore_index: label to leave out.
    """

    batches: Iterator[tuple[Tensor, Tensor]]
    number: int
    ignore_index: int | None


@dataclass(frozen=True)
class Trained:
    """What came of a training.

    Attributes:
        folder: of the results.
        epochs: that have been trained, those before a resume included.
        best_epoch: number of the best one, from 0.
        metric: by which it is the best.
        best: its value in validation.
        early: whether patience ended it.
    """

    folder: Path
    epochs: int
    best_epoch: int
    metric: str
    best: float
    early: bool
