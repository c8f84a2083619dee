"""Images in folders, a folder a class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from segcal.datasets.classification.samples import UNSAID, Samples

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
FOLDERS = {"train": 0, "val": 1, "valid": 1, "validation": 1, "test": 2}
"""Folders above those of the classes, and the part they are."""


def read_images(path: str | Path, size: int | tuple[int, int], colour: bool = True) -> Samples:
    """Read ``CLASS/IMAGE.png``, or ``train/CLASS/IMAGE.png`` with ``val`` and ``test``.

    All images are held in memory at the given size, a byte a value, upright as their camera says.

    Args:
        path: the folder.
        size: (height, width) that images are brought to, or one number for both.
        colour: three channels; False makes one of grey values.

    Raises:
        ValueError: naming the folder or file: nothing there, or no image.
    """
    root = Path(path)
    height, width = (size, size) if isinstance(size, int) else size
    above = [f for f in _folders(root) if f.name.lower() in FOLDERS]
    if above and (beside := [f.name for f in _folders(root) if f not in above]):
        raise ValueError(
            f"{root}: expected either folders of classes or {', '.join(f.name for f in above)} "
            f"with folders of classes in them; beside these there are {', '.join(beside[:5])}"
        )
    tops = {f: FOLDERS[f.name.lower()] for f in above} if above else {root: UNSAID}
    found = [
        (file, folder.name, part)
        for top, part in tops.items()
        for folder in _folders(top)
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in ENDINGS and not file.name.startswith(".")
    ]
    if not found:
        raise ValueError(f"{root}: expected folders of images, a folder a class; found no image")
    names = sorted({name for _, name, _ in found})
    images = np.stack([_read(file, height, width, colour) for file, _, _ in found])
    classes = np.array([names.index(name) for _, name, _ in found], np.int64)
    parts = np.array([part for _, _, part in found], np.int64) if above else None
    return Samples(images, classes, tuple(names), parts).check(str(root))


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(f for f in root.iterdir() if f.is_dir() and not f.name.startswith("."))
    except OSError as error:
        raise ValueError(f"{root}: cannot be read ({error})") from None


def _read(file: Path, height: int, width: int, colour: bool) -> NDArray[np.uint8]:
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):  # all above 255 would become white
                raise ValueError("more than 8 bits a value; scale it to 8 bits, or make an .npz")
            upright = ImageOps.exif_transpose(image).convert("RGB" if colour else "L")
            array = np.asarray(upright.resize((width, height), Image.Resampling.BILINEAR), np.uint8)
    except (OSError, ValueError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file}: not an image that can be read ({error})") from None
    return np.moveaxis(array, 2, 0) if colour else array[None]
