"""Word vectors from text files, as GloVe, word2vec and fastText publish them."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


def read_vectors(path: Path, wanted: Container[str]) -> dict[str, NDArray[np.float32]]:
    """Vectors of the wanted words that a file has, in the order of the file.

    A line is a word and its numbers, with spaces between: ``the 0.418 0.24968 -0.41242 ...``. The
    first line may give the number of words and of numbers, as in word2vec's files. A word may
    contain spaces (some in ``glove.840B`` do); if a word is repeated, the first vector counts.

    Args:
        path: of the file, not compressed.
        wanted: the words.

    Raises:
        ValueError: a vector of another length or without numbers (the message names file and line),
            or no wanted word in the file.
    """
    found: dict[str, NDArray[np.float32]] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
            head = first.split()
            counts = len(head) == 2 and all(part.isdecimal() for part in head)
            length = int(head[1]) if counts else len(head) - 1
            if length < 1:
                raise ValueError(
                    f"{path}: line 1: expected a word and its numbers, with spaces between, got "
                    f"{first[:80]!r}"
                )
            for number, line in enumerate(chain([] if counts else [first], file), 1 + counts):
                word, *values = line.rstrip().rsplit(" ", length)
                if word in wanted and word not in found:
                    found[word] = _vector(values, length, f"{path}: line {number}")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error})") from None
    if not found:
        raise ValueError(
            f"{path}: has no vector of any word of the texts (written in lower case); is it a text "
            "file of vectors, one word a line?"
        )
    return found


def _vector(values: list[str], length: int, where: str) -> NDArray[np.float32]:
    try:
        vector = np.array(values, np.float32)
    except ValueError:
        vector = np.array([np.nan])
    if len(vector) != length or not np.isfinite(vector).all():
        raise ValueError(
            f"{where}: expected {length} numbers after the word, as in the first line, got "
            f"{' '.join(values)[:60]!r}"
        )
    return vector
