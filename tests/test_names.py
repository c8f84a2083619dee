"""One word, one thing: no two public classes of the package share a name."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import segcal


def test_every_public_class_has_a_name_of_its_own():
    package = Path(segcal.__file__).parent
    places = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    twice = {name: modules for name, modules in places.items() if len(modules) > 1}
    assert not twice
