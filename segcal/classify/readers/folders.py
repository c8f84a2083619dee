"""Files in folders, one folder per class, optionally below folders that name the part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from segcal.classify.readers.samples import UNSAID

PARTS = {
    "train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "testing": 2,
}  # fmt: skip
"""Names of folders above the folders of classes, with the part that they mean."""


def files_of_classes(root: Path, part: Callable[[str], int]) -> list[tuple[Path, str, int]]:
    """Files with their class and their part; hidden files are left out.

    Args:
        root: folder of the classes, or of parts with classes in them.
        part: number of the part for the name of a folder; UNSAID if it names no part.

    Raises:
        ValueError: the folder, which is named, is not readable, or mixes parts and other folders.
    """
    tops = {folder: part(folder.name) for folder in _folders(root)}
    above = {folder: number for folder, number in tops.items() if number != UNSAID}
    if above and (beside := [f.name for f in tops if f not in above]):
        raise ValueError(
            f"{root}: expected either folders of classes or {', '.join(f.name for f in above)} "
            f"with folders of classes in them; beside these there are {', '.join(beside[:5])}; "
            "move or rename what does not belong there"
        )
    return [
        (file, folder.name, number)
        for top, number in (above or {root: UNSAID}).items()
        for folder in _folders(top)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not any(map(_hidden, file.relative_to(folder).parts))
    ]


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(f for f in root.iterdir() if f.is_dir() and not _hidden(f.name))
    except OSError as error:
        raise ValueError(f"{root}: cannot be read ({error})") from None


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
