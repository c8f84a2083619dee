"""Tables and summaries on disk."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from segcal.io.files import whole_file

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of a formula in a spreadsheet."""
NUMBER = re.compile(r"[-+]?[0-9.]*(e[-+]?[0-9]+)?")
"""Numbers, and the dash of an undefined number, are not formulas."""


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table with its index, whole or not at all; undefined cells are empty, inf is inf.

    Text that a spreadsheet would read as a formula gets an apostrophe before it.
    """
    safe = table.rename(index=_no_formula, columns=_no_formula).map(_no_formula)
    with whole_file(path) as temporary:
        safe.to_csv(temporary, float_format="%.12g", errors="backslashreplace")


def _no_formula(cell: Any) -> Any:
    if not isinstance(cell, str) or not cell.startswith(FORMULA) or NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"
