"""Multi-label tables as ARFF, the format of Weka, Mulan and MEKA."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray
from scipy.io import arff

from segcal.datasets.classification.samples import Samples

XML_BYTES = 1 << 22
"""A list of labels that is longer is none."""


def read_arff(path: str | Path, labels: int | Sequence[str] | str | Path) -> Samples:
    """Read a table of numbers and labels.

    Args:
        path: ``.arff`` or ``.arff.gz``.
        labels: how many of the last columns are labels (of the first ones, if negative); or their
            names; or Mulan's XML file that names them. A missing value is an unknown label.

    Raises:
        ValueError: naming the file: not readable, sparse, features that are no numbers, labels
            other than 0 and 1, or no column of that name.
    """
    path = Path(path)
    text = _text(path)
    try:
        table, meta = arff.loadarff(io.StringIO(text))
    except (arff.ArffError, NotImplementedError, ValueError, StopIteration) as error:
        raise ValueError(f"{path}: not an ARFF file of plain columns ({error})") from None
    columns = list(meta.names())
    chosen = _label_columns(path, columns, labels)
    features = [name for name in columns if name not in set(chosen)]
    if wrong := [name for name in features if meta[name][0] != "numeric"]:
        raise ValueError(f"{path}: features that are no numbers: {', '.join(wrong[:5])}")
    inputs = np.stack([table[name] for name in features], 1).astype(np.float32)
    targets = np.stack([_label(path, name, table[name]) for name in chosen], 1)
    return Samples(inputs, targets, tuple(chosen)).check(str(path))


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None


def _label_columns(
    path: Path, columns: list[str], labels: int | Sequence[str] | str | Path
) -> list[str]:
    if isinstance(labels, int):
        if not 0 < abs(labels) < len(columns):
            raise ValueError(f"{path}: labels {labels} of {len(columns)} columns leave none")
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
    """Names of Mulan's XML, which has no need of entities; a file with some is not read."""
    try:
        content = path.read_bytes()
        if len(content) > XML_BYTES or b"<!" in content.replace(b"<!--", b""):
            raise ValueError(f"{path}: expected a short list of labels without declarations")
        root = ElementTree.fromstring(content)  # noqa: S314 - no declarations, so no entities
    except (OSError, ElementTree.ParseError) as error:
        raise ValueError(f"{path}: not an XML file of labels ({error})") from None
    return [e.attrib["name"] for e in root.iter() if e.tag.endswith("label") and "name" in e.attrib]


def _label(path: Path, name: str, values: NDArray[np.generic]) -> NDArray[np.int8]:
    if values.dtype.kind == "S":
        values = np.array([float("nan") if v == b"?" else _number(v) for v in values])
    unknown = np.isnan(values.astype(float))
    if not (unknown | (values == 0) | (values == 1)).all():
        raise ValueError(f"{path}: label {name}: expected 0, 1 or ? (unknown)")
    return np.where(unknown, -1, np.nan_to_num(values.astype(float))).astype(np.int8)


def _number(value: bytes) -> float:
    try:
        return float(value)
    except ValueError:
        return -2.0  # neither 0 nor 1
