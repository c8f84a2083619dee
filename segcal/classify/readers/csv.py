"""CSV tables of numbers, with one column for the class or several for labels."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from segcal.classify.readers.samples import PARTS, Samples

OPENERS: Mapping[str, Callable[..., Any]] = {
    ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open,
}  # fmt: skip
NAMELESS = re.compile(r"Unnamed: \d+")
"""pandas' names for columns without a name."""


def read_csv(path: str | Path, target: str | Sequence[str], part: str | None = None) -> Samples:
    """Read a table; all columns that are not named here are features.

    Args:
        path: of the file, which may be compressed (``.gz``, ``.bz2``, ``.xz``).
        target: column of the class; or a list of columns of labels, 0 or 1, empty if unknown.
        part: column that says train, validation or test.

    Raises:
        ValueError: the file, which is named, is not readable; it lacks or repeats a column; rows
            have another length or no class; features have no name or are no numbers.
    """
    targets = [target] if isinstance(target, str) else list(target)
    named = [*targets, *([] if part is None else [part])]
    table = read_table(path, named)
    features = table.drop(columns=named)
    if nameless := [name for name in features.columns if NAMELESS.fullmatch(str(name))]:
        raise ValueError(
            f"{path}: a column has no name ({nameless[0]}, from 0); remove it if it numbers "
            "the rows (pandas: to_csv(..., index=False)), or name it if it is a feature"
        )
    wrong = [str(n) for n, t in features.dtypes.items() if not pd.api.types.is_numeric_dtype(t)]
    if wrong or not len(features.columns):
        raise ValueError(
            f"{path}: expected features that are numbers, got {', '.join(wrong[:5]) or 'none'}"
        )
    names: Sequence[str]
    if not isinstance(target, str):
        labels = table[targets].astype(object).where(table[targets].notna(), -1).to_numpy()
        if not np.isin(labels, (-1, 0, 1)).all():
            raise ValueError(f"{path}: {', '.join(targets)}: expected 0, 1, or empty (unknown)")
        classes, names = labels.astype(np.int8), targets
    else:
        check_filled(path, table[target])
        codes, found = pd.factorize(table[target], sort=True)
        classes, names = codes.astype(np.int64), [str(name) for name in found]
    parts = None
    if part is not None:
        said = table[part].map({name: i for i, name in enumerate(PARTS)})
        if said.isna().any():
            raise ValueError(f"{path}: {part}: expected {', '.join(PARTS)}")
        parts = said.to_numpy(np.int64)
    return Samples(features.to_numpy(np.float32), classes, tuple(names), parts).check(str(path))


def read_table(path: str | Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read a CSV file with certain columns; only empty cells are missing values, "NA" is a text.

    Raises:
        ValueError: the file, which is named, is not readable or lacks a column.
    """
    try:
        with OPENERS.get(Path(path).suffix, open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
        _check_rows(text)
        table = pd.read_csv(
            io.StringIO(text),
            index_col=False,
            keep_default_na=False,
            na_values=[""],
            low_memory=False,  # in pieces, a column can have 1 and "1"
        )
    except Exception as error:  # noqa: BLE001 - a damaged file fails anywhere in the readers
        raise ValueError(f"{path}: cannot be read as CSV ({error})") from None
    if unknown := [name for name in columns if name not in table.columns]:
        raise ValueError(
            f"{path}: has no column {', '.join(unknown)}; it has {', '.join(table.columns[:20])}"
        )
    return table


def _check_rows(text: str) -> None:
    """Raise ValueError for rows and columns that pandas would fill up, shift or rename."""
    rows = csv.reader(io.StringIO(text, newline=""))
    header = next(filter(None, rows), [])
    if twice := [name for name, times in Counter(header).items() if name and times > 1]:
        raise ValueError(f"a column is repeated: {', '.join(twice[:5])}")
    for row in filter(None, rows):
        if len(row) < len(header) or any(row[len(header) :]):
            raise ValueError(
                f"line {rows.line_num}: expected {len(header)} values as in the header, got "
                f"{len(row)}"
            )


def check_filled(path: str | Path, column: pd.Series) -> None:
    """Raise ValueError if a column has missing values; the message names the file and a row."""
    if missing := np.flatnonzero(column.isna()).tolist():
        raise ValueError(
            f"{path}: {column.name}: {len(missing)} rows have no value, the first is row "
            f"{missing[0] + 1} below the header; fill them in or remove them"
        )
