"""VISPR's (Visual Privacy) images, labelled with the private attributes that they show."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np

from segcal.classify.readers.annotations import (
    PartNames,
    check_apart,
    fields,
    label_rows,
    part_numbers,
    read_json,
    read_lines,
    read_text,
)
from segcal.classify.readers.samples import Samples
from segcal.classify.readers.streamed import streamed

ATTRIBUTES = "attributes.tsv"


def read_vispr(
    path: str | Path,
    train: PartNames = ("train2017", "val2017"),
    validation: PartNames = None,
    test: PartNames = "test2017",
) -> Samples:
    """Read ``NAME.txt``, the annotations that it lists with their images, and ``attributes.tsv``.

    An image has the attributes that its annotation lists and no others (``a0_safe`` is one of the
    68). The format is the one that the data set's own program reads
    (https://github.com/tribhuvanesh/vpa, ``vispr/tools``): a list of annotations for each part;
    ``image_path`` and ``labels`` in every annotation; a table of attributes with their ``idx``. The
    paper of the two-way loss trains on train and val (14167) and tests on test (8000).

    Args:
        path: folder of the data set; paths in its files are relative to it.
        train: NAME of the list of the training part, or several names.
        validation: of the validation part; None draws a share of the training samples.
        test: of the test part; None draws a share of the training samples.

    Raises:
        ValueError: the file, which is named, is missing, damaged, or has an attribute that the
            table lacks; images are missing, or in two parts.
    """
    root = Path(path)
    names = parse_attributes(read_text(root / ATTRIBUTES), str(root / ATTRIBUTES))
    files, labels, parts = [], [], []
    for name, part in part_numbers(train, validation, test):
        for line in read_lines(root / f"{name}.txt"):
            image, of = parse_image(read_json(root / line), names, str(root / line))
            files.append(root / image)
            labels.append(of)
            parts.append(part)
    check_apart(files, parts, str(root))
    targets = label_rows(labels, names)
    return streamed(files, targets, names, parts=np.array(parts, np.int64), source=str(root))


def parse_attributes(table: str, where: str) -> tuple[str, ...]:
    """Names of the attributes, in the order of their ``idx``; attributes without one are left out.

    Args:
        table: content of the file.
        where: beginning of messages.

    Raises:
        ValueError: columns are missing, or numbers are invalid.
    """
    rows = list(csv.DictReader(table.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))
    try:
        found = {int(row["idx"]): row["attribute_id"] for row in rows if row["idx"]}
    except (KeyError, ValueError):
        found = {}
    if not found or not all(found.values()):
        raise ValueError(f"{where}: expected columns idx (numbers) and attribute_id, with tabs")
    return tuple(found[number] for number in sorted(found))


def parse_image(content: Any, names: tuple[str, ...], where: str) -> tuple[str, list[str]]:
    """Path of an image, and its attributes.

    Args:
        content: of the JSON file.
        names: of all attributes.
        where: beginning of messages.

    Raises:
        ValueError: keys are missing, or an attribute is unknown.
    """
    image, labels = fields(content, {"image_path": str, "labels": list}, where)
    if new := [str(label) for label in labels if label not in names]:
        raise ValueError(f"{where}: {ATTRIBUTES} has no {', '.join(new[:3])}")
    return image, labels
