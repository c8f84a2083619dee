"""Keeps results of cases on disk while an evaluation runs, so that it can be continued."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segcal.io.files import remove_leftovers, whole_file
from segcal.io.pairing import Case
from segcal.tally import Tally

FORMAT = 2
"""Version of the stored files."""
COMPANIONS = (".pkl", ".raw", ".zraw")
"""Endings of files that are read together with another: nnU-Net v1's crop, MetaImage's voxels."""


@dataclass(frozen=True)
class CaseOutcome:
    """Outcome of a case, small enough to be kept and to be sent between processes.

    Attributes:
        result: row of numbers, or the reason why there is none.
        notes: anything unusual about the case.
        calibration: :meth:`segcal.tally.Tally.to_arrays` by scope.
    """

    result: dict[str, float] | str
    notes: list[str]
    calibration: dict[str, dict[str, NDArray[Any]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Store:
    """A folder with an array file per case that has been evaluated.

    A result is reused only if it was made from the same files (by path, size and time) with the
    same settings.

    Attributes:
        folder: folder that belongs to the store alone.
        making: text of everything besides the files that the numbers depend on: settings, labels,
            versions.
    """

    folder: Path
    making: str

    def holds(self, case: Case) -> bool:
        """Whether there is a result for exactly these files and settings."""
        try:
            return str(_read(self._path(case), "key")["key"]) == self._key(case)
        except Exception:  # noqa: BLE001 - a foreign or damaged file fails anywhere
            return False

    def load(self, case: Case) -> CaseOutcome | None:
        """Result of a case that the store holds; None if the file is damaged."""
        try:
            return _outcome(_read(self._path(case)))
        except Exception:  # noqa: BLE001 - as above
            return None

    def save(self, case: Case, outcome: CaseOutcome) -> None:
        """Keep a result; a case that failed is not kept, so it is tried again next time."""
        if isinstance(outcome.result, str):
            return
        known = {
            "row": {key: repr(value) for key, value in outcome.result.items()},
            "notes": outcome.notes,
            "scopes": list(outcome.calibration),
        }
        arrays: dict[str, Any] = {"key": self._key(case), "known": json.dumps(known)}
        for scope, one in outcome.calibration.items():
            arrays.update({f"{scope}/{k}": v for k, v in one.items()})
        with suppress(OSError), whole_file(self._path(case)) as temporary:
            np.savez(temporary, **arrays)  # what cannot be kept is evaluated again

    def remove(self) -> None:
        """Remove all results, and the folder if it holds nothing else."""
        for path in self.folder.glob("*.npz"):
            path.unlink(missing_ok=True)
        if self.folder.is_dir():
            remove_leftovers(self.folder)
        with suppress(OSError):
            self.folder.rmdir()

    def _path(self, case: Case) -> Path:
        return self.folder / f"{case.name}.npz"

    def _key(self, case: Case) -> str:
        files = []
        for given in (
            case.prediction,
            case.reference,
            case.label_map,
            case.roi,
            *case.raters,
            *case.samples,
        ):
            for path in () if given is None else _files(given):
                stat = path.stat()
                files.append([str(path.resolve()), stat.st_size, stat.st_mtime_ns])
        text = json.dumps([FORMAT, self.making, files])
        return hashlib.sha256(text.encode()).hexdigest()


def _files(path: Path) -> list[Path]:
    """Files that are read for a path: all files of a folder, or a file with its companions."""
    if path.is_dir():
        return sorted(path.iterdir())
    companions = (path.with_suffix(ending) for ending in COMPANIONS)
    return [path, *(one for one in companions if one.is_file())]


def _read(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """All or the named arrays of an ``.npz``, each read to its end, where its checksum is."""
    with zipfile.ZipFile(path) as archive:
        return {
            name: np.lib.format.read_array(
                io.BytesIO(archive.read(f"{name}.npy")), allow_pickle=False
            )
            for name in names or [one.removesuffix(".npy") for one in archive.namelist()]
        }


def _outcome(arrays: Mapping[str, NDArray[Any]]) -> CaseOutcome:
    known = json.loads(str(arrays["known"]))
    calibration = {
        scope: {
            name.removeprefix(f"{scope}/"): array
            for name, array in arrays.items()
            if name.startswith(f"{scope}/")
        }
        for scope in known["scopes"]
    }
    for one in calibration.values():
        Tally.from_arrays(one)  # or it is damaged
    row = {key: float(value) for key, value in known["row"].items()}
    return CaseOutcome(row, known["notes"], calibration)
