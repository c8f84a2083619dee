"""Images of VISPR (Visual Privacy) with the private attributes that they show."""

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
    """Read ``NAME.txt``, the annotations that it lists, the images these name, ``attributes.tsv``.

    An image has the attributes that its annotation lists and no others (``a0_safe`` is one of the
    68). The format is that which the data set's own program reads
    (https://github.com/tribhuvanesh/vpa, ``vispr/tools``): a list of annotations a part; in each of
    them ``image_path`` and ``labels``; the attributes with an ``idx`` in a table. The two-way
    loss's paper trains on train and val (14167) and tests on test (8000).

    Args:
        path: folder of the data set, which all paths in its files are relative to.
        train: NAME of the list of what trains, or several.
        validation: of what validates; None draws a share of the training samples.
        test: of what tests; None draws a share of them, too.

    Raises:
        ValueError: naming the file: not there, damaged, or with an attribute that the table has
            not; images that are missing, or in two parts.
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
    """Names of the attributes, in the order of their ``idx``; those without one are left out.

    Args:
        table: what the file holds.
        where: it is, as messages begin.

    Raises:
        ValueError: columns that are missing, or numbers that are none.
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
        where: it is, as messages begin.

    Raises:
        ValueError: keys that are missing, or an attribute of another name.
    """
    image, labels = fields(content, {"image_path": str, "labels": list}, where)
    if new := [str(label) for label in labels if label not in names]:
        raise ValueError(f"{where}: {ATTRIBUTES} has no {', '.join(new[:3])}")
    return image, labels
