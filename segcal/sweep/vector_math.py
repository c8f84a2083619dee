"""Exponential and logarithm in float32 that the compiler turns into vector instructions.

Numba calls the C library's ``expf`` and ``logf`` for one number at a time, unless Intel's SVML is
installed beside it, and a loop with a call in it stays a scalar loop. The two functions here are
additions, products and selections alone: about ten times as fast with AVX2, measured by ``python
scripts/bench_losses.py --functions``. In float64, which is for tests, the C library computes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

EXACT = {"contract", "nsz"}
"""Optimisations by LLVM that keep NaN and infinity: a * b + c in one rounding; -0 is 0."""
IN_VECTORS: Any = {"forceinline": True, "fastmath": EXACT, "error_model": "numpy"}
"""Options of a loop that is to become vector instructions. A division by 0 gives infinity or NaN as
in NumPy: Python's error would be a branch out of the loop, which then stays a scalar loop."""
ANY_ORDER: Any = {**IN_VECTORS, "fastmath": {"reassoc", "nsz"}}
"""The same for sums: partial sums side by side, in an order fixed by the compiler."""


@njit(**IN_VECTORS)
def exp32(x):
    """e^x of a float32 <= 0 within 2 ulp: Cody-Waite reduction, the polynomial of Cephes' expf.

    ``e^x = 2^n e^r`` with ``r = x - n log 2`` in [-log 2 / 2, log 2 / 2], where log 2 is subtracted
    in two parts, and n times the first part is exact. Below -87 the result is that of -87, the
    smallest x for which 2^n is a normal number.
    """
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    # 2^n: its exponent's bits are n + 127, its fraction's are 0
    return p * np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)


@njit(**IN_VECTORS)
def log32(x):
    """Log x of a normal float32 > 0 within 1 ulp: exponent, and the polynomial of Cephes' logf.

    ``log x = e log 2 + log(1 + m)`` with ``x = 2^e (1 + m)`` and 1 + m in [sqrt 1/2, sqrt 2].
    """
    bits = np.float32(x).view(np.int32)
    e = (bits >> np.int32(23)) - np.int32(126)
    m = np.int32((bits & np.int32(0x7FFFFF)) | np.int32(0x3F000000)).view(np.float32)  # [1/2, 1)
    low = m < np.float32(0.707106781186547524)
    e = np.float32(e) - (np.float32(1) if low else np.float32(0))
    m = (m + m if low else m) - np.float32(1)
    z = m * m
    p = np.float32(7.0376836292e-2)
    p = p * m - np.float32(1.1514610310e-1)
    p = p * m + np.float32(1.1676998740e-1)
    p = p * m - np.float32(1.2420140846e-1)
    p = p * m + np.float32(1.4249322787e-1)
    p = p * m - np.float32(1.6668057665e-1)
    p = p * m + np.float32(2.0000714765e-1)
    p = p * m - np.float32(2.4999993993e-1)
    p = p * m + np.float32(3.3333331174e-1)
    p = p * m * z
    p = p + np.float32(-2.12194440e-4) * e
    p = p - np.float32(0.5) * z
    return ((m + p) + np.float32(0.693359375) * e) + (x - x)  # NaN stays NaN


def exponential(x: Any) -> Any:
    """e^x of a number <= 0, in compiled code: :func:`exp32` of a float32."""
    raise NotImplementedError


@overload(exponential, inline="always")
def _exponential(x):
    return (lambda x: exp32(x)) if x == types.float32 else (lambda x: math.exp(x))


def logarithm(x: Any) -> Any:
    """Log x of a number > 0, in compiled code: :func:`log32` of a float32."""
    raise NotImplementedError


@overload(logarithm, inline="always")
def _logarithm(x):
    return (lambda x: log32(x)) if x == types.float32 else (lambda x: math.log(x))
