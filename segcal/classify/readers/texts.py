"""Texts from folders, from a table, or from the documentation of installed packages.

A word becomes the remainder of its checksum. No vocabulary is learned from texts, and since the
numbers are limited, some words share a number. Words with a vector in a file have separate numbers
above these.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from segcal.classify.readers.csv import check_filled, read_table
from segcal.classify.readers.folders import PARTS, files_of_classes
from segcal.classify.readers.samples import UNSAID, Samples
from segcal.classify.readers.vectors import read_vectors

WORD = re.compile(r"[^\W\d_]{2,}")
PACKAGES = ("matplotlib", "monai", "nibabel", "numpy", "pandas", "scipy", "torch")
CHOICE = 2
"""Number of texts that are read for each text that is taken."""
SHORTEST = 12
"""Smallest number of words of a docstring that is used."""
ALIKE = 0.5
"""Texts that share this fraction of their distinct words are near-duplicates."""


def words(
    texts: Iterable[str],
    *,
    vocabulary: int,
    length: int,
    known: Mapping[str, int] | None = None,
) -> NDArray[np.int64]:
    """Numbers of the words of texts ``(N, length)``, from 1; 0 after the end.

    Args:
        texts: N texts; words are runs of two letters or more, in lower case.
        vocabulary: number of numbers, including 0.
        length: number of first words of a text that are used.
        known: numbers of words that have separate numbers.
    """
    rows = []
    known = known or {}
    for text in texts:
        found = _words_of(text, length)
        numbers = [
            known[word] if word in known else 1 + zlib.crc32(word.encode()) % (vocabulary - 1)
            for word in found
        ]
        rows.append(numbers + [0] * (length - len(numbers)))
    return np.array(rows, np.int64).reshape(-1, length)


def near_duplicates(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups ``(N,)`` of texts that are similar, directly or through other texts.

    Two texts are similar if the Jaccard index of their sets of words (size of the intersection over
    size of the union) is at least one half. If one of them trains, the other cannot test.

    Args:
        numbers: of words, ``(N, L)``, as :func:`words` gives them.
    """
    own = [np.unique(row[row > 0]) for row in numbers]
    sizes = np.array([len(of) for of in own])
    where = (np.repeat(np.arange(len(own)), sizes), np.concatenate(own))
    held = sparse.csr_matrix((np.ones(len(where[0])), where), (len(own), int(numbers.max()) + 1))
    shared = (held @ held.T).tocoo()
    union = sizes[shared.row] + sizes[shared.col] - shared.data
    alike = shared.data >= ALIKE * union
    pairs = (shared.data[alike], (shared.row[alike], shared.col[alike]))
    groups: NDArray[np.int32] = connected_components(sparse.csr_matrix(pairs, shared.shape))[1]
    return groups.astype(np.int64)


def _words_of(text: str, length: int) -> list[str]:
    return WORD.findall(text.lower())[:length]


def read_texts(
    path: str | Path,
    vocabulary: int = 20000,
    length: int = 200,
    text: str = "text",
    target: str = "label",
    vectors: str | Path | None = None,
) -> Samples:
    """Read texts and their classes.

    Args:
        path: a folder with one folder per class (optionally below folders with train, validation or
            test as a word of their names, as in 20 Newsgroups); or a CSV file.
        vocabulary: size of the vocabulary, see :func:`words`.
        length: number of words of a text, see :func:`words`.
        text: column of the text in a CSV file.
        target: column of the class in a CSV file.
        vectors: a text file of initial word vectors for a network, such as
            ``glove.6B.100d.txt``: see :func:`segcal.classify.readers.vectors.read_vectors`.

    Raises:
        ValueError: the file, which is named, is not readable, has no texts, or rows without text or
            class.
    """
    root = Path(path)
    if root.is_dir():
        found, parts = _folder_texts(root)
    else:
        found, parts = _table_texts(root, text, target), None
    return _samples(found, parts, vocabulary, length, str(path), vectors)


