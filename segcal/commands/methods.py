"""``segcal methods``: what can be trained, and what each method does."""

from __future__ import annotations

import importlib
import inspect
import json
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segcal.commands.errors import user_errors

SINGULAR = {"losses": "loss", "penalties": "penalty"}


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A loss, penalty or recipe to explain; none lists all.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Names, for other programs.")] = False,
) -> None:
    """List losses, penalties and recipes, or explain one: formula, options, source.

    Example: segcal methods crac
    """
    with user_errors():
        if as_json:
            typer.echo(json.dumps(_names(), indent=2))
        elif name is None:
            _list(Console())
        else:
            _explain(Console(), name)


def _names() -> dict[str, list[str]]:
    from segcal.io.config import names

    return {kind: names(kind) for kind in ("losses", "penalties", "recipes")}


def _list(console: Console) -> None:
    from segcal.io.config import load_component, load_recipe

    for kind, found in _names().items():
        table = Table(title=kind, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
        table.add_column("name", no_wrap=True)
        table.add_column("what" if kind == "recipes" else "what, and its paper")
        table.add_column("defaults" if kind != "recipes" else "terms")
        for name in found:
            if kind == "recipes":
                recipe = load_recipe(name)
                terms = {**recipe.base, **recipe.penalties}
                details = " + ".join(
                    term if weight == 1 else f"{weight:g} {term}" for term, weight in terms.items()
                )
                summary = recipe.summary
            else:
                component = load_component(kind, name)  # type: ignore[arg-type]
                details = _arguments(component.args)
                summary = component.summary
                paper = f"\n{component.paper}" if component.paper else ""
            what = Text(summary)
            if kind != "recipes":
                what.append(paper, style="dim")
            table.add_row(name, what, Text(details))
        console.print(table)
    console.print("segcal methods NAME explains one.", style="dim")


def _explain(console: Console, name: str) -> None:
    from segcal.io.config import accepted_arguments, load_component, load_recipe, target

    kinds = [kind for kind, found in _names().items() if name in found]
    if not kinds:
        raise ValueError(f"no method named {name!r}; 'segcal methods' lists them")
    for kind in kinds:
        if kind == "recipes":
            recipe = load_recipe(name)
            console.print(Text(f"recipe {name}: {recipe.summary}", style="bold"))
            for term, weight in {**recipe.base, **recipe.penalties}.items():
                console.print(f"  {weight:g} x {term}", highlight=False)
            continue
        component = load_component(kind, name)  # type: ignore[arg-type]
        what = target(component)
        module = importlib.import_module(what.__module__)
        console.print(Text(f"{SINGULAR[kind]} {name}: {component.summary}", style="bold"))
        console.print(Text(f"source: {component.paper}" if component.paper else ""))
        console.print(Text(f"defaults: {_arguments(component.args) or 'none'}"))
        accepted = [k for k in accepted_arguments(what) if k != "num_classes"]
        console.print(Text(f"options: {', '.join(accepted)}\n"))
        function = getattr(module, what.__module__.rpartition(".")[2], None)
        for documented in (function, what):
            if inspect.isfunction(documented) or inspect.isclass(documented):
                console.print(Text(f"{documented.__module__}.{documented.__name__}", style="cyan"))
                console.print(Text(f"{inspect.getdoc(documented) or ''}\n"), soft_wrap=True)


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in arguments.items())
