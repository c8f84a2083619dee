"""The example of the package runs and says what it shows."""

from __future__ import annotations

import doctest

import pytest

import segcal.posthoc


@pytest.mark.usefixtures("one_thread")
def test_the_example():
    failed, tried = doctest.testmod(segcal.posthoc)
    assert (failed, tried > 5) == (0, True)
