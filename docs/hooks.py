"""What mkdocs does besides: pages of methods and of the API, tables, links of docstrings.

Pages of methods are made from the files in ``configs/`` and the docstrings, by the functions behind
``segcal methods``; pages of the API from ``tests/public_api.txt``; the table of metrics from
:mod:`segcal.metrics.table`; the table of layers from ``pyproject.toml``. So none of them can be out
of date.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from segcal.commands.methods import documentation, method_data, recipe_terms
from segcal.metrics import table as metrics
from segcal.recipes import load_recipe, names

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("losses", "penalties", "posthoc", "multilabel")
HEADINGS = {
    "losses": "Losses",
    "penalties": "Penalties",
    "posthoc": "Post-hoc methods",
    "multilabel": "Multi-label losses",
}
WHAT = {
    "losses": "A loss says how wrong a prediction is. These losses compare probabilities with "
    "labels, voxel by voxel or over an image.",
    "penalties": "A penalty is added to a loss and keeps the network from promising too much. The "
    "weight of some is constant; others learn their weights (the *multipliers*) from the "
    "validation set, by an augmented Lagrangian: a weight grows as long as a condition is not met.",
    "posthoc": "A post-hoc method repairs the probabilities of a finished network. It is fitted to "
    "cases that the network was not trained on.",
    "multilabel": "Losses of `segcal classify` for samples that can have several labels at once.",
}
METRICS = {
    "STRUCTURE": "For every label or region: the mask compared with the reference",
    "PENALISED": "For every case: means in which a missed structure costs the image diagonal",
    "CALIBRATION": "For the voxels of every scope: the probabilities compared with the labels",
    "FLOOR": "For all voxels of a scope together: how large ECE would be by chance",
    "CONFIDENCE": "For every label or region: what the probabilities say without a reference",
    "RATERS": "For every label or region that several raters drew",
    "ENERGY": "For samples of segmentations",
    "BRIER_SOFT": "For every scope of cases that several raters labelled",
}
"""Lists of :mod:`segcal.metrics.table` and what they are of."""
SETTINGS = {
    "bins": 15,
    "tace_threshold": 0.001,
    "nsd_tolerance_mm": 2.0,
    "level": 0.95,
    "unit": "mm",
}
"""Defaults of ``segcal evaluate`` in the meanings of metrics."""
ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):<code>~?([\w.]+)</code>")
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and put them into the navigation."""
    pages = {**_method_pages(), **_api_pages()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    methods: list[Any] = ["methods/index.md"]
    for kind in KINDS:
        methods.append({HEADINGS[kind]: [{name: _page_of(kind, name)} for name in names(kind)]})
    api = ["api/index.md", *sorted(p for p in pages if p.startswith("api/") and "index" not in p)]
    config.nav = _filled(config.nav, {"methods": methods, "api": api})
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put tables into the places that pages leave for them."""
    if "<!-- metrics -->" in markdown:
        markdown = markdown.replace("<!-- metrics -->", _metrics())
    if "<!-- layers -->" in markdown:
        markdown = markdown.replace("<!-- layers -->", _layers())
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn references of docstrings (``:func:``) into links, where there is a page of them."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        return f'<autoref optional identifier="{name}"><code>{name}</code></autoref>'

    return ROLE.sub(link, html).replace("::</p>", ":</p>")  # a colon of reStructuredText


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that a reader without a network would not see whole.

    Raises:
        PluginError: it loads something from the network.
    """
    if found := LOADED.search(output):
        raise PluginError(f"{page.file.src_uri} loads from the network: {found[0][:200]}")
    return output


def _filled(nav: Any, lists: dict[str, list[Any]]) -> Any:
    """Navigation with lists in the places of their names."""
    if isinstance(nav, list):
        return [_filled(item, lists) for item in nav]
    if isinstance(nav, dict):
        return {key: _filled(value, lists) for key, value in nav.items()}
    return lists.get(nav, nav)


def _page_of(kind: str, name: str) -> str:
    return f"methods/{kind}/{name}.md"


def _method_pages() -> dict[str, str]:
    """Text by path: an index, and a page for every loss, penalty and post-hoc method."""
    recipes = {name: load_recipe(name) for name in names("recipes")}
    trainers = {
        n: f"nnUNetTrainer{recipe.trainer}" for n, recipe in recipes.items() if recipe.trainer
    }
    index = [
        "# Methods\n",
        "Every method is a file in `configs/` and has a page here; `segcal methods NAME` prints "
        "the same. A *recipe* is a weighted sum of losses and penalties; it is what "
        "`segcal train`, the nnU-Net trainers and `segcal.recipes.build` take. "
        "[Which method should I take?](../which-method.md) says which of them helped.\n",
    ]
    pages = {}
    for kind in KINDS:
        index += [
            f"## {HEADINGS[kind]}\n",
            f"{WHAT[kind]}\n",
            "| name | what it does | source |",
            "|---|---|---|",
        ]
        for name in names(kind):
            data = method_data(kind, name)
            cells = [f"[{name}]({kind}/{name}.md)", _cell(data["summary"]), _cell(data["paper"])]
            index.append(f"| {' | '.join(cells)} |")
            within = [r for r, recipe in recipes.items() if name in _terms(recipe)]
            pages[_page_of(kind, name)] = _method_page(kind, name, data, within, trainers)
        index.append("")
    index += [
        "## Recipes\n",
        "The trainer of a recipe is what nnU-Net's option `-tr` takes; with the suffix `_CE` it "
        "leaves Dice out.\n",
        "| recipe | what it adds up | nnU-Net trainer |",
        "|---|---|---|",
    ]
    for name in recipes:
        trainer = f"`{trainers[name]}`" if name in trainers else "-"
        terms = recipe_terms(method_data("recipes", name))
        index.append(f"| `{name}` | {_cell(recipes[name].summary)} ({_cell(terms)}) | {trainer} |")
    pages["methods/index.md"] = "\n".join(index) + "\n"
    return pages


def _terms(recipe: Any) -> set[str]:
    """Names of losses and penalties that a recipe adds up, of all its heads."""
    terms = {*recipe.base, *recipe.penalties}
    if recipe.probability:
        terms |= {*recipe.probability.weights}
    return terms


def _method_page(
    kind: str, name: str, data: dict[str, Any], recipes: list[str], trainers: dict[str, str]
) -> str:
    lines = [f"# {name}\n", f"{data['summary'][0].upper()}{data['summary'][1:]}.\n"]
    if data["paper"]:
        lines.append(f"**Source:** {data['paper']}\n")
    if recipes and kind != "multilabel":
        said = (f"`{r}`" + (f" (`-tr {trainers[r]}`)" if r in trainers else "") for r in recipes)
        lines.append(f"**Recipes with it:** {', '.join(said)}\n")
    if kind == "posthoc":
        lines.append(f"**On files:** `segcal calibrate fit ... --method {name}`\n")
    if kind == "multilabel":
        lines.append(f"**In a training:** `segcal classify train ... --set recipe={name}`\n")
    lines.append("## Definition\n")
    for documented in documentation(data["target"]):
        identifier = f"{documented.__module__}.{documented.__name__}"
        lines += [
            f"### `{identifier}`\n",
            f"::: {identifier}",
            "    options:",
            "      show_root_heading: false",
            "      show_root_toc_entry: false",
            "      members: false",
            "      heading_level: 4\n",
        ]
    if data["options"]:
        lines += ["## Options\n", "| option | default |", "|---|---|"]
        lines += [
            f"| `{option}` | {_default(value)} |" for option, value in data["options"].items()
        ]
        lines.append("")
    return "\n".join(lines)


def _default(value: Any) -> str:
    if isinstance(value, dict) and "target" in value:
        value = value["target"].rpartition(".")[2]
    return f"`{_cell(str(value))}`"


def _api_pages() -> dict[str, str]:
    """Text by path: an index, and a page for every package of the public API."""
    packages: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for line in (ROOT / "tests" / "public_api.txt").read_text(encoding="utf-8").splitlines():
        module, _, listed = line.partition(":")
        loaded = importlib.import_module(module)
        # a package repeats what its modules define
        own = [
            name
            for name in listed.split()
            if not hasattr(loaded, "__path__")
            or getattr(getattr(loaded, name), "__module__", module) == module
        ]
        depth = 3 if module.startswith(("segcal.adapters.", "segcal.losses.multilabel.")) else 2
        parts = module.split(".")
        top = len(parts) == 2 and not hasattr(loaded, "__path__")
        packages["segcal" if top else ".".join(parts[:depth])][module] = own
    index = [
        "# API reference\n",
        "What is listed here changes only with a note in the change log. Everything else may "
        "change without notice. Logits are tensors `(N, K, *S)`, labels `(N, *S)` integers, with "
        "one to three spatial axes `S`; arguments after the tensors are named.\n",
        "| package | what it holds |",
        "|---|---|",
    ]
    pages = {}
    for package in sorted(packages):
        summary = (importlib.import_module(package).__doc__ or "").partition("\n")[0]
        index.append(f"| [`{package}`]({package}.md) | {_cell(summary)} |")
        lines = [f"# {package}\n"]
        for module, members in packages[package].items():
            if members:
                lines += [
                    f"## {module}\n",
                    f"::: {module}",
                    "    options:",
                    "      show_root_heading: false",
                    "      show_root_toc_entry: false",
                    "      heading_level: 3",
                    f"      members: [{', '.join(members)}]\n",
                ]
        pages[f"api/{package}.md"] = "\n".join(lines)
    pages["api/index.md"] = "\n".join(index) + "\n"
    return pages


def _metrics() -> str:
    """Tables of all metrics that are reported."""
    lines = []
    for variable, title in METRICS.items():
        rows = getattr(metrics, variable)
        lines += [
            f"### {title}\n",
            "| key | name | definition | unit | better |",
            "|---|---|---|---|---|",
        ]
        for row in rows if isinstance(rows, tuple) else (rows,):
            meaning = _cell(row.meaning.format(**SETTINGS))
            unit = row.unit or "-"
            lines.append(
                f"| `{row.key}` | {row.heading} | {meaning} | {unit} | {row.better or '-'} |"
            )
        lines.append("")
    return "\n".join(lines)


def _layers() -> str:
    """Layers of the package, the outermost first, as import-linter checks them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = next(c for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    lines = ["| layer | what it is |", "|---|---|"]
    for layer in layers["layers"]:
        for name in re.split(r"\s*\|\s*", layer):
            doc = importlib.import_module(f"segcal.{name}").__doc__ if name != "__main__" else None
            summary = (doc or "``python -m segcal``.").partition("\n")[0]
            lines.append(f"| `segcal.{name}` | {_cell(summary)} |")
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text that stays in its cell of a table, and is no markup."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"([|_*<>])(?=[^`]*(?:`[^`]*`[^`]*)*$)", r"\\\1", " ".join(text.split()))
