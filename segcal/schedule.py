"""Schedules of weights: a factor on a term of the objective that changes while training goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Ramp", "Schedules", "generalisation_gap"]

MEMORY = 0.7
"""Weight of the past in the running mean of the gap, which spans about three epochs."""


def generalisation_gap(train: float, validation: float) -> float:
    """How far validation lies behind training, as a share: ``(validation - train) / validation``.

    Args:
        train: mean loss of an epoch, a likelihood such as cross-entropy.
        validation: mean of the same loss in the validation pass after it.

    Returns:
        the gap in [0, 1]; 0 where validation is not behind, as with few steps or much augmentation;
        NaN where a loss is NaN.
    """
    if math.isnan(train) or math.isnan(validation):
        return math.nan
    if validation <= 0:
        return 0.0
    return min(max((validation - train) / validation, 0.0), 1.0)


@dataclass(frozen=True)
class Ramp:
    """A factor that changes linearly from one value to another.

    Before `start` it is `first`, after `end` it is `last`. Both are shares of the epochs: 0 is the
    beginning of the training and 1 its end, so that a schedule fits a training of any length.

    With `dice` the clock of the ramp starts when the Dice of a validation pass first reaches this
    value: `start` and `end` then count from there.

    With `gap` the factor follows the :func:`generalisation_gap` and not the epochs: it is `first`
    up to the lower of two gaps, and `last` from the upper gap on. So a term takes effect as far as
    a network learns its cases by heart. Where the gap is unknown, the factor is `last`.

    Args:
        first: factor at the beginning.
        last: factor at the end.
        start: share of the epochs at which the factor begins to change.
        end: share of the epochs at which the factor stops changing.
        dice: validation Dice, mean over the foreground classes, that the ramp waits for; None
            waits for nothing.
        gap: generalisation gaps between which the factor changes; None goes by the epochs.

    Raises:
        ValueError: factors below 0, shares out of order or out of [0, 1], a Dice out of (0, 1],
            gaps out of order or out of [0, 1], or beside other clocks.
    """

    first: float = 1.0
    last: float = 0.0
    start: float = 0.0
    end: float = 1.0
    dice: float | None = None
    gap: tuple[float, float] | None = None

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
        if self.gap is None:
            return
        if not 0 <= self.gap[0] < self.gap[1] <= 1:
            raise ValueError(
                f"gap: expected two gaps, 0 <= lower < upper <= 1, got {list(self.gap)}"
            )
        if (self.start, self.end, self.dice) != (0.0, 1.0, None):
            raise ValueError(
                "gap: goes by validation, not by the epochs; leave out start, end, dice"
            )

    def at(self, progress: float, began: float = math.nan, gap: float = math.nan) -> float:
        """Return the factor.

        Args:
            progress: share of the epochs that are done.
            began: share of the epochs at which the validation Dice was first reached; NaN for not
                yet.
            gap: generalisation gap; NaN for unknown.
        """
        if self.gap is not None:
            low, high = self.gap
            share = 1.0 if math.isnan(gap) else min(max((gap - low) / (high - low), 0.0), 1.0)
            return self.first + (self.last - self.first) * share
        done = progress if self.dice is None else progress - began
        if math.isnan(done) or done < self.start:
            return self.first
        if done >= self.end:
            return self.last
        return self.first + (self.last - self.first) * (done - self.start) / (self.end - self.start)


class Schedules(nn.Module):
    """Ramps by the name of their terms, and the validation results that some of them depend on.

    Args:
        ramps: ramps by name.

    Attributes:
        began: share of the epochs at which the Dice was reached, per ramp; NaN for not yet.
        gap: running mean of the generalisation gap, because the gap of a single epoch is noisy; NaN
            for unknown.
    """

    began: Tensor
    gap: Tensor

    def __init__(self, ramps: Mapping[str, Ramp]) -> None:
        super().__init__()
        self.ramps = dict(ramps)
        if ramps:
            self.register_buffer("began", torch.full((len(ramps),), math.nan).double())
        if self.by_gap:
            self.register_buffer("gap", torch.tensor(math.nan).double())

    @property
    def by_gap(self) -> bool:
        """Whether a ramp depends on the generalisation gap, which :meth:`see_gap` must then set."""
        return any(ramp.gap is not None for ramp in self.ramps.values())

    def see_gap(self, gap: float) -> None:
        """Take in the generalisation gap of the epoch just done; 0 before the first.

        A gap of NaN changes nothing.
        """
        if not self.by_gap or math.isnan(gap):
            return
        known = not bool(self.gap.isnan())
        self.gap.copy_(MEMORY * self.gap + (1 - MEMORY) * gap if known else torch.tensor(gap))

    def factors(self, progress: float, dice: float = math.nan) -> dict[str, float]:
        """Return the factors for the next epoch, by name.

        Args:
            progress: share of the epochs that are done, in [0, 1].
            dice: Dice of the last validation pass, mean over the foreground classes; NaN for none.
        """
        found = {}
        gap = float(self.gap) if self.by_gap else math.nan
        for i, (name, ramp) in enumerate(self.ramps.items()):
            reached = ramp.dice is not None and dice >= ramp.dice
            if reached and bool(self.began[i].isnan()):
                self.began[i] = progress
            found[name] = ramp.at(progress, float(self.began[i]), gap)
        return found
