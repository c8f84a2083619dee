"""Mosaics of handwritten digits."""

from __future__ import annotations

import numpy as np
import pytest

from segcal.classify.readers.digits import read_digit_mosaics, read_digits


def test_mosaics_hold_every_digit_once_with_its_label():
    digits, mosaics = read_digits(), read_digit_mosaics()
    assert mosaics.inputs.shape == (883, 1, 16, 16)
    assert mosaics.targets.dtype == np.int8
    known: dict[bytes, list[int]] = {}
    for number, one in enumerate(digits.inputs[:, 0]):
        known.setdefault(one.tobytes(), []).append(number)
    used: list[int] = []
    for mosaic, labels in zip(mosaics.inputs[:, 0], mosaics.targets, strict=True):
        tiles = [mosaic[y : y + 8, x : x + 8] for y in (0, 8) for x in (0, 8)]
        found = [known[np.ascontiguousarray(t).tobytes()].pop() for t in tiles if t.any()]
        assert sorted(set(digits.targets[found])) == np.flatnonzero(labels).tolist()
        used += found
    assert len(used) == len(set(used)) > 1790  # of 1797, all but those that the last did not take


def test_mosaics_follow_from_their_seed():
    one, other = read_digit_mosaics(seed=1), read_digit_mosaics(seed=2)
    assert np.array_equal(one.inputs, read_digit_mosaics(seed=1).inputs)
    assert not np.array_equal(one.targets[:100], other.targets[:100])
    full = read_digit_mosaics(side=1, filled=1.0)
    assert full.inputs.shape == (1797, 1, 8, 8)
    assert (full.targets.sum(1) == 1).all()
    for numbers in ({"side": 0}, {"side": 9}, {"side": "2"}, {"filled": 0.0}, {"filled": 1.1}):
        with pytest.raises(ValueError, match="side, filled: expected 1 to 8 cells"):
            read_digit_mosaics(**numbers)