def read_docstrings(
    packages: Sequence[str] = PACKAGES,
    vocabulary: int = 20000,
    length: int = 80,
    most: int = 400,
    seed: int = 0,
) -> Samples:
    """Read the documentation of functions and classes; the class of a text is its package.

    Sources are parsed; nothing is imported or run. The names of the packages are removed. Several
    functions often have nearly the same text: such texts form a group, so that none of them tests
    what another has trained.

    Args:
        packages: installed packages, the classes.
        vocabulary: size of the vocabulary, see :func:`words`.
        length: number of words of a text, see :func:`words`.
        most: largest number of texts of a package, chosen at random.
        seed: of that choice.

    Raises:
        ValueError: a package that is not installed or has no documentation.
    """
    rng = np.random.default_rng(seed)
    taken_out = re.compile("|".join(map(re.escape, packages)), re.IGNORECASE)
    found = []
    for package in packages:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ValueError(f"packages: {package} is not installed")
        place = Path(spec.submodule_search_locations[0])
        texts = sorted(_docstrings(place, rng, CHOICE * most))
        if not texts:
            raise ValueError(f"packages: {package} has no documentation in its sources")
        for i in rng.permutation(len(texts))[:most]:
            found.append((taken_out.sub(" ", texts[i]), package))
    samples = _samples(found, None, vocabulary, length, "docstrings")
    return replace(samples, groups=near_duplicates(np.asarray(samples.inputs, np.int64)))


def _samples(
    found: Sequence[tuple[str, str]],
    parts: NDArray[np.int64] | None,
    vocabulary: int,
    length: int,
    source: str,
    vectors: str | Path | None = None,
) -> Samples:
    if vocabulary < 2 or length < 1:
        raise ValueError(
            f"vocabulary, length: expected at least 2 and 1, got {vocabulary}, {length}"
        )
    if not found:
        raise ValueError(f"{source}: expected texts in one folder per class; found none")
    names = sorted({name for _, name in found})
    known: dict[str, int] = {}
    rows = None
    if vectors is not None:
        there = {word for text, _ in found for word in _words_of(text, length)}
        read = read_vectors(Path(vectors), there)
        known = {word: vocabulary + i for i, word in enumerate(read)}
        values = np.stack(list(read.values()))
        unknown = np.full((vocabulary, values.shape[1]), np.nan, np.float32)
        rows = np.concatenate([unknown, values])
    texts = (text for text, _ in found)
    inputs = words(texts, vocabulary=vocabulary, length=length, known=known)
    classes = np.array([names.index(name) for _, name in found], np.int64)
    return Samples(inputs, classes, tuple(names), parts, vectors=rows).check(source)


def _folder_texts(root: Path) -> tuple[list[tuple[str, str]], NDArray[np.int64] | None]:
    files = files_of_classes(root, _part)
    found = [(f.read_text(encoding="utf-8", errors="replace"), name) for f, name, _ in files]
    parts = np.array([part for _, _, part in files], np.int64)
    return found, None if (parts == UNSAID).all() else parts


def _part(name: str) -> int:
    """Part named by a word of the name: ``20news-bydate-train``, but not ``trains``."""
    return next((PARTS[w] for w in re.findall("[a-z]+", name.lower()) if w in PARTS), UNSAID)


def _table_texts(path: Path, text: str, target: str) -> list[tuple[str, str]]:
    table = read_table(path, [text, target])
    for column in (text, target):
        check_filled(path, table[column])
    return [(str(a), str(b)) for a, b in zip(table[text], table[target], strict=True)]


def _docstrings(folder: Path, rng: np.random.Generator, enough: int) -> set[str]:
    """Distinct docstrings of a package, from randomly chosen files until there are `enough`."""
    files = sorted(folder.rglob("*.py"))
    found: set[str] = set()
    for i in rng.permutation(len(files)):
        if len(found) >= enough:
            break
        if "tests" not in files[i].parts:
            found.update(_of_file(files[i]))
    return found


def _of_file(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return  # nothing to learn from
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            text = ast.get_docstring(node)
            if text and len(WORD.findall(text)) >= SHORTEST:
                yield text
