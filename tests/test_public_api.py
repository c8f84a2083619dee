"""What is public: the names in ``__all__``, and a list of them that changes only on purpose."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import segcal

LIST = Path(__file__).parent / "public_api.txt"
PACKAGE = Path(segcal.__file__).parent
ALL_PUBLIC = ("losses", "penalties", "metrics", "posthoc", "reproduction")
"""Rooms in which every module says what is public."""


def listed() -> dict[str, list[str]]:
    rows = [line.split(":") for line in LIST.read_text(encoding="utf-8").splitlines()]
    return {module: names.split() for module, names in rows}


def written() -> dict[str, list[str]]:
    """Names in ``__all__`` by module, without an import."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.List)):
                continue  # __all__ of nnU-Net's trainers is made of the recipes
            if [t.id for t in node.targets if isinstance(t, ast.Name)] == ["__all__"]:
                parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
                module = ".".join(p for p in parts if p != "__init__")
                found[module] = ast.literal_eval(node.value)
    return found


def test_the_list_is_what_modules_say():
    assert written() == listed(), f"if this is meant, change {LIST.name} and CHANGELOG.md"


def test_every_method_says_what_is_public():
    silent = [
        path
        for room in ALL_PUBLIC
        for path in (PACKAGE / room).rglob("*.py")
        if path.name != "__init__.py"
        and ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) not in listed()
    ]
    assert not silent


@pytest.mark.parametrize("module", listed())
def test_public_names_are_there_and_explained(module):
    found = importlib.import_module(module)
    for name in listed()[module]:
        thing = getattr(found, name)
        if inspect.isfunction(thing) or inspect.isclass(thing):
            assert inspect.getdoc(thing), name


def test_names_that_others_rely_on():
    from segcal.evaluation.api import evaluate
    from segcal.objective import build as from_objective
    from segcal.recipes import build
    from segcal.term import Term

    assert from_objective is build
    assert callable(evaluate)
    assert inspect.isclass(Term)
