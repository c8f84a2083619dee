"""Multi-label tables in ARFF, the format of Weka, Mulan and MEKA, dense or sparse."""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from segcal.classify.readers.samples import Samples

XML_BYTES = 1 << 22
"""Largest size of an XML file with a list of labels."""
QUOTED = r"""'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)\""""
VALUE = rf"""(?:(?:{QUOTED}|([^\s'",][^,\t]*))\s*)?(,|\t|$)"""
DENSE = re.compile(rf"\s*(){VALUE}")
SPARSE = re.compile(rf"\s*(\d+)\s+{VALUE}")
"""A value of a row, preceded by its column in sparse rows, and the mark that ends it."""
ATTRIBUTE = re.compile(rf"@attribute\s+(?:{QUOTED}|([^\s'\"]\S*))\s+(.+)", re.IGNORECASE)
NUMERIC = re.compile(r"(numeric|real|int|integer)\b", re.IGNORECASE)
MEKA = re.compile(r"\s-C\s+([-+]?\d+)")
"""The number of label columns, in the name of the relation."""
NO_NUMBER = -(2.0**100)
"""Marks a value that is no number, and so no label either."""
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
TRUTH = {"false": 0.0, "true": 1.0}


def read_arff(path: str | Path, labels: int | Sequence[str] | str | Path | None = None) -> Samples:
    """Read a table of numbers, categories and labels.

    A declared list of at most two numbers, such as ``{0,1}``, is a column of numbers. For any other
    list, every value gets a column of 0 and 1 (one-hot); a missing value is 0 in all of them.

    Args:
        path: ``.arff`` or ``.arff.gz``; in sparse rows, columns that are not named are 0, or the
            first declared value.
        labels: number of the last columns that are labels (of the first columns, if negative); or
            names of labels; or Mulan's XML file with these names. None looks for MEKA's ``-C n`` in
            the relation's name (the first n columns, or the last ones if negative), then for an XML
            file with the table's name beside it. A missing value is an unknown label.

    Raises:
        ValueError: the file, which is named, is not readable, has text among the features, labels
            other than 0 and 1 (false and true), or no column of a given name.
    """
    path = Path(path)
    lines = enumerate(io.StringIO(_text(path), newline=None), 1)
    try:
        relation, columns = _header(lines)
    except ValueError as error:
        raise ValueError(f"{path}: not an ARFF file of numbers and labels ({error})") from None
    if labels is None:
        labels = _said_labels(path, relation)
    chosen = _label_columns(path, list(columns), labels)
    labelled = set(chosen)
    categories = {
        name: values
        for name, values in columns.items()
        if values and name not in labelled and not _numeric(values)
    }
    try:
        rows = np.array(list(_rows(lines, columns, categories)), np.float32)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    rows = rows.reshape(-1, len(columns))
    of = {name: rows[:, i] for i, name in enumerate(columns)}
    inputs = np.concatenate(
        [
            _one_hot(of[name], len(categories[name])) if name in categories else of[name][:, None]
            for name in columns
            if name not in labelled
        ],
        1,
    )
    targets = np.stack([_label(path, name, of[name]) for name in chosen], 1)
    return Samples(inputs, targets, tuple(chosen)).check(str(path))


def _header(lines: Iterator[tuple[int, str]]) -> tuple[str, dict[str, tuple[str, ...] | None]]:
    """Name of the relation, and the declared values of each column; None for numbers."""
    relation = ""
    columns: dict[str, tuple[str, ...] | None] = {}
    for number, line in lines:
        content = line.strip()
        word = content.split(maxsplit=1)[0].lower() if content else "%"
        if word == "@data" and columns:
            return relation, columns
        if found := ATTRIBUTE.fullmatch(content):
            name = _unquoted(*found.groups()[:3])
            if name in columns:
                raise ValueError(f"line {number}: {name} is declared twice")
            columns[name] = _declared(number, found[4])
        elif word == "@relation":
            relation = content
        elif not word.startswith("%"):
            raise ValueError(f"line {number}: expected @attribute NAME TYPE or @data")
    raise ValueError("expected @attribute NAME TYPE, then @data")


def _said_labels(path: Path, relation: str) -> int | Path:
    """Information in the table itself, or beside it, on its labels."""
    if found := MEKA.search(relation):
        return -int(found[1])  # MEKA counts from the first column, and from the last if negative
    xml = path.with_name(path.name.removesuffix(".gz").removesuffix(".arff") + ".xml")
    if xml.is_file():
        return xml
    raise ValueError(
        f"{path}: labels: give the number of last columns that are labels (first columns, if "
        f"negative), or their names; @relation has no -C n of MEKA, and no {xml.name} of Mulan is "
        "beside the file"
    )


def _declared(number: int, kind: str) -> tuple[str, ...] | None:
    if kind.startswith("{"):
        return tuple(value or "?" for _, value in _values(DENSE, kind[1:].rpartition("}")[0]))
    if not NUMERIC.match(kind):
        raise ValueError(f"line {number}: expected numeric or {{values}}, got {kind}")
    return None


