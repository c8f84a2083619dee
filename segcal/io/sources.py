"""Finds the files of a data set as it was downloaded: in folders, in zip archives, or in both."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

HEADER_ENDINGS = (".hdr", ".hdr.gz", ".mhd", ".nhdr")
"""Endings of headers whose voxels are in another file."""
VOXEL_ENDINGS = (".img", ".img.gz", ".raw", ".zraw", ".raw.gz")
"""Endings of the files with the voxels."""


@dataclass(frozen=True)
class Source:
    """A file, or a member of a zip archive.

    Attributes:
        path: the file, or the archive that holds it.
        member: name in the archive; None for a file.
        stamp: size, and time of change or checksum; it changes when the content does.
    """

    path: Path
    member: str | None
    stamp: tuple[int, int]

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """Yield a path to read from; a member of an archive is unpacked while it is open.

        If a volume is in two files, the file with the voxels is unpacked beside the header.

        Raises:
            ValueError: a member cannot be unpacked.
        """
        if self.member is None:
            yield self.path
            return
        with tempfile.TemporaryDirectory(prefix="segcal-") as folder:
            try:
                with zipfile.ZipFile(self.path) as archive:
                    for name in (self.member, *_voxels_of(self.member, archive.namelist())):
                        target = Path(folder) / PurePosixPath(name).name
                        with archive.open(name) as packed, target.open("wb") as unpacked:
                            shutil.copyfileobj(packed, unpacked)
            except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
                raise ValueError(
                    f"{self.path}: {self.member} cannot be unpacked ({error}); download it again"
                ) from None
            yield Path(folder) / PurePosixPath(self.member).name


def _voxels_of(header: str, names: Iterable[str]) -> list[str]:
    """Names of the members that hold the voxels of a volume whose header is another member."""
    ending = next((e for e in HEADER_ENDINGS if header.endswith(e)), None)
    if ending is None:
        return []
    stem = header.removesuffix(ending)
    return [name for name in names if name.removeprefix(stem) in VOXEL_ENDINGS]


def find_sources(root: Path) -> dict[str, Source]:
    """Every file below a folder or in a zip archive, by its relative path with slashes.

    An archive in the folder counts as a folder of its name, unless that folder exists, too. Hidden
    files, and files that macOS adds to archives, are left out.

    Raises:
        ValueError: the path is neither a folder nor a zip archive, or an archive is damaged.
    """
    if root.is_file():
        return _visible(_members(root, PurePosixPath()))
    if not root.is_dir():
        raise ValueError(f"{root}: no such file or folder")
    found: dict[str, Source] = {}
    seen = set()
    for place, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link back to where we were
            folders.clear()
            continue
        seen.add(real)
        here = Path(place)
        for name in files:
            path = here / name
            relative = PurePosixPath(path.relative_to(root).as_posix())
            if path.suffix == ".zip":
                if path.stem not in folders:
                    found.update(_members(path, relative.with_suffix("")))
            elif path.is_file():
                stat = path.stat()
                found[str(relative)] = Source(path, None, (stat.st_size, stat.st_mtime_ns))
    return _visible(found)


def _members(archive: Path, prefix: PurePosixPath) -> dict[str, Source]:
    try:
        with zipfile.ZipFile(archive) as opened:
            return {
                str(prefix / info.filename): Source(
                    archive, info.filename, (info.file_size, info.CRC)
                )
                for info in opened.infolist()
                if not info.is_dir()
            }
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{archive}: expected a folder or a zip archive ({error}); unpack an archive of "
            "another kind, or download a damaged archive again"
        ) from None


def _visible(sources: Mapping[str, Source]) -> dict[str, Source]:
    return {
        name: sources[name]
        for name in sorted(sources)
        if not any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
    }
