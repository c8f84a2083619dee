"""Trainings that stop when time is up, to be resumed later."""

from __future__ import annotations

import math
import time

__all__ = ["NEVER", "OutOfTimeError", "is_past"]

NEVER = math.inf


class OutOfTimeError(Exception):
    """Time was up: the training stopped after an epoch, from whose checkpoint it can go on."""


def is_past(until: float) -> bool:
    """Whether it is later than `until`, in seconds since the epoch as of ``time.time``."""
    return time.time() > until
