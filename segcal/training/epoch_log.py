"""The log of a training: one line per epoch, each a JSON object."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segcal.io.files import write_text

LOG_NAME = "segcal_log.jsonl"


class EpochLog:
    """``segcal_log.jsonl`` of a training's folder.

    Args:
        folder: folder of the log, which need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOG_NAME

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the line of an epoch.

        Args:
            record: content of the line, with the epoch's number as ``epoch``. NaN and infinity,
                which JSON does not have, become null.
        """
        with self.path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(_finite(record), allow_nan=False) + "\n")

    def records(self) -> list[dict[str, Any]]:
        """Content of the lines; empty before the first epoch has ended.

        Raises:
            ValueError: a line is not JSON; the message names the file.
        """
        records = []
        for number, line in enumerate(self._lines(), 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{self.path}: line {number} is damaged ({error}); remove it"
                ) from None
        return records

    def forget_from(self, epoch: int) -> None:
        """Drop lines of epochs that a resumed training runs again, and incomplete lines."""
        if self.path.exists():
            kept = [line for line in self._lines() if _epoch_of(line) < epoch]
            write_text(self.path, "".join(kept))

    def _lines(self) -> list[str]:
        if not self.path.exists():
            return []
        return self.path.read_text(encoding="utf-8").splitlines(keepends=True)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _epoch_of(line: str) -> int:
    try:
        return int(json.loads(line)["epoch"])
    except (ValueError, KeyError):  # half a line, from a killed run
        return 10**9
