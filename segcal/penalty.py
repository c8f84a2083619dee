"""The port that every host talks to: three verbs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]
"""Takes a tensor of one rank's sums and returns the sum over all ranks (``all_reduce(SUM)``)."""


@dataclass(frozen=True)
class DualStep:
    """What one update of the multipliers did, as nested lists ready for JSON.

    Attributes:
        step: how many updates there have been, this one included.
        lam: multipliers after the update, ``[region][class]``.
        rho: penalty parameters after the update, ``[region][class]``.
        constraint: constraint of the validation pass, ``[region][class]``: the region's sum over
            all valid voxels, or over its own (``average="region"``).
        count: voxels seen per region.
        notes: sentences a user should read (an empty region, a multiplier at its bound).
    """

    step: int
    lam: list[list[float]]
    rho: list[list[float]]
    constraint: list[list[float]]
    count: list[int]
    notes: list[str] = field(default_factory=list)


class Penalty(nn.Module):
    """A term added to the loss, with what it needs to learn its own weights.

    ``forward(logits, labels)`` gives the scalar to add to the loss; ``observe(logits, labels)``
    is called on every validation batch, ``dual_step()`` once after the last one. A penalty whose
    weight is constant inherits verbs that do nothing.
    """

    def observe(self, logits: Tensor, labels: Tensor) -> None:
        """Take in one validation batch. Nothing to do for a constant weight."""

    def dual_step(self, reduce: Reduce | None = None) -> DualStep | None:
        """Update what is learned from validation; None when nothing is."""
        return None
