"""Loops over voxels, compiled by Numba when they are first needed and kept on disk.

Constants and small functions of other modules are compiled into a loop, but Numba renews its cache
only when the loop's own file changes. Here the cache is renewed when any source file changes that
the loop's module imports from its own package, directly or through other modules.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Collection, Iterator
from functools import cache, lru_cache
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], *, fastmath: Collection[str] = ()) -> Callable[P, R]:
    """Compile a loop that runs without the interpreter's lock, and keep it on disk if possible.

    Numba is imported here and not above, so that programs which need no such loop start faster. A
    division by 0 gives infinity or NaN as in NumPy, because a loop that could raise an error does
    not become vector instructions. An integer divided by 0 gives 0 without an error, so a loop must
    not divide by one that may be 0.

    Args:
        function: a loop that Numba understands.
        fastmath: floating-point optimisations that LLVM may use; none by default.
    """
    from numba import njit

    loop = njit(nogil=True, fastmath=set(fastmath), error_model="numpy")(function)
    try:
        kept = _on_disk(function)
    except (ImportError, OSError, RuntimeError, SyntaxError, ValueError):
        return loop  # no folder to write into, or no source files to compare with
    loop._cache = kept  # where njit(cache=True) puts its own
    return loop


def _on_disk(function: Callable[..., Any]) -> Any:
    """Numba's cache of a function, with the digest of all its sources as its freshness."""
    from numba.core.caching import FunctionCache

    digest = source_digest(function.__module__ or "")
    kept = FunctionCache(function)
    kept._cache_file._source_stamp = (kept._cache_file._source_stamp, digest)
    return kept


@lru_cache
def source_digest(module: str) -> str:
    """Return the SHA-256 of all source files that a module depends on, as hexadecimal digits.

    They are its own file and the files of its package's modules that it imports, anywhere in its
    text, directly or through other modules. These may be more files than its constants come from,
    but never fewer.

    Args:
        module: full name of a module.

    Raises:
        ValueError, ImportError, OSError: there is no such module, or it has no source text.
    """
    digest = hashlib.sha256()
    for name, text in sorted(sources(module).items()):
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def sources(module: str) -> dict[str, str]:
    """Return the text of a module and of its package's modules that it imports, by full name.

    Raises:
        ValueError, ImportError, OSError: there is no such module, or it has no source text.
    """
    found: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], imported = _read(name)
            waiting.extend(imported)
    return found


@cache  # loops of several modules import the same, and parsing is slow
def _read(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the text of a module, and the modules of its package that it imports."""
    spec = find_spec(name)
    loader = None if spec is None else spec.loader
    text = loader.get_source(name) if isinstance(loader, InspectLoader) else None
    if spec is None or text is None:
        raise ImportError(f"{name} has no source text")
    parent = name if _is_package(spec) else spec.parent
    package = name.partition(".")[0]
    own = [n for n in _imported(text, parent or "") if n.partition(".")[0] == package]
    return text, tuple(module for one in own for module in _modules(one))


def _imported(text: str, parent: str) -> Iterator[str]:
    """Full names that a source text of package `parent` imports: modules, or names in modules."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = resolve_name("." * node.level + (node.module or ""), parent)
            yield from (f"{name}.{alias.name}" for alias in node.names)


def _modules(imported: str) -> Iterator[str]:
    """Modules that the import of a full name reads: itself, if it is a module, and its parents."""
    inside, _, _ = imported.rpartition(".")
    lies_in = find_spec(inside) if inside else None
    if lies_in is not None:
        yield inside
    if (lies_in is None or _is_package(lies_in)) and find_spec(imported) is not None:
        yield imported


def _is_package(spec: ModuleSpec) -> bool:
    return spec.submodule_search_locations is not None
