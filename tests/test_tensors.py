"""What the vocabulary of the maths returns, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from segcal.arrays import distinct_labels

KINDS = ("uint8", "int8", "uint16", "int16", ">i2", "int32", "uint64", "bool")


@given(st.sampled_from(KINDS).flatmap(lambda kind: arrays.arrays(kind, (4, 3, 5))))
def test_distinct_labels_are_those_of_numpy(labels):
    for part in (labels, labels[..., ::2], labels.T, labels[:0]):
        found = distinct_labels(part)
        np.testing.assert_array_equal(found, np.unique(part))
        assert found.dtype == part.dtype


@pytest.mark.parametrize("kind", ["uint8", "int16"])
def test_labels_of_every_piece_are_found(kind):
    labels = np.zeros(400_000, kind)
    labels[[3, 200_000, -1]] = 7, 100, 5
    assert distinct_labels(labels).tolist() == [0, 5, 7, 100]
