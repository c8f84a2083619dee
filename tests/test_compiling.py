"""Compiled loops do what they say, wherever they can be kept, and load Numba only when needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from segcal.compiling import compiled, source_digest, sources

SOURCE = """
def total(n):
    t = 0
    for i in range(n):
        t += i
    return t
"""
LOOP = """
from segcal.compiling import compiled
from copied.inner.steps import step

@compiled
def total(n):
    t = 0
    for i in range(n):
        t += step(i)
    return t

print(total(10), len(total.stats.cache_hits), len(total.stats.cache_misses))
"""
STEPS = """
from numba import njit
from ..between import FACTOR

@njit
def step(i):
    return i * FACTOR + {number}
"""
BETWEEN = """
from copied import numbers

FACTOR = numbers.FACTOR
"""


def test_without_a_place_for_the_cache():
    scope = {}
    exec(SOURCE, scope)  # Numba finds no file to keep the result beside
    assert compiled(scope["total"])(101) == 5050


def test_numba_waits_until_it_is_needed():
    script = "import segcal.surface, sys; assert 'numba' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("loops", "others"),
    [
        ("segcal.sweep.loops", {"segcal.sweep.terms", "segcal.sweep.vector_math"}),
        ("segcal.counting", {"segcal.binning", "segcal.arrays"}),
    ],
)
def test_where_the_constants_of_the_loops_come_from(loops, others):
    assert {loops, *others} <= set(sources(loops))


def test_each_source_counts(monkeypatch):
    texts = sources("segcal.sweep.loops")
    digests = {source_digest("segcal.sweep.loops")}
    for name in texts:
        changed = texts | {name: texts[name] + "\n"}
        monkeypatch.setattr("segcal.compiling.sources", lambda module, changed=changed: changed)
        source_digest.cache_clear()
        digests.add(source_digest("segcal.sweep.loops"))
    source_digest.cache_clear()
    assert len(digests) == 1 + len(texts)


def test_what_is_on_disk_is_renewed_with_any_source(tmp_path):
    def run(*, factor, number):
        """The loop's result, how often it was found on disk, and how often compiled."""
        texts = {
            "__init__.py": "",
            "inner/__init__.py": "",
            "loop.py": LOOP,
            "inner/steps.py": STEPS.format(number=number),
            "between.py": BETWEEN,
            "numbers.py": f"import copied.loop\n\nFACTOR = {factor}\n",  # a circle
        }
        for name, text in texts.items():
            path = tmp_path / "copied" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (1e9, 1e9))  # as a package's files may have after an update
        unset = ("NUMBA_CACHE_DIR", "NUMBA_DISABLE_JIT")
        environment = {k: v for k, v in os.environ.items() if k not in unset} | {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)]),
            "PYTHONDONTWRITEBYTECODE": "1",  # files of one second and size would be mistaken
        }
        done = subprocess.run(
            [sys.executable, "-c", "import copied.loop"],
            capture_output=True,
            text=True,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        return tuple(map(int, done.stdout.split()))

    assert run(factor=1, number=0) == (45, 0, 1)
    assert run(factor=1, number=0) == (45, 1, 0)
    assert run(factor=2, number=0) == (90, 0, 1)  # a constant at three removes
    assert run(factor=2, number=1) == (100, 0, 1)  # the function that is compiled into the loop
    assert run(factor=2, number=1) == (100, 1, 0)
