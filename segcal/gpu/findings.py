"""Keeps what a part of the check has found so far in a file that is always complete."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from segcal.io.files import write_json


class Findings:
    """Numbers by name, and sentences on what is wrong.

    Args:
        path: JSON file, rewritten whenever something is added.
        seconds: how long the part may run.

    Attributes:
        found: what was found, by name.
        wrong: sentences on what is wrong.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self.found: dict[str, Any] = {}
        self.wrong: list[str] = []
        self.skipped = ""
        self._path = path
        self._end = time.monotonic() + seconds
        self._write()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self._end - time.monotonic()

    def note(self, name: str, value: Any) -> None:
        """Keep a number or text, or a list or dict of numbers or texts."""
        self.found[name] = value
        self._write()

    def expect(self, holds: bool, otherwise: str) -> None:
        """Keep the sentence `otherwise` unless `holds`."""
        if not holds:
            self.wrong.append(otherwise)
            self._write()

    def skip(self, why: str) -> None:
        """Say why this part cannot be run here."""
        self.skipped = why
        self._write()

    def _write(self) -> None:
        content = {"found": self.found, "wrong": self.wrong, "skipped": self.skipped}
        write_json(self._path, content)
