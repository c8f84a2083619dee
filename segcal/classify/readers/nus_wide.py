"""NUS-WIDE's images, labelled with 81 concepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segcal.classify.readers.annotations import PartNames, first_there, part_numbers, read_lines
from segcal.classify.readers.samples import Samples
from segcal.classify.readers.streamed import streamed


def read_nus_wide(
    path: str | Path,
    train: PartNames = "Train",
    validation: PartNames = None,
    test: PartNames = "Test",
    *,
    images: str | Path | None = None,
    keep_empty: bool = True,
) -> Samples:
    r"""Read ``ImageList/NAMEImagelist.txt``, ``Groundtruth/TrainTestLabels`` and the images.

    The labels of a concept are in ``Labels_CONCEPT_NAME.txt``, with a line of 0 or 1 for each image
    of the list; ``Concepts81.txt`` lists the concepts (https://github.com/NExTplusplus/NUS-WIDE). A
    number below 0 means unknown: the published ``Labels_lake_Train.txt`` has one. Names of images
    have ``\`` between folders.

    Args:
        path: folder of the data set.
        train: NAME of the training part.
        validation: of the validation part; None draws a share of the training samples.
        test: of the test part; None draws a share of the training samples.
        images: folder of the images; None is ``Flickr``, ``images`` or ``Images`` below `path`.
        keep_empty: whether to keep images without a concept.

    Raises:
        ValueError: the file, which is named, is missing, damaged, or of another length than the
            list; images are missing.
    """
    root = Path(path)
    names = read_lines(
        first_there(root, ("Concepts81.txt", "ConceptsList/Concepts81.txt"), "the concepts")
    )
    places = ("Flickr", "images", "Images")
    folder = first_there(root, places, "images") if images is None else Path(images)
    labels = root / "Groundtruth" / "TrainTestLabels"
    files: list[Path] = []
    parts: list[NDArray[np.int64]] = []
    targets: list[NDArray[np.int8]] = []
    for name, part in part_numbers(train, validation, test):
        listed = read_lines(root / "ImageList" / f"{name}Imagelist.txt")
        columns = []
        for concept in names:
            file = labels / f"Labels_{concept}_{name}.txt"
            columns.append(parse_labels(read_lines(file), len(listed), str(file)))
        rows = np.stack(columns, 1)
        kept = np.flatnonzero(keep_empty | (rows == 1).any(1))
        files += [folder / listed[i].replace("\\", "/") for i in kept]
        targets.append(rows[kept])
        parts.append(np.full(len(kept), part))
    return streamed(
        files, np.concatenate(targets), names, parts=np.concatenate(parts), source=str(root)
    )


def parse_labels(lines: list[str], count: int, where: str) -> NDArray[np.int8]:
    """Targets of a concept ``(count,)``: 0, 1, and -1 where the number is below 0.

    Args:
        lines: of the file.
        count: of the images.
        where: beginning of messages.

    Raises:
        ValueError: another number of lines, or a value other than 0 and 1.
    """
    if len(lines) != count:
        raise ValueError(
            f"{where}: expected a line for each of {count} images, got {len(lines)}; are the list "
            "of images and the labels of one version of the data set?"
        )
    try:
        values = np.array(lines, np.int64)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: expected 0 or 1 in every line ({error})") from None
    if (values > 1).any():
        line = int((values > 1).argmax())
        raise ValueError(f"{where}: line {line + 1}: expected 0 or 1, got {values[line]}")
    return np.maximum(values, -1).astype(np.int8)
