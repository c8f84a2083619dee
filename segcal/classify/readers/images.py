"""Images in folders, one folder per class."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from segcal.classify.readers.decoding import content_of, decoded
from segcal.classify.readers.folders import PARTS, files_of_classes
from segcal.classify.readers.samples import UNSAID, Samples

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")


def read_images(path: str | Path, size: int | tuple[int, int], colour: bool = True) -> Samples:
    """Read ``CLASS/IMAGE.png``, or ``train/CLASS/IMAGE.png`` with ``val`` and ``test``.

    All images are held in memory at the given size, one byte per value, turned upright by their
    camera data.

    Args:
        path: the folder.
        size: (height, width) to which images are resized, or one number for both.
        colour: three channels; False makes one of grey values.

    Raises:
        ValueError: an invalid size; or a folder or file, which is named, is empty or no image.
    """
    root = Path(path)
    height, width = _sides(size)
    found = [
        (file, name, part)
        for file, name, part in files_of_classes(root, lambda name: PARTS.get(name.lower(), UNSAID))
        if file.suffix.lower() in ENDINGS
    ]
    if not found:
        raise ValueError(f"{root}: expected folders of images, one per class; found no image")
    names = sorted({name for _, name, _ in found})
    images, checksum = [], 0
    for file, _, _ in found:
        content = content_of(file)
        checksum = zlib.crc32(file.relative_to(root).as_posix().encode(), checksum)
        checksum = zlib.crc32(content, checksum)
        images.append(decoded(file, content, colour=colour, size=(height, width)))
    classes = np.array([names.index(name) for _, name, _ in found], np.int64)
    parts = np.array([part for _, _, part in found], np.int64)
    said = None if (parts == UNSAID).all() else parts
    samples = Samples(np.stack(images), classes, tuple(names), said, checksum=checksum)
    return samples.check(str(root))


def _sides(size: object) -> tuple[int, int]:
    sides = [size, size] if isinstance(size, int) else size
    match sides:
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
    raise ValueError(f"size: expected pixels, from 1, or [height, width], got {size!r}")
