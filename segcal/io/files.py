"""Writes files whole or not at all, and finds the names of cases."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

TEMPORARY = ".segcal-"
CHUNK = 1 << 18
BULK = 1 << 21
"""Bytes that a thread unpacks while others are copied; with fewer bytes, both threads would mostly
wait for the interpreter's lock."""
JPEG_ENDINGS = (".jpg", ".jpeg")
IMAGE_ENDINGS = (".png", ".bmp", ".tif", ".tiff", *JPEG_ENDINGS)
"""Endings of 2-D images, which have no size in mm."""
VOLUME_ENDINGS = (
    ".nii.gz", ".nii", ".seg.nrrd", ".nrrd", ".nhdr", ".mha", ".mhd", ".mgz", ".mgh", ".gipl",
    ".gipl.gz", ".hdr", ".hdr.gz", *IMAGE_ENDINGS,
)  # fmt: skip
ARRAY_ENDINGS = (".npz", ".npy")
DEPTH = 100
"""Most levels of a file of settings or results; deeper files would exceed the recursion limit."""
LONGEST_END = 32
"""Characters of a file's name that its temporary file keeps."""


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path` and rename it to `path` when the block succeeds.

    The temporary name keeps the ending, which many writers read the format from.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    end = f"-{path.name[-LONGEST_END:]}"  # a name has room for 255 bytes
    handle, name = tempfile.mkstemp(prefix=TEMPORARY, suffix=end, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        if error.filename is None:  # a full disk, say
            raise OSError(f"{path}: cannot be written: {error}") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Check, before the work starts, that files can be written into a folder.

    Args:
        folder: folder to check; if it does not exist, the nearest folder above it is checked.

    Raises:
        ValueError: nothing can be written there.
    """
    place = next(one for one in (folder, *folder.absolute().parents) if one.exists())
    try:
        with tempfile.TemporaryFile(prefix=TEMPORARY, dir=place):
            pass
    except OSError as error:
        raise ValueError(
            f"{folder}: nothing can be written into {place} ({error.strerror}); name another "
            "folder, or check its permissions and free space"
        ) from None


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files that :func:`whole_file` leaves if its process is killed."""
    for path in folder.glob(f"{TEMPORARY}????????-*"):
        path.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: the file is missing, is a folder, or is not JSON; the message names it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: a folder, expected a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON file ({error})") from None
    if too_deep(value):
        raise ValueError(
            f"{path}: nested more than {DEPTH} levels deep, which no file of this kind is"
        )
    return value


def too_deep(value: Any) -> bool:
    """Whether lists and mappings are nested deeper than :data:`DEPTH`."""
    level = [value]
    for _ in range(DEPTH):
        inside = [v for v in level if isinstance(v, (dict, list))]
        level = [v for one in inside for v in (one.values() if isinstance(one, dict) else one)]
        if not level:
            return False
    return True


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON; NaN and infinity are refused, so pass None instead."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The value itself, or None if it is NaN or infinite, which JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_exactly(
    file: IO[bytes], size: int, arrived: Callable[[NDArray[np.uint8], int], None] | None = None
) -> NDArray[np.uint8]:
    """Read `size` bytes into one array in small chunks, so that no second copy is held.

    Memory is used only as bytes arrive, so a false size in a header costs nothing.

    Args:
        file: file to read from.
        size: number of bytes.
        arrived: called again and again with the array, and how many of its bytes are there.

    Raises:
        EOFError: the file ends earlier.
    """
    content = np.empty(size, np.uint8)
    filled = 0
    with ThreadPoolExecutor(1) as reader:  # unpacks the next bytes while these are copied
        coming = reader.submit(file.read, min(BULK, size))
        while filled < size:
            chunk = coming.result()
            if not chunk:
                raise EOFError(f"ends after {filled} of {size} bytes")
            ahead = filled + len(chunk)
            if ahead < size:
                coming = reader.submit(file.read, min(BULK, size - ahead))
            content[filled:ahead] = np.frombuffer(chunk, np.uint8)
            filled = ahead
            if arrived is not None:
                arrived(content, filled)
    return content


def ending_of(name: str) -> str:
    """Ending of the name of a volume or an array; empty if it has none. Images may use capitals."""
    endings = (*VOLUME_ENDINGS, *ARRAY_ENDINGS)
    found = next((e for e in endings if name.endswith(e)), "")
    return found or next((name[-len(e) :] for e in IMAGE_ENDINGS if name.lower().endswith(e)), "")


def is_image(path: PurePath) -> bool:
    """Whether a file has the ending of a 2-D image."""
    return path.name.lower().endswith(IMAGE_ENDINGS)


def is_jpeg(path: PurePath) -> bool:
    """Whether a file has the ending of a JPEG, which does not keep the exact pixel values."""
    return path.name.lower().endswith(JPEG_ENDINGS)


def is_segmentation(path: PurePath) -> bool:
    """Whether a file has the ending of 3D Slicer's segments."""
    return path.name.endswith(".seg.nrrd")


def is_array(path: PurePath) -> bool:
    """Whether a file has an ending of NumPy's files."""
    return path.suffix in ARRAY_ENDINGS


def case_name(path: PurePath) -> str | None:
    """Name of the case a file belongs to, or None if it is neither a volume nor an array."""
    ending = ending_of(path.name)
    return path.name.removesuffix(ending) if ending and not path.name.startswith(".") else None


def read_names(path: Path) -> list[str]:
    """Names of cases from a text file: the first word of each line.

    Raises:
        ValueError: the file is missing or holds no names, or a name occurs twice.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    names = [words[0] for line in path.read_text(encoding="utf-8").splitlines()
             if (words := line.split())]  # fmt: skip
    if not names or len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(
            f"{path}: expected names of cases, one per line, each once"
            + (f"; got {', '.join(twice[:3])} twice" if twice else "; got none")
        )
    return names


def legible(name: str, path: PurePath) -> str:
    """Return the name of a case if it can be written to a report.

    Raises:
        ValueError: the name is not valid UTF-8.
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        shown = ascii(str(path))[1:-1]
        raise ValueError(
            f"{shown}: its name is not valid UTF-8, so no report can show it; rename the file"
        ) from None
    return name
