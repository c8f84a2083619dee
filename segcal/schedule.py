"""Schedules of weights: a factor on a term of the objective that changes while training goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Ramp", "Schedules"]


@dataclass(frozen=True)
class Ramp:
    """A factor that goes along a straight line from one value to another.

    Before `start` it is `first`, after `end` it is `last`. Both are shares of the epochs: 0 is the
    beginning of the training and 1 its end, so that a schedule fits a training of any length.

    With `dice` the clock of the ramp starts when the Dice of a validation pass first reaches this
    value: `start` and `end` then count from there.

    Args:
        first: factor at the beginning.
        last: factor at the end.
        start: share of the epochs at which it begins to change.
        end: share of the epochs at which it has changed.
        dice: validation Dice, mean over the foreground classes, that the ramp waits for; None
            waits for nothing.

    Raises:
        ValueError: factors below 0, shares out of order or out of [0, 1], a Dice out of (0, 1].
    """

    first: float = 1.0
    last: float = 0.0
    start: float = 0.0
    end: float = 1.0
    dice: float | None = None

    def __post_init__(self) -> None:
        for name, factor in (("from", self.first), ("to", self.last)):
            if not 0 <= factor < math.inf:
                raise ValueError(f"{name}: expected a finite factor of at least 0, got {factor}")
        if not 0 <= self.start <= self.end <= 1:
            raise ValueError(
                "start, end: expected shares of the epochs, 0 <= start <= end <= 1, got "
                f"{self.start} and {self.end}"
            )
        if self.dice is not None and not 0 < self.dice <= 1:
            raise ValueError(f"dice: expected a Dice in (0, 1], got {self.dice}")

    def at(self, progress: float, began: float = math.nan) -> float:
        """Return the factor.

        Args:
            progress: share of the epochs that are done.
            began: where the validation Dice was first reached, as such a share; NaN: not yet.
        """
        done = progress if self.dice is None else progress - began
        if math.isnan(done) or done < self.start:
            return self.first
        if done >= self.end:
            return self.last
        return self.first + (self.last - self.first) * (done - self.start) / (self.end - self.start)


class Schedules(nn.Module):
    """Ramps by the name of their terms, and when the Dice that some wait for was reached.

    Args:
        ramps: by name.
    """

    began: Tensor

    def __init__(self, ramps: Mapping[str, Ramp]) -> None:
        super().__init__()
        self.ramps = dict(ramps)
        if ramps:  # share of the epochs; NaN: not yet
            self.register_buffer("began", torch.full((len(ramps),), math.nan).double())

    def factors(self, progress: float, dice: float = math.nan) -> dict[str, float]:
        """Return the factors for what is trained next, by name.

        Args:
            progress: share of the epochs that are done, in [0, 1].
            dice: of the validation pass just done, mean over the foreground classes; NaN: none.
        """
        found = {}
        for i, (name, ramp) in enumerate(self.ramps.items()):
            reached = ramp.dice is not None and dice >= ramp.dice
            if reached and bool(self.began[i].isnan()):
                self.began[i] = progress
            found[name] = ramp.at(progress, float(self.began[i]))
        return found
