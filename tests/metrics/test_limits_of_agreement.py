"""Limits of agreement by hand."""

from __future__ import annotations

import math

import pytest

from segcal.metrics.limits_of_agreement import limits_of_agreement


def test_by_hand():
    # differences 1, 3: mean 2, standard deviation sqrt(2)
    found = limits_of_agreement([11, 13], [10, 10])
    assert found.bias == 2
    assert found.low == pytest.approx(2 - 1.96 * math.sqrt(2))
    assert found.high == pytest.approx(2 + 1.96 * math.sqrt(2))


def test_few():
    assert limits_of_agreement([3], [1]).bias == 2
    assert math.isnan(limits_of_agreement([3], [1]).low)
    assert all(map(math.isnan, limits_of_agreement([], [])))


def test_what_is_refused():
    with pytest.raises(ValueError, match="one length"):
        limits_of_agreement([1, 2], [1])
    with pytest.raises(ValueError, match="finite"):
        limits_of_agreement([math.nan], [1])
