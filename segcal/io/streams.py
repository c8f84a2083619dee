"""Checks compressed voxel data to its end, since ITK reads on where it is damaged."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import IO, cast

from segcal.io.files import CHUNK

GZIP = b"\x1f\x8b"
ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS
MOST_HEADER = 1 << 20
"""Largest size of a text header, in bytes."""
MOST_LINE = 1000
"""Longest line of an NRRD's header, in bytes: longer lines of unknown fields crash ITK's reader."""
GIPL_HEADER = 256
YES = (b"T", b"t", b"1")
"""First letters of values that MetaImage reads as true."""
AXES = [b"%d" % n for n in range(1, 10)]
MOST_BEHIND = 1 << 20
"""Most bytes after the voxels that are tolerated; or as many as the voxels have, if more."""


def is_gzip(path: Path) -> bool:
    """Whether a file begins like a gzip file, whatever its name is."""
    with path.open("rb") as file:
        return file.read(2) == GZIP


def open_unpacked(path: Path) -> IO[bytes]:
    """Open a file, unpacking it if it is a gzip."""
    return cast("IO[bytes]", gzip.open(path)) if is_gzip(path) else path.open("rb")


def count_behind(file: IO[bytes], size: int) -> int:
    """Count the bytes after the first `size` bytes of a file, up to its checksum.

    Data after the end of a gzip that is not itself a gzip counts as one byte.

    Raises:
        ValueError: there is far more data than is plausible.
        OSError: the gzip is damaged.
    """
    behind = 0
    try:
        while chunk := file.read(CHUNK):
            behind += len(chunk)
            if behind > max(size, MOST_BEHIND):
                raise ValueError(f"more data after the {size} bytes that its header describes")
    except gzip.BadGzipFile as error:
        if "Not a gzipped file" not in str(error):  # the checksum was good, another file follows
            raise
        behind += 1
    return behind


def check_header(path: Path) -> None:
    """Check that the header of a MetaImage or NRRD has no line that would crash ITK.

    Raises:
        ValueError: it has such a line.
    """
    if path.name.endswith((".mha", ".mhd")):
        with path.open("rb") as file:
            axes = _metaimage_fields(file).get("ndims", b"")
        if axes not in AXES:
            raise ValueError(f"expected NDims of 1 to 9 in its header, got {axes[:20]!r}")
    if not path.name.endswith((".nrrd", ".nhdr")):
        return
    with path.open("rb") as file:
        while file.tell() < MOST_HEADER and (line := file.readline(MOST_HEADER).rstrip(b"\r\n")):
            if len(line) > MOST_LINE and not line.startswith(b"#") and b":=" not in line:
                raise ValueError(f"a line of {len(line)} bytes in its header")


def check_stream(path: Path, size: int) -> bool:
    """Check that the voxel data of a file of ITK's formats is complete, where ITK does not.

    Args:
        path: path of the file, or of its header.
        size: number of bytes of the voxels.

    Returns:
        whether a MetaImage or an NRRD holds more data after the voxels.

    Raises:
        ValueError: the file is too short; its compressed data is damaged, too short, too long, or
            in several files; or a MetaImage has 8 bytes per voxel and ITK would read 4.
        OSError: the file of the voxels cannot be read.
    """
    if is_gzip(path):
        with gzip.open(path) as file:
            while file.read(CHUNK):
                pass
    elif path.name.endswith((".mha", ".mhd")):
        return _check_metaimage(path, size)
    elif path.name.endswith((".nrrd", ".nhdr")):
        return _check_nrrd(path, size)
    elif path.name.endswith(".gipl") and (there := path.stat().st_size - GIPL_HEADER) < size:
        raise ValueError(f"ends after {max(there, 0)} of the {size} bytes of its voxels")
    return False


def _check_metaimage(path: Path, size: int) -> bool:
    """Check what ``CompressedData = True`` announces; the voxels are the last field's."""
    with path.open("rb") as file:
        fields = _metaimage_fields(file)
        elsewhere = fields.get("elementdatafile", b"")
        if fields.get("compresseddata", b"")[:1] in YES:
            stated = fields.get("compresseddatasize", b"0")
            length = int(stated) if stated.isdigit() else 0
            return _check_zlib(path, file, elsewhere, size, length)
        if fields.get("headersize", b"0") != b"0" or fields.get("binarydata", b"T")[:1] not in YES:
            return False
        behind = _behind(path, file, elsewhere, size)
    kind = fields.get("elementtype", b"").decode("latin-1")
    if behind == size and kind.startswith(("MET_LONG", "MET_ULONG")) and "LONG_LONG" not in kind:
        raise ValueError(
            f"a voxel takes 8 bytes, but {kind} means 4; state {kind.replace('LONG', 'LONG_LONG')} "
            "in its header, or write the file again as MET_INT"
        )
    return behind > 0


