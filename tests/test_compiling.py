"""Compiled loops do what they say, wherever they can be kept, and load Numba only when needed."""

from __future__ import annotations

import subprocess
import sys

from segcal.compiling import compiled

SOURCE = """
def total(n):
    t = 0
    for i in range(n):
        t += i
    return t
"""


def test_without_a_place_for_the_cache():
    scope = {}
    exec(SOURCE, scope)  # Numba finds no file to keep the result beside
    assert compiled(scope["total"])(101) == 5050


def test_numba_waits_until_it_is_needed():
    script = "import segcal.surface, sys; assert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
