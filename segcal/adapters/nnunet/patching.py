"""Replacing functions of nnU-Net for a while, and what both sides of such a patch must know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Aggregation:
    """How the predictions of mirrors, windows and folds are combined.

    Attributes:
        average: what is averaged over all three, ``logit`` as in nnU-Net, or ``prob``.
        save_logits: also write the logits, in the geometry of the probabilities.
        per_fold: also write what each fold predicts alone.
        calibrator: file of a calibrator; ``model`` for the calibrator in the folder of the model,
            which must have one; ``none`` leaves probabilities as they are. None applies the
            calibrator in the folder of the model if there is one that fits.
        any_model: apply the calibrator even if it was fitted to another model.
    """

    average: Literal["logit", "prob"] = "logit"
    save_logits: bool = False
    per_fold: bool = False
    calibrator: str | None = None
    any_model: bool = False


class RefusedError(ValueError):
    """An error that the user can correct, found after nnU-Net has started but before it works."""


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace what `module` calls `name` by `value` within the block."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