def _behind(path: Path, file: IO[bytes], elsewhere: bytes, size: int) -> int:
    """Number of bytes after the voxels, which begin at `file` or lie in a file that is named."""
    name = elsewhere.decode("utf-8", "replace")
    if name.upper() == "LOCAL":
        return path.stat().st_size - file.tell() - size
    if name.upper().startswith("LIST") or "%" in name:
        return 0
    return (path.parent / name).stat().st_size - size


def _metaimage_fields(file: IO[bytes]) -> dict[str, bytes]:
    """Fields of a header, up to the last field, after which the voxels may begin."""
    fields: dict[str, bytes] = {}
    while "elementdatafile" not in fields and file.tell() < MOST_HEADER:
        if not (line := file.readline(MOST_HEADER)):
            break
        key, _, value = line.partition(b"=")
        fields[_word(key)] = value.strip()
    return fields


def _check_nrrd(path: Path, size: int) -> bool:
    """Check what ``encoding: gzip`` announces; the voxels follow the first empty line."""
    with path.open("rb") as file:
        fields = {}
        while file.tell() < MOST_HEADER and (line := file.readline(MOST_HEADER).rstrip(b"\r\n")):
            key, _, value = line.partition(b":")
            fields[_word(key)] = value.strip()
        encoding, skipped = _word(fields.get("encoding", b"")), fields.get("byteskip", b"0")
        size += int(skipped) if skipped.isdigit() else 0
        elsewhere = fields.get("datafile", b"LOCAL")
        if encoding == "raw" and skipped.isdigit() and fields.get("lineskip", b"0") == b"0":
            return _behind(path, file, elsewhere, size) > 0
        if encoding not in ("gzip", "gz"):
            return False
        if fields.get("lineskip", b"0") != b"0":
            raise ValueError(
                "its header skips lines before compressed data, which is not supported; write it "
                "without a line skip"
            )
        return _check_zlib(path, file, elsewhere, size, 0)


def _word(text: bytes) -> str:
    """Name of a field for comparisons: in lower case, without spaces."""
    return text.decode("latin-1").replace(" ", "").strip().lower()


def _check_zlib(path: Path, file: IO[bytes], elsewhere: bytes, size: int, length: int) -> bool:
    """Check the stream at `file`, or in the file whose name a header gives."""
    name = elsewhere.decode("utf-8", "replace")
    if name.upper() == "LOCAL":
        return _measure(file, size, length)
    if name.upper().startswith("LIST") or "%" in name:
        raise ValueError(
            "its compressed data is in several files, which is not supported; write it as one file"
        )
    with (path.parent / name).open("rb") as other:
        return _measure(other, size, length)


def _measure(file: IO[bytes], size: int, length: int) -> bool:
    """Unpack a stream to its end, where zlib compares the checksum; say if more data follows."""
    stream, unpacked, read = zlib.decompressobj(ZLIB_OR_GZIP), 0, 0
    while not stream.eof:
        chunk = stream.unconsumed_tail
        if not chunk:
            chunk = file.read(min(CHUNK, length - read) if length else CHUNK)
            read += len(chunk)
        try:
            unpacked += len(stream.decompress(chunk, CHUNK) if chunk else stream.flush())
        except zlib.error as error:
            raise ValueError(f"its compressed data is damaged ({error}); copy it again") from None
        if unpacked > size or not (chunk or stream.eof):
            break
    if unpacked != size or not stream.eof:
        what = "is longer than" if unpacked > size else f"ends after {unpacked} of"
        raise ValueError(f"its compressed data {what} the {size} bytes that its header describes")
    return bool(stream.unused_data or file.read(1))
