"""The port that every host talks to: three verbs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Reduce = Callable[[Tensor], Tensor]
"""Takes a tensor of one rank's sums and returns the sum over all ranks (``all_reduce(SUM)``)."""

STATE_VERSION = 1


def sum_over_ranks(x: Tensor) -> Tensor:
    """Sum of `x` over the ranks of the default process group; `x` itself where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return x
    on_gpu = "nccl" in dist.get_backend() and not x.is_cuda  # which sums nothing else
    total = x.cuda() if on_gpu else x.clone()
    dist.all_reduce(total)
    return total.to(x.device)


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

    def start_pass(self) -> None:
        """Forget what was observed since the last update: a pass that was broken off."""


class LearnedPenalty(Penalty):
    """A penalty whose weights are learned, and whose saved state says what it is the state of.

    The state of another method or of other settings, as named by :meth:`identity`, is refused.
    """

    def identity(self) -> dict[str, Any]:
        """What a state must have in common with this penalty to be loaded."""
        return {"method": type(self).__name__}

    def get_extra_state(self) -> Tensor:
        """Version of the format and :meth:`identity` for ``state_dict``: JSON, as bytes."""
        text = json.dumps({"version": STATE_VERSION, **self.identity()})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing to do: the state has been compared before it was loaded."""

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Compare version and identity, then load.

        Raises:
            ValueError: with all that differs; nothing of this penalty has been loaded.
        """
        key = f"{prefix}_extra_state"
        if key in state_dict:
            self._check_identity(state_dict[key])
        elif f"{prefix}lam" in state_dict:
            raise ValueError(
                f"{prefix}lam: the state of an older segcal, which does not say of what penalty; "
                "start the multipliers anew"
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _check_identity(self, state: Tensor) -> None:
        saved, here = (json.loads(bytes(s.tolist())) for s in (state, self.get_extra_state()))
        differences = [
            f"{name} {saved.get(name)!r}, here {here.get(name)!r}"
            for name in sorted({*saved, *here})
            if saved.get(name) != here.get(name)
        ]
        if differences:
            raise ValueError(
                f"not a state of this {type(self).__name__}: {'; '.join(differences)}. Build the "
                "penalty with the settings that the state was saved with, or start anew"
            )
