"""Archives of arrays (``.npz``), packed and unpacked by ISA-L, which is faster than zlib.

The archives are those of NumPy: zipfile writes and reads them, and only the stream inside a member
goes through another library. Without it (no wheel for the machine), or where zipfile keeps its
streams elsewhere than today, zlib does the same.
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
"""Probabilities get as small as with zlib's default."""
DAMAGED_STREAM: tuple[type[Exception], ...] = (
    () if isal_zlib is None else (cast("type[Exception]", isal_zlib.error),)
)
"""What is raised of a stream that is damaged, beside zlib's own errors."""


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays as :func:`numpy.savez_compressed`, many times as fast.

    Args:
        path: of the file, whatever it is called.
        arrays: by name, of numbers.

    Raises:
        ValueError: an array of objects.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                if isal_zlib is not None and hasattr(member, "_compressor"):
                    packing = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, RAW)
                    member._compressor = packing
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)


def unpack_fast(member: IO[bytes]) -> None:
    """Let a member that is open, and of which nothing was read, be unpacked by ISA-L.

    zipfile goes on counting and comparing its checksum.
    """
    deflated = getattr(member, "_compress_type", None) == zipfile.ZIP_DEFLATED
    if isal_zlib is not None and deflated and hasattr(member, "_decompressor"):
        member._decompressor = isal_zlib.decompressobj(RAW)
