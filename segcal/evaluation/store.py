"""Results of cases on disk while an evaluation runs, so that it can be continued."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from segcal.evaluation.case import CaseResult
from segcal.io.cases import Case
from segcal.io.files import whole_file
from segcal.tally import Tally

FORMAT = 1
"""Changes with what is kept of a case."""


@dataclass(frozen=True)
class Outcome:
    """What became of a case: its numbers, or why there are none; and what was odd."""

    result: CaseResult | str
    notes: list[str]


@dataclass(frozen=True)
class Store:
    """A folder with an array file per case that has been evaluated.

    A result is taken only if it was made from the same files (by path, size and time) with the
    same settings.

    Attributes:
        folder: belongs to the store alone.
        making: what the numbers depend on besides the files: settings, labels, versions.
    """

    folder: Path
    making: str

    def holds(self, case: Case) -> bool:
        """Whether there is a result of just these files and settings."""
        try:
            with np.load(self._path(case), allow_pickle=False) as archive:
                return str(archive["key"]) == self._key(case)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            return False

    def load(self, case: Case) -> Outcome:
        """Result of a case that it holds."""
        with np.load(self._path(case), allow_pickle=False) as archive:
            known = json.loads(str(archive["known"]))
            calibration = {
                scope: Tally.from_arrays(
                    {
                        name.removeprefix(f"{scope}/"): archive[name]
                        for name in archive.files
                        if name.startswith(f"{scope}/")
                    }
                )
                for scope in known["scopes"]
            }
        row = {key: float(value) for key, value in known["row"].items()}
        return Outcome(CaseResult(row, calibration), known["notes"])

    def save(self, case: Case, outcome: Outcome) -> None:
        """Keep a result; a failure is tried again next time."""
        if isinstance(outcome.result, str):
            return
        known = {
            "row": {key: repr(value) for key, value in outcome.result.row.items()},
            "notes": outcome.notes,
            "scopes": list(outcome.result.calibration),
        }
        arrays: dict[str, Any] = {"key": self._key(case), "known": json.dumps(known)}
        for scope, one in outcome.result.calibration.items():
            arrays.update({f"{scope}/{k}": v for k, v in one.to_arrays().items()})
        with whole_file(self._path(case)) as temporary:
            np.savez(temporary, **arrays)

    def remove(self) -> None:
        """Forget everything."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, case: Case) -> Path:
        return self.folder / f"{case.name}.npz"

    def _key(self, case: Case) -> str:
        files = []
        for path in (case.prediction, case.reference, case.label_map, case.roi):
            if path is not None:
                stat = path.stat()
                files.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
        text = json.dumps([FORMAT, self.making, files])
        return hashlib.sha256(text.encode()).hexdigest()
