"""Files in folders, a folder a class, maybe below folders that say what they are for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from segcal.classify.readers.samples import UNSAID

PARTS = {
    "train": 0, "training": 0, "val": 1, "valid": 1, "validation": 1, "test": 2, "testing": 2,
}  # fmt: skip
"""Names of folders above those of the classes, and the part they are."""


def files_of_classes(root: Path, part: Callable[[str], int]) -> list[tuple[Path, str, int]]:
    """Files with their class and their part; what is hidden is left out.

    Args:
        root: folder of the classes, or of parts with classes in them.
        part: of the name of a folder; UNSAID if it is none.

    Raises:
        ValueError: naming the folder: not readable, or with parts and others side by side.
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
