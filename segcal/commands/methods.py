"""``segcal methods``: what can be trained, and what each method does."""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from segcal.commands.console import open_console
from segcal.commands.errors import user_errors

SINGULAR = {
    "losses": "loss",
    "penalties": "penalty",
    "multilabel": "multi-label loss",
    "posthoc": "post-hoc method",
    "recipes": "recipe",
}
TITLES = {
    "multilabel": "multi-label losses (segcal classify)",
    "posthoc": "post-hoc methods (segcal.posthoc)",
}


def methods(
    name: Annotated[
        str | None, typer.Argument(help="A method to explain; without a name, all are listed.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print names, or one method's data, as JSON.")
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(
            help="Draw a figure into this .png file. Penalties with learned multipliers (cals, "
            "crac, crac_bands): the penalty functions PHR, P2 and P3 of a constraint. Multi-label "
            "losses (spa, focal, ...): the loss over the score, and the link that turns scores "
            "into probabilities, beside those of bce."
        ),
    ] = None,
) -> None:
    """List losses, penalties, post-hoc methods and recipes, or explain one of them.

    Examples: segcal methods crac

    segcal methods cals --figure functions.png

    segcal methods spa --figure spa.png
    """
    with user_errors({"figure": "--figure"}):
        if figure is not None:
            _draw(name, figure)
        if name is not None:
            kinds = _kinds(name)
            if as_json:
                typer.echo(json.dumps({kind: method_data(kind, name) for kind in kinds}, indent=2))
            else:
                for kind in kinds:
                    _explain(open_console(), kind, name)
        elif as_json:
            typer.echo(json.dumps(_names(), indent=2))
        else:
            _list(open_console())


def _draw(name: str | None, path: Path) -> None:
    """Draw the functions of a penalty, or a multi-label loss and its link.

    Raises:
        ValueError: the method is neither, or the file is no .png.
    """
    from segcal.classify.loss_figure import plot_label_losses
    from segcal.components import build_component
    from segcal.recipes import load_component, names
    from segcal.reporting.penalty_functions import plot_penalty_functions
    from segcal.reporting.picture import draw

    learned, labels = _penalties_with_functions(), names("multilabel")
    if name not in (*learned, *labels):
        raise ValueError(
            f"figure: expected a penalty with learned multipliers ({', '.join(learned)}) or a "
            f"multi-label loss ({', '.join(labels)}), got {name}"
        )
    if path.suffix != ".png":
        raise ValueError(f"figure: expected the name of a .png, got {path}")
    if name in learned:
        draw(plot_penalty_functions(), "Functions of a constraint").save(path)
        return
    shown = {one: build_component(load_component("multilabel", one)) for one in ("bce", name)}
    draw(plot_label_losses(shown), f"{name}: loss of a label, and its link").save(path)


def _penalties_with_functions() -> list[str]:
    from segcal.alm import AugmentedLagrangian
    from segcal.components import target
    from segcal.recipes import load_component, names

    return [
        penalty
        for penalty in names("penalties")
        if issubclass(target(load_component("penalties", penalty)), AugmentedLagrangian)
    ]


def _names() -> dict[str, list[str]]:
    from segcal.recipes import names

    return {kind: names(kind) for kind in SINGULAR}  # type: ignore[arg-type]


def _kinds(name: str) -> list[str]:
    """Kinds of the methods that have this name.

    Raises:
        ValueError: there is none; the message suggests similar names.
    """
    found = _names()
    kinds = [kind for kind, names in found.items() if name in names]
    if not kinds:
        every = sorted({n for names in found.values() for n in names})
        near = [n for n in every if name in n] or difflib.get_close_matches(name, every)
        hint = f" (did you mean {', '.join(near)}?)" if near else ""
        raise ValueError(f"no method named {name!r}{hint}; 'segcal methods' lists all")
    return kinds


def _list(console: Console) -> None:
    for kind, found in _names().items():
        table = Table(
            title=TITLES.get(kind, kind), box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left"
        )
        table.add_column("name", no_wrap=True)
        table.add_column("summary" if kind == "recipes" else "summary, and its paper")
        table.add_column("defaults" if kind != "recipes" else "terms")
        for name in found:
            data = method_data(kind, name)
            what = Text(data["summary"])
            if data.get("paper"):
                what.append(f"\n{data['paper']}", style="dim")
            details = recipe_terms(data) if kind == "recipes" else _arguments(data["args"])
            table.add_row(name, what, Text(details))
        console.print(table)
    console.print("segcal methods NAME explains one.", style="dim")


def method_data(kind: str, name: str) -> dict[str, Any]:
    """What the config says and, for all but recipes, every option with its default."""
    from segcal.components import accepted_arguments, target
    from segcal.recipes import load_component, load_recipe

    if kind == "recipes":
        return load_recipe(name).model_dump()
    component = load_component(kind, name)  # type: ignore[arg-type]
    options = {
        option: None if parameter.default is parameter.empty else parameter.default
        for option, parameter in accepted_arguments(target(component)).items()
        if option != "num_classes"
    }
    return {**component.model_dump(), "options": {**options, **component.args}}


def recipe_terms(data: dict[str, Any]) -> str:
    """Say in one line what a recipe adds up."""
    parts = []
    for term, weight in {**data["base"], **data["penalties"]}.items():
        arguments = _arguments(data["args"].get(term, {}))
        factor = "" if weight == 1 else f"{weight:g} "
        parts.append(f"{factor}{term}" + (f" ({arguments})" if arguments else ""))
    return " + ".join(parts)


def _explain(console: Console, kind: str, name: str) -> None:
    data = method_data(kind, name)
    console.print(Text(f"{SINGULAR[kind]} {name}: {data['summary']}", style="bold"))
    if kind == "recipes":
        console.print(Text(f"  {recipe_terms(data)}\n"))
        return
    if data["paper"]:
        console.print(Text(f"source: {data['paper']}"))
    console.print(Text(f"options: {_arguments(data['options'])}\n"))
    for documented in documentation(data["target"]):
        console.print(Text(f"{documented.__module__}.{documented.__name__}", style="cyan"))
        console.print(Text(f"{inspect.getdoc(documented)}\n"), soft_wrap=True)


def documentation(target: str) -> list[Any]:
    """Objects whose docstrings explain a method: functions, class, bases, what they refer to."""
    module = importlib.import_module(target.rpartition(".")[0])
    cls = getattr(module, target.rpartition(".")[2])
    functions = [
        value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == cls.__module__ and name[0] != "_"
    ]
    bases = [base for base in cls.__mro__[1:] if "**" in str(inspect.signature(cls)) and (
        base.__module__.startswith("segcal.") and "__init__" in vars(base))]  # fmt: skip
    first = [f for f in functions if f.__name__ == module.__name__.rpartition(".")[2]]
    found = [*first, cls, *functions, *bases]
    for reference in re.findall(r":func:`(segcal[\w.]+)`", "".join(d.__doc__ or "" for d in found)):
        place, _, name = reference.rpartition(".")
        found.append(getattr(importlib.import_module(place), name))
    return list(dict.fromkeys(d for d in found if d.__doc__))


def _arguments(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{k}={_value(v)}" for k, v in arguments.items())


def _value(value: Any) -> str:
    if isinstance(value, dict) and "target" in value:
        name = value["target"].rpartition(".")[2]
        return f"{name}({_arguments(value.get('args', {}))})"
    return str(value)
