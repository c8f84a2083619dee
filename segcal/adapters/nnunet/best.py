"""Choosing the best calibrated epoch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class BestCalibrated:
    """The lowest calibration error among epochs whose Dice is near the best.

    Calibration error alone would choose a network that finds nothing, since it is easy to be
    confident and right about background. So no epoch is chosen while a class has collapsed (is
    never predicted), or while Dice is below `floor`.

    Attributes:
        tolerance: how far below the best Dice so far an epoch may lie.
        floor: lowest Dice that an epoch may have.
        top_dice: best Dice so far.
        ece: calibration error of the chosen epoch.
        dice: its Dice.
    """

    tolerance: float = 0.02
    floor: float = 0.05
    top_dice: float = -1.0
    ece: float = float("inf")
    dice: float = -1.0

    def update(self, ece: float, dice: float, *, collapsed: bool = False) -> bool:
        """Take in an epoch; True if it is chosen. An epoch with a NaN in `ece` or `dice` is not."""
        self.top_dice = max(self.top_dice, dice) if dice == dice else self.top_dice
        limit = self.top_dice - self.tolerance
        fits = dice >= max(limit, self.floor) and not collapsed
        if fits and (ece < self.ece or (self.dice < limit and ece == ece)):
            self.ece, self.dice = ece, dice
            return True
        return False
