"""COCO's images, labelled with the categories of the objects in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from segcal.classify.readers.annotations import (
    PartNames,
    check_apart,
    fields,
    first_there,
    label_rows,
    part_numbers,
    read_json,
)
from segcal.classify.readers.samples import Samples
from segcal.classify.readers.streamed import streamed


class Instances(NamedTuple):
    """Content of a file of instances.

    Attributes:
        names: of the categories, in the order of their numbers.
        images: by the number of an image, its file name and the names of its categories.
    """

    names: tuple[str, ...]
    images: dict[int, tuple[str, frozenset[str]]]


def read_coco(
    path: str | Path,
    train: PartNames = "train2014",
    validation: PartNames = None,
    test: PartNames = "val2014",
    *,
    keep_empty: bool = False,
) -> Samples:
    """Read ``annotations/instances_NAME.json`` and the images of ``NAME/`` or ``images/NAME/``.

    An image has the label of a category if it shows any object of the category, including crowds.
    The format is described at https://cocodataset.org/#format-data, object detection. The default
    names follow the paper of the two-way loss, which leaves out images without an object (82081
    train, 40137 test).

    Args:
        path: folder of the data set.
        train: NAME of the training part, or several names.
        validation: of the validation part; None draws a share of the training samples.
        test: of the test part; None draws a share of the training samples.
        keep_empty: whether to keep images without an object, with all labels 0.

    Raises:
        ValueError: the file, which is named, is missing, damaged, or has other categories than the
            first file; images are missing, or in two parts.
    """
    root = Path(path)
    numbers: list[int] = []
    files: list[Path] = []
    labels: list[frozenset[str]] = []
    parts: list[int] = []
    names: tuple[str, ...] = ()
    for name, part in part_numbers(train, validation, test):
        file = root / "annotations" / f"instances_{name}.json"
        found = parse_instances(read_json(file, leave_out=("segmentation",)), str(file))
        if names and found.names != names:
            raise ValueError(f"{file}: has other categories than {', '.join(names[:3])}, ...")
        names = found.names
        folder = first_there(root, (name, f"images/{name}"), "images")
        for number, (image, of) in found.images.items():
            if of or keep_empty:
                numbers.append(number)
                files.append(folder / image)
                labels.append(of)
                parts.append(part)
    check_apart(numbers, parts, str(root))
    targets = label_rows(labels, names)
    return streamed(files, targets, names, parts=np.array(parts, np.int64), source=str(root))


def parse_instances(content: Any, where: str) -> Instances:
    """Categories of the images in a file of instances.

    Args:
        content: of the JSON file.
        where: beginning of messages.

    Raises:
        ValueError: keys are missing, or the image or category of an object is not listed.
    """
    given = fields(content, dict.fromkeys(("images", "annotations", "categories"), list), where)
    categories = dict(
        sorted(
            fields(c, {"id": int, "name": str}, f"{where}: categories[{i}]")
            for i, c in enumerate(given[2])
        )
    )
    images = dict(
        fields(image, {"id": int, "file_name": str}, f"{where}: images[{i}]")
        for i, image in enumerate(given[0])
    )
    labels: dict[int, set[str]] = {number: set() for number in images}
    for i, one in enumerate(given[1]):
        place = f"{where}: annotations[{i}]"
        image, category = fields(one, {"image_id": int, "category_id": int}, place)
        if image not in images or category not in categories:
            raise ValueError(
                f"{place}: image {image} or category {category} is not listed; check "
                "that the file is complete"
            )
        labels[image].add(categories[category])
    found = {number: (images[number], frozenset(of)) for number, of in labels.items()}
    return Instances(tuple(categories.values()), found)
