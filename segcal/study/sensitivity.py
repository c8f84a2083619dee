"""Recipes that differ in one number only, for curves of results against that number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Family", "families", "flatten"]

FEWEST = 3
"""Smallest number of values for which a curve is drawn."""


@dataclass(frozen=True)
class Family:
    """Recipes that differ in one number only.

    Attributes:
        argument: path of the number, such as ``nacl.args.alpha``.
        values: the number by recipe, in rising order.
    """

    argument: str
    values: dict[str, float]

    @property
    def name(self) -> str:
        """The argument without the parts of the path that every recipe has."""
        parts = [p for p in self.argument.split(".") if p not in ("args", "terms", "term")]
        return ".".join(parts)


def flatten(content: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested mappings and lists by their path."""
    if isinstance(content, Mapping):
        pairs = [(str(key), value) for key, value in content.items()]
    elif isinstance(content, list | tuple):
        pairs = [(str(index), value) for index, value in enumerate(content)]
    else:
        return {path: content}
    return {
        leaf: value
        for key, inner in pairs
        for leaf, value in flatten(inner, f"{path}.{key}" if path else key).items()
    }


def families(terms: Mapping[str, Mapping[str, Any]]) -> list[Family]:
    """Families of three or more recipes that differ only in the same number.

    Args:
        terms: resolved terms by recipe; a recipe without terms belongs to no family.
    """
    flat = {recipe: flatten(of) for recipe, of in terms.items() if of}
    arguments = dict.fromkeys(
        path for leaves in flat.values() for path, value in leaves.items() if _is_number(value)
    )
    found = []
    for argument in arguments:
        by_rest: dict[str, dict[str, float]] = {}
        for recipe, leaves in flat.items():
            if _is_number(leaves.get(argument)):
                rest = repr(sorted((k, v) for k, v in leaves.items() if k != argument))
                by_rest.setdefault(rest, {})[recipe] = float(leaves[argument])
        found += [
            Family(argument, dict(sorted(values.items(), key=lambda item: item[1])))
            for values in by_rest.values()
            if _several(list(values.values()))
        ]
    return found


def _several(values: Sequence[float]) -> bool:
    return len(set(values)) >= FEWEST


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
