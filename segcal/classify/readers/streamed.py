"""Images that stay on disk: a list of files and boxes, decoded on demand.

A reader of a data set that may exceed memory passes its files to :func:`streamed` and returns the
result; its name is listed in :data:`segcal.classify.experiment.STREAMED`.
"""

from __future__ import annotations

import os
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
"""Number of missing files that a message names."""


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
    """Samples of images that are decoded on demand.

    All files must exist; their content is checked when they are decoded. The checksum covers their
    names below their common folder, so that they may be copied elsewhere, and a damaged file may be
    replaced without training again.

    Args:
        files: N images; an image with several boxes occurs several times.
        targets: as in :class:`Samples`: classes ``(N,)``, or labels ``(N, T)`` of 0, 1, and -1
            where unknown.
        names: of the classes or labels.
        boxes: ``(N, 4)`` left, upper, right, lower edge in pixels of the part to cut out of each
            image, NaN for the whole image; None takes all images whole.
        parts: ``(N,)`` 0 train, 1 validation, 2 test, -1 where unknown; None if the data set gives
            no parts.
        groups: ``(N,)`` samples of a group, e.g. of one photograph, always stay together.
        colour: three channels; False makes one of grey values.
        source: beginning of messages: the folder, or the file of the annotations.

    Raises:
        ValueError: files are missing (the first are named); boxes without an area; samples that
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
    """Checksum of the names of files, in the order of the samples, and of their boxes."""
    unique, inverse = np.unique(paths, return_inverse=True)
    is_file = os.path.isfile  # of a million files
    if missing := [os.fsdecode(path) for path in unique if not is_file(path)]:
        more = ", ..." if len(missing) > MOST_NAMED else ""
        raise ValueError(
            f"{source}: {len(missing)} of {len(unique)} image files are missing: "
            f"{', '.join(missing[:MOST_NAMED])}{more}; copy them there, or remove "
            "them from the list"
        )
    above = os.path.commonpath({os.path.dirname(path) for path in unique})  # noqa: PTH120
    sum_ = 0
    for path in unique:
        sum_ = zlib.crc32(path[len(above) :] + b"\0", sum_)
    sum_ = zlib.crc32(inverse.astype(np.int64).data, sum_)
    return sum_ if edges is None else zlib.crc32(edges.data, sum_)
