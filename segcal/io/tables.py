"""Tables and summaries on disk."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from segcal.io.files import whole_file


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """Write a table with its index, whole or not at all; undefined cells are empty, inf is inf."""
    with whole_file(path) as temporary:
        table.to_csv(temporary, float_format="%.12g")
