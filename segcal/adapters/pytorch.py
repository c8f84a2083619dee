"""Plain PyTorch: an objective by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segcal.io.config import build as build_component
from segcal.io.config import load_recipe, resolve_terms
from segcal.objective import Objective


def build(
    recipe: str | Path,
    num_classes: int,
    *,
    ignore_index: int | None = None,
    **overrides: dict[str, Any],
) -> Objective:
    """Build a recipe's objective.

    Example::

        objective = build("crac", num_classes=4, crac={"margin_inner": 3.0})
        loss = objective(logits, labels)        # (N, K, *S), (N, *S)
        objective.observe(logits, labels)       # every validation batch, under no_grad
        objective.dual_step()                   # once after the last

    Args:
        recipe: name of a shipped recipe, or a YAML file.
        num_classes: K.
        ignore_index: label that every term leaves out.
        **overrides: arguments of a term, by its name.

    Raises:
        ValueError: an unknown recipe, term or argument, with what there is instead.
    """
    loaded = load_recipe(recipe)
    terms = {
        name: build_component(component, num_classes=num_classes, ignore_index=ignore_index)
        for name, component in resolve_terms(loaded, overrides=overrides).items()
    }
    return Objective(terms, {**loaded.base, **loaded.penalties})
