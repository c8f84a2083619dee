"""Handwritten digits from scikit-learn: 1797 images of 8 x 8 grey values, or mosaics of them."""

from __future__ import annotations

import numpy as np

from segcal.classify.readers.samples import Samples


def read_digits() -> Samples:
    """Read the digits, images ``(1797, 1, 8, 8)`` with values from 0 to 1.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError("digits: come with scikit-learn: pip install scikit-learn") from None
    images, classes = load_digits(return_X_y=True)
    inputs = (images / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    names = tuple(map(str, range(10)))
    return Samples(inputs, classes.astype(np.int64), names).check("digits")


def read_digit_mosaics(side: int = 2, filled: float = 0.5, seed: int = 0) -> Samples:
    """Make images of ``side`` x ``side`` cells, some with a digit; the labels are these digits.

    Every digit is used in at most one image, so that samples are independent. By default there are
    883 images ``(1, 16, 16)`` with 1.9 labels on average; some have none.

    Args:
        side: cells in a row and in a column, 1 to 8.
        filled: probability that a cell has a digit.
        seed: of the arrangement.

    Raises:
        ValueError: numbers do not fit, or scikit-learn is not installed.
    """
    if side not in range(1, 9) or not 0 < filled <= 1:
        raise ValueError(
            f"side, filled: expected 1 to 8 cells and a probability above 0, got {side} and "
            f"{filled}"
        )
    digits = read_digits()
    pictures = np.asarray(digits.inputs)[:, 0]
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits))
    images, targets, used = [], [], 0
    while True:
        cells = np.flatnonzero(rng.random(side**2) < filled)
        chosen = order[used : used + len(cells)]
        if len(chosen) < len(cells):  # all digits have been laid
            break
        used += len(cells)
        tiles = np.zeros((side**2, *pictures.shape[1:]), np.float32)
        tiles[cells] = pictures[chosen]
        images.append(np.vstack([np.hstack(list(row)) for row in np.split(tiles, side)]))
        targets.append(np.isin(np.arange(len(digits.names)), digits.targets[chosen]))
    return Samples(np.stack(images)[:, None], np.array(targets, np.int8), digits.names).check(
        "digit_mosaics"
    )
