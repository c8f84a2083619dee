"""Archives of arrays (``.npz``), packed and unpacked by ISA-L, which is faster than zlib.

The archives are NumPy's: zipfile writes and reads them, and only the stream inside a member goes
through ISA-L. If ISA-L is missing (no wheel for the machine), or if zipfile keeps its streams
elsewhere than today, zlib does the same.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray

try:
    from isal import isal_zlib
except ImportError:
    isal_zlib = None  # type: ignore[assignment]

__all__ = ["DAMAGED_STREAM", "save_arrays", "unpack_fast"]

RAW = -15
"""Deflate without a header, as zip archives hold it."""
LEVEL = 2
"""Level of compression at which probabilities get as small as with zlib's default."""
DAMAGED_STREAM: tuple[type[Exception], ...] = (
    () if isal_zlib is None else (cast("type[Exception]", isal_zlib.error),)
)
"""Errors that a damaged stream raises, besides zlib's own."""


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as :func:`numpy.savez_compressed` does, many times as fast.

    Args:
        path: path of the file, with any ending.
        arrays: arrays of numbers, by name.

    Raises:
        ValueError: an array holds objects.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                if isal_zlib is not None and hasattr(member, "_compressor"):
                    packing = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, RAW)
                    member._compressor = packing
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def unpack_fast(member: IO[bytes]) -> None:
    """Let ISA-L unpack an open member from which nothing has been read yet, and check its sum.

    zipfile still checks its length.
    """
    deflated = getattr(member, "_compress_type", None) == zipfile.ZIP_DEFLATED
    if isal_zlib is None or not deflated or not hasattr(member, "_decompressor"):
        return
    member._decompressor = isal_zlib.decompressobj(RAW)
    if getattr(member, "_expected_crc", None) is not None and hasattr(member, "_update_crc"):
        member._update_crc = _Checksum(member)


class _Checksum:
    """Takes the place of zipfile's check of a member, whose CRC-32 takes a tenth of the time."""

    def __init__(self, member: Any) -> None:
        self._member, self._expected, self._found = member, member._expected_crc, 0

    def __call__(self, read: bytes) -> None:
        self._found = isal_zlib.crc32(read, self._found)
        if self._member._eof and self._found != self._expected:
            raise zipfile.BadZipFile(f"Bad CRC-32 for file {self._member.name!r}")
