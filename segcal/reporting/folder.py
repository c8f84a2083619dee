"""Keeps track of which files in the folder of a report may be written and removed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from segcal.io.files import check_writable, read_json, write_json

MANIFEST = ".segcal-report.json"
"""File that lists the files of a report, so that the next report touches no others."""


@dataclass
class ReportFolder:
    """A folder in which one report replaces another, beside files that must not be touched.

    Attributes:
        path: path of the folder.
        written: files of this report so far, relative to the folder.
    """

    path: Path
    written: list[str] = field(default_factory=list)

    def check(self, patterns: Iterable[str]) -> None:
        """Check that no file will be overwritten that is not of an earlier report.

        Args:
            patterns: patterns of the names of files that a report may write.

        Raises:
            ValueError: the path is a file, nothing can be written there, or it holds files of
                these names that no report wrote.
        """
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: is a file; the report needs a folder")
        check_writable(self.path)
        ours = self._listed()
        for pattern in patterns:
            for found in self.path.glob(pattern):
                if found.relative_to(self.path).as_posix() not in ours:
                    raise ValueError(
                        f"{found}: was not written by segcal here and would be overwritten; name "
                        "another folder for the report"
                    )

    def place(self, name: str) -> Path:
        """Path of a file of this report, which is listed as such from now on."""
        self.written.append(name)
        self._list(self._listed() | {name})
        return self.path / name

    def close(self) -> None:
        """Remove files of earlier reports that this report does not have."""
        for name in self._listed() - set(self.written):
            (self.path / name).unlink(missing_ok=True)
        self._list(set(self.written))

    def _listed(self) -> set[str]:
        manifest = self.path / MANIFEST
        names = read_json(manifest) if manifest.is_file() else []
        if not isinstance(names, list) or not all(map(_inside, names)):
            raise ValueError(f"{manifest}: is not a list of the files of a report; remove it")
        return set(names)

    def _list(self, names: set[str]) -> None:
        write_json(self.path / MANIFEST, sorted(names))


def _inside(name: object) -> bool:
    """Whether this is a relative path that stays inside the folder."""
    if not isinstance(name, str) or not name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name
