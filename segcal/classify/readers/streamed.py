"""Images that stay on disk: which files, and what is cut out of them, decoded when wanted.

A reader that finds more images than memory holds gives the files to :func:`streamed` and returns
what comes of it; its name stands in :data:`segcal.classify.experiment.STREAMED`.
"""

from __future__ import annotations

import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from segcal.classify.readers.decoding import ImageFiles
from segcal.classify.readers.samples import Samples

__all__ = ["streamed"]

MOST_NAMED = 3
"""Missing files that a message names."""


def streamed(
    files: Sequence[str | Path],
    targets: NDArray[Any],
    names: Sequence[str],
    *,
    boxes: ArrayLike | None = None,
    parts: NDArray[np.int64] | None = None,
    groups: NDArray[np.int64] | None = None,
    colour: bool = True,
    source: str = "images",
) -> Samples:
    """Samples of images that are decoded when they are wanted.

    All files must be there; what they hold is seen when they are decoded. Their checksum is that of
    their names (below the folder that they share), sizes and times in seconds: files that are
    copied elsewhere keep it if their times are kept (``cp -p``, ``rsync -a``, ``tar``).

    Args:
        files: N images; one with several boxes is there several times.
        targets: as of :class:`Samples`: classes ``(N,)``, or labels ``(N, T)`` of 0, 1, and -1
            where unknown.
        names: of the classes or labels.
        boxes: ``(N, 4)`` left, upper, right, lower edge in pixels of what is cut out of each
            image, NaN for all of it; None takes all images whole.
        parts: ``(N,)`` 0 train, 1 validation, 2 test, -1 where the data set does not say; None
            says nothing.
        groups: ``(N,)`` samples of a group are never parted: those of one photograph, say.
        colour: three channels; False makes one of grey values.
        source: what messages begin with: the folder, or the file of the annotations.

    Raises:
        ValueError: naming the first files that are missing; boxes without an area; what
            :meth:`Samples.check` refuses.
    """
    if not len(files):
        raise ValueError(f"{source}: expected images, found none")
    paths = np.array([os.fsencode(file) for file in files])
    edges = None if boxes is None else _edges(np.asarray(boxes, np.float32), files, source)
    return Samples(
        inputs=ImageFiles(paths, edges, colour),
        targets=targets,
        names=tuple(names),
        parts=parts,
        groups=groups,
        checksum=_checksum(paths, edges, source),
    ).check(source)


def _edges(
    boxes: NDArray[np.float32], files: Sequence[str | Path], source: str
) -> NDArray[np.float32]:
    if boxes.shape != (len(files), 4):
        raise ValueError(f"{source}: expected boxes ({len(files)}, 4), got {boxes.shape}")
    empty = (boxes[:, 0] >= boxes[:, 2]) | (boxes[:, 1] >= boxes[:, 3])
    if empty.any():
        first = int(empty.argmax())
        raise ValueError(
            f"{source}: expected boxes of left, upper, right and lower edge with pixels between "
            f"them; got {boxes[first].tolist()} of {files[first]}"
        )
    return boxes


def _checksum(paths: NDArray[np.bytes_], edges: NDArray[np.float32] | None, source: str) -> int:
    """Of names, sizes and times of files, in the order of the samples, and their boxes."""
    unique, inverse = np.unique(paths, return_inverse=True)
    sizes = np.zeros((len(unique), 2), np.int64)
    missing = []
    for i, path in enumerate(unique):
        try:
            found = os.stat(path)  # noqa: PTH116 - of a million files
        except OSError:
            found = None
        if found is None or not stat.S_ISREG(found.st_mode):
            missing.append(os.fsdecode(path))
        else:
            sizes[i] = found.st_size, int(found.st_mtime)
    if missing:
        more = ", ..." if len(missing) > MOST_NAMED else ""
        raise ValueError(
            f"{source}: {len(missing)} of {len(unique)} image files are missing: "
            f"{', '.join(missing[:MOST_NAMED])}{more}; bring them there, or leave them out of what "
            "lists them"
        )
    above = os.path.commonpath({os.path.dirname(path) for path in unique})  # noqa: PTH120
    sum_ = zlib.crc32(sizes.data)
    for path in unique:
        sum_ = zlib.crc32(path[len(above) :] + b"\0", sum_)
    sum_ = zlib.crc32(inverse.astype(np.int64).data, sum_)
    return sum_ if edges is None else zlib.crc32(edges.data, sum_)
