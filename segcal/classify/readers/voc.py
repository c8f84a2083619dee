"""PASCAL VOC's images, labelled with the classes of the objects in them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args
from xml.etree.ElementTree import Element

import numpy as np

from segcal.arrays import check_choice
from segcal.classify.readers.annotations import (
    PartNames,
    check_apart,
    part_numbers,
    read_lines,
    read_xml,
)
from segcal.classify.readers.samples import Samples
from segcal.classify.readers.streamed import streamed

Difficult = Literal["unknown", "positive", "negative"]
VALUES = {"unknown": -1, "positive": 1, "negative": 0}


def read_voc(
    path: str | Path,
    train: PartNames = "trainval",
    validation: PartNames = None,
    test: PartNames = "test",
    *,
    difficult: Difficult = "unknown",
) -> Samples:
    """Read ``ImageSets/Main/NAME.txt``, ``Annotations/*.xml`` and ``JPEGImages/*.jpg``.

    The layout and the convention are those of the development kits of VOC2007 and VOC2012
    (http://host.robots.ox.ac.uk/pascal/VOC/voc2007/htmldoc/index.html): if all objects of a class
    in an image are marked difficult, the image is neither positive nor negative for the class. For
    2007 the paper of the two-way loss trains on trainval (5011) and tests on test (4952), which
    comes in a separate archive; for 2012, whose test set has no annotations, it trains on train
    (5717) and tests on val (5823).

    Args:
        path: folder of a year, e.g. ``VOCdevkit/VOC2007``.
        train: NAME of the list of the training part, or several names.
        validation: of the validation part; None draws a share of the training samples.
        test: of the test part; None draws a share of the training samples.
        difficult: target of a class whose objects in an image are all difficult.

    Raises:
        ValueError: the file, which is named, is missing or damaged; images are missing, or in two
            parts.
    """
    check_choice("difficult", difficult, get_args(Difficult))
    root = Path(path)
    listed = [
        (line.split()[0], part)
        for name, part in part_numbers(train, validation, test)
        for line in read_lines(root / "ImageSets" / "Main" / f"{name}.txt")
    ]
    parts = [part for _, part in listed]
    check_apart([image for image, _ in listed], parts, str(root))
    objects = [
        parse_objects(read_xml(file), str(file))
        for file in (root / "Annotations" / f"{image}.xml" for image, _ in listed)
    ]
    names = sorted({name for of in objects for name in of})
    targets = np.zeros((len(listed), len(names)), np.int8)
    for row, of in zip(targets, objects, strict=True):
        for name, easy in of.items():
            row[names.index(name)] = 1 if easy else VALUES[difficult]
    files = [root / "JPEGImages" / f"{image}.jpg" for image, _ in listed]
    return streamed(files, targets, names, parts=np.array(parts, np.int64), source=str(root))


def parse_objects(annotation: Element, where: str) -> dict[str, bool]:
    """Classes of the objects in an image, and whether any of them is not difficult.

    Args:
        annotation: root of the XML file.
        where: beginning of messages.

    Raises:
        ValueError: no annotation of VOC, or an object without a name.
    """
    if annotation.tag != "annotation":
        raise ValueError(f"{where}: expected <annotation>, got <{annotation.tag}>")
    found: dict[str, bool] = {}
    for one in annotation.iterfind("object"):
        name = (one.findtext("name") or "").strip()
        difficult = (one.findtext("difficult") or "0").strip()
        if not name or difficult not in ("0", "1"):
            raise ValueError(
                f"{where}: expected <object> with <name> and <difficult> 0 or 1, got {name!r} and "
                f"{difficult!r}"
            )
        found[name] = found.get(name, False) or difficult == "0"
    return found
