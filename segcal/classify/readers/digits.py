"""Handwritten digits that come with scikit-learn: 1797 images of 8 x 8 grey values."""

from __future__ import annotations

import numpy as np

from segcal.classify.readers.samples import Samples


def read_digits() -> Samples:
    """Read the digits, images ``(1797, 1, 8, 8)`` of 0 to 1.

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
