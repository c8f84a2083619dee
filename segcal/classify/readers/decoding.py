"""Images in files that are decoded on demand."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

__all__ = ["ImageError", "ImageFiles", "content_of", "decoded"]


class ImageError(ValueError):
    """Raised for a file that holds no image, or an unexpected one."""


@dataclass(frozen=True)
class ImageFiles:
    """Images in files, used like an array of images.

    Attributes:
        paths: ``(N,)`` as bytes, which processes can share; a path may occur many times.
        boxes: ``(N, 4)`` left, upper, right, lower edge in pixels of the upright image, the last
            two exclusive; NaN takes the whole image. None takes all images whole.
        colour: three channels; False makes one of grey values.
    """

    paths: NDArray[np.bytes_]
    boxes: NDArray[np.float32] | None = None
    colour: bool = True

    ndim = 4

    def __len__(self) -> int:
        """Number of images."""
        return len(self.paths)

    def __getitem__(self, index: NDArray[Any]) -> ImageFiles:
        """Return some of the images, without decoding them."""
        boxes = None if self.boxes is None else self.boxes[index]
        return replace(self, paths=self.paths[index], boxes=boxes)

    @property
    def channels(self) -> int:
        """Of every image."""
        return 3 if self.colour else 1

    def file(self, number: int) -> Path:
        """Return the file of an image."""
        return Path(os.fsdecode(self.paths[number]))

    def decode(self, number: int) -> NDArray[np.uint8]:
        """Return an image ``(C, H, W)``, turned upright by its camera data and cut to its box.

        Raises:
            ImageError: the file, which is named, is not readable, or its box lies outside.
        """
        box = None if self.boxes is None or np.isnan(self.boxes[number]).any() else (
            self.boxes[number].tolist()
        )  # fmt: skip
        return decoded(self.file(number), colour=self.colour, box=box)


def content_of(file: Path) -> bytes:
    """Return the content of a file.

    Raises:
        ImageError: the file, which is named, cannot be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise ImageError(f"{file}: cannot be read ({error})") from None


def decoded(
    file: Path,
    content: bytes | None = None,
    *,
    colour: bool = True,
    box: Sequence[float] | None = None,
    size: tuple[int, int] | None = None,
) -> NDArray[np.uint8]:
    """Return an image ``(C, H, W)``, turned upright by its camera data.

    Args:
        file: of the image.
        content: of the file, if it has been read.
        colour: three channels; False makes one of grey values.
        box: left, upper, right, lower edge in pixels of the part to cut out; None takes all.
        size: (height, width) to resize to; None leaves the size as it is.

    Raises:
        ImageError: the file, which is named, is not a readable image, or the box lies outside.
    """
    content = content_of(file) if content is None else content
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.mode.startswith(("I", "F")):  # all above 255 would become white
                raise ValueError("more than 8 bits a value; scale it to 8 bits, or make an .npz")
            upright = ImageOps.exif_transpose(image).convert("RGB" if colour else "L")
    except Exception as error:  # noqa: BLE001 - a damaged file fails anywhere in the readers
        raise ImageError(
            f"{file}: not an image that can be read ({error}); copy it again, or leave it out"
        ) from None
    if box is not None:
        upright = upright.crop(_within(file, box, upright.size))
    if size is not None:
        upright = upright.resize(size[::-1], Image.Resampling.BILINEAR)
    array = np.array(upright, np.uint8)  # a copy, which may be written to
    return np.ascontiguousarray(np.moveaxis(array, 2, 0)) if colour else array[None]


def _within(file: Path, box: Sequence[float], size: tuple[int, int]) -> tuple[int, int, int, int]:
    """The pixels of an image that a box touches."""
    width, height = size
    left, upper = max(0, math.floor(box[0])), max(0, math.floor(box[1]))
    right, lower = min(width, math.ceil(box[2])), min(height, math.ceil(box[3]))
    if left >= right or upper >= lower:
        raise ImageError(
            f"{file}: the box {list(box)} lies outside of its {width} x {height} pixels; check "
            "that the annotations belong to this image"
        )
    return left, upper, right, lower
