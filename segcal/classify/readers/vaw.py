"""Objects in images of VAW (Visual Attributes in the Wild), with attributes mostly unknown."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segcal.classify.readers.annotations import (
    PartNames,
    edges,
    fields,
    first_there,
    part_numbers,
    read_json,
)
from segcal.classify.readers.samples import Samples
from segcal.classify.readers.streamed import streamed

INDEX = "attribute_index.json"
"""Numbers of the attributes, by name."""
FOLDERS = ("VG_100K", "VG_100K_2", ".")
"""Folders of Visual Genome's images, which come in two archives."""


class Instance(NamedTuple):
    """An object in an image.

    Attributes:
        image: its number in Visual Genome.
        box: left, upper, right and lower edge.
        positive: attributes that it has.
        negative: attributes that it does not have.
    """

    image: int
    box: tuple[float, float, float, float]
    positive: frozenset[str]
    negative: frozenset[str]


def read_vaw(
    path: str | Path,
    images: str | Path,
    train: PartNames = ("train_part1", "train_part2", "val"),
    validation: PartNames = None,
    test: PartNames = "test",
) -> Samples:
    """Read ``data/NAME.json`` and images of Visual Genome.

    A sample is an object, cut out by its box. An attribute is 1 if it is listed as positive, 0 if
    listed as negative, and unknown if listed as neither or both. The format is described at
    https://github.com/adobe-research/vaw_dataset. Objects of one image stay in one part. The paper
    of the two-way loss trains on train and val (229076) and tests on test (31819).

    Args:
        path: folder of the data set; the files are in its folder ``data``, or in itself.
        images: folder with Visual Genome's ``VG_100K`` and ``VG_100K_2``, or with all images.
        train: NAME of the files of the training part.
        validation: of the validation part; None draws a share of the training images.
        test: of the test part; None draws a share of the training images.

    Raises:
        ValueError: the file, which is named, is missing, damaged, or has attributes that
            ``attribute_index.json`` lacks; images are missing.
    """
    root = Path(path)
    instances: list[Instance] = []
    parts: list[int] = []
    for name, part in part_numbers(train, validation, test):
        file = first_there(root, (f"data/{name}.json", f"{name}.json"), "instances")
        found = parse_instances(read_json(file, leave_out=("instance_polygon",)), str(file))
        instances += found
        parts += [part] * len(found)
    names = _names(root, instances)
    column = {name: t for t, name in enumerate(names)}
    targets = np.full((len(instances), len(names)), -1, np.int8)
    for row, one in zip(targets, instances, strict=True):
        row[[column[a] for a in one.positive - one.negative]] = 1
        row[[column[a] for a in one.negative - one.positive]] = 0
    return streamed(
        _files(Path(images), [one.image for one in instances]),
        targets,
        names,
        boxes=[one.box for one in instances],
        parts=np.array(parts, np.int64),
        groups=np.array([one.image for one in instances], np.int64),
        source=str(root),
    )


def parse_instances(content: Any, where: str) -> list[Instance]:
    """The objects of a file.

    Args:
        content: of the JSON file.
        where: beginning of messages.

    Raises:
        ValueError: keys are missing, or a box is invalid.
    """
    if not isinstance(content, list):
        raise ValueError(f"{where}: expected a list of instances, got {type(content).__name__}")
    kinds: dict[str, type | tuple[type, ...]] = {
        "image_id": (int, str), "instance_bbox": list, "positive_attributes": list,
        "negative_attributes": list,
    }  # fmt: skip
    found = []
    for i, one in enumerate(content):
        place = f"{where}: [{i}]"
        image, box, positive, negative = fields(one, kinds, place)
        if not str(image).isdecimal():
            raise ValueError(f"{place}: image_id: expected a number, got {image!r}")
        found.append(
            Instance(
                int(image),
                edges(box, place),
                frozenset(map(str, positive)),
                frozenset(map(str, negative)),
            )
        )
    return found


def _names(root: Path, instances: list[Instance]) -> list[str]:
    """Names of the attributes in the published order; without it, in alphabetical order."""
    used = {a for one in instances for a in one.positive | one.negative}
    for file in (root / "data" / INDEX, root / INDEX):
        if file.is_file():
            index = read_json(file)
            if not isinstance(index, dict) or not all(isinstance(i, int) for i in index.values()):
                raise ValueError(f"{file}: expected numbers by the names of attributes")
            if new := sorted(used - index.keys()):
                raise ValueError(f"{file}: has no {', '.join(new[:3])}, which instances have")
            return sorted(index, key=index.__getitem__)
    return sorted(used)


def _files(root: Path, numbers: list[int]) -> list[Path]:
    """Files of images, in the first folder that has them."""
    folders = [root / name for name in FOLDERS if (root / name).is_dir()]
    if not folders:
        raise ValueError(f"images: {root}: no such folder")
    there = {
        number: next(
            (file for folder in folders if (file := folder / f"{number}.jpg").is_file()),
            folders[0] / f"{number}.jpg",
        )
        for number in set(numbers)
    }
    return [there[number] for number in numbers]
