"""nnU-Net's functions replaced for a while, and what both sides of such a patch must know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Aggregation:
    """How the predictions of mirrors, windows and folds become one.

    Attributes:
        average: ``logit``, as nnU-Net does, or ``prob``: what is averaged over all three.
        save_logits: also write the logits, in the geometry of the probabilities.
        per_fold: also write what each fold predicts alone.
        calibrator: file of a calibrator, or ``model`` for the one that lies beside the model; None
            leaves probabilities as they are.
        any_model: apply it though it was fitted to another model.
    """

    average: Literal["logit", "prob"] = "logit"
    save_logits: bool = False
    per_fold: bool = False
    calibrator: str | None = None
    any_model: bool = False


class RefusedError(ValueError):
    """What a user can mend, found out where nnU-Net already runs but has not begun to work."""


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Put `value` in the place of what `module` calls `name`, for the time of the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
