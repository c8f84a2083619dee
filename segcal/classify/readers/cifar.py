"""CIFAR-10 as downloaded, in the binary version or the version for Python.

Files of the Python version are pickles, which can run code when they are loaded. They are therefore
not loaded: their instructions are parsed, and bytes and numbers are taken from CIFAR-10's places.
"""

from __future__ import annotations

import pickletools
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segcal.classify.readers.samples import Samples

NAMES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
VALUES = 3 * 32 * 32
LARGEST = 1 << 26
"""Largest size of a file in bytes; a batch of CIFAR-10 has less than half."""
STRINGS = ("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINUNICODE",
           "SHORT_BINUNICODE")  # fmt: skip
INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1")


def read_cifar10(path: str | Path) -> Samples:
    """Read CIFAR-10: 50000 training and 10000 test images ``(3, 32, 32)``.

    Args:
        path: folder of ``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``, or of
            the same names without an ending.

    Raises:
        ValueError: files are missing, or are not batches of CIFAR-10.
    """
    folder = Path(path)
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for ending, read in ((".bin", _binary), ("", _python)):
        files = [folder / f"{name}{ending}" for name in names]
        if all(file.is_file() for file in files):
            batches = [read(file) for file in files]
            return Samples(
                np.concatenate([images for images, _ in batches]).reshape(-1, 3, 32, 32),
                np.concatenate([classes for _, classes in batches]),
                NAMES,
                np.concatenate([np.full(len(c), 2 if i == 5 else 0) for i, (_, c) in
                                enumerate(batches)]),
            ).check(str(folder))  # fmt: skip
    raise ValueError(f"{folder}: expected {names[0]}.bin, ..., {names[-1]}.bin (or without .bin)")


def _binary(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A binary batch: for each image its class, then its values, one byte each."""
    content = np.fromfile(path, np.uint8)
    if not len(content) or len(content) % (VALUES + 1):
        raise ValueError(f"{path}: expected images of {VALUES + 1} bytes, got {len(content)} bytes")
    rows = content.reshape(-1, VALUES + 1)
    return rows[:, 1:], rows[:, 0].astype(np.int64)


def _python(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A Python batch: the numbers after the key ``labels``, and the string with as many images."""
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path}: too large for a batch of CIFAR-10")
    labels: list[int] = []
    images: list[bytes] = []
    key = ""
    try:
        for instruction, value, _ in pickletools.genops(path.read_bytes()):
            if instruction.name in STRINGS and value is not None:
                text = value if isinstance(value, str) else value.decode("latin-1")
                if len(text) >= VALUES:
                    images.append(text.encode("latin-1"))
                key = text[:16]
            elif instruction.name in INTEGERS and key == "labels":
                labels.append(int(value or 0))
    except (ValueError, UnicodeError, OverflowError) as error:
        raise ValueError(f"{path}: not a batch of CIFAR-10 ({error})") from None
    if (
        len(images) != 1
        or not 0 < len(labels) == len(images[0]) / VALUES
        or not set(labels) <= set(range(len(NAMES)))
    ):
        raise ValueError(
            f"{path}: not a batch of CIFAR-10 as it is downloaded; take the binary version "
            "(cifar-10-binary.tar.gz)"
        )
    rows = np.frombuffer(images[0], np.uint8).reshape(len(labels), VALUES)
    return rows, np.array(labels, np.int64)
