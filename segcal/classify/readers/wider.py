"""People in images of WIDER Attribute, labelled with attributes such as their clothes."""

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

FILES = ("wider_attribute_trainval.json", "wider_attribute_test.json")
FOLDERS = ("", "Anno/", "Annotations/", "wider_attribute_annotation/")
"""Possible folders of the files; the archive has no folder."""
MEANINGS = {1: 1, -1: 0, 0: -1}
"""Positive, negative and unspecified, with their targets."""


class Person(NamedTuple):
    """A person in an image.

    Attributes:
        file: of the image, below the folder of images.
        box: left, upper, right and lower edge.
        targets: of every attribute: 1, 0, or -1 where unspecified.
    """

    file: str
    box: tuple[float, float, float, float]
    targets: list[int]


def read_wider(
    path: str | Path,
    train: PartNames = ("train", "val"),
    validation: PartNames = None,
    test: PartNames = "test",
) -> Samples:
    """Read ``wider_attribute_trainval.json``, ``wider_attribute_test.json`` and ``Image/``.

    A sample is a person, cut out by the box; an attribute is 1 (positive), 0 (negative, -1 in the
    file) or unknown (unspecified, 0 in the file). The format is described in the data set's
    Readme.txt (http://mmlab.ie.cuhk.edu.hk/projects/WIDERAttribute.html). People of one image stay
    in one part. The papers train on train and val and test on test.

    Args:
        path: folder of the data set.
        train: the training part: folders of ``Image/``, with which the names of the files begin.
        validation: the validation part; None draws a share of the training images.
        test: the test part; None draws a share of the training images.

    Raises:
        ValueError: the file, which is named, is missing or damaged; images are missing.
    """
    root = Path(path)
    parts = dict(part_numbers(train, validation, test))
    names: tuple[str, ...] = ()
    people: list[Person] = []
    for name in FILES:
        file = first_there(root, [folder + name for folder in FOLDERS], "the attributes of people")
        found, of = parse_people(read_json(file), str(file))
        if names and found != names:
            raise ValueError(f"{file}: has other attributes than {FILES[0]}")
        names = found
        people += of
    kept = [person for person in people if person.file.split("/")[0] in parts]
    files = [person.file for person in kept]
    return streamed(
        [root / "Image" / file for file in files],
        np.array([person.targets for person in kept], np.int8).reshape(-1, len(names)),
        names,
        boxes=[person.box for person in kept],
        parts=np.array([parts[file.split("/")[0]] for file in files], np.int64),
        groups=np.unique(files, return_inverse=True)[1],
        source=str(root),
    )


def parse_people(content: Any, where: str) -> tuple[tuple[str, ...], list[Person]]:
    """Names of the attributes, and the people of a file.

    Args:
        content: of the JSON file.
        where: beginning of messages.

    Raises:
        ValueError: keys are missing, a box is invalid, or attributes are not 1, -1 or 0.
    """
    images, numbered = fields(content, {"images": list, "attribute_id_map": dict}, where)
    try:
        names = tuple(str(numbered[key]) for key in sorted(numbered, key=int))
    except ValueError:
        raise ValueError(f"{where}: attribute_id_map: expected numbers as keys") from None
    people = []
    for i, image in enumerate(images):
        place = f"{where}: images[{i}]"
        file, targets = fields(image, {"file_name": str, "targets": list}, place)
        for person in targets:
            attributes, box = fields(person, {"attribute": list, "bbox": list}, place)
            known = all(isinstance(a, int) and a in MEANINGS for a in attributes)
            if len(attributes) != len(names) or not known:
                raise ValueError(
                    f"{place}: attribute: expected {len(names)} of 1, -1 and 0, got {attributes}"
                )
            people.append(Person(file, edges(box, place), [MEANINGS[a] for a in attributes]))
    return names, people
