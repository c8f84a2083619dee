"""Reading files of annotations, with a limit of their size and errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from segcal.classify.readers.samples import PARTS

JSON_BYTES, XML_BYTES, TEXT_BYTES = 2 << 30, 1 << 22, 1 << 28
"""Largest size of a file of annotations (COCO's largest has half a gigabyte)."""
PartNames = str | Sequence[str] | None
"""A data set's name for the samples of a part: one name, several, or none."""


def part_numbers(train: PartNames, validation: PartNames, test: PartNames) -> list[tuple[str, int]]:
    """A data set's names of its parts, with the number of the part.

    Raises:
        ValueError: no name to train on, or a repeated name.
    """
    named = [
        (name, number)
        for number, names in enumerate((train, validation, test))
        for name in ((names,) if isinstance(names, str) else names or ())
    ]
    found = [name for name, _ in named]
    if not all(isinstance(name, str) for name in found) or len(set(found)) < len(found):
        raise ValueError(f"{', '.join(PARTS)}: expected names, each once, got {found}")
    if not any(number == 0 for _, number in named):
        raise ValueError("train: expected the name of the training part, got none")
    return named


def check_apart(images: Sequence[Hashable], parts: Sequence[int], where: str) -> None:
    """Raise ValueError if an image is in several parts, since it would be trained on and tested.

    Args:
        images: an identifier of the image, for every sample.
        parts: of the samples.
        where: beginning of messages.
    """
    first: dict[Hashable, int] = {}
    for image, part in zip(images, parts, strict=True):
        if first.setdefault(image, part) != part:
            raise ValueError(
                f"{where}: image {image} is for {PARTS[first[image]]} and for {PARTS[part]}; name "
                "parts that hold different images"
            )


def first_there(root: Path, names: Sequence[str], what: str) -> Path:
    """Return the first of some files or folders below a folder that exists.

    Args:
        root: the folder.
        names: of files or folders below it.
        what: their content, for messages.

    Raises:
        ValueError: none of them exists.
    """
    for name in names:
        if (root / name).exists():
            return root / name
    raise ValueError(
        f"{root}: expected {' or '.join(names)} with {what}, found neither"
        if len(names) > 1
        else f"{root}: expected {names[0]} with {what}, which is missing"
    )


def read_json(path: Path, *, leave_out: Collection[str] = ()) -> Any:
    """Return the content of a JSON file.

    Args:
        path: of the file.
        leave_out: keys that are dropped everywhere, since outlines of objects need more memory than
            everything else.

    Raises:
        ValueError: the file, which is named, is missing, too large or damaged.
    """

    def kept(found: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in found.items() if key not in leave_out}

    content = _content(path, JSON_BYTES)
    try:
        return json.loads(content, object_hook=kept if leave_out else None)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON ({error}); copy or download the file again") from None


def read_xml(path: Path) -> ElementTree.Element:
    """Return the root of an XML file, which may declare no entities or other document types.

    Raises:
        ValueError: the file, which is named, is missing, too large, damaged, or declares a document
            type.
    """
    content = _content(path, XML_BYTES)
    try:
        parser = ElementTree.XMLParser(target=_WithoutDoctype())  # noqa: S314
        parser.feed(content)
        root: ElementTree.Element = parser.close()
    except ElementTree.ParseError as error:
        raise ValueError(f"{path}: not XML ({error}); copy or download the file again") from None
    except _DoctypeError:
        raise ValueError(
            f"{path}: declares a document type, which no annotation needs; remove <!DOCTYPE ...>"
        ) from None
    return root


def read_text(path: Path) -> str:
    """Return the content of a text file.

    Raises:
        ValueError: the file, which is named, is missing, too large, or not text.
    """
    content = _content(path, TEXT_BYTES)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not text in UTF-8 ({error})") from None


def read_lines(path: Path) -> list[str]:
    """Return the non-empty lines of a text file, without spaces around them.

    Raises:
        ValueError: as :func:`read_text`.
    """
    return [line for line in map(str.strip, read_text(path).splitlines()) if line]


def fields(entry: Any, kinds: Mapping[str, type | tuple[type, ...]], where: str) -> list[Any]:
    """Return the values of an entry's keys.

    Args:
        entry: of a JSON file.
        kinds: types of the values, by key.
        where: beginning of messages.

    Raises:
        ValueError: no mapping, or a key that is missing or has another type.
    """
    if not isinstance(entry, Mapping):
        raise ValueError(f"{where}: expected {{...}}, got {type(entry).__name__}")
    for key, kind in kinds.items():
        value = entry.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(
                f"{where}: {key}: expected {_name(kind)}, got "
                f"{'nothing' if key not in entry else repr(value)[:60]}"
            )
    return [entry[key] for key in kinds]


def edges(box: Sequence[Any], where: str) -> tuple[float, float, float, float]:
    """Return left, upper, right and lower edge of a box, made at least one pixel wide and high.

    Args:
        box: left, upper, width, height.
        where: beginning of messages.

    Raises:
        ValueError: not four numbers.
    """
    if len(box) != 4 or not all(isinstance(v, int | float) and abs(v) < 1e6 for v in box):
        raise ValueError(f"{where}: expected [left, upper, width, height], got {str(box)[:60]}")
    left, upper, width, height = map(float, box)
    return left, upper, left + max(width, 1.0), upper + max(height, 1.0)


def label_rows(
    labelled: Sequence[Collection[str]], names: Sequence[str], *, rest: int = 0
) -> NDArray[np.int8]:
    """Targets ``(N, T)``: 1 for the labels of a sample, `rest` for the others."""
    column = {name: t for t, name in enumerate(names)}
    targets = np.full((len(labelled), len(names)), rest, np.int8)
    for row, labels in zip(targets, labelled, strict=True):
        row[[column[label] for label in labels]] = 1
    return targets


class _DoctypeError(Exception):
    """Raised for a declaration of a document type."""


class _WithoutDoctype(ElementTree.TreeBuilder):
    def doctype(self, *_: Any) -> None:
        raise _DoctypeError


def _content(path: Path, most: int) -> bytes:
    try:
        if (size := path.stat().st_size) > most:
            raise ValueError(
                f"{path}: {size} bytes are more than annotations have; is it the right file?"
            )
        return path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}); check that path is the folder of "
            "the data set, and that it is complete"
        ) from None


def _name(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    words = {int: "a whole number", str: "text", list: "a list", dict: "{...}", float: "a number"}
    return " or ".join(words.get(k, k.__name__) for k in kinds)