def _numeric(values: Sequence[str]) -> bool:
    """Whether a list of values stands for a number with one or two values."""
    return len(values) <= 2 and all(_number(value) != NO_NUMBER for value in values)


def _one_hot(places: NDArray[np.float32], count: int) -> NDArray[np.float32]:
    """One-hot columns ``(N, count)`` for positions in a list; NaN gives 0 in all columns."""
    return (places[:, None] == np.arange(count)).astype(np.float32)


def _rows(
    lines: Iterator[tuple[int, str]],
    columns: Mapping[str, tuple[str, ...] | None],
    categories: Collection[str],
) -> Iterator[NDArray[np.float32]]:
    """Rows of numbers; a category is given by its position in the list."""
    read = [_reader(values, name in categories) for name, values in columns.items()]
    first = np.array(
        [
            0.0 if values is None or name in categories else _number(values[0])
            for name, values in columns.items()
        ],
        np.float32,
    )
    for number, line in lines:
        content = line.strip()
        if not content or content.startswith("%"):
            continue
        row = first.copy()
        try:
            for i, value in _cells(content, len(row)):
                row[i] = np.nan if value is None else read[i](value)
        except KeyError as error:
            raise ValueError(f"line {number}: {error} is no declared value of its column") from None
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        yield row


def _cells(content: str, count: int) -> list[tuple[int, str | None]]:
    """Columns and values of a row."""
    if content[0] == "{":
        if content[-1] != "}":
            raise ValueError("a sparse row does not end with }")
        inside = content[1:-1].strip()
        cells = [(int(i), value) for i, value in _values(SPARSE, inside)] if inside else []
        named = {i for i, _ in cells}
        if len(named) < len(cells) or not named <= set(range(count)):
            raise ValueError(f"expected columns 0 to {count - 1}, each once")
        return cells
    cells = [(i, value) for i, (_, value) in enumerate(_values(DENSE, content))]
    if len(cells) != count:
        raise ValueError(f"expected {count} values, got {len(cells)}")
    return cells


def _values(form: re.Pattern[str], text: str) -> Iterator[tuple[str, str | None]]:
    """Prefix of each value, and the value; None where it is missing."""
    at, end = 0, ","
    while end:
        found = form.match(text, at)
        if found is None:
            raise ValueError(f"cannot be read from {text[at : at + 20]!r} on")
        before, single, double, plain, end = found.groups()
        value = _unquoted(single, double, plain)
        yield before, None if plain and value == "?" else value
        at = found.end()


def _unquoted(single: str | None, double: str | None, plain: str | None) -> str:
    quoted = double if single is None else single
    if quoted is None:
        return (plain or "").strip()
    return re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[1]), quoted)


def _reader(values: tuple[str, ...] | None, category: bool) -> Callable[[str], float]:
    if values is None:
        return float
    read = {v: float(i) if category else _number(v) for i, v in enumerate(values)}
    return read.__getitem__


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _label_columns(
    path: Path, columns: list[str], labels: int | Sequence[str] | str | Path
) -> list[str]:
    if isinstance(labels, int):
        if not 0 < abs(labels) < len(columns):
            raise ValueError(
                f"{path}: labels {labels} of {len(columns)} columns leave no features; expected "
                "the number of last columns that are labels (below 0: of first columns), or "
                "nothing if the file says it, as MEKA's do (data.args.labels=null)"
            )
        return columns[-labels:] if labels > 0 else columns[:-labels]
    names = _xml_names(Path(labels)) if isinstance(labels, (str, Path)) else list(labels)
    if unknown := [name for name in names if name not in columns]:
        raise ValueError(f"{path}: has no column {', '.join(unknown[:5])}")
    if not 0 < len(set(names)) == len(names) < len(columns):
        raise ValueError(
            f"{path}: labels: expected names, each once, that leave features; got {len(names)} of "
            f"{len(columns)} columns"
        )
    return names


def _xml_names(path: Path) -> list[str]:
    """Names in Mulan's XML file; a file that declares entities, which none needs, is refused."""
    try:
        content = path.read_bytes()
        text = content.decode("utf-8-sig")
        if len(content) > XML_BYTES or "\0" in text or "<!" in text.replace("<!--", ""):
            raise ValueError("expected a short list in UTF-8, without declarations")
        root = ElementTree.fromstring(text)  # noqa: S314 - no declarations, so no entities
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise ValueError(f"{path}: not an XML file of labels ({error})") from None
    return [e.attrib["name"] for e in root.iter() if e.tag.endswith("label") and "name" in e.attrib]


def _label(path: Path, name: str, values: NDArray[np.float32]) -> NDArray[np.int8]:
    unknown = np.isnan(values)
    if not (unknown | (values == 0) | (values == 1)).all():
        raise ValueError(f"{path}: label {name}: expected 0, 1 (false, true) or ? (unknown)")
    return np.where(unknown, -1, np.nan_to_num(values)).astype(np.int8)


def _number(value: str) -> float:
    try:
        return TRUTH[value.lower()] if value.lower() in TRUTH else float(value)
    except ValueError:
        return NO_NUMBER
