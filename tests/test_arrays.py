"""Arrays are copied and read exactly, with torch and without it."""

from __future__ import annotations

import numpy as np
import pytest

from segcal import arrays
from segcal.arrays import copy_floats

EVERY = np.arange(2**16, dtype=np.uint16).view(np.float16).reshape(4, -1)
"""Every value of half precision: subnormal numbers, infinities and NaN too."""


def frozen(values):
    values = values.copy()
    values.flags.writeable = False
    return values


@pytest.mark.parametrize("wide", [np.float32, np.float64])
@pytest.mark.parametrize("imported", [True, False], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    "kind", [frozen, lambda x: x[:, ::-1], lambda x: x.astype(">f2"), lambda x: x[:, ::3]]
)
def test_half_precision_is_copied_exactly(kind, imported, wide, monkeypatch):
    if not imported:
        monkeypatch.delitem(arrays.sys.modules, "torch", raising=False)
    values = kind(EVERY)
    out = np.empty(values.shape, wide)
    assert copy_floats(values, out) is out
    with np.errstate(invalid="ignore"):  # some of the NaN are signals
        np.testing.assert_array_equal(out, np.vectorize(float)(values).astype(wide))
