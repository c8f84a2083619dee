"""What docstrings refer to is there: a module, a class, a function or a method."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import segcal

PACKAGE = Path(segcal.__file__).parent
REFERENCE = re.compile(r":(?:func|class|meth|mod|data|attr):`~?(segcal[\w.]*)`")


def names() -> set[str]:
    """Full names of all modules and of what is defined in them and in their classes."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(part for part in parts if part != "__init__")
        found.add(module)
        for place, body in _bodies(module, ast.parse(path.read_text(encoding="utf-8"))):
            for node in body:
                found |= {f"{place}.{name}" for name in _defined(node)}
    return found


def _bodies(module, tree):
    yield module, tree.body
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield f"{module}.{node.name}", node.body


def _defined(node):
    if isinstance(node, ast.ImportFrom):  # a package's face
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_references_of_docstrings():
    known = names()
    dead = {
        f"{path.relative_to(PACKAGE)}: {reference}"
        for path in PACKAGE.rglob("*.py")
        for reference in REFERENCE.findall(path.read_text(encoding="utf-8"))
        if reference not in known
    }
    assert not dead
    assert "segcal.penalties.crac.CRaC.constraints" in known
